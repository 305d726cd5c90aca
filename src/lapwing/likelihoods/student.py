"""Student-t noise: y_c = f_c + s·t_ν, with heavy tails; `scale` s and `df` ν, one for all outputs or one each.

    log p = −½(ν + 1) log(1 + z²/ν) + constants,  z = (y − f)/s      not concave: an outlier pulls less
    E[−∂²_f log p] = diag((ν + 1)/((ν + 3) s²))                      the Fisher information, which is the factor

How well it fits at another s or ν is no function of a few sums, so both are settings: fit several and compare their
evidences. Var y = s²ν/(ν − 2), infinite for ν ≤ 2, and there is no mean for ν ≤ 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapwing.errors import InvalidValue, Unsupported
from lapwing.likelihoods.base import Likelihood, standard_normal
from lapwing.likelihoods.checks import check_deviation, check_real
from lapwing.likelihoods.special import student_tail


@dataclass(frozen=True)
class StudentT(Likelihood):
    """y = f + s·t_ν, for each output: noise with heavy tails."""

    outcome: ClassVar[str] = "real numbers"
    settings: ClassVar[tuple[str, ...]] = ("scale", "df")
    concave: ClassVar[bool] = False
    response: ClassVar[str] = "identity"
    elementwise: ClassVar[bool] = True
    scale: Any = 1.0  # s, a tensor () or (c,) once made
    df: Any = 4.0  # ν, likewise

    def __post_init__(self) -> None:
        super().__post_init__()
        check_deviation("scale", self.scale)

    def validate(self, f: Tensor, y: Tensor) -> None:
        check_real(f, y, self.name)
        for name, value in (("scale", self.scale), ("df", self.df)):
            if value.ndim and len(value) != f.shape[-1]:
                raise InvalidValue(f"{name} has {len(value)} values for {f.shape[-1]} outputs; give one, or one each")

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        s, nu = self.scale.to(f), self.df.to(f)
        ways = torch.lgamma(0.5 * (nu + 1)) - torch.lgamma(0.5 * nu) - 0.5 * torch.log(math.pi * nu) - s.log()
        return (ways - 0.5 * (nu + 1) * torch.log1p(((y - f) / s).square() / nu)).sum(-1)

    def sample(self, f: Tensor, generator: torch.Generator) -> Tensor:
        half = (0.5 * self.df.to(f)).expand(f.shape).contiguous().to(generator.device)
        shrink = (torch._standard_gamma(half, generator=generator) / half).rsqrt().to(f)
        return f + self.scale.to(f) * shrink * standard_normal(f, generator)

    def mean(self, f: Tensor) -> Tensor:
        if bool((self.df <= 1).any()):
            raise Unsupported(f"Student-t noise has a mean for df > 1 only, got {self.df.tolist()}; use quantile(0.5)")
        return f

    def variance(self, f: Tensor) -> Tensor:
        s, nu = self.scale.to(f), self.df.to(f)
        return torch.where(nu > 2, s.square() * nu / (nu - 2), math.inf).expand(f.shape)

    def cdf(self, f: Tensor, y: Tensor) -> Tensor:
        z, nu = (y - f) / self.scale.to(f), self.df.to(f)
        tail = student_tail(z, nu)
        return torch.where(z > 0, 1 - tail, tail)

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        residual, s, nu = y.to(f) - f, self.scale.to(f), self.df.to(f)
        return (nu + 1) * residual / (nu * s.square() + residual.square())

    def hessian_root(self, f: Tensor) -> Tensor:
        s, nu = self.scale.to(f), self.df.to(f)
        return torch.diag_embed(((nu + 1) / (nu + 3)).sqrt().div(s).expand(f.shape))

    def curvature_weights(self, factor: str = "exact") -> Tensor:
        if factor == "hessian":
            raise Unsupported(
                "the Hessian of Student-t noise is indefinite at outliers; use factor='exact', the Fisher information"
            )
        return super().curvature_weights(factor)
