"""What the doctor predicts against what is then measured, on the networks of structured.py.

    python benchmarks/doctor.py [--repeat 3] [--tangent]

The doctor is asked three times for each network, in this process, and the median of its predictions taken; each figure
is then measured: seconds of a fit, of tuning (with what predictions need) and of predicting 1,000 inputs, over those of
a gradient; and the peak memory of a process that does all three above one that has taken a gradient and run all three
on a toy: torch, the network and the data. The bar is 30 % either way.

Tuning at the tangent MAP is held to the prediction for as many passes (or rounds, where J is in memory) as it took: how
many that would be, the doctor cannot know. It is run once, and timed by the doctor's own clock, the thread's. A small
regression network with the full curvature, whose rows of J are in memory, stands beside the two others.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from _common import Bar, best, clock, peak_memory, table, write
from structured import BATCH, PACKAGES, SEED, gradient_epoch, problem
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw
from lapwing.doctor.tangent import PASSES, ROUNDS

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
        la.state.memo.clear()
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


# -- at the tangent MAP ------------------------------------------------------------------------------------------


def small(n: int = 2000) -> tuple[nn.Module, DataLoader]:
    """A regression network, trained, and its data."""
    torch.manual_seed(SEED)
    net = nn.Sequential(nn.Linear(8, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 1))
    x = torch.randn(n, 8)
    y = x[:, :1].sin() + 0.3 * x[:, 1:2] + 0.1 * torch.randn(n, 1)
    loader = DataLoader(TensorDataset(x, y), BATCH)
    optimizer = torch.optim.Adam(net.parameters(), 5e-3)
    for _ in range(40):
        for inputs, targets in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(net(inputs), targets).backward()
            optimizer.step()
    return net, loader


def squares_epoch(net: nn.Module, loader: DataLoader) -> None:
    for x, y in loader:
        net.zero_grad()
        nn.functional.mse_loss(net(x), y, reduction="sum").backward()
    net.zero_grad()


def at_tangent() -> Iterator[tuple[str, str, float, float]]:
    """(case, what, predicted for as many passes or rounds as were made, measured)."""
    cases: list[tuple[str, str, str, str, Any, Any]] = [
        ("cnn", "categorical", "kron", "kron", gradient_epoch, lambda: problem("cnn")[:2]),
        ("mlp", "categorical", "kron", "kron", gradient_epoch, lambda: problem("mlp")[:2]),
        ("small", "gaussian", "full", "full (primal)", squares_epoch, small),
    ]
    for name, likelihood, structure, row, epoch, make in cases:
        net, loader = make()
        costs = [lw.doctor(net, loader, likelihood).plan[row] for _ in range(3)]
        la = lw.laplace(net, loader, likelihood, structure=structure)
        if name == "small":
            la.tuned()  # a short run has what comes once in a process in it
            la.state.memo.clear()
        before = [thread_seconds(lambda: epoch(net, loader))[0] for _ in range(4)]  # noqa: B023
        seconds, done = thread_seconds(la.tuned)
        unit = min([*before, *(thread_seconds(lambda: epoch(net, loader))[0] for _ in range(4))])  # noqa: B023
        passes, rounds = done.tuning.passes, done.tuning.iterations
        more = passes - PASSES if passes > 1 else rounds - ROUNDS
        what = f"tuned() of {passes} passes" if passes > 1 else f"tuned() of {rounds} rounds"
        yield f"{name} {structure}", what, statistics.median(c.tangent + more * c.each for c in costs), seconds / unit
        if name in NETWORKS:
            peak = memory(name, f"{structure}:tangent")
            yield f"{name} {structure}", "memory with tuned(), MB", costs[0].memory / 1e6, peak / 1e6


def thread_seconds(function: Any) -> tuple[float, Any]:
    start = time.thread_time()
    out = function()
    return time.thread_time() - start, out


def memory(name: str, structure: str) -> int:
    """structure: "base" is none of them; "kron:tangent" is tuned at the tangent MAP."""

    def peak(task: str) -> int:
        return int(subprocess.check_output([sys.executable, __file__, "--job", f"{name}:{task}"], text=True))

    return peak(structure) - peak("base")


def run(net: nn.Module, data: Any, x: Tensor, structure: str, center: str) -> None:
    float(lw.laplace(net, data, "categorical", structure=structure).tuned(center=center).predict(x).covariance.sum())


def job(what: str) -> None:
    name, structure, *center = what.split(":")
    net, loader, _ = problem(name)
    x = inputs_of(loader)
    gradient_epoch(net, [next(iter(loader))])
    run(nn.Linear(1, 2), (torch.zeros(8, 1), torch.arange(8) % 2), torch.zeros(2, 1), "kron", "map")  # loads the code
    if structure != "base":
        run(net, loader, x, structure, "tangent" if center else "map")
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
            yield case, "memory, MB", costs[0].memory_at_map / 1e6, memory(name, structure) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--tangent", action="store_true", help="only tuning at the tangent MAP")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.job:
        job(args.job)
        return
    warnings.simplefilter("ignore", lw.errors.LapwingWarning)  # untrained: data that determine little
    rows = [*at_tangent(), *([] if args.tangent else compare(args.repeat))]
    shown = [(case, what, f"{p:.3g}", f"{m:.3g}", f"{p / m:.2f}") for case, what, p, m in rows]
    print(table([("case", "what", "predicted", "measured", "ratio"), *shown]))
    bars = [Bar(f"{case}: {what}, off by", abs(p / m - 1), 0.3) for case, what, p, m in rows]
    print(*bars, sep="\n")
    body: dict[str, Any] = {
        "seed": SEED,
        "cases": [dict(zip(("case", "what", "predicted", "measured"), row, strict=True)) for row in rows],
    }
    print("written to", write("doctor_partial" if args.tangent else "doctor", body, bars, PACKAGES))


if __name__ == "__main__":
    main()
