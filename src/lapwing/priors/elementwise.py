"""Priors under which weights are independent with one density about zero, up to a scale:  log p(θ) = Σ_i log p(w_i).

A scale mixture p(w) = ∫ N(w; 0, s) p(s) ds has A = E[1/s | w] = −p'(w)/(w p(w)). A subclass gives log p(w) and that.
Shapes: w (..., p).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.operators import Diagonal
from lapwing.priors.base import Prior


@dataclass(frozen=True, eq=False)
class Elementwise(Prior):
    """Base class. A subclass gives `each_log_prob` and `each_precision`."""

    def each_log_prob(self, w: Tensor) -> Tensor:
        """log p(w_i), (p,)."""
        raise NotImplementedError(f"{type(self).__name__} has no each_log_prob(w)")

    def each_precision(self, w: Tensor) -> Tensor:
        """E[1/s | w_i], (p,)."""
        raise NotImplementedError(f"{type(self).__name__} has no each_precision(w)")

    def log_prob(self, weights: Mapping[str, Tensor]) -> Tensor:
        """Σ_i log p(w_i)."""
        return self.log_density(self.vector(weights))

    def log_density(self, v: Tensor) -> Tensor:
        return self.each_log_prob(v).sum()

    def quadratic(self, v: Tensor) -> tuple[Diagonal, Tensor]:
        """E[1/s | v] as a diagonal, and zeros: its mean is 0."""
        return Diagonal(self.each_precision(v), len(v)), torch.zeros_like(v)


def standard_normal(shape: tuple[int, ...], generator: torch.Generator, like: Tensor) -> Tensor:
    """Standard normal numbers in float64, on the device of a tensor."""
    return torch.randn(shape, generator=generator, dtype=torch.float64, device=generator.device).to(like.device)


def uniform(shape: tuple[int, ...], generator: torch.Generator, like: Tensor) -> Tensor:
    """Numbers in [0, 1), in float64, on the device of a tensor."""
    return torch.rand(shape, generator=generator, dtype=torch.float64, device=generator.device).to(like.device)
