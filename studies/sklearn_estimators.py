"""The estimators for scikit-learn beside its own networks: log-likelihood on the sets that it brings.

    python studies/sklearn_estimators.py                      # seeds 0 to 4, which are scored
    python studies/sklearn_estimators.py --seeds 100 101 102  # any others: printed, and not written to the page
    python studies/sklearn_estimators.py --sets iris wine     # some of the sets
    python studies/sklearn_estimators.py --table              # the page again, from the record
    python studies/sklearn_estimators.py --evidence           # of each depth, on seed 100: the page's last table

    lapwing        LaplaceClassifier(random_state=seed), LaplaceRegressor(random_state=seed)
    sklearn        StandardScaler and MLPClassifier or MLPRegressor, as they come: 200 passes over the data
    sklearn, long  the same with max_iter=2000
    linear         StandardScaler and LogisticRegression, or BayesianRidge for each output

A fifth of the data is tested on; a seed is a split (stratified for classes), and the start of every network. Regressors
are scored as N(mean, std²) of each output, summed: Lapwing's and BayesianRidge's by their own `return_std`. The std of
MLPRegressor is that of its residuals on a held-out tenth of its training data, with targets standardized for it.
Probabilities of 0 count as 1e-15. Each row goes to a journal when it is done, and a run goes on from there. Writes
`results/sklearn_estimators.json` and the tables of `docs/studies/sklearn_estimators.md`.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import pathlib
import sys
import time
import warnings
from typing import Any

import numpy as np
import torch
from sklearn import datasets
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import BayesianRidge, LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.preprocessing import StandardScaler

from lapwing.errors import LapwingWarning
from lapwing.integrations.sklearn import LaplaceClassifier, LaplaceRegressor
from lapwing.integrations.sklearn.networks import WIDTHS

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "benchmarks"))

from _common import machine, versions  # noqa: E402  isort: skip

NAME = "sklearn_estimators"
RESULTS, PAGE = HERE / "results" / f"{NAME}.json", HERE.parent / "docs" / "studies" / f"{NAME}.md"
JOURNAL = HERE.parent / "out" / f"{NAME}.jsonl"  # of rows that are done
CLASSES, NUMBERS = ("iris", "wine", "breast_cancer", "digits"), ("diabetes", "linnerud")
METHODS = ("lapwing", "sklearn", "sklearn, long", "linear")
SCORED = (0, 1, 2, 3, 4)


def normal_nll(y: np.ndarray, mean: np.ndarray, std: np.ndarray) -> float:
    """−log N(y; mean, std²), outputs summed, mean over examples."""
    mean, std = mean.reshape(y.shape), np.broadcast_to(std.reshape(-1, y.shape[1]), y.shape)
    return float((0.5 * np.log(2 * math.pi * std**2) + 0.5 * ((y - mean) / std) ** 2).sum(1).mean())


def classifier(method: str, seed: int) -> Any:
    """An estimator with class probabilities."""
    if method == "lapwing":
        return LaplaceClassifier(random_state=seed)
    if method == "linear":
        return LogisticRegression(max_iter=1000)
    return MLPClassifier(random_state=seed, max_iter=2000 if method.endswith("long") else 200)


def scored_classes(method: str, seed: int, train: Any, test: Any) -> tuple[float, float, str]:
    """NLL, accuracy, and the network that was chosen."""
    x, y = test
    model = classifier(method, seed).fit(*train)
    p = model.predict_proba(x)
    nll = -np.log(np.clip(p[np.arange(len(y)), y], 1e-15, None)).mean()
    return float(nll), float((p.argmax(1) == y).mean()), chosen(model)


def scored_numbers(method: str, seed: int, train: Any, test: Any) -> tuple[float, float, str]:
    """NLL, the root of the mean square error in units of the targets' standard deviations, and the network."""
    (x, y), (new, truth) = train, test
    if method == "lapwing":
        model = LaplaceRegressor(random_state=seed).fit(x, y)
        mean, std = model.predict(new, return_std=True)
    elif method == "linear":
        model = None
        each = [BayesianRidge().fit(x, column).predict(new, return_std=True) for column in y.T]
        mean, std = (np.stack(part, 1) for part in zip(*each, strict=True))
    else:
        fit_x, held_x, fit_y, held_y = train_test_split(x, y, test_size=0.1, random_state=seed)
        scale = StandardScaler().fit(fit_y)
        steps = 2000 if method.endswith("long") else 200
        model = MLPRegressor(random_state=seed, max_iter=steps).fit(fit_x, scale.transform(fit_y).squeeze())
        back = lambda x, y: scale.inverse_transform(model.predict(x).reshape(y.shape))  # noqa: E731
        mean, std = back(new, truth), np.sqrt(np.mean((back(held_x, held_y) - held_y) ** 2, 0))
    error = np.sqrt(np.mean(((mean - truth) / y.std(0)) ** 2))
    return normal_nll(truth, mean, std), float(error), chosen(model)


def chosen(model: Any) -> str:
    """The network that the evidence took."""
    return model.comparison_.best.name if hasattr(model, "comparison_") else ""


def one(name: str, method: str, seed: int) -> dict[str, Any]:
    """A row of the journal."""
    X, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    classes = name in CLASSES
    y = y if classes else y.reshape(len(y), -1).astype(float)
    parts = train_test_split(X, y, test_size=0.2, random_state=seed, stratify=y if classes else None)
    scaler = StandardScaler().fit(parts[0])
    train, test = (scaler.transform(parts[0]), parts[2]), (scaler.transform(parts[1]), parts[3])
    start = time.process_time()
    nll, error, network = (scored_classes if classes else scored_numbers)(method, seed, train, test)
    seconds = round(time.process_time() - start, 2)
    return {"set": name, "method": method, "seed": seed, "nll": nll, "error": error, "network": network,
            "seconds": seconds}  # fmt: skip


