"""Evidence during training against plain training, and against a grid of weight decays, in one run.

    LAPWING_DATA=/path/to/data python benchmarks/online.py [--quick] [--epochs 40] [--examples 10000] [--seeds 0]

Fashion-MNIST, a small CNN (105,866 weights), Adam. With every=5 and burn_in=5 there is one update for each five epochs
from the first to the last, so a burn-in does not flatter the ratio of total times; everything is timed, from the making
of OnlineEvidence to the last step. Beside it, epoch about, the same network is trained without evidence and weight
decay: that is the plain training a ratio is to, so that a drift of the machine meets both. The grid's choice is the
best of its five *test* NLLs, which no user could make: the bar is higher than a validation set's. NLLs are the
networks' own (no error bars), ours at the weights of the highest evidence; those of the last epoch, and of the Laplace
predictive, stand beside them. A ratio is that of the clock, wall or CPU, that speaks against us.

Denormal numbers are flushed to zero, for every run: weights that a strong prior or weight decay draws to zero become
denormal in float32, and a CPU takes up to twice the time for an epoch with them.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from _common import Bar, clocks, table, write
from structured import cnn
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw
from lapwing.curvature import Factor

EVERY, BATCH, RATE = 5, 128, 1e-3
GRID = (0.0, 1e-5, 1e-4, 1e-3, 1e-2)  # weight decays: λ/N
PER_WEIGHT = lw.priors.Gaussian(1.0, per="weight")
RUNS: dict[str, dict[str, Any]] = {
    "kron, layerwise, Monte-Carlo": {"structure": "kron", "prior": "layerwise", "factor": Factor("monte_carlo", 1)},
    "kron, layerwise, exact": {"structure": "kron", "prior": "layerwise", "factor": "exact"},
    "diag, per weight, Monte-Carlo": {"structure": "diag", "prior": PER_WEIGHT, "factor": Factor("monte_carlo", 1)},
    "diag, per weight, exact": {"structure": "diag", "prior": PER_WEIGHT, "factor": "exact"},
}
PACKAGES = ("torch", "numpy", "lapwing")
Data = tuple[Tensor, Tensor]


def images(n: int) -> tuple[Data, Data]:
    """The first n training images and all test images, centered and scaled by the training set's."""
    folder = os.environ.get("LAPWING_DATA")
    if folder is None or not (pathlib.Path(folder) / "fashion_mnist.npz").is_file():
        raise SystemExit("set LAPWING_DATA to the folder that holds fashion_mnist.npz; see studies/README.md")
    stored = np.load(pathlib.Path(folder) / "fashion_mnist.npz")
    x = {k: torch.from_numpy(stored[f"x_{k}"]).reshape(-1, 1, 28, 28).float() / 255 for k in ("train", "test")}
    y = {k: torch.from_numpy(stored[f"y_{k}"]).long().reshape(-1) for k in ("train", "test")}
    mean, std = x["train"].mean(), x["train"].std()
    return ((x["train"][:n] - mean) / std, y["train"][:n]), ((x["test"] - mean) / std, y["test"])


