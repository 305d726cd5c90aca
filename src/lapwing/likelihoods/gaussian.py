"""Gaussian noise: y_c ~ N(f_c, σ_c²), `noise` σ a standard deviation, one for all outputs or one each.

−∂²_f log p = diag(1/σ²): at unit scale S = I, and the weight is 1/σ² (1/σ⁴ for the empirical factor).
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

ENOUGH_TARGETS = 32  # before whole values are odd
FEW_VALUES = 10  # whole ones, that may be classes


@dataclass(frozen=True)
class Gaussian(Likelihood):
    """y = f + σ ε, one σ for all outputs or one for each."""

    outcome: ClassVar[str] = "real numbers"
    quadratic: ClassVar[bool] = True
    response: ClassVar[str] = "identity"
    normal: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True
    deviation: ClassVar[str] = "noise"
    sampled: ClassVar[tuple[str, ...]] = ("noise",)
    noise: Any = 1.0  # σ, a tensor () or (c,) once made; or its density, for samplers: lw.priors.Gamma(0.5, 1.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.unknown:
            check_deviation("noise", self.noise)

    @property
    def per_output(self) -> bool:
        """Whether each output has its own σ."""
        return self.noise.ndim == 1

    def validate(self, f: Tensor, y: Tensor) -> None:
        check_real(f, y, self.name)
        if self.per_output and len(self.noise) != f.shape[-1]:
            raise InvalidValue(f"noise has {len(self.noise)} values for {f.shape[-1]} outputs; give one, or one each")

    def target_note(self, y: Tensor, outputs: int) -> str:
        if len(y) < ENOUGH_TARGETS or not bool((y == y.round()).all()) or y.unique().numel() > FEW_VALUES:
            return ""
        what = f"the targets take {y.unique().numel()} whole values only"
        return f"{what}; if they are class labels, use likelihood='categorical' with integer labels"

    def observations(self, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """ỹ (n, c) and σ², (1, c) or (1, 1), as those of labels (`dirichlet.py`)."""
        return y.double(), self.noise.double().square().reshape(1, -1)

    def constant(self, y: Tensor, outputs: int = 0) -> Tensor:
        return y.double().mean(0)

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        z = (y - f) / self.noise.to(f)
        return -(0.5 * z.square() + torch.log(self.noise.to(f)) + 0.5 * math.log(2 * math.pi)).sum(-1)

    def sample(self, f: Tensor, generator: torch.Generator) -> Tensor:
        return f + self.noise.to(f) * standard_normal(f, generator)

    def mean(self, f: Tensor) -> Tensor:
        return f

    def variance(self, f: Tensor) -> Tensor:
        return self.noise.to(f).square().expand(f.shape)

    def cdf(self, f: Tensor, y: Tensor) -> Tensor:
        return torch.special.ndtr((y - f) / self.noise.to(f))

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        return y - f

    def hessian_root(self, f: Tensor) -> Tensor:
        return torch.eye(f.shape[-1], dtype=f.dtype, device=f.device).expand(*f.shape, f.shape[-1])

    def unit_log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        each = -0.5 * (y - f).square()
        return each if self.per_output else each.sum(-1, keepdim=True)

    def curvature_weights(self, factor: str = "exact") -> Tensor:
        if factor not in ("exact", "hessian") and self.per_output:
            raise Unsupported(
                f"factor='{factor}' mixes the outputs, so per-output noise cannot be applied afterwards; "
                "use factor='exact', or one noise for all outputs"
            )
        return self.noise.reshape(-1) ** (-4 if factor == "empirical" else -2)

    def statistics(self, f: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"sse": (y.double() - f.double()).square().sum(0), **target_sums(y.double())}

    def shapes(self, statistics: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
        c = self.noise.numel() if self.per_output else statistics["sse"].numel() if "sse" in statistics else 1
        return dict.fromkeys(("sse", "sum", "square", "count"), (c,))

    def log_likelihood(self, statistics: dict[str, Tensor]) -> Tensor:
        count, variance = statistics["count"], self.noise.square()
        return -0.5 * (statistics["sse"] / variance + count * torch.log(2 * math.pi * variance)).sum()

    def residual_noise(self, statistics: dict[str, Tensor]) -> Tensor:
        """The maximum-likelihood σ, in the shape of `noise`."""
        sse, count = statistics["sse"], statistics["count"]
        return (sse / count).sqrt() if self.per_output else (sse.sum() / count.sum()).sqrt()

    def target_scale(self, statistics: dict[str, Tensor]) -> Tensor:
        """The standard deviation of the targets (1 where they do not vary), in the shape of `noise`."""
        variance, rounding = target_variance(statistics)
        variance = variance if self.per_output else variance.mean()
        return torch.where(variance > rounding, variance.clamp(min=0).sqrt(), torch.ones_like(variance))

    def limits(self, statistics: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
        scale, tiny = self.target_scale(statistics), torch.finfo(torch.float64).tiny
        low, high = (scale * 1e-6).log(), (scale * 1e3).log()
        start = self.residual_noise(statistics).clamp(min=tiny).log().clamp(low + 1, high - 1)
        return {"noise": (low, high, start)}

    def floors(self, statistics: dict[str, Tensor]) -> dict[str, Tensor]:
        """The residuals' σ: predictions keep the network's mean, and err by that."""
        return {"noise": self.residual_noise(statistics).clamp(min=torch.finfo(torch.float64).tiny).log()}

    def wanted(self, statistics: dict[str, Tensor], slope: Tensor) -> dict[str, Tensor]:
        """σ² = SSE/(count − γ), γ = −½ ∂ log|G + A| / ∂ log σ: how many data the fit used up, as the noise sees it."""
        sse, count = statistics["sse"], statistics["count"]
        if not self.per_output:
            sse, count = sse.sum(), count.sum()
        free = (count + 0.5 * slope * self.noise.detach()).clamp(min=1e-3)
        return {"noise": 0.5 * (sse.clamp(min=torch.finfo(torch.float64).tiny) / free).log()}

    def output_variance(self, statistics: dict[str, Tensor]) -> float:
        return float(self.target_scale(statistics).square().mean())


def target_sums(y: Tensor) -> dict[str, Tensor]:
    """Sums over targets y (n, c), each (c,), from which their variance follows."""
    return {"sum": y.sum(0), "square": y.square().sum(0), "count": torch.full_like(y[0], len(y))}


def target_variance(statistics: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The variance of each output's targets (c,), and what rounding may make of targets that do not vary."""
    mean, square = (statistics[key] / statistics["count"] for key in ("sum", "square"))
    return square - mean.square(), 1e-24 * square.sum() + torch.finfo(torch.float64).tiny
