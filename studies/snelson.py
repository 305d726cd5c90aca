"""The posterior of a network with three hidden layers of 50 units beside that of its Gaussian process.

    LAPWING_DATA=<folder> python studies/snelson.py [--draws 100] [--warmup 200] [--leapfrog 40]

Snelson's 200 points, standardized. The evidence of the process (three ReLU layers of infinite width) picks the
variances of weights and biases and the noise; the network gets the same ones as its prior and likelihood, and its
posterior is sampled by HMC, four chains from the prior (Matthews et al. 2018, figure 6). On a grid that goes beyond the
data: both means and standard deviations of f, R-hat of the chains, and the Monte-Carlo error of their mean.
Writes studies/results/snelson.json and docs/studies/figures/snelson.png.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import time
from typing import Any

import numpy as np
import torch
from _networks import data
from torch import Tensor, nn

import lapwing as lw
from lapwing.gp import infinite

ROOT = pathlib.Path(__file__).parents[1]
WIDTH, CHAINS = 50, 4


def snelson() -> tuple[Tensor, Tensor]:
    """Inputs and targets (200, 1), with mean 0 and standard deviation 1."""
    stored = np.load(data("toy1d/snelson.npz"))
    x, y = (torch.from_numpy(stored[name]).double()[:, None] for name in ("x_train", "y_train"))
    return (x - x.mean()) / x.std(), (y - y.mean()) / y.std()


def network() -> nn.Sequential:
    hidden = [layer for _ in range(2) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(nn.Linear(1, WIDTH), nn.ReLU(), *hidden, nn.Linear(WIDTH, 1)).double()


def picture(x: Tensor, y: Tensor, grid: Tensor, both: dict[str, tuple[Tensor, Tensor]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for axes, (name, (mean, std)) in zip(figure.subplots(1, 2, sharey=True), both.items(), strict=True):
        axes.fill_between(grid[:, 0], mean - 2 * std, mean + 2 * std, color="tab:blue", alpha=0.25, linewidth=0)
        axes.plot(grid[:, 0], mean, color="tab:blue")
        axes.plot(x[:, 0], y[:, 0], ".", color="0.3", markersize=3)
        axes.set_title(name, fontsize=10)
        axes.set_xlabel("x, standardized")
    figure.savefig(ROOT / "docs/studies/figures/snelson.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--warmup", type=int, default=200)
    parser.add_argument("--leapfrog", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    start, (x, y) = time.process_time(), snelson()
    grid = torch.linspace(-3, 3, 121, dtype=torch.float64)[:, None]
    process = infinite.nngp(3, "relu", 2.0, 0.5).regression((x, y), noise=0.4).tuned()
    k, predicted = process.kernel, process.predict(grid)
    torch.manual_seed(options.seed)
    prior = lw.priors.WidthScaled({"*.weight": 1 / k.weight_variance, "*.bias": 1 / k.bias_variance})
    post = lw.samplers.hmc(
        network(), (x, y), process.likelihood, prior=prior, chains=CHAINS, draws=options.draws, warmup=options.warmup,
        leapfrog=options.leapfrog, start="prior", generator=torch.Generator().manual_seed(options.seed),
    )  # fmt: skip
    f = post.predict(grid)
    both = {
        "infinite width": (predicted.f_mean[:, 0], predicted.f_var[:, 0].sqrt()),
        "three layers of 50, HMC": (f.f_mean[:, 0], f.f_var[:, 0].sqrt()),
    }
    picture(x, y, grid, both)
    inside = (grid[:, 0] >= x.min()) & (grid[:, 0] <= x.max())
    record: dict[str, Any] = {
        "weight variance": k.weight_variance, "bias variance": k.bias_variance,
        "noise": float(process.likelihood.noise), "log evidence": float(process.log_evidence()),
        "rhat": float(torch.as_tensor(post.diagnostics.rhat(grid)).max()),
        "ess": float(torch.as_tensor(post.diagnostics.ess(grid)).min()),
        "acceptance": float(torch.as_tensor(post.diagnostics.acceptance).mean()),
    }  # fmt: skip
    (m, s), (mean, std) = both.values()
    for name, some in (("among the data", inside), ("beyond the data", ~inside)):
        record[name] = {
            "difference of means, in the process's deviations": float(((mean - m) / s)[some].square().mean().sqrt()),
            "deviation, network's over process's": float((std / s)[some].log().mean().exp()),
            "Monte-Carlo error of the mean, in deviations": 1 / math.sqrt(max(1.0, record["ess"])),
        }
    record |= {"options": vars(options), "cpu seconds": round(time.process_time() - start)}
    (ROOT / "studies/results/snelson.json").write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
