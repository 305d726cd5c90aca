"""Counts y_c in {0, 1, 2, …} with mean μ = exp f, one output each.

    Poisson            Var y = μ           −∂²_f log p = diag(μ)               canonical: the same whatever y is
    NegativeBinomial   Var y = μ + μ²/r    E[−∂²_f log p] = diag(rμ/(r + μ))   r, `dispersion`; Poisson as r → ∞

The negative binomial's log p is concave in f; its Hessian (y + r)rμ/(r + μ)² depends on y, and the factor is its mean,
the Fisher information. r shapes the curvature, so it is a setting: fit several and compare their evidences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapwing.errors import InvalidValue
from lapwing.likelihoods.base import Likelihood
from lapwing.likelihoods.checks import check_same_shape
from lapwing.likelihoods.special import betainc


@dataclass(frozen=True)
class _Counts(Likelihood):
    outcome: ClassVar[str] = "counts"
    elementwise: ClassVar[bool] = True
    counts: ClassVar[bool] = True

    def validate(self, f: Tensor, y: Tensor) -> None:
        check_same_shape(f, y)
        if y.is_complex() or y.dtype == torch.bool or not bool(((y >= 0) & (y == y.round()) & torch.isfinite(y)).all()):
            raise InvalidValue(f"{self.name} targets must be counts, the numbers 0, 1, 2, ... (integer or float)")

    def log_pmf(self, f: Tensor, y: Tensor) -> Tensor:
        """log P(y_j | f_j) of each target by itself."""
        raise NotImplementedError

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return self.log_pmf(f, y).sum(-1)

    def pmf(self, f: Tensor, y: Tensor) -> Tensor:
        return self.log_pmf(f, y).exp()

    def mean(self, f: Tensor) -> Tensor:
        return f.exp()


@dataclass(frozen=True)
class Poisson(_Counts):
    """Counts y of mean exp f, for each output."""

    def log_pmf(self, f: Tensor, y: Tensor) -> Tensor:
        y = y.to(f)
        return y * f - f.exp() - torch.lgamma(y + 1)

    def sample(self, f: Tensor, generator: torch.Generator) -> Tensor:
        return torch.poisson(f.exp().to(generator.device), generator=generator).to(f)

    def variance(self, f: Tensor) -> Tensor:
        return f.exp()

    def cdf(self, f: Tensor, y: Tensor) -> Tensor:
        return torch.special.gammaincc(y.to(f).floor() + 1, f.exp())

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        return y.to(f) - f.exp()

    def hessian_root(self, f: Tensor) -> Tensor:
        return torch.diag_embed((0.5 * f).exp())


@dataclass(frozen=True)
class NegativeBinomial(_Counts):
    """Counts y of mean exp f and variance μ + μ²/r, for each output."""

    settings: ClassVar[tuple[str, ...]] = ("dispersion",)
    dispersion: Any = 1.0  # r, a tensor () or (c,) once made

    def validate(self, f: Tensor, y: Tensor) -> None:
        super().validate(f, y)
        r, outputs = self.dispersion, f.shape[-1]
        if r.ndim and len(r) != outputs:
            raise InvalidValue(f"dispersion has {len(r)} values for {outputs} outputs; give one, or one each")

    def log_pmf(self, f: Tensor, y: Tensor) -> Tensor:
        y, r = y.to(f), self.dispersion.to(f)
        log_r = r.log()
        ways = torch.lgamma(y + r) - torch.lgamma(r) - torch.lgamma(y + 1)
        return ways + r * log_r + y * f - (y + r) * torch.logaddexp(log_r, f)

    def sample(self, f: Tensor, generator: torch.Generator) -> Tensor:
        """A Poisson whose rate is μ times a gamma of mean 1."""
        r = self.dispersion.to(f).expand(f.shape).contiguous().to(generator.device)
        rate = f.exp().to(generator.device) * torch._standard_gamma(r, generator=generator) / r
        return torch.poisson(rate, generator=generator).to(f)

    def variance(self, f: Tensor) -> Tensor:
        return f.exp() + (2 * f).exp() / self.dispersion.to(f)

    def cdf(self, f: Tensor, y: Tensor) -> Tensor:
        r = self.dispersion.to(f)
        return betainc(r, y.to(f).floor() + 1, torch.sigmoid(r.log() - f), torch.sigmoid(f - r.log()))

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        share = torch.sigmoid(self.dispersion.to(f).log() - f)  # r/(r + μ)
        return (y.to(f) - f.exp()) * share

    def hessian_root(self, f: Tensor) -> Tensor:
        r = self.dispersion.to(f)
        return torch.diag_embed((r * torch.sigmoid(f - r.log())).sqrt())
