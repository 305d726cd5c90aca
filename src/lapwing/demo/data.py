"""The demo's data: what scikit-learn bundles, so nothing is downloaded.

digits()  1,797 images of 8 x 8 pixels; classes 0..6 are learned, 7, 8 and 9 are unknown to the network
wines()   178 wines: flavanoids -> log color intensity, with every wine between 1.2 and 2.2 hidden
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits, load_wine
from torch import Tensor

UNKNOWN = (7, 8, 9)  # about a third of the classes, the last ones
GAP = (1.2, 2.2)  # of flavanoids: the valley of the curve, where a guess from both sides is hard


@dataclass(frozen=True)
class Digits:
    """Images of the classes that are learned, and of those that are not."""

    train: tuple[Tensor, Tensor]  # (n, 64) in 0..1, (n,) labels
    test: tuple[Tensor, Tensor]
    moved: tuple[Tensor, Tensor]  # the test images, one pixel to the left, right, up and down
    unknown: Tensor  # images of classes that were never shown


def digits(seed: int = 0) -> Digits:
    """Half of the known images to train on, half to test on."""
    data = load_digits()
    x, y = torch.tensor(data.data / 16).float(), torch.tensor(data.target).long()
    known = torch.isin(y, torch.tensor(UNKNOWN), invert=True).nonzero().flatten()
    order = known[torch.randperm(len(known), generator=torch.Generator().manual_seed(seed))]
    train, test = order[: len(order) // 2], order[len(order) // 2 :]
    steps = [(1, 0), (-1, 0), (0, 1), (0, -1)]
    return Digits(
        train=(x[train], y[train]),
        test=(x[test], y[test]),
        moved=(torch.cat([move(x[test], *step) for step in steps]), y[test].repeat(len(steps))),
        unknown=x[torch.isin(y, torch.tensor(UNKNOWN))],
    )


def move(images: Tensor, right: int, down: int, side: int = 8) -> Tensor:
    """Shift flat images (n, side²) by whole pixels; what leaves is lost, what enters is blank."""
    out = torch.zeros_like(images).reshape(-1, side, side)
    source = images.reshape(-1, side, side)
    out[:, max(down, 0) : side + min(down, 0), max(right, 0) : side + min(right, 0)] = source[
        :, max(-down, 0) : side + min(-down, 0), max(-right, 0) : side + min(-right, 0)
    ]
    return out.reshape(images.shape)


@dataclass(frozen=True)
class Wines:
    """Standardized flavanoids and log color intensity, (n, 1) each."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]  # outside the gap
    gap: tuple[Tensor, Tensor]  # hidden from training
    scales: tuple[float, float, float, float]  # mean and standard deviation of x, then of y

    def standardized(self, flavanoids: Tensor) -> Tensor:
        """Flavanoids (n,) as the network takes them, (n, 1)."""
        return ((flavanoids - self.scales[0]) / self.scales[1]).float().unsqueeze(-1)

    def flavanoids(self, x: Tensor) -> Tensor:
        """Inputs (n, 1) as flavanoids (n,)."""
        return x.squeeze(-1) * self.scales[1] + self.scales[0]

    def color(self, y: Tensor) -> Tensor:
        """Outputs (n, 1) as color intensities (n,)."""
        return torch.exp(y.squeeze(-1) * self.scales[3] + self.scales[2])


def wines(seed: int = 0) -> Wines:
    """Three quarters of the wines outside the gap to train on, a quarter to test on."""
    data = load_wine()
    column = {name: torch.tensor(data.data[:, i]) for i, name in enumerate(data.feature_names)}
    x, y = column["flavanoids"], column["color_intensity"].log()
    hidden = (x > GAP[0]) & (x < GAP[1])
    outside = (~hidden).nonzero().flatten()
    order = outside[torch.randperm(len(outside), generator=torch.Generator().manual_seed(seed))]
    test, train = order[: len(order) // 4], order[len(order) // 4 :]
    scales = (float(x[train].mean()), float(x[train].std()), float(y[train].mean()), float(y[train].std()))
    x, y = ((x - scales[0]) / scales[1]).float()[:, None], ((y - scales[2]) / scales[3]).float()[:, None]
    return Wines((x[train], y[train]), (x[test], y[test]), (x[hidden], y[hidden]), scales)
