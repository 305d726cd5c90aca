"""What q may be, of p weights with the mean μ. Draws are θ = μ + (spread)·ε: gradients pass through them.

    MeanField       θ = μ + s ε                       ε_i = F⁻¹(u_i) of any family; H = Σ log s + const
    FullLayers      θ_l = μ_l + L_l ε_l               a Cholesky factor for each layer l; H = Σ log diag L + const
    LowRankLayers   θ_l = μ_l + s_l (ε_l + R_l z_l)   R_l (m, k):  Σ_l = s_l (I + R_l R_lᵀ) s_l

`log_q` is the density of a draw, `entropy` what of H moves, `variance` diag Σ (p,).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.distributions import LowRankMultivariateNormal

from lapwing.errors import InvalidValue
from lapwing.operators import linalg

MOST = 4096  # weights of a layer whose covariance is kept in full: 128 MB
HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True)
class Family:
    """A distribution of one weight, of unit scale: ε = F⁻¹(u), u uniform on (0, 1)."""

    inverse_cdf: Callable[[Tensor], Tensor] | None  # None: the normal distribution
    log_density: Callable[[Tensor], Tensor]

    @staticmethod
    def of(family: Any) -> Family:
        """ "normal", or a pair (inverse CDF, log-density) of functions that act on each entry."""
        if isinstance(family, str) and family == "normal":
            return Family(None, lambda e: -0.5 * e.square() - HALF_LOG_2PI)
        if isinstance(family, tuple) and len(family) == 2 and all(callable(one) for one in family):
            found = Family(*family)
            found.check()
            return found
        raise InvalidValue(
            f"family is 'normal' or a pair (inverse_cdf, log_density) of functions of tensors, got {family!r}"
        )

    def check(self) -> None:
        """Raise unless p(F⁻¹(u)) · dF⁻¹/du = 1."""
        u = torch.linspace(0.05, 0.95, 19, dtype=torch.float64, requires_grad=True)
        e = self.inverse_cdf(u)  # type: ignore[misc]
        if e.shape != u.shape or not e.requires_grad:
            raise InvalidValue("the family's inverse CDF must act on each entry of a tensor, differentiably")
        slope = torch.autograd.grad(e.sum(), u)[0]
        off = float((self.log_density(e.detach()) + slope.log()).abs().max())
        if not off < 1e-3:
            raise InvalidValue(
                f"the family's log-density is not that of its inverse CDF: log p(F⁻¹(u)) + log dF⁻¹/du is {off:.3g} "
                "away from 0; give both of one normalized distribution"
            )

    def noise(self, shape: tuple[int, ...], generator: torch.Generator, like: Tensor) -> Tensor:
        """Draws of ε."""
        if self.inverse_cdf is None:
            return linalg.standard_normal(shape, generator, like)
        u = torch.rand(shape, generator=generator, dtype=torch.float64, device=generator.device)
        return self.inverse_cdf(u.clamp(1e-12, 1 - 1e-12)).to(like)


class Approximation(Protocol):
    """A family of q under way; `parameters` are what climbs."""

    mean: Tensor  # (p,)

    @property
    def normal(self) -> bool:
        """Whether it is Gaussian."""

    @property
    def parameters(self) -> list[Tensor]:
        """Leaves, the mean first."""

    def entropy(self) -> Tensor:
        """H up to a constant, 0-dim."""

    def variance(self) -> Tensor:
        """Of each weight, (p,); of a family, in its own unit."""

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        """(n, p), differentiable."""

    def log_q(self, theta: Tensor) -> Tensor:
        """Of draws (n, p): (n,)."""


class MeanField:
    """Independent weights of one family."""

    def __init__(self, mean: Tensor, deviation: Tensor, family: Family) -> None:
        self.mean, self.log_deviation = _leaf(mean), _leaf(deviation.log())
        self.family, self.normal = family, family.inverse_cdf is None

    @property
    def parameters(self) -> list[Tensor]:
        """Leaves, the mean first."""
        return [self.mean, self.log_deviation]

    def entropy(self) -> Tensor:
        """H up to a constant, 0-dim."""
        return self.log_deviation.sum()

    def variance(self) -> Tensor:
        """Of each weight, (p,)."""
        return (2 * self.log_deviation).exp()

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        """n weight vectors, (n, p)."""
        noise = self.family.noise((n, len(self.mean)), generator, self.mean)
        return self.mean + self.log_deviation.exp() * noise

    def log_q(self, theta: Tensor) -> Tensor:
        """Of draws (n, p): (n,)."""
        e = (theta - self.mean) / self.log_deviation.exp()
        return (self.family.log_density(e) - self.log_deviation).sum(1)


class FullLayers:
    """A covariance for each layer."""

    normal: ClassVar[bool] = True

    def __init__(self, mean: Tensor, deviation: Tensor, layers: dict[str, Tensor]) -> None:
        for name, index in layers.items():
            if len(index) > MOST:
                raise InvalidValue(
                    f"layer {name!r} has {len(index):,} weights, more than the {MOST:,} whose covariance is kept in "
                    "full; give rank=, such as 10"
                )
        self.mean, self.layers = _leaf(mean), layers
        self.log_diagonal = _leaf(deviation.log())
        self.lower = [_leaf(torch.zeros(len(i), len(i)).to(mean)) for i in layers.values()]

    @property
    def parameters(self) -> list[Tensor]:
        """Leaves, the mean first."""
        return [self.mean, self.log_diagonal, *self.lower]

    def _roots(self) -> list[tuple[Tensor, Tensor]]:
        """The index (m,) and L (m, m) of each layer; rows of L are in the unit of their diagonal."""
        d = self.log_diagonal.exp()
        eye = [torch.eye(len(i)).to(d) for i in self.layers.values()]
        return [
            (i, d[i].unsqueeze(1) * (low.tril(-1) + one))
            for i, low, one in zip(self.layers.values(), self.lower, eye, strict=True)
        ]

    def entropy(self) -> Tensor:
        """H up to a constant, 0-dim."""
        return self.log_diagonal.sum()

    def variance(self) -> Tensor:
        """Of each weight, (p,)."""
        return _placed([(i, L.square().sum(1)) for i, L in self._roots()], self.mean)

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        """n weight vectors, (n, p)."""
        noise = linalg.standard_normal((n, len(self.mean)), generator, self.mean)
        return self.mean + _placed([(i, noise[:, i] @ L.mT) for i, L in self._roots()], noise)

    def log_q(self, theta: Tensor) -> Tensor:
        """Of draws (n, p): (n,)."""
        away = theta - self.mean
        e = torch.cat([torch.linalg.solve_triangular(L, away[:, i].mT, upper=False).mT for i, L in self._roots()], 1)
        return -(0.5 * e.square() + HALF_LOG_2PI).sum(1) - self.entropy()


class LowRankLayers:
    """A diagonal and a few directions for each layer."""

    normal: ClassVar[bool] = True

    def __init__(
        self, mean: Tensor, deviation: Tensor, layers: dict[str, Tensor], rank: int, g: torch.Generator
    ) -> None:
        self.mean, self.layers, self.log_deviation = _leaf(mean), layers, _leaf(deviation.log())
        self.R = [  # in the unit of the deviations; not 0, where its gradient vanishes
            _leaf(0.1 * linalg.standard_normal((len(i), min(rank, len(i))), g, mean)) for i in layers.values()
        ]

    @property
    def parameters(self) -> list[Tensor]:
        """Leaves, the mean first."""
        return [self.mean, self.log_deviation, *self.R]

    def entropy(self) -> Tensor:
        """H up to a constant, 0-dim."""
        inner = [torch.eye(R.shape[1]).to(R) + R.mT @ R for R in self.R]  # |diag s² + s R Rᵀ s| = Π s² |I + RᵀR|
        return self.log_deviation.sum() + 0.5 * torch.stack([torch.logdet(one) for one in inner]).sum()

    def variance(self) -> Tensor:
        """Of each weight, (p,)."""
        spread = _placed([(i, R.square().sum(1)) for i, R in zip(self.layers.values(), self.R, strict=True)], self.mean)
        return (2 * self.log_deviation).exp() * (1 + spread)

    def draw(self, n: int, generator: torch.Generator) -> Tensor:
        """n weight vectors, (n, p)."""
        noise = linalg.standard_normal((n, len(self.mean)), generator, self.mean)
        low = [
            (i, linalg.standard_normal((n, R.shape[1]), generator, self.mean) @ R.mT)
            for i, R in zip(self.layers.values(), self.R, strict=True)
        ]
        return self.mean + self.log_deviation.exp() * (noise + _placed(low, noise))

    def log_q(self, theta: Tensor) -> Tensor:
        """Of draws (n, p): (n,)."""
        s, total = self.log_deviation.exp(), torch.zeros(len(theta)).to(theta)
        for i, R in zip(self.layers.values(), self.R, strict=True):
            q = LowRankMultivariateNormal(self.mean[i], s[i].unsqueeze(1) * R, s[i].square())
            total = total + q.log_prob(theta[:, i])
        return total


def held(q: Approximation) -> Approximation:
    """q at the parameters that it has now: its density, as a function of a draw alone."""
    other = copy.copy(q)
    for name, value in vars(q).items():
        if isinstance(value, Tensor):
            setattr(other, name, value.detach())
        elif isinstance(value, list):
            setattr(other, name, [one.detach() for one in value])
    return other


def _leaf(value: Tensor) -> Tensor:
    return value.detach().clone().requires_grad_()


def _placed(parts: list[tuple[Tensor, Tensor]], like: Tensor) -> Tensor:
    """Parts (..., m) at their indices, (..., p)."""
    order = torch.cat([i for i, _ in parts]).argsort()
    return torch.cat([value for _, value in parts], -1)[..., order].to(like)
