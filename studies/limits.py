"""Networks of finite width beside their limit, and one whose limit is no Gaussian process.

    python studies/limits.py [--draws 10000] [--seed 0]

1. One hidden ReLU layer of 1 to 10,000 units with random weights, at two inputs, beside its Gaussian process: excess
   kurtosis (15/H, exactly), the covariance, and the energy distance between draws of both.
2. Three hidden layers, the same. At finite width the layers before the last are random too, so that it is further away.
3. Output weights that are stable with index α = 1 (Cauchy), scaled by 1/H: the sum over units does not become normal,
   and the largest unit keeps its share of it, where that of a normal prior's goes to zero (Neal 1996, chapter 2).
   Functions on a line jump: the largest change of a function over a fortieth of the line, as a share of its range.
4. The tangent kernel in training: ‖Θ_t − Θ_0‖/‖Θ_0‖ of networks of several widths on 16 points, after full-batch
   gradient descent in the parameters that are N(0, 1).
Writes studies/results/limits.json and docs/studies/figures/infinite_width.png.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import pathlib
import time
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.gp import infinite

ROOT = pathlib.Path(__file__).parents[1]
WIDTHS = (1, 3, 10, 30, 100, 300, 1_000, 10_000)
DEEP = (1, 3, 10, 30, 100)
TRAINED = (10, 30, 100, 300, 1_000)
INPUTS = torch.tensor([[1.0, 0.0], [0.6, 0.8]], dtype=torch.float64)
AT_ONCE = 2**23  # numbers drawn at once


def normal(*shape: int, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def shallow(width: int, draws: int, generator: torch.Generator) -> Tensor:
    """Draws (draws, 2) of one hidden layer at the two inputs; weight variance 2."""
    out = []
    for start in range(0, draws, max(1, AT_ONCE // width)):
        n = min(draws - start, max(1, AT_ONCE // width))
        hidden = torch.relu(normal(n, width, 2, generator=generator) @ INPUTS.mT)  # N(0, 2 / 2)
        out.append(torch.einsum("nh,nhx->nx", normal(n, width, generator=generator), hidden) * math.sqrt(2 / width))
    return torch.cat(out)


def deep(width: int, draws: int, generator: torch.Generator) -> Tensor:
    """The same of three hidden layers."""
    out = []
    for start in range(0, draws, max(1, AT_ONCE // (4 * width**2))):
        n = min(draws - start, max(1, AT_ONCE // (4 * width**2)))
        h = torch.relu(normal(n, width, 2, generator=generator) @ INPUTS.mT)
        for _ in range(2):
            h = torch.relu(normal(n, width, width, generator=generator) @ h * math.sqrt(2 / width))
        out.append(torch.einsum("nh,nhx->nx", normal(n, width, generator=generator), h) * math.sqrt(2 / width))
    return torch.cat(out)


def energy(a: Tensor, b: Tensor) -> tuple[float, float]:
    """2 E|a − b| − E|a − a'| − E|b − b'| of draws (n, d), without bias, and its standard error over ten parts."""
    parts = []
    for x, y in zip(a.chunk(10), b.chunk(10), strict=True):
        n = len(x)
        own = sum(float(torch.cdist(z, z).sum()) / (n * (n - 1)) for z in (x, y))
        parts.append(2 * float(torch.cdist(x, y).mean()) - own)
    found = torch.tensor(parts)
    return float(found.mean()), float(found.std() / math.sqrt(len(parts)))


def moments(f: Tensor, limit: Tensor, K: Tensor) -> dict[str, float]:
    """How far draws of a network are from draws of its limit."""
    scaled = f / K.diagonal().sqrt()
    fourth, cross = scaled[:, 0] ** 4, f[:, 0] * f[:, 1]
    distance, error = energy(f, limit)
    return {
        "excess kurtosis": float(fourth.mean() - 3),
        "its error": float(fourth.std() / math.sqrt(len(f))),
        "covariance / kernel": float(cross.mean() / K[0, 1]),
        "covariance error": float(cross.std() / math.sqrt(len(f)) / K[0, 1]),
        "energy distance": distance,
        "energy error": error,
    }


def to_limit(draws: int, generator: torch.Generator) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, depth, widths, make in (("one layer", 1, WIDTHS, shallow), ("three layers", 3, DEEP, deep)):
        k = infinite.nngp(depth)
        limit = k.draw(INPUTS, draws, generator)
        out[name] = {str(width): moments(make(width, draws, generator), limit, k(INPUTS)) for width in widths}
        out[name]["the process"] = moments(k.draw(INPUTS, draws, generator), limit, k(INPUTS))
    return out


def function(width: int, heavy: bool, x: Tensor, generator: torch.Generator) -> tuple[Tensor, float]:
    """One function of steps erf on a line, and the share that its largest unit has of Σ|units|, in the mean over x."""
    place, steep = 4 * torch.rand(width, generator=generator, dtype=torch.float64) - 2, 30.0
    v = normal(width, generator=generator)
    v = v / normal(width, generator=generator) / width if heavy else v / math.sqrt(width)  # Cauchy: normal over normal
    units = v[:, None] * torch.erf(steep * (x - place[:, None]))
    return units.sum(0), float((units.abs().amax(0) / units.abs().sum(0)).mean())


def heavy_tails(functions: int, generator: torch.Generator) -> dict[str, Any]:
    """By width: the largest unit's share, and the largest step of a function on a fine grid as a share of its range."""
    x, out = torch.linspace(-2, 2, 801, dtype=torch.float64), {}
    for width in (10, 100, 1_000, 10_000):
        row = {}
        for name, heavy in (("normal", False), ("Cauchy", True)):
            shares, steps = [], []
            for _ in range(functions):
                f, share = function(width, heavy, x, generator)
                shares.append(share)
                window = (f[20:] - f[:-20]).abs().max()  # 0.1, about as wide as a unit's own step
                steps.append(float(window / (f.max() - f.min())))
            row[name] = {
                "largest unit": float(torch.tensor(shares).median()),
                "largest step": float(torch.tensor(steps).median()),
            }
        out[str(width)] = row
    return out


