"""Binary weights, each of two values with the probability π of the second:  w ~ Bernoulli(π).

    log p(θ) = Σ_i log(1 − π) [w_i = a] + log π [w_i = b]

There is no gradient: `lw.samplers.metropolis` flips weights, and whatever asks for a slope refuses it by name (Soudry
et al. 2014; Baldassi et al. 2007).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapwing import given
from lapwing.errors import InvalidValue, Unsupported
from lapwing.operators import Diagonal
from lapwing.priors.base import Prior
from lapwing.priors.elementwise import uniform


@dataclass(frozen=True, eq=False)
class Bernoulli(Prior):
    """w is values[1] with this probability, else values[0]; one probability for all weights or one for each group."""

    settings: ClassVar[tuple[str, ...]] = (*Prior.settings, "values")
    discrete: ClassVar[bool] = True
    probability: Any = 0.5  # π
    values: tuple[float, ...] = (0.0, 1.0)
    per: Any = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not bool((self.probability < 1).all()):
            raise InvalidValue(f"probability lies between 0 and 1, got {self.probability.tolist()}")
        values = given.real(self.values, "values")
        if values.shape != (2,) or not bool(torch.isfinite(values).all()) or values[0] == values[1]:
            raise InvalidValue(f"values are two different numbers, such as (0, 1) or (-1, 1), got {values.tolist()}")
        object.__setattr__(self, "values", tuple(values.tolist()))

    def log_prob(self, weights: Mapping[str, Tensor]) -> Tensor:
        return self.log_density(self.vector(weights))

    def log_density(self, v: Tensor) -> Tensor:
        """−∞ where a weight has another value."""
        share = self.each(self.probability)
        second = torch.where(v == self.values[1], share.log(), -torch.inf)
        return torch.where(v == self.values[0], torch.log1p(-share), second).sum()

    def quadratic(self, v: Tensor) -> tuple[Diagonal, Tensor]:
        """None: binary weights have no neighborhood."""
        raise Unsupported(
            "Bernoulli is a prior of binary weights, which no Gaussian stands for; sample them with "
            "lw.samplers.metropolis"
        )

    def nearest(self, v: Tensor) -> Tensor:
        """The weights' values nearest to v, (p,)."""
        a, b = self.values
        return torch.where((v - a).abs() <= (v - b).abs(), a, b).to(v)

    def flipped(self, v: Tensor, which: Tensor) -> Tensor:
        """v with the other value where `which` says so."""
        return torch.where(which, sum(self.values) - v, v)

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        share = self.each(self.probability).detach()
        second = uniform((n, len(share)), generator, share) < share
        return torch.where(second, self.values[1], self.values[0]).double()
