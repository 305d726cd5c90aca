"""Functions that priors over weights imply: draws of one network, before any data.

python examples/prior_functions.py          writes docs/images/prior_functions.png
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display needed

import matplotlib.pyplot as plt
import torch
from demo_figures import BLUE, GRAY, STYLE
from torch import Tensor, nn

import lapwing as lw

UNITS, DRAWS = 50, 12
IMAGE = Path(__file__).parent.parent / "docs" / "images" / "prior_functions.png"


def network() -> nn.Module:
    """One hidden layer."""
    return nn.Sequential(nn.Linear(1, UNITS), nn.Tanh(), nn.Linear(UNITS, 1)).double()


def smooth(length: float) -> Tensor:
    """A covariance (UNITS, UNITS) of weights that differ little from those of the next unit."""
    i = torch.arange(UNITS, dtype=torch.float64)
    return torch.exp(-0.5 * ((i - i.unsqueeze(1)) / length).square()) + 1e-6 * torch.eye(UNITS, dtype=torch.float64)


def priors() -> dict[str, lw.priors.Prior]:
    """By what the panels say."""
    neighbors = {"0.weight": smooth(10.0), "0.bias": smooth(10.0), "2.weight": smooth(10.0) / UNITS}
    return {
        "Gaussian(1.0)": lw.priors.Gaussian(1.0),
        "WidthScaled(0.2)": lw.priors.WidthScaled(0.2),
        "StudentT(0.3, df=1.5)": lw.priors.StudentT(0.3, df=1.5),
        "Horseshoe(0.1)": lw.priors.Horseshoe(0.1),
        "Hierarchical(per='layer')": lw.priors.Hierarchical(per="layer"),
        "Correlated, neighbors alike": lw.priors.Correlated(0.2, covariance=neighbors),
    }


def drawn(prior: lw.priors.Prior, x: Tensor, seed: int) -> Tensor:
    """Functions at x (n, 1): (DRAWS, n)."""
    model = network()
    networks = prior.draw(model, DRAWS, torch.Generator().manual_seed(seed))
    return torch.func.vmap(lambda w: torch.func.functional_call(model, w, (x,)))(networks).squeeze(-1).detach()


def main() -> None:
    """Draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=IMAGE)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    x = torch.linspace(-4, 4, 400, dtype=torch.float64).unsqueeze(1)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(2, 3, figsize=(9, 5), layout="constrained", sharex=True)
        for axis, (name, prior) in zip(axes.flat, priors().items(), strict=True):
            axis.axhline(0, color=GRAY, lw=0.5)
            axis.plot(x, drawn(prior, x, options.seed).T, color=BLUE, lw=0.9, alpha=0.6)
            axis.set_title(name)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(options.out, dpi=110)


if __name__ == "__main__":
    main()
