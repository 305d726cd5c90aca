"""Second moments of an activation φ under a normal law: all that a layer of infinitely many units keeps of it.

    (u, v) ~ N(0, [[k₁₁, k₁₂], [k₁₂, k₂₂]]):   second = E[φ(u)φ(v)],   slope = E[φ'(u)φ'(v)],   mean = E[φ(u)]

    identity    second k₁₂,                                            slope 1
    relu        √(k₁₁k₂₂) (sin θ + (π − θ) cos θ)/2π,                  slope (π − θ)/2π,      θ = arccos k₁₂/√(k₁₁k₂₂)
    leaky, a    a k₁₂ + (1 − a)² relu's,                               slope a + (1 − a)² relu's
    erf         (2/π) arcsin 2k₁₂/√((1 + 2k₁₁)(1 + 2k₂₂)),             slope (4/π)/√((1 + 2k₁₁)(1 + 2k₂₂) − 4k₁₂²)
    sin         ½ (e^(k₁₂ − s) − e^(−k₁₂ − s)), s = ½(k₁₁ + k₂₂),      slope ½ (e^(k₁₂ − s) + e^(−k₁₂ − s))

Any other is integrated (`quadrature.py`). Sources: Cho and Saul 2009 (relu), Williams 1997 (erf). k₁₁, k₂₂ and k₁₂ are
float64 tensors of shapes that broadcast. A slope of relu between inputs that are nearly the same is known to about the
root of rounding, 1e-8, since arccos is as steep as that at 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class Activation(Protocol):
    """What a layer asks of its activation."""

    def second(self, k11: Tensor, k22: Tensor, k12: Tensor) -> Tensor:
        """E[φ(u)φ(v)]."""

    def slope(self, k11: Tensor, k22: Tensor, k12: Tensor) -> Tensor:
        """E[φ'(u)φ'(v)]."""

    def mean(self, k: Tensor) -> Tensor:
        """E[φ(u)] for u ~ N(0, k)."""


@dataclass(frozen=True)
class LeakyReLU:
    """φ(u) = max(u, a u): relu for a = 0, the identity for a = 1."""

    negative_slope: float = 0.0  # a

    def second(self, k11: Tensor, k22: Tensor, k12: Tensor) -> Tensor:
        """a k₁₂ + (1 − a)² √(k₁₁k₂₂) (sin θ + (π − θ) cos θ)/2π."""
        size, cos = correlation(k11, k22, k12)
        sin = ((1 - cos) * (1 + cos)).sqrt()
        relu = size * (sin + (math.pi - torch.acos(cos)) * cos) / (2 * math.pi)
        return self._leaked(k12, relu)

    def slope(self, k11: Tensor, k22: Tensor, k12: Tensor) -> Tensor:
        """a + (1 − a)² (π − θ)/2π."""
        _, cos = correlation(k11, k22, k12)
        return self._leaked(torch.ones_like(k12), (math.pi - torch.acos(cos)) / (2 * math.pi))

    def mean(self, k: Tensor) -> Tensor:
        """(1 − a) √(k/2π)."""
        return (1 - self.negative_slope) * (k / (2 * math.pi)).sqrt()

    def _leaked(self, linear: Tensor, relu: Tensor) -> Tensor:
        a = self.negative_slope
        return relu if a == 0 else a * linear + (1 - a) ** 2 * relu


@dataclass(frozen=True)
class Identity:
    """φ(u) = u."""

    def second(self, k11: Tensor, k22: Tensor, k12: Tensor) -> Tensor:
        """k₁₂."""
        return k12

    def slope(self, k11: Tensor, k22: Tensor, k12: Tensor) -> Tensor:
        """1."""
        return torch.ones_like(k12)

    def mean(self, k: Tensor) -> Tensor:
        """0."""
        return torch.zeros_like(k)


@dataclass(frozen=True)
class Erf:
    """φ(u) = erf u."""

    def second(self, k11: Tensor, k22: Tensor, k12: Tensor) -> Tensor:
        """(2/π) arcsin 2k₁₂/√((1 + 2k₁₁)(1 + 2k₂₂))."""
        return torch.asin(2 * k12 / ((1 + 2 * k11) * (1 + 2 * k22)).sqrt()) * (2 / math.pi)

    def slope(self, k11: Tensor, k22: Tensor, k12: Tensor) -> Tensor:
        """(4/π)/√((1 + 2k₁₁)(1 + 2k₂₂) − 4k₁₂²)."""
        return ((1 + 2 * k11) * (1 + 2 * k22) - 4 * k12.square()).rsqrt() * (4 / math.pi)

    def mean(self, k: Tensor) -> Tensor:
        """0."""
        return torch.zeros_like(k)


@dataclass(frozen=True)
class Sin:
    """φ(u) = sin u."""

    def second(self, k11: Tensor, k22: Tensor, k12: Tensor) -> Tensor:
        """e^−s sinh k₁₂, s = ½(k₁₁ + k₂₂)."""
        s = 0.5 * (k11 + k22)
        return 0.5 * ((k12 - s).exp() - (-k12 - s).exp())

    def slope(self, k11: Tensor, k22: Tensor, k12: Tensor) -> Tensor:
        """e^−s cosh k₁₂, s = ½(k₁₁ + k₂₂)."""
        s = 0.5 * (k11 + k22)
        return 0.5 * ((k12 - s).exp() + (-k12 - s).exp())

    def mean(self, k: Tensor) -> Tensor:
        """0."""
        return torch.zeros_like(k)


CLOSED: dict[str, Callable[[], Activation]] = {
    "relu": LeakyReLU,
    "leaky_relu": lambda: LeakyReLU(0.01),  # torch's default
    "erf": Erf,
    "sin": Sin,
    "identity": Identity,
}


def correlation(k11: Tensor, k22: Tensor, k12: Tensor) -> tuple[Tensor, Tensor]:
    """√(k₁₁k₂₂), and k₁₂ divided by it, which rounding may not take out of [−1, 1]; 0 where a variance is 0."""
    size = (k11 * k22).sqrt()  # not √k₁₁√k₂₂: of equal variances it is that variance to the last bit
    return size, torch.where(size > 0, k12 / size, 0.0).clamp(-1, 1)
