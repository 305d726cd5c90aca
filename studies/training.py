"""Standard training against training by evidence: a small CNN on 10,000 images of CIFAR-10, curves of train and test.

    LAPWING_DATA=/path/to/data python studies/training.py [--epochs 40] [--seed 0]

Three runs of the same network from the same weights, by Adam: without weight decay, with the customary 5e-4, and with a
precision a layer learnt by `lw.OnlineEvidence` (kron, one Monte-Carlo sample) in the same single training. No
augmentation, no early stopping, no validation set. Where cifar10_train.npz is there, its first 10,000 images are for
training and the 10,000 of the test set for testing; else the test set is cut, 8,000 and 2,000, and the record says so.
Writes docs/studies/figures/training.png and studies/results/training.json.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import time
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display needed

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw

ROOT = pathlib.Path(__file__).parents[1]
BATCH, RATE, EVERY = 128, 1e-3, 5
RUNS = {"standard, no weight decay": 0.0, "standard, weight decay 5e-4": 5e-4, "evidence, a precision a layer": None}
COLORS = {"standard, no weight decay": "#D55E00", "standard, weight decay 5e-4": "#E69F00"}
Data = tuple[Tensor, Tensor]


def images() -> tuple[Data, Data, str]:
    folder = os.environ.get("LAPWING_DATA")
    if folder is None or not (pathlib.Path(folder) / "cifar10/cifar10_test.npz").is_file():
        raise SystemExit("set LAPWING_DATA to the folder that holds cifar10/cifar10_test.npz; see studies/README.md")
    root = pathlib.Path(folder) / "cifar10"
    test = _load(root / "cifar10_test.npz")
    if (root / "cifar10_train.npz").is_file():
        train = _load(root / "cifar10_train.npz")
        return (train[0][:10_000], train[1][:10_000]), test, "10,000 of the training set; all 10,000 of the test set"
    order = torch.randperm(len(test[1]), generator=torch.Generator().manual_seed(0))
    a, b = order[:8000], order[8000:]
    return (test[0][a], test[1][a]), (test[0][b], test[1][b]), "8,000 and 2,000 of the test set's 10,000"


def _load(path: pathlib.Path) -> Data:
    stored = np.load(path)
    mean, std = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2023, 0.1994, 0.2010])
    x = ((torch.from_numpy(stored["x"]) / 255 - mean) / std).permute(0, 3, 1, 2).contiguous()
    return x, torch.from_numpy(stored["y"]).long().reshape(-1)


def cnn(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, 2, 1),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, 2, 1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(1024, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def score(net: nn.Module, data: Data) -> dict[str, float]:
    with torch.no_grad():
        f = torch.cat([net(x) for x in data[0].split(500)])
    accuracy = (f.argmax(-1) == data[1]).float().mean()
    return {"nll": float(nn.functional.cross_entropy(f, data[1])), "accuracy": float(accuracy)}


def run(decay: float | None, train: Data, test: Data, epochs: int, seed: int) -> dict[str, Any]:
    """Curves of one training; decay None learns precisions by evidence."""
    net = cnn(seed)
    loader = DataLoader(TensorDataset(*train), BATCH, shuffle=True)
    optimizer = torch.optim.Adam(net.parameters(), lr=RATE, weight_decay=decay or 0.0)
    online = None
    if decay is None:
        factor = lw.curvature.Factor("monte_carlo", 1)
        online = lw.OnlineEvidence(net, loader, "categorical", every=EVERY, burn_in=EVERY, factor=factor)
    loss = nn.functional.cross_entropy if online is None else online.loss
    curves: dict[str, list[float]] = {
        f"{part} {what}": [] for part in ("train", "test") for what in ("nll", "accuracy")
    }
    seconds = 0.0
    for _ in range(epochs):
        start = time.perf_counter()
        for x, y in loader:
            optimizer.zero_grad()
            loss(net(x), y).backward()
            optimizer.step()
        if online is not None:
            online.step()
        seconds += time.perf_counter() - start
        for part, data in (("train", train), ("test", test)):
            for what, value in score(net, data).items():
                curves[f"{part} {what}"].append(value)
    out: dict[str, Any] = {"seconds": seconds, "curves": curves}
    if online is not None:
        print(online.history)
        best = online.restore()
        out |= {
            "records": [vars(record) for record in online.history],
            "best": {"epoch": best.epoch, "log_evidence": best.log_evidence, **score(net, test)},
        }
    return out


def draw(results: dict[str, Any], path: pathlib.Path) -> None:
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for name, result in results.items():
        color = COLORS.get(name, "#0072B2")
        for axis, what in zip(axes, ("accuracy", "nll"), strict=True):
            curves = result["curves"]
            epochs = range(1, len(curves["train nll"]) + 1)
            axis.plot(epochs, curves[f"test {what}"], color=color, label=f"{name}: test")
            axis.plot(epochs, curves[f"train {what}"], "--", color=color, lw=1, label=f"{name}: train")
    axes[0].set(xlabel="epoch", ylabel="accuracy")
    axes[1].set(xlabel="epoch", ylabel="negative log-likelihood, nats", yscale="log")
    axes[0].legend(frameon=False, fontsize=7)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140, facecolor="white")
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    train, test, what = images()
    results = {name: run(decay, train, test, args.epochs, args.seed) for name, decay in RUNS.items()}
    for name, r in results.items():
        c = r["curves"]
        least = min(c["test nll"])
        shown = "  ".join(f"{key} {values[-1]:.3f}" for key, values in c.items())
        print(f"{name:<30} {shown}  least test nll {least:.3f}  {r['seconds']:.0f} s")
    record = {
        "images": what,
        "epochs": args.epochs,
        "seed": args.seed,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "runs": results,
    }
    target = ROOT / "studies/results/training.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(record, indent=1) + "\n")
    draw(results, ROOT / "docs/studies/figures/training.png")
    print("written to", target.relative_to(ROOT), "and docs/studies/figures/training.png")


if __name__ == "__main__":
    main()
