"""Gaussian noise that depends on the input: c = 2t outputs are both parameters of N(y; μ, σ²) for t targets.

HeteroscedasticGaussian: natural parameters f = [η₁ | η₂] (first all η₁, then all η₂), η₁ = μ/σ², η₂ = −1/(2σ²) < 0,

    log p = η₁y + η₂y² + η₁²/(4η₂) + ½ log(−2η₂) − ½ log 2π                                 concave in (η₁, η₂)
    −∂² log p = Cov[(y, y²)] = v₁v₁ᵀ + v₂v₂ᵀ,   v₁ = σ (1, 2μ),  v₂ = √2 σ² (0, 1)          whatever y is

so Gauss-Newton, Fisher and Hessian in f are one matrix. η₂ < 0 is the network's to keep, by `NaturalHead`: its last
module, through which J is taken. Source: Immer, Palumbo, Marx, Vogt. Effective Bayesian heteroscedastic regression with
deep neural networks. NeurIPS 2023.

MeanLogVariance: f = [μ | log σ²], the common form, for contrast. Its Hessian can be indefinite; the factor is the
Fisher information diag(1/σ², ½), and there is no convex tangent model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lapwing.errors import InvalidValue, Unsupported
from lapwing.likelihoods.base import Likelihood, standard_normal
from lapwing.likelihoods.checks import check_finite

LOG_2PI = math.log(2 * math.pi)


class NaturalHead(nn.Module):
    """(a, b) -> (a, −½ softplus b), the last module of a network for HeteroscedasticGaussian: [a | b] (n, ..., 2t)."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] % 2:
            raise InvalidValue(f"NaturalHead takes two inputs for each target, got {x.shape[-1]}")
        a, b = x.chunk(2, -1)
        return torch.cat([a, -0.5 * F.softplus(b)], -1)


@dataclass(frozen=True)
class _TwoOutputs(Likelihood):
    """Two outputs a target: what does not depend on how they say μ and σ²."""

    outcome: ClassVar[str] = "real numbers"
    normal: ClassVar[bool] = True

    def moments(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """μ and σ², (..., t) each."""
        raise NotImplementedError

    def validate(self, f: Tensor, y: Tensor) -> None:
        c, t = f.shape[-1], y.shape[-1] if y.ndim == f.ndim else None
        if not y.is_floating_point():
            raise InvalidValue(f"{self.name} targets must be floating point, got {y.dtype}; use y.float()")
        if t is None or y.shape[:-1] != f.shape[:-1] or c != 2 * t:
            hint = "; add the target dimension with y.unsqueeze(-1)" if y.ndim == f.ndim - 1 else ""
            raise InvalidValue(
                f"{self.name} takes two outputs for each target, got outputs {tuple(f.shape)} and targets "
                f"{tuple(y.shape)}{hint}"
            )
        check_finite(y)

    def sample(self, f: Tensor, generator: torch.Generator) -> Tensor:
        mean, variance = self.moments(f)
        return mean + variance.sqrt() * standard_normal(mean, generator)

    def mean(self, f: Tensor) -> Tensor:
        return self.moments(f)[0]

    def variance(self, f: Tensor) -> Tensor:
        return self.moments(f)[1]

    def cdf(self, f: Tensor, y: Tensor) -> Tensor:
        mean, variance = self.moments(f)
        return torch.special.ndtr((y - mean) / variance.sqrt())


@dataclass(frozen=True)
class HeteroscedasticGaussian(_TwoOutputs):
    """Mean and variance of y from the network, as natural parameters (η₁, η₂) in f (n, 2c)."""

    def moments(self, f: Tensor) -> tuple[Tensor, Tensor]:
        eta1, eta2 = f.chunk(2, -1)
        variance = -0.5 / eta2
        return eta1 * variance, variance

    def inside(self, f: Tensor) -> Tensor:
        return (f.chunk(2, -1)[1] < 0).all(-1)

    def validate(self, f: Tensor, y: Tensor) -> None:
        super().validate(f, y)
        eta2 = f.chunk(2, -1)[1]
        if not bool(self.inside(f).all()):
            raise InvalidValue(
                f"the second half of the outputs is eta2 = -1/(2 variance) and must be negative, got up to "
                f"{float(eta2.max()):.3g}; end the network with lw.likelihoods.NaturalHead()"
            )

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """−∞ where η₂ ≥ 0, so that a search along a line stays inside."""
        inside = self.inside(f)
        eta1, eta2 = torch.where(inside.unsqueeze(-1), f, -1.0).chunk(2, -1)
        y = y.to(f)
        each = eta1 * y + eta2 * y.square() + eta1.square() / (4 * eta2) + 0.5 * torch.log(-2 * eta2) - 0.5 * LOG_2PI
        return torch.where(inside, each.sum(-1), -math.inf)

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        mean, variance = self.moments(f)
        y = y.to(f)
        return torch.cat([y - mean, y.square() - mean.square() - variance], -1)

    def hessian_root(self, f: Tensor) -> Tensor:
        mean, variance = self.moments(f)
        std = variance.sqrt()
        upper = torch.cat([torch.diag_embed(std), torch.zeros_like(torch.diag_embed(std))], -1)  # (..., t, 2t)
        lower = torch.cat([torch.diag_embed(2 * mean * std), torch.diag_embed(math.sqrt(2) * variance)], -1)
        return torch.cat([upper, lower], -2)


@dataclass(frozen=True)
class MeanLogVariance(_TwoOutputs):
    """Mean and log-variance of y from the network, in f (n, 2c); not concave."""

    concave: ClassVar[bool] = False

    def moments(self, f: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = f.chunk(2, -1)
        return mean, log_variance.exp()

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        mean, log_variance = f.chunk(2, -1)
        z = (y.to(f) - mean).square() * torch.exp(-log_variance)
        return -0.5 * (z + log_variance + LOG_2PI).sum(-1)

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        mean, variance = self.moments(f)
        residual = y.to(f) - mean
        return torch.cat([residual / variance, 0.5 * (residual.square() / variance - 1)], -1)

    def hessian_root(self, f: Tensor) -> Tensor:
        """Of the Fisher information: E[−∂² log p] = diag(1/σ², ½)."""
        half = f.chunk(2, -1)[1]
        return torch.diag_embed(torch.cat([torch.exp(-0.5 * half), torch.full_like(half, math.sqrt(0.5))], -1))

    def curvature_weights(self, factor: str = "exact") -> Tensor:
        if factor == "hessian":
            raise Unsupported(
                "the Hessian of a mean and a log variance can be indefinite; use factor='exact', the Fisher "
                "information, or the natural parameters of HeteroscedasticGaussian"
            )
        return super().curvature_weights(factor)
