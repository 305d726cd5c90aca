"""Densities of a positive number x: of a noise that is sampled with the weights, or of the scale of others.

    Gamma(a, b)      p(x) = bᵃ xᵃ⁻¹ e^{−bx} / Γ(a)
    HalfCauchy(s)    p(x) = 2 / (π s (1 + x²/s²))

A sampler walks in t = log x, where the density is p(eᵗ) eᵗ; its logarithm is concave in t for both.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from lapwing import given, registry
from lapwing.errors import InvalidValue


@dataclass(frozen=True)
class Positive:
    """Base class; fields are positive numbers."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        registry.enter("prior", cls)  # files hold them as part of one

    def __post_init__(self) -> None:
        for f in fields(self):
            value = given.real(getattr(self, f.name), f"{f.name} of {type(self).__name__}")
            if value.ndim or not 0 < float(value) < math.inf:
                raise InvalidValue(
                    f"{f.name} of {type(self).__name__} must be one positive, finite number, got {value.tolist()}"
                )
            object.__setattr__(self, f.name, float(value))

    def log_prob(self, x: Tensor) -> Tensor:
        """log p(x), elementwise."""
        raise NotImplementedError

    def slope(self, x: Tensor) -> Tensor:
        """∂ log(p(x) x) / ∂ log x, elementwise: falling in x."""
        raise NotImplementedError

    def sample(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        """Draws of this shape, float64."""
        raise NotImplementedError

    @property
    def typical(self) -> float:
        """A number in the middle of it."""
        raise NotImplementedError


@dataclass(frozen=True)
class Gamma(Positive):
    """x ~ Gamma(shape, rate), with the mean shape/rate."""

    shape: float = 1.0  # a
    rate: float = 1.0  # b

    def log_prob(self, x: Tensor) -> Tensor:
        a, b = self.shape, self.rate
        return (a - 1) * x.log() - b * x + (a * math.log(b) - math.lgamma(a))

    def slope(self, x: Tensor) -> Tensor:
        return self.shape - self.rate * x

    def sample(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        a = torch.full(shape, self.shape, dtype=torch.float64, device=generator.device)
        return torch._standard_gamma(a, generator=generator) / self.rate

    @property
    def typical(self) -> float:
        """Its mean."""
        return self.shape / self.rate


@dataclass(frozen=True)
class HalfCauchy(Positive):
    """x = |s·t|, t standard Cauchy: half of it lies above s, and it has no mean."""

    scale: float = 1.0  # s

    def log_prob(self, x: Tensor) -> Tensor:
        return math.log(2 / (math.pi * self.scale)) - torch.log1p((x / self.scale).square())

    def slope(self, x: Tensor) -> Tensor:
        return 1 - 2 / (1 + (self.scale / x).square())

    def sample(self, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        u = torch.rand(shape, generator=generator, dtype=torch.float64, device=generator.device)
        return self.scale * torch.tan(0.5 * math.pi * u)

    @property
    def typical(self) -> float:
        """Its median."""
        return self.scale
