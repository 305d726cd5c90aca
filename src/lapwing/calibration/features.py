"""Features of the inputs that have seen no label: random Fourier features (Rahimi and Recht, 2007).

    φ(x) = [cos(x̃ W + b) / √d, √½],   x̃ = (x − mean) / std / √D,   W ~ N(0, 1),  b ~ U(0, 2π)

so that φ(x)ᵀφ(x') ≈ ½ exp(−½‖x̃ − x̃'‖²) + ½: a smooth function of the inputs with a constant, of mean square 1. A
number of the inputs that never changes is left out. Shapes: n inputs of D numbers, d features and one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lapwing.data import passes, ranks_of

COUNT = 1024  # d
MOST_NUMBERS = 2**14  # of one input: beyond, W alone would take more than 128 MB
SEED = 0


@dataclass(frozen=True, eq=False)
class InputFeatures:
    """φ, for inputs with this mean (D,) and 1/(std √D) (D,), which is 0 for those that never change."""

    center: Tensor
    scale: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """(n, d + 1), float64."""
        W, b = self._waves
        z = (x.flatten(1).double() - self.center) * self.scale @ W
        return torch.cat([z.add_(b).cos_() / math.sqrt(COUNT), z.new_full((len(x), 1), math.sqrt(0.5))], 1)

    @property
    def fingerprint(self) -> Tensor:
        """Sums of W and b (2,), by which a file knows them again."""
        return torch.stack([one.sum() for one in self._waves]).cpu()

    @cached_property
    def _waves(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(SEED)
        W = torch.randn(len(self.center), COUNT, generator=generator, dtype=torch.float64)
        b = torch.rand(COUNT, generator=generator, dtype=torch.float64)
        return W.to(self.center.device), (2 * math.pi * b).to(self.center.device)


def input_features(batches: Iterable[Any], device: torch.device) -> InputFeatures | None:
    """By one pass over the data, without the network; None where inputs are no tensor of numbers, or of too many."""
    ranks, fit = ranks_of(batches), True
    found: InputMoments | None = None
    for x, _ in passes(batches, device, label="inputs"):
        fit = fit and suits(x) and (found is None or x[0].numel() == len(found.mean))
        if fit:
            some = InputMoments.of(x)
            found = some if found is None else found.joined(some)
    if ranks.anywhere(not fit, "inputs without features"):
        return None
    parts = ranks.joined([] if found is None else [found], "moments of the inputs")
    if len({len(one.mean) for one in parts}) != 1:
        return None
    n, mean, square, eps = functools.reduce(InputMoments.joined, parts)
    std = (square / n).sqrt()
    still = std <= 4 * eps * mean.abs()  # it changes by rounding alone, whatever its unit
    return InputFeatures(mean, torch.where(still, 0.0, 1 / (std * math.sqrt(max(1, int((~still).sum()))))))


class InputMoments(NamedTuple):
    """Of rows of inputs, each number by itself; sums of squares are about the mean, and so lose nothing by rounding."""

    n: Tensor  # 0-dim
    mean: Tensor  # (D,)
    square: Tensor  # Σ (x − mean)² (D,)
    eps: Tensor  # of the inputs' dtype, 0-dim

    @staticmethod
    def of(x: Tensor) -> InputMoments:
        """Of a batch (n, ...)."""
        rows = x.flatten(1).double()
        mean, eps = rows.mean(0), rows.new_tensor(torch.finfo(x.dtype).eps)
        return InputMoments(rows.new_tensor(len(rows)), mean, (rows - mean).square().sum(0), eps)

    def joined(self, other: InputMoments) -> InputMoments:
        """Of the rows of both."""
        n, apart = self.n + other.n, other.mean - self.mean
        square = self.square + other.square + apart.square() * (self.n * other.n / n)
        return InputMoments(n, self.mean + apart * (other.n / n), square, torch.maximum(self.eps, other.eps))


def suits(x: Any) -> bool:
    """Whether inputs are a tensor of numbers, (n, ...), that features can be made of."""
    return isinstance(x, Tensor) and x.is_floating_point() and x.ndim >= 2 and x[0].numel() <= MOST_NUMBERS