class Scaled(nn.Module):
    """A ReLU network of two hidden layers in parameters that are N(0, 1)."""

    def __init__(self, width: int, generator: torch.Generator) -> None:
        super().__init__()
        sizes = (2, width, width, 1)
        self.weights = nn.ParameterList(
            [nn.Parameter(normal(o, i, generator=generator)) for i, o in itertools.pairwise(sizes)]
        )

    def forward(self, x: Tensor) -> Tensor:
        for i, w in enumerate(self.weights):
            x = (torch.relu(x) if i else x) @ w.mT * math.sqrt(2 / w.shape[1])
        return x


def drift(width: int, seeds: int, steps: int) -> dict[str, float]:
    """‖Θ_t − Θ_0‖/‖Θ_0‖ and ‖Θ_0 − Θ‖/‖Θ‖ of the limit Θ, in Frobenius norm: means over seeds."""
    angle = torch.linspace(0, 2 * math.pi, 17, dtype=torch.float64)[:-1]
    x = torch.stack([angle.cos(), angle.sin()], 1)
    y, limit = torch.sin(2 * angle)[:, None], infinite.ntk(2)(x)
    rate, moved, away, fits = 1.0 / float(torch.linalg.eigvalsh(limit)[-1]), [], [], []
    for seed in range(seeds):
        net = Scaled(width, torch.Generator().manual_seed(seed))
        before = lw.gp.kernel(lw.linearize(net), x, per_output=True)[0]
        optimizer = torch.optim.SGD(net.parameters(), lr=rate)
        for _ in range(steps):
            optimizer.zero_grad()
            (0.5 * (net(x) - y).square().sum()).backward()
            optimizer.step()
        after = lw.gp.kernel(lw.linearize(net), x, per_output=True)[0]
        moved.append(float((after - before).norm() / before.norm()))
        away.append(float((before - limit).norm() / limit.norm()))
        fits.append(float((net(x) - y).square().mean().detach()))
    mean = lambda values: sum(values) / len(values)  # noqa: E731
    return {"drift": mean(moved), "start to limit": mean(away), "training error": mean(fits)}


def picture(found: dict[str, Any], generator: torch.Generator) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.4), layout="constrained")
    one, two, three = figure.subplots(1, 3)
    x = torch.linspace(-2, 2, 801, dtype=torch.float64)
    for axes, heavy, title in ((one, False, "normal weights"), (two, True, "Cauchy weights")):
        for _ in range(4):
            f, _ = function(10_000, heavy, x, generator)
            axes.plot(x, (f - f.mean()) / (f.max() - f.min()), linewidth=0.9)
        axes.set_title(f"10,000 units, {title}")
    widths = [int(w) for w in found["drift"]]
    drifts = [found["drift"][str(w)]["drift"] for w in widths]
    three.loglog(widths, drifts, "o-", label="tangent kernel, drift in training")
    kurtosis = found["limit"]["one layer"]
    three.loglog(WIDTHS, [15 / w for w in WIDTHS], color="0.6", label="excess kurtosis, 15/H")
    known = [w for w in WIDTHS if kurtosis[str(w)]["excess kurtosis"] > 3 * kurtosis[str(w)]["its error"]]
    three.loglog(known, [kurtosis[str(w)]["excess kurtosis"] for w in known], "s", label="of draws")
    three.set_xlabel("units a layer")
    three.legend(fontsize=8)
    figure.savefig(ROOT / "docs/studies/figures/infinite_width.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=10_000)
    parser.add_argument("--functions", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    generator, start = torch.Generator().manual_seed(options.seed), time.process_time()
    found = {
        "limit": to_limit(options.draws, generator),
        "heavy": heavy_tails(options.functions, generator),
        "drift": {str(width): drift(width, options.seeds, options.steps) for width in TRAINED},
    }
    picture(found, generator)
    record = {**found, "options": vars(options), "cpu seconds": round(time.process_time() - start)}
    (ROOT / "studies/results/limits.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
