"""What the doctor predicts against what is then measured, on the networks of structured.py.

    python benchmarks/doctor.py [--repeat 3]

The doctor is asked three times for each network, in this process, and the median of its predictions taken; each figure
is then measured: seconds of a fit, of tuning (with what predictions need) and of predicting 1,000 inputs, over those of
a gradient; and the peak memory of a process that does all three above one that has taken a gradient and run all three
on a toy: torch, the network and the data. The bar is 30 % either way.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import torch
from _common import Bar, best, clock, peak_memory, table, write
from structured import PACKAGES, SEED, gradient_epoch, problem
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lapwing as lw

NETWORKS = ("cnn", "mlp")
STRUCTURES = ("kron", "diag")
INPUTS = 1000


def inputs_of(loader: DataLoader) -> Tensor:
    return torch.cat([x for x, _ in loader])[:INPUTS]


def measured(net: nn.Module, loader: DataLoader, structure: str, repeat: int) -> dict[str, float]:
    """In gradients: epochs for fit and tune, passes over the inputs for predict."""
    epoch = best(lambda: gradient_epoch(net, loader), 2 * repeat)
    x = inputs_of(loader)
    n = len(loader.dataset)  # type: ignore[arg-type]

    def fit() -> lw.Laplace:
        la = lw.laplace(net, loader, "categorical", structure=structure)
        float(la.log_evidence())
        return la

    la = fit()

    def tune() -> None:  # with the eigenvectors that predictions need
        la.state.cache.clear()
        la.tuned(center="map").predict(x[:1])

    def predict() -> None:
        float(la.replace(prior=2.0).predict(x).covariance.sum())

    def without_evidence() -> None:
        lw.laplace(net, loader, "categorical", structure=structure)

    return {
        "fit": best(without_evidence, repeat) / epoch,
        "tune": best(tune, repeat) / epoch,
        "predict": best(predict, repeat) / (epoch * INPUTS / n),
    }


def memory(name: str, structure: str) -> int:
    def peak(task: str) -> int:
        return int(subprocess.check_output([sys.executable, __file__, "--job", f"{name}:{task}"], text=True))

    return peak(structure) - peak("base")


def run(net: nn.Module, data: Any, x: Tensor, structure: str) -> None:
    float(lw.laplace(net, data, "categorical", structure=structure).tuned(center="map").predict(x).covariance.sum())


def job(what: str) -> None:
    name, structure = what.split(":")
    net, loader, _ = problem(name)
    x = inputs_of(loader)
    gradient_epoch(net, [next(iter(loader))])
    run(nn.Linear(1, 2), (torch.zeros(8, 1), torch.arange(8) % 2), torch.zeros(2, 1), "kron")  # loads the code
    if structure != "base":
        run(net, loader, x, structure)
    print(peak_memory())


def compare(repeat: int) -> Iterator[tuple[str, str, float, float]]:
    """(case, what, predicted, measured)."""
    for name in NETWORKS:
        net, loader, _ = problem(name)
        gradient_epoch(net, loader)
        calls = [clock(lambda net=net, loader=loader: lw.doctor(net, loader, "categorical")) for _ in range(3)]
        print(f"{name}: the doctor took {min(seconds for seconds, _ in calls):.3g} s")
        for structure in STRUCTURES:
            costs, case = [report.plan[structure] for _, report in calls], f"{name} {structure}"
            found = measured(net, loader, structure, repeat)
            for what in ("fit", "tune", "predict"):
                yield case, what, statistics.median(getattr(cost, what) for cost in costs), found[what]
            yield case, "memory, MB", costs[0].memory / 1e6, memory(name, structure) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        job(args.job)
        return
    rows = list(compare(args.repeat))
    shown = [(case, what, f"{p:.3g}", f"{m:.3g}", f"{p / m:.2f}") for case, what, p, m in rows]
    print(table([("case", "what", "predicted", "measured", "ratio"), *shown]))
    bars = [Bar(f"{case}: {what}, off by", abs(p / m - 1), 0.3) for case, what, p, m in rows]
    print(*bars, sep="\n")
    body: dict[str, Any] = {
        "seed": SEED,
        "cases": [dict(zip(("case", "what", "predicted", "measured"), row, strict=True)) for row in rows],
    }
    print("written to", write("doctor", body, bars, PACKAGES))


if __name__ == "__main__":
    main()
