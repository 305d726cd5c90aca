"""Class labels as Gaussian observations of the logits (Eq. 25; Milios et al. 2018).

A label t (n, c), one-hot or probabilities, counts α_c = ε + t_c for class c. A Gamma(α_c, 1) of that count is taken as
log-normal with the same mean and variance, so that the label observes each logit with a noise that is known:

    σ_c² = log(1 + 1/α_c),   ỹ_c = log α_c − ½σ_c²,   log p = Σ_c log N(ỹ_c; f_c, σ_c²),   −∂²_f log p = diag(1/σ²)

    Dirichlet(ε)             logits f (n, c) of c classes
    DirichletBernoulli(ε)    one logit for each binary output: ỹ₁ − ỹ₀, with the variance σ₁² + σ₀²

The curvature depends on the label alone, so it does not vanish where the network is sure, and the evidence is that of a
regression. That density is of ỹ: evidences of different ε do not compare. Predictions are of labels, by softmax or
sigmoid of the logits, and are scored as such (`plain`, `predictive`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lapwing.errors import InvalidValue
from lapwing.likelihoods.base import Likelihood, standard_normal
from lapwing.likelihoods.bernoulli import Bernoulli
from lapwing.likelihoods.soft import Labels
from lapwing.solvers.noise import Placed

LEAST, MOST = 1e-20, 1e6  # of ε: in float32, 1/ε is finite and 1 + ε is not ε


@dataclass(frozen=True)
class ObservedLogits(Likelihood):
    """N(ỹ; f, σ²), where ỹ and σ² are functions of the label."""

    settings: ClassVar[tuple[str, ...]] = ("concentration",)
    quadratic: ClassVar[bool] = True
    concentration: Tensor | float = 0.1  # ε

    def __post_init__(self) -> None:
        super().__post_init__()
        if self._epsilon.ndim or not LEAST <= float(self._epsilon) <= MOST:
            raise InvalidValue(
                f"concentration is one number from {LEAST:g} to {MOST:g}, got {self._epsilon.tolist()}; 0.1 is usual"
            )

    def observations(self, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """ỹ and σ², both of the shape of f."""
        raise NotImplementedError

    @property
    def _epsilon(self) -> Tensor:
        assert isinstance(self.concentration, Tensor)
        return self.concentration

    @property
    def density(self) -> str:
        return self.kind

    @property
    def plain(self) -> Likelihood:
        return self.predictive

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        target, variance = self.observations(f, y)
        return -0.5 * ((target - f).square() / variance + (2 * math.pi * variance).log()).sum(-1)

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        target, variance = self.observations(f, y)
        return (target - f) / variance

    def columns(self, outputs: int) -> int:
        return outputs

    def hessian_root(self, f: Tensor) -> Tensor:
        raise NotImplementedError(f"the curvature of {self.name} depends on the labels: curvature_root(f, y)")

    def curvature_root(self, f: Tensor, y: Tensor) -> Tensor:
        return torch.diag_embed(self.observations(f, y)[1].rsqrt())

    # without a matrix of outputs by outputs

    def curvature_product(self, f: Tensor, y: Tensor, v: Tensor) -> Tensor:
        variance = self.observations(f, y)[1]
        return v.to(variance) / variance

    def curvature_trace(self, f: Tensor, y: Tensor) -> Tensor:
        return self.observations(f, y)[1].reciprocal().sum(-1)

    def curvature_noise(self, f: Tensor, y: Tensor, k: int, generator: torch.Generator | Placed) -> Tensor:
        variance = self.observations(f, y)[1]
        return standard_normal(variance.expand(k, *variance.shape), generator) * variance.rsqrt()

    def sampled_scores(self, f: Tensor, y: Tensor, k: int, generator: torch.Generator) -> Tensor:
        """Those of ỹ ~ N(f, σ²) are N(0, 1/σ²), as S e is."""
        return self.curvature_noise(f, y, k, generator).permute(1, 2, 0) / k**0.5


@dataclass(frozen=True)
class Dirichlet(ObservedLogits, Labels):
    """Labels y (n,), or probabilities y (n, c), of c classes, with logits f (n, c)."""

    @property
    def predictive(self) -> Likelihood:
        return Labels()

    def validate(self, f: Tensor, y: Tensor) -> None:
        if f.shape[-1] < 2:
            raise InvalidValue(
                f"dirichlet needs at least 2 outputs, one a class, got {f.shape[-1]}; for one logit use "
                "'dirichlet_bernoulli'"
            )
        super().validate(f, y)

    def observations(self, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if not y.is_floating_point():
            y = y.unsqueeze(-1) == torch.arange(f.shape[-1], device=f.device)
        return log_normal(self._epsilon.to(f) + y.to(f))


@dataclass(frozen=True)
class DirichletBernoulli(ObservedLogits, Bernoulli):
    """y ∈ {0, 1} for each output, with logits f (n, c)."""

    @property
    def predictive(self) -> Likelihood:
        return Bernoulli()

    def observations(self, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        t, epsilon = y.to(f), self._epsilon.to(f)
        (one, its), (zero, other) = log_normal(epsilon + t), log_normal(epsilon + 1 - t)
        return one - zero, its + other


def log_normal(alpha: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of log g, where g is log-normal with the mean α and the variance α of Gamma(α, 1)."""
    variance = torch.log1p(1 / alpha)
    return alpha.log() - 0.5 * variance, variance