def seeded(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return cnn()


def score(net: nn.Module, test: Data) -> dict[str, float]:
    with torch.no_grad():
        f = torch.cat([net(x) for x in test[0].split(500)])
    accuracy = (f.argmax(-1) == test[1]).float().mean()
    return {"nll": float(nn.functional.cross_entropy(f, test[1])), "accuracy": float(accuracy)}


def plain(loader: DataLoader, test: Data, decay: float, epochs: int, seed: int) -> dict[str, Any]:
    net = seeded(seed)
    optimizer = torch.optim.Adam(net.parameters(), lr=RATE, weight_decay=decay)

    seconds, _ = clocks(lambda: [epoch(net, optimizer, loader, nn.functional.cross_entropy) for _ in range(epochs)])
    return {"seconds": seconds, **score(net, test)}


def epoch(
    net: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader, loss: Callable[[Tensor, Tensor], Tensor]
) -> None:
    for x, y in loader:
        optimizer.zero_grad()
        loss(net(x), y).backward()
        optimizer.step()


def evidence(loader: DataLoader, test: Data, how: dict[str, Any], epochs: int, seed: int) -> dict[str, Any]:
    net, twin = seeded(seed), seeded(seed)
    optimizer, twins = (torch.optim.Adam(each.parameters(), lr=RATE) for each in (net, twin))
    updates: list[float] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lw.errors.LapwingWarning)  # weights that the data do not determine: counted
        seconds, online = clocks(
            lambda: lw.OnlineEvidence(net, loader, "categorical", every=EVERY, burn_in=EVERY, **how)
        )
        beside = dict.fromkeys(seconds, 0.0)
        for _ in range(epochs):
            trained, _ = clocks(lambda: epoch(net, optimizer, loader, online.loss))
            stepped, update = clocks(online.step)
            plainly, _ = clocks(lambda: epoch(twin, twins, loader, nn.functional.cross_entropy))
            seconds = {k: seconds[k] + trained[k] + stepped[k] for k in seconds}
            beside = {k: beside[k] + plainly[k] for k in beside}
            updates += [stepped["wall"]] if update is not None else []
    print(f"\n{online.history}")
    last, best = score(net, test), online.restore()
    la = online.laplace()
    pieces = zip(test[0].split(500), test[1].split(500), strict=True)
    bayes = torch.cat([la.predict(x, link="probit").log_prob(y) for x, y in pieces])
    return {
        "seconds": seconds,
        "seconds_of_plain_training": beside,
        "seconds_an_update": updates,
        **score(net, test),
        "best_epoch": best.epoch,
        "last_epoch": last,
        "laplace_nll": -float(bayes.mean()),
        "log_evidence": [r.log_evidence for r in online.history],
        "at_bound": online.history[-1].at_bound,
    }


def run(n: int, epochs: int, seed: int) -> tuple[dict[str, Any], list[Bar]]:
    train, test = images(n)
    loader = DataLoader(TensorDataset(*train), BATCH, shuffle=True)
    plain(DataLoader(TensorDataset(train[0][:256], train[1][:256]), BATCH), test, 0.0, 1, seed)  # warm up
    grid = {f"{decay:g}": plain(loader, test, decay, epochs, seed) for decay in GRID}
    best = min(grid.values(), key=lambda r: r["nll"])
    found = {name: evidence(loader, test, how, epochs, seed) for name, how in RUNS.items()}
    bars, unit = [], grid["0"]["seconds"]
    rows = [("", "wall s", "CPU s", "times plain", "test NLL", "accuracy", "NLL, last epoch", "NLL, Laplace")]
    for decay, r in grid.items():
        rows.append((f"weight decay {decay}", *_times(r, unit), f"{r['nll']:.4f}", f"{r['accuracy']:.4f}", "", ""))
    for name, r in found.items():
        beside = r["seconds_of_plain_training"]
        r["times_plain"] = max(r["seconds"][clock] / beside[clock] for clock in beside)
        more = f"{r['last_epoch']['nll']:.4f}", f"{r['laplace_nll']:.4f}"
        rows.append((name, *_times(r, beside), f"{r['nll']:.4f}", f"{r['accuracy']:.4f}", *more))
        bars.append(Bar(f"{name}: total time, times plain training", r["times_plain"], 2.2 if "exact" in name else 1.6))
        bars.append(Bar(f"{name}: test NLL less the best of the grid's", r["nll"] - best["nll"], 0.0))
    print(f"\nseed {seed}", table(rows), *bars, sep="\n")
    return {"seed": seed, "grid": grid, "online": found}, bars


def _times(r: dict[str, Any], unit: dict[str, float]) -> tuple[str, str, str]:
    wall, cpu = r["seconds"]["wall"], r["seconds"]["cpu"]
    return f"{wall:.1f}", f"{cpu:.1f}", f"{max(wall / unit['wall'], cpu / unit['cpu']):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1,000 images and 10 epochs: to see that it runs")
    parser.add_argument("--examples", type=int, default=10_000)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    args = parser.parse_args()
    torch.set_flush_denormal(True)  # before any thread is started: each inherits it
    n, epochs = (1_000, 10) if args.quick else (args.examples, args.epochs)
    bars: list[Bar] = []
    body: dict[str, Any] = {"examples": n, "epochs": epochs, "every": EVERY, "batch": BATCH, "runs": []}
    for seed in args.seeds:
        result, more = run(n, epochs, seed)
        body["runs"].append(result)
        bars += more
    whole = (n, epochs) == (10_000, 40)
    print("\nwritten to", write("online" if whole else "online_partial", body, bars, PACKAGES))


if __name__ == "__main__":
    main()
