"""The Laplace distribution, w ~ Laplace(0, b): an exponential mixture of normals, s ~ Exponential(mean 2b²).

    log p(w) = −|w|/b − log 2b,        E[1/s | w] = 1/(b|w|)

Its penalty is that of the lasso: the MAP has exact zeros, and the posterior has none (Park & Casella 2008; Kabán 2007).
A is infinite at w = 0, so a weight that is exactly 0 is refused by `lw.laplace`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapwing.priors.elementwise import Elementwise, uniform


@dataclass(frozen=True, eq=False)
class Laplace(Elementwise):
    """w ~ Laplace(0, b), one scale b for all weights or one for each group."""

    scale: Any = 1.0  # b
    per: Any = "all"

    def each_log_prob(self, w: Tensor) -> Tensor:
        b = self.each(self.scale)
        return -(w.abs() / b + (2 * b).log())

    def each_precision(self, w: Tensor) -> Tensor:
        return 1 / (self.each(self.scale) * w.abs())

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        b = self.each(self.scale).detach()
        u = uniform((n, len(b)), generator, b) - 0.5
        return -b * u.sign() * torch.log1p(-2 * u.abs())

    def scaled(self, c: float) -> Laplace:
        return self.replace(scale=self.scale.detach() / c)
