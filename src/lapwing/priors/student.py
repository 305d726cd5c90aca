"""Student's t, w = τ t_ν: a mixture of normals over inverse-gamma variances, s ~ Γ⁻¹(ν/2, ντ²/2).

    log p(w) = −½(ν + 1) log(1 + w²/ντ²) + constants,        E[1/s | w] = (ν + 1)/(ντ² + w²)

The pull of the prior, w E[1/s | w], is at most (ν + 1)/(2√ν τ), and falls off beyond: a weight that the data want large
is left alone. ν is fixed; compare several by their evidence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapwing import given
from lapwing.errors import InvalidValue
from lapwing.priors.base import Prior
from lapwing.priors.elementwise import Elementwise, standard_normal


@dataclass(frozen=True, eq=False)
class StudentT(Elementwise):
    """w = τ t_ν, one scale τ for all weights or one for each group; `df` ν for all of them."""

    settings: ClassVar[tuple[str, ...]] = (*Prior.settings, "df")
    scale: Any = 1.0  # τ
    df: float = 4.0  # ν
    per: Any = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        nu = given.real(self.df, "df")
        if nu.ndim or not 0 < float(nu) < math.inf:
            raise InvalidValue(f"df is one positive number of degrees of freedom, got {nu.tolist()}")
        object.__setattr__(self, "df", float(nu))

    def each_log_prob(self, w: Tensor) -> Tensor:
        tau, nu = self.each(self.scale), self.df
        constant = math.lgamma(0.5 * (nu + 1)) - math.lgamma(0.5 * nu) - 0.5 * math.log(math.pi * nu)
        return constant - tau.log() - 0.5 * (nu + 1) * torch.log1p((w / tau).square() / nu)

    def each_precision(self, w: Tensor) -> Tensor:
        return (self.df + 1) / (self.df * self.each(self.scale).square() + w.square())

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        tau = self.each(self.scale).detach()
        half = torch.full((n, len(tau)), 0.5 * self.df, dtype=torch.float64, device=generator.device)
        shrink = (torch._standard_gamma(half, generator=generator) / half).rsqrt().to(tau.device)
        return tau * shrink * standard_normal((n, len(tau)), generator, tau)

    def scaled(self, c: float) -> StudentT:
        return self.replace(scale=self.scale.detach() / c**0.5)
