"""The default for numbers beside the network it was given: log-likelihood of nine UCI sets.

    LAPWING_DATA=<folder> python studies/regressors.py [--sets yacht ...] [--splits 5 6 7 8 9]

    plug-in      N(f, s²), s the network's residuals on its training data
    gaussian     lw.laplace(net, data, "gaussian").tuned(): about the network's outputs
    regression   lw.laplace(net, data, "regression").tuned(): three parts of that, one of the process

The weight of the process was chosen on splits 0 to 2 of yacht, energy, boston, concrete and wine, with other networks.
Two networks a split: one hidden layer of 50 ReLU units, and the two with batch norm of `uci_evidence.py`. Differences
are paired over test examples, all splits together. Writes `results/regressors.json` and the table of
`docs/studies/regressors.md`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import pathlib
import time
import warnings
from typing import Any

import torch
from left_out import line
from torch import Tensor, nn
from uci_evidence import Data, mlp, regression_data, trained

import lapwing as lw

from _common import machine, versions  # isort: skip  (benchmarks/, which left_out puts on the path)

HERE = pathlib.Path(__file__).parent
RESULTS, PAGE = HERE / "results" / "regressors.json", HERE.parent / "docs" / "studies" / "regressors.md"
SETS = ("boston", "concrete", "energy", "kin8nm", "naval", "power", "protein", "wine", "yacht")
COLUMNS = ("plug-in", "gaussian", "regression")
NETWORKS = {"plain": lambda i: plain(i), "batch norm": lambda i: mlp(i, 1)}


def plain(inputs: int) -> nn.Sequential:
    """One hidden layer of 50 units."""
    return nn.Sequential(nn.Linear(inputs, 50), nn.ReLU(), nn.Linear(50, 1)).double()


def one(train: Data, test: Data, kind: str, seed: int) -> dict[str, Tensor]:
    """log p of each test target, in units of the targets' standard deviation."""
    (x, y), (new, y_new) = train, test
    net = trained(lambda: NETWORKS[kind](x.shape[1]), train, nn.functional.mse_loss, seed)
    with torch.no_grad():
        noise, f = (y - net(x)).square().mean().sqrt(), net(new)
    made = {"plug-in": torch.distributions.Normal(f, noise).log_prob(y_new).reshape(-1)}
    for word in ("gaussian", "regression"):
        la = lw.laplace(net, train, word).tuned()
        made[word] = la.predict(new).log_prob(y_new).reshape(-1)
    return made


def paired(some: Tensor, other: Tensor) -> list[float]:
    """Mean difference and its standard error."""
    d = some - other
    return [float(d.mean()), float(d.std()) / math.sqrt(len(d))]


def row(name: str, kind: str, splits: list[int]) -> dict[str, Any]:
    """All splits of a set."""
    start, found = time.process_time(), []
    for split in splits:
        train, test, _ = regression_data(name, split)
        found.append(one(train, test, kind, split))
    joined = {c: torch.cat([f[c] for f in found]) for c in COLUMNS}
    against = {c: paired(joined["regression"], joined[c]) for c in COLUMNS[:2]}
    means = {c: float(v.mean()) for c, v in joined.items()}
    return {"set": name, "network": kind, "n_test": len(joined["plug-in"]), "log p": means, "regression less": against,
            "cpu_seconds": round(time.process_time() - start)}  # fmt: skip


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Means, and the differences; * below by more than two standard errors."""

    def cell(pair: list[float]) -> str:
        mean, error = pair
        return f"{mean:+.3f} ± {error:.3f}" + ("*" if mean < -2 * error else "")

    out = [line(("set", "network", *COLUMNS, "regression less plug-in", "regression less gaussian"))]
    out.append("|---|---" + "|--:" * 5 + "|")
    for r in rows:
        figures = (f"{r['log p'][c]:.3f}" for c in COLUMNS)
        out.append(line((r["set"], r["network"], *figures, *(cell(r["regression less"][c]) for c in COLUMNS[:2]))))
    return out


def by_set(rows: list[dict[str, Any]]) -> list[str]:
    """Differences of both networks of a set together, which have the same number of test examples."""
    out = ["", line(("set, both networks", "regression less plug-in", "regression less gaussian")), "|---|--:|--:|"]
    for name in dict.fromkeys(r["set"] for r in rows):
        some = [r["regression less"] for r in rows if r["set"] == name]
        pairs = [list(zip(*(one[c] for one in some), strict=True)) for c in COLUMNS[:2]]
        found = ((sum(means) / len(means), math.hypot(*errors) / len(errors)) for means, errors in pairs)
        out.append(line((name, *(f"{m:+.4f} ± {e:.4f}" + ("*" if m < -2 * e else "") for m, e in found))))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=SETS)
    parser.add_argument("--splits", nargs="+", type=int, default=(5, 6, 7, 8, 9))
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", lw.errors.LapwingWarning)
    rows = []
    for name in args.sets:
        splits = [s for s in args.splits if name != "protein" or s < 5] or [0, 1, 2, 3, 4]  # protein has five
        for kind in NETWORKS:
            rows.append(row(name, kind, splits))
            print(json.dumps(rows[-1]), flush=True)
    record = {"date": datetime.date.today().isoformat(), "machine": machine(), "versions": versions("torch", "lapwing")}
    record |= {"splits": list(args.splits), "cpu_seconds": sum(r["cpu_seconds"] for r in rows), "rows": rows}
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")
    before, _, rest = PAGE.read_text().partition("<!-- tables -->\n")
    text, after = "\n".join([*table(rows), *by_set(rows), ""]), rest.partition("<!-- end of tables -->\n")[2]
    PAGE.write_text(f"{before}<!-- tables -->\n{text}<!-- end of tables -->\n{after}")
    print(text)


if __name__ == "__main__":
    main()
