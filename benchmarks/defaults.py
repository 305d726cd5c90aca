"""What the default call costs: fit, tuned() and predictions of "classification", in gradient epochs.

    python benchmarks/defaults.py [--repeat 3]

    mlp    64-32-32-10, 300 examples
    cnn    87,000 weights, 2,000 images of 28 × 28, 10 classes, with a last layer of 3,137 inputs
    resnet ResNet-20 on CIFAR-10 (with LAPWING_DATA): fit, tuned() and predictions of 10,000 images, at most 12 gradient
           epochs of all 50,000. From two sizes of data, since each cost is a constant and so much an image; with the
           factor that "auto" is of all images

tuned() may take 5 gradient epochs, or three eigendecompositions where that is more: of P × P, which an exact structure
would factorize, or of the largest Kronecker factor, which the first prediction would factorize otherwise. A gradient
epoch is one forward and backward pass over the same data. Labels are learnt for a few epochs, so that the rule has
something to choose; the data are random.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from _common import Bar, best, clock, clocks, write
from scale import cifar
from torch import Tensor, nn

import lapwing as lw

SIZES, ALL, TESTED, PREDICTED = (500, 1500), 50_000, 10_000, 256  # images of ResNet-20


def mlp() -> tuple[nn.Module, Tensor, Tensor]:
    """Ten classes in 64 dimensions."""
    x = torch.randn(300, 64)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10)), x, _labels(x)


def cnn() -> tuple[nn.Module, Tensor, Tensor]:
    """Ten classes of noisy images."""
    x = torch.randn(2000, 1, 28, 28)
    layers: list[nn.Module] = []
    for i, o, stride in ((1, 32, 2), (32, 64, 2), (64, 64, 1)):
        layers += [nn.Conv2d(i, o, 3, stride, 1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 49, 10)), x, _labels(x.flatten(1))


def _labels(x: Tensor) -> Tensor:
    return (x @ torch.randn(x.shape[1], 10)).argmax(1)


def gradients(net: nn.Module, x: Tensor, y: Tensor) -> None:
    """One epoch."""
    for some, labels in zip(x.split(256), y.split(256), strict=True):
        net.zero_grad()
        nn.functional.cross_entropy(net(some), labels).backward()


def measured(make: Any, repeat: int) -> dict[str, float]:
    """Seconds of each step; the least of several runs."""
    torch.manual_seed(0)
    net, x, y = make()
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(10):
        gradients(net, x, y)
        optimizer.step()
    net.eval()
    rows = []
    for _ in range(repeat):
        fit, la = clock(lambda: lw.laplace(net, (x, y), "classification"))
        tune, la = clock(la.tuned)
        predict, _ = clock(lambda la=la: la.predict(x[:256]).probs.sum())
        rows.append({"fit": fit, "tune": tune, "predict 256": predict})
    out = {key: min(row[key] for row in rows) for key in rows[0]}
    out["gradient epoch"] = best(lambda: gradients(net, x, y), 3 * repeat)
    out["parameters"] = sum(p.numel() for p in net.parameters())
    return out


def resnet() -> dict[str, Any]:
    """CPU seconds at two sizes of data, and what follows for all of it."""
    rows, factor = [], lw.curvature.Factor("monte_carlo", 1)
    assert lw.curvature.Kronecker.samples_past < ALL  # so that this is what "auto" is
    for n in SIZES:
        net, loader = cifar(n)
        x, y = (torch.cat(parts) for parts in zip(*loader, strict=True))
        gradient = min(clocks(lambda: gradients(net, x, y))[0]["cpu"] for _ in range(3))  # noqa: B023
        fit, la = clocks(lambda: lw.laplace(net, (x, y), "classification", factor=factor))  # noqa: B023
        tune, la = clocks(la.tuned)
        predict, _ = clocks(lambda: la.predict(x[:PREDICTED]).probs.sum())  # noqa: B023
        rows.append({"gradient": gradient, "fit": fit["cpu"], "tune": tune["cpu"], "predict": predict["cpu"]})
    small, large = rows
    at_all = {k: large[k] + (large[k] - small[k]) / (SIZES[1] - SIZES[0]) * (ALL - SIZES[1]) for k in ("fit", "tune")}
    at_all |= {"gradient": large["gradient"] / SIZES[1] * ALL, "predict": large["predict"] / PREDICTED * TESTED}
    epochs = {k: at_all[k] / at_all["gradient"] for k in ("fit", "tune", "predict")}
    return {"sizes": dict(zip(map(str, SIZES), rows, strict=True)), "epochs": epochs, "in all": sum(epochs.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    repeat = parser.parse_args().repeat
    found: dict[str, Any] = {"mlp": measured(mlp, repeat), "cnn": measured(cnn, repeat)}
    for name, size in (("mlp", 3466), ("cnn", 3137)):
        matrix = torch.randn(size, size, dtype=torch.float64)
        found[name]["eigendecomposition"] = best(lambda matrix=matrix: torch.linalg.eigh(matrix @ matrix.mT), 1)
    for name, row in found.items():
        print(name, {key: round(value, 3) for key, value in row.items()})
    bars = []
    for name, row in found.items():
        allowed = max(5 * row["gradient epoch"], 3 * row["eigendecomposition"])
        bars.append(Bar(f"{name}: tuned(), of what it may take", row["tune"] / allowed, 1))
        print(f"{name}: tuned() takes {row['tune'] / row['gradient epoch']:.1f} gradient epochs")
    if os.environ.get("LAPWING_DATA"):
        found["resnet"] = resnet()
        bars.append(Bar("resnet: fit, tuned() and predictions, in gradient epochs", found["resnet"]["in all"], 12))
        print("resnet", found["resnet"]["epochs"])
    else:
        print("resnet: skipped, LAPWING_DATA names no folder")
    for bar in bars:
        print(bar)
    write("defaults", found, bars, ("torch", "lapwing"))


if __name__ == "__main__":
    main()
