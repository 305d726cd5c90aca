"""Gaussian noise with a full covariance over the outputs: y ~ N(f, R), `covariance` R (c, c) learnt by the evidence.

−∂²_f log p = Π = R⁻¹ is linear in Π, and by polarization a sum of fixed columns with weights that may be negative
(`polarization.py`), so curvature is kept apart by column, as for noise per output, and R is tuned without a pass. At a
stationary point of the evidence (Eq. 7, for matrices)

    N R = Σ_n r_n r_nᵀ + Σ_n J_n (G + A)⁻¹ J_nᵀ,      r = y − f,

whose last term is ∂ log|G + A| / ∂Π. R is searched for by its matrix logarithm: any symmetric matrix is one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lapwing import given
from lapwing.errors import InvalidValue, Unsupported
from lapwing.likelihoods import polarization
from lapwing.likelihoods.base import Likelihood, standard_normal
from lapwing.likelihoods.checks import check_real
from lapwing.likelihoods.gaussian import target_sums, target_variance

LOW, HIGH = 1e-6, 1e3  # standard deviations, of those of the targets
FLOOR = 1e-8  # of a direction's variance, relative to the mean: R and its inverse have Cholesky factors in float64


@dataclass(frozen=True)
class CorrelatedGaussian(Likelihood):
    """y = f + noise of covariance R (c, c), which the evidence learns."""

    outcome: ClassVar[str] = "real numbers"
    quadratic: ClassVar[bool] = True
    response: ClassVar[str] = "identity"
    normal: ClassVar[bool] = True
    paired: ClassVar[bool] = True
    covariance: Tensor  # R (c, c), positive definite

    def __post_init__(self) -> None:
        R = given.real(self.covariance, "covariance")
        if R.ndim != 2 or R.shape[0] != R.shape[1] or not bool(torch.isfinite(R).all()):
            raise InvalidValue(
                f"covariance must be a finite matrix, a row and a column an output; got {tuple(R.shape)}"
            )
        if not torch.allclose(R, R.mT) or int(torch.linalg.cholesky_ex(R.detach()).info) > 0:
            raise InvalidValue("covariance must be symmetric and positive definite; zero noise has no density")
        object.__setattr__(self, "covariance", R)

    @property
    def precision(self) -> Tensor:
        """R⁻¹ (c, c)."""
        return torch.linalg.inv(self.covariance)

    @property
    def factors(self) -> tuple[str, ...]:
        return ("exact",)

    @property
    def unit(self) -> CorrelatedGaussian:
        return self.replace(covariance=torch.eye(len(self.covariance), device=self.covariance.device))

    def columns(self, outputs: int) -> int:
        return outputs * (outputs + 1) // 2

    def validate(self, f: Tensor, y: Tensor) -> None:
        check_real(f, y, self.name)
        if len(self.covariance) != f.shape[-1]:
            raise InvalidValue(f"covariance is of {len(self.covariance)} outputs, and there are {f.shape[-1]}")

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        residual, R = y.to(f) - f, self.covariance.to(f)
        square = (residual * (residual @ torch.linalg.inv(R))).sum(-1)
        return -0.5 * (square + torch.logdet(R) + len(R) * math.log(2 * math.pi))

    def sample(self, f: Tensor, generator: torch.Generator) -> Tensor:
        return f + standard_normal(f, generator) @ torch.linalg.cholesky(self.covariance.to(f)).mT

    def mean(self, f: Tensor) -> Tensor:
        return f

    def variance(self, f: Tensor) -> Tensor:
        return self.covariance.diagonal().to(f).expand(f.shape)

    def noise_covariance(self, f: Tensor) -> Tensor:
        return self.covariance.to(f).expand(*f.shape, f.shape[-1])

    def cdf(self, f: Tensor, y: Tensor) -> Tensor:
        return torch.special.ndtr((y - f) / self.variance(f).sqrt())

    # -- the curvature ----------------------------------------------------------------------------------------------

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        return y.to(f) - f

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        return self.score(f, y) @ self.precision.to(f)

    def hessian_root(self, f: Tensor) -> Tensor:
        return polarization.columns(f.shape[-1]).to(f).expand(*f.shape[:-1], -1, -1)

    def scaled_root(self, f: Tensor, y: Tensor) -> Tensor:
        return torch.linalg.cholesky(self.precision).to(f).expand(*f.shape, f.shape[-1])

    def unit_log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return -0.5 * ((y.to(f) - f) @ polarization.columns(f.shape[-1]).to(f)).square()

    def curvature_weights(self, factor: str = "exact") -> Tensor:
        if factor not in ("exact", "hessian"):
            raise Unsupported(f"factor='{factor}' mixes the outputs, so their covariance cannot be learnt; use 'exact'")
        return polarization.weights_of(self.precision)

    # -- the fit ----------------------------------------------------------------------------------------------------

    def statistics(self, f: Tensor, y: Tensor) -> dict[str, Tensor]:
        residual = y.double() - f.double()
        return {"outer": residual.mT @ residual, **target_sums(y.double())}

    def shapes(self, statistics: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
        c = len(self.covariance)
        return {"outer": (c, c), "sum": (c,), "square": (c,), "count": (c,)}

    def log_likelihood(self, statistics: dict[str, Tensor]) -> Tensor:
        R, n = self.covariance, statistics["count"][0]
        square = (torch.linalg.inv(R) * statistics["outer"]).sum()
        return -0.5 * (square + n * (torch.logdet(R) + len(R) * math.log(2 * math.pi)))

    # -- its own search -----------------------------------------------------------------------------------------------

    def coordinates(self) -> dict[str, Tensor]:
        return {"covariance": _log(self.covariance.detach())}

    def moved(self, coordinates: dict[str, Tensor]) -> CorrelatedGaussian:
        """R = exp X, and so much of its mean variance in every direction that R can be inverted: few examples leave
        directions without noise, and a search that follows them ends in rounding."""
        X = coordinates["covariance"]
        R = torch.linalg.matrix_exp(0.5 * (X + X.mT))
        return self.replace(covariance=R + torch.diag_embed(FLOOR * R.diagonal().mean().expand(len(R))))

    def limits(self, statistics: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
        """Of log R: of its diagonal those of noise per output; R starts at the residuals' covariance."""
        spread = self._target_variance(statistics)
        wide = torch.full_like(self.covariance, 2 * math.log(HIGH / LOW))
        low = torch.diag_embed((LOW**2 * spread).log() + wide.diagonal()) - wide
        high = torch.diag_embed((HIGH**2 * spread).log() - wide.diagonal()) + wide
        start = statistics["outer"] / statistics["count"]
        start = start + torch.diag_embed(FLOOR * spread)  # residuals may leave a direction out
        return {"covariance": (low, high, _log(start).clamp(low + 1, high - 1))}

    def wanted(self, statistics: dict[str, Tensor], slope: Tensor) -> dict[str, Tensor]:
        """log R of the fixed point, for slope = ∂ log|G + A| / ∂R = −Π M Π with M = Σ_n J_n (G + A)⁻¹ J_nᵀ."""
        R = self.covariance.detach()
        M = -R @ (0.5 * (slope + slope.mT)) @ R
        return {"covariance": _log((statistics["outer"] + M) / statistics["count"])}

    def output_variance(self, statistics: dict[str, Tensor]) -> float:
        return float(self._target_variance(statistics).mean())

    def _target_variance(self, statistics: dict[str, Tensor]) -> Tensor:
        """1 where targets do not vary."""
        variance, rounding = target_variance(statistics)
        return torch.where(variance > rounding, variance, torch.ones_like(variance))


def _log(R: Tensor) -> Tensor:
    """The logarithm of a symmetric positive definite matrix."""
    values, vectors = torch.linalg.eigh(0.5 * (R + R.mT))
    return (vectors * values.clamp(min=torch.finfo(R.dtype).tiny).log()) @ vectors.mT