def run(sets: list[str], seeds: list[int]) -> list[dict[str, Any]]:
    """All rows of these seeds; those that the journal has are not run again."""
    JOURNAL.parent.mkdir(exist_ok=True)
    known = [json.loads(text) for text in JOURNAL.read_text().splitlines()] if JOURNAL.exists() else []
    rows = {(r["set"], r["method"], r["seed"]): r for r in known}
    wanted = [(name, method, seed) for name in sets for seed in seeds for method in METHODS]
    for key in wanted:
        if key not in rows:
            rows[key] = one(*key)
            with JOURNAL.open("a") as journal:
                journal.write(json.dumps(rows[key]) + "\n")
            print(json.dumps(rows[key]), flush=True)
    return [rows[key] for key in wanted]


def evidences(seed: int) -> list[str]:
    """Of classifiers of each depth: the evidence that ranks them, that of the network itself, and the test's NLL."""
    rows = [line(("set", "network", "tangent model", "trained weights", "NLL")), "|---|---|--:|--:|--:|"]
    for name in ("iris", "wine", "breast_cancer"):
        X, y = getattr(datasets, f"load_{name}")(return_X_y=True)
        x, new, y, truth = train_test_split(X, y, test_size=0.2, random_state=seed, stratify=y)
        for network in WIDTHS:
            model = LaplaceClassifier(network, random_state=seed).fit(x, y)
            nll = -np.log(model.predict_proba(new)[np.arange(len(truth)), truth]).mean()
            found = f"{model.comparison_.best.log_evidence:.1f}", f"{model.log_evidence_:.1f}", f"{nll:.4f}"
            rows.append(line((name, chosen(model), *found)))
    return rows


def write(mark: str, rows: list[str]) -> None:
    """The rows between their marks in the page."""
    print("\n".join(rows))
    before, _, rest = PAGE.read_text().partition(f"<!-- {mark} -->\n")
    after = rest.partition(f"<!-- end of {mark} -->\n")[2]
    PAGE.write_text("\n".join([f"{before}<!-- {mark} -->", *rows, f"<!-- end of {mark} -->\n"]) + after)


def paired(some: np.ndarray, other: np.ndarray) -> str:
    """Mean difference over splits and its standard error."""
    d = some - other
    return f"{d.mean():+.4f} ± {d.std(ddof=1) / math.sqrt(len(d)):.4f}"


def line(cells: Any) -> str:
    return "| " + " | ".join(cells) + " |"


def tables(rows: list[dict[str, Any]]) -> list[str]:
    """NLL; what else was seen."""

    def of(name: str, method: str, field: str) -> Any:
        found = [r[field] for r in rows if r["set"] == name and r["method"] == method]
        return found if field == "network" else np.array(found)

    rivals, sets = METHODS[1:], list(dict.fromkeys(r["set"] for r in rows))
    out = ["NLL, nats an example, mean of the splits; lower is better.", ""]
    out += [line(("set", *METHODS, *(f"lapwing less {m}" for m in rivals))), "|---" + "|--:" * 7 + "|"]
    for name in sets:
        nll = {m: of(name, m, "nll") for m in METHODS}
        out.append(line((name, *(f"{nll[m].mean():.4f}" for m in METHODS),
                         *(paired(nll["lapwing"], nll[m]) for m in rivals))))  # fmt: skip
    lost = [f"{name} (seed {seed}: {method})" for name in sets for method in METHODS[1:3]
            for seed, a, b in zip(of(name, "lapwing", "seed"), of(name, "lapwing", "nll"), of(name, method, "nll"),
                                  strict=True) if a > b]  # fmt: skip
    out += ["", f"Splits in which a network of scikit-learn is better: {', '.join(lost) or 'none'}.", ""]
    out += ["Accuracy; for numbers, root mean square error in standard deviations of the targets.", ""]
    out += [
        line(("set", *METHODS, "chosen", "lapwing, CPU seconds", "sklearn", "sklearn, long")),
        "|---" + "|--:" * 8 + "|",
    ]
    for name in sets:
        took = of(name, "lapwing", "network")
        told = ", ".join(f"{n} ({took.count(n)})" for n in sorted(set(took)))
        seconds = (f"{of(name, m, 'seconds').mean():.1f}" for m in METHODS[:3])
        out.append(line((name, *(f"{of(name, m, 'error').mean():.3f}" for m in METHODS), told, *seconds)))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", choices=(*CLASSES, *NUMBERS), default=(*CLASSES, *NUMBERS))
    parser.add_argument("--seeds", nargs="+", type=int, default=SCORED)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--evidence", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for kind in (LapwingWarning, ConvergenceWarning):
        warnings.simplefilter("ignore", kind)
    if args.evidence:
        return write("evidence", evidences(100))
    rows = json.loads(RESULTS.read_text())["rows"] if args.table else run(args.sets, args.seeds)
    if tuple(args.seeds) != SCORED:
        return print("\n".join(tables(rows)))
    if not args.table:
        record = {"date": datetime.date.today().isoformat(), "machine": machine()}
        record |= {"versions": versions("torch", "lapwing", "scikit-learn"), "rows": rows}
        RESULTS.write_text(json.dumps(record, indent=1) + "\n")
    write("tables", tables(rows))


if __name__ == "__main__":
    main()
