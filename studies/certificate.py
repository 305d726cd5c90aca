"""Does the certificate say what holds at new inputs? Variances of a structure over those of the exact posterior, on
training inputs, on test inputs, and by leave-one-out as `certify` estimates it.

    LAPWING_DATA=<folder> python studies/certificate.py [--sets yacht glass ...]

Networks with two hidden layers of 50 tanh units; prior and noise are the exact posterior's, tuned. The exact ratios are
by `structure="full"`, those of the certificate by 32 probes. `covered`: of 20 certificates of kron with seeds of their
own, on two sets, how many intervals hold the value by leave-one-out over all training inputs. Writes
`results/certificate.json` and the tables of `docs/studies/certificate.md`.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import pathlib
import sys
import time
import warnings
from typing import Any

import numpy as np
import torch
import uci_evidence as uci
from torch import nn

import lapwing as lw

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "benchmarks"))

from _common import machine, versions  # noqa: E402

REGRESSION = ("boston", "concrete", "energy", "yacht")
CLASSES = ("glass", "vehicle", "waveform")
STRUCTURES = ("kron", "ekfac", "diag", "block")
SEEDS, COVERED = 20, ("energy", "yacht")  # certificates of kron, each with a seed of its own, on these sets
RESULTS, PAGE = HERE / "results" / "certificate.json", HERE.parent / "docs" / "studies" / "certificate.md"


def class_data(name: str) -> tuple[uci.Data, uci.Data]:
    """Two thirds to train on, standardized by them."""
    stored = np.load(uci.folder() / "uci_classification" / f"{name}.npz")
    x, y = torch.from_numpy(stored["X"]).double(), torch.from_numpy(stored["y"]).long().reshape(-1)
    y = torch.unique(y, return_inverse=True)[1]
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    a, b = order[: 2 * len(x) // 3], order[2 * len(x) // 3 :]
    spread = x[a].std(0)
    x = (x - x[a].mean(0)) / torch.where(spread > 0, spread, 1.0)
    return (x[a], y[a]), (x[b], y[b])


def fitted(name: str) -> tuple[lw.Laplace, uci.Data, uci.Data]:
    """The exact posterior of a trained network, tuned, and its data."""
    if name in REGRESSION:
        train, test, _ = uci.regression_data(name, 0)
        outputs, loss, likelihood = 1, nn.functional.mse_loss, "gaussian"
    else:
        train, test = class_data(name)
        outputs, loss, likelihood = int(train[1].max()) + 1, nn.functional.cross_entropy, "categorical"

    def make() -> nn.Sequential:
        widths = (train[0].shape[1], uci.WIDTH, uci.WIDTH)
        hidden = [m for i, o in itertools.pairwise(widths) for m in (nn.Linear(i, o), nn.Tanh())]
        return nn.Sequential(*hidden, nn.Linear(uci.WIDTH, outputs)).double()

    net = uci.trained(make, train, loss, 0)
    return lw.laplace(net, train, likelihood, structure="full").tuned(), train, test


def summed(la: lw.Laplace, x: torch.Tensor) -> float:
    return float(sum(la.predict(some).f_var.sum() for some in x.split(250)))


def said(e: Any) -> dict[str, Any]:
    """V/C, as ratios."""
    return {"value": 1 + e.value, "interval": [1 + v for v in e.interval]}


def one(name: str) -> dict[str, Any]:
    exact, train, test = fitted(name)
    n, p = len(train[0]), exact.state.layout.size
    out: dict[str, Any] = {"n": n, "parameters": p, "outputs": exact.predict(test[0][:2]).f_var.shape[-1]}
    for structure in STRUCTURES:
        la = lw.laplace(exact.tangent.model, train, exact.likelihood, structure=structure, prior=exact.prior)
        start = time.process_time()
        found = la.certify()
        out[structure] = {
            "training": summed(la, train[0]) / summed(exact, train[0]),
            "test": summed(la, test[0]) / summed(exact, test[0]),
            "leave-one-out": said(found.variance),
            "at test inputs": said(la.certify(inputs=test[0]).variance),
            "at training inputs": said(found.variance_training),
            "passes": found.passes,
            "residual": found.residual,
            "notes": list(found.notes),
            "seconds": time.process_time() - start,
        }
        if structure == "kron" and name in COVERED:
            out[structure]["covered"] = covered(la, n)
        print(name, structure, out[structure], flush=True)
    return out


def covered(la: lw.Laplace, n: int) -> dict[str, Any]:
    whole = la.certify(n).variance
    found = [la.certify(generator=torch.Generator().manual_seed(1_000 + s)).variance for s in range(SEEDS)]
    hits = sum(e.interval[0] <= whole.value <= e.interval[1] for e in found)
    return {"whole": 1 + whole.value, "hits": hits, "of": SEEDS}


def tables(record: dict[str, Any]) -> list[str]:
    def shown(e: dict[str, Any]) -> str:
        return f"{e['value']:.2f} [{e['interval'][0]:.2f}, {e['interval'][1]:.2f}]"

    head = ("set", "structure", "training", "test", "leave-one-out", "certified at the test inputs", "note")
    lines = [uci.row(head), "|---|---" + "|--:" * 4 + "|---|"]
    for name, run in record["sets"].items():
        for structure in STRUCTURES:
            r = run[structure]
            note = "one input decides" if any("inputs has" in text for text in r["notes"]) else ""
            cells = (f"{r['training']:.2f}", f"{r['test']:.2f}", shown(r["leave-one-out"]), shown(r["at test inputs"]))
            lines.append(uci.row((name, structure, *cells, note)))
    head = ("set", "N", "outputs", "passes", "leave-one-out of kron over all inputs", "held by intervals")
    lines += ["", uci.row(head), "|---" + "|--:" * 5 + "|"]
    for name, run in record["sets"].items():
        found = run["kron"].get("covered")
        cells = ("", "") if found is None else (f"{found['whole']:.2f}", f"{found['hits']} of {found['of']}")
        lines.append(uci.row((name, run["n"], run["outputs"], run["kron"]["passes"], *cells)))
    return lines


def write(record: dict[str, Any]) -> None:
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")
    before, _, rest = PAGE.read_text().partition("<!-- tables -->\n")
    after = rest.partition("<!-- end of tables -->\n")[2]
    text = "\n".join([*tables(record), ""])
    PAGE.write_text(f"{before}<!-- tables -->\n{text}<!-- end of tables -->\n{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", choices=(*REGRESSION, *CLASSES), default=(*REGRESSION, *CLASSES))
    args = parser.parse_args()
    uci.folder()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", lw.errors.LapwingWarning)  # of tuning, which is not what this is about
    record: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {"experiment": "certificate"}
    record |= {"date": datetime.date.today().isoformat(), "machine": machine()}
    record |= {"versions": versions("torch", "lapwing")}
    for name in args.sets:
        found = record.get("sets", {}) | {name: one(name)}
        record["sets"] = {s: found[s] for s in (*REGRESSION, *CLASSES) if s in found}
        write(record)


if __name__ == "__main__":
    main()
