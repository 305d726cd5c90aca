"""Gaussian noise that is known for each example: y_nc ~ N(f_nc, σ_nc²), with σ in the targets: `KnownNoise.pack(y, σ)`.

−∂²_f log p = diag(1/σ_n²). There is nothing to tune but the prior. At new inputs the noise is not known: predictions
have the mean and the epistemic part, and the density of targets that come with their noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lapwing.errors import InvalidValue, Unsupported
from lapwing.likelihoods.base import Likelihood
from lapwing.likelihoods.checks import check_finite

UNKNOWN = "the noise at new inputs is not known; use mean, f_var, or log_prob(KnownNoise.pack(y, noise))"


@dataclass(frozen=True)
class KnownNoise(Likelihood):
    """y = f + σ_n ε with σ known for each example; targets are [y | σ], (n, 2c)."""

    quadratic: ClassVar[bool] = True
    response: ClassVar[str] = "identity"
    normal: ClassVar[bool] = True

    @staticmethod
    def pack(y: Tensor, noise: Tensor) -> Tensor:
        """[y | σ], (..., 2c), for σ of y's shape, or one for each row of outputs."""
        noise = noise.unsqueeze(-1) if noise.ndim == y.ndim - 1 else noise
        if noise.shape[:-1] != y.shape[:-1] or noise.shape[-1] not in (1, y.shape[-1]):
            raise InvalidValue(
                f"noise of shape {tuple(noise.shape)} for targets {tuple(y.shape)}; give one a row, or one each"
            )
        return torch.cat([y, noise.to(y).expand(y.shape)], -1)

    def validate(self, f: Tensor, y: Tensor) -> None:
        if not y.is_floating_point() or y.shape != (*f.shape[:-1], 2 * f.shape[-1]):
            raise InvalidValue(
                f"knownnoise targets come from KnownNoise.pack(y, noise), floating point of shape "
                f"{(*f.shape[:-1], 2 * f.shape[-1])}; got {y.dtype} of shape {tuple(y.shape)}"
            )
        check_finite(y)
        noise = y.chunk(2, -1)[1]
        if not bool((noise > 0).all()):
            raise InvalidValue(f"noise must be positive, a standard deviation; the least is {float(noise.min()):.4g}")

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        target, noise = y.to(f).chunk(2, -1)
        return -(0.5 * ((target - f) / noise).square() + noise.log() + 0.5 * math.log(2 * math.pi)).sum(-1)

    def mean(self, f: Tensor) -> Tensor:
        return f

    def variance(self, f: Tensor) -> Tensor:
        raise Unsupported(UNKNOWN)

    def sample(self, f: Tensor, generator: torch.Generator) -> Tensor:
        raise Unsupported(UNKNOWN)

    def observed(self, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        target, noise = y.to(f).chunk(2, -1)
        return target, torch.diag_embed(noise.square())

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        target, noise = y.to(f).chunk(2, -1)
        return (target - f) / noise.square()

    def curvature_root(self, f: Tensor, y: Tensor) -> Tensor:
        return torch.diag_embed(1 / y.to(f).chunk(2, -1)[1])

    def sampled_scores(self, f: Tensor, y: Tensor, k: int, generator: torch.Generator) -> Tensor:
        """Those of y ~ N(f, σ²) are N(0, 1/σ²), as S e is."""
        return self.curvature_noise(f, y, k, generator).permute(1, 2, 0) / k**0.5
