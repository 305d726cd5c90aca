"""What a likelihood p(y | f) must say, per example: f (n, c), y as its class documents.

Curvature is kept at *unit* scale and multiplied afterwards, so that tuning the noise never needs a second pass:

    −∂²_f log p = Σ_g w_g S_g S_gᵀ,   S = hessian_root(f) (n, c, k),  w = curvature_weights() (g,)

With one weight (g = 1) it multiplies everything; with g = k weights, weight j belongs to column j of S.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from lapwing.errors import InvalidValue


@dataclass(frozen=True)
class Likelihood:
    """Base class. Fields are hyperparameters: positive float64 tensors with names."""

    def __post_init__(self) -> None:
        for f in fields(self):
            value = torch.as_tensor(getattr(self, f.name), dtype=torch.float64)  # 0.3 is not float32's 0.30000001
            if value.ndim > 1 or not value.numel():
                raise InvalidValue(
                    f"{f.name} must be one value, or one for each output, got shape {tuple(value.shape)}"
                )
            if not bool((torch.isfinite(value) & (value > 0)).all()):
                raise InvalidValue(f"{f.name} must be positive and finite, got {value.tolist()}")
            object.__setattr__(self, f.name, value)

    @property
    def name(self) -> str:
        return type(self).__name__.lower()

    @property
    def hyperparameters(self) -> dict[str, Tensor]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def replace(self, **hyperparameters: Any) -> Any:
        return replace(self, **hyperparameters)

    def to(self, device: torch.device) -> Any:
        return self.replace(**{k: v.to(device) for k, v in self.hyperparameters.items()})

    # -- the observations -----------------------------------------------------------------------------------------

    def validate(self, f: Tensor, y: Tensor) -> None:
        """Raise on targets that the likelihood cannot take. Not part of log_prob, which must stay traceable."""
        raise NotImplementedError

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """log p(y_n | f_n), (n,)."""
        raise NotImplementedError

    def sample(self, f: Tensor, generator: torch.Generator) -> Tensor:
        """One y for each row of f."""
        raise NotImplementedError

    # -- moments of y given f, for predictions ---------------------------------------------------------------------

    def mean(self, f: Tensor) -> Tensor:
        """E[y | f] (class probabilities), (..., c)."""
        raise NotImplementedError

    def variance(self, f: Tensor) -> Tensor:
        """Var[y | f], (..., c)."""
        raise NotImplementedError

    # -- the curvature, at unit scale -----------------------------------------------------------------------------

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        """∂_f log p(y | f) at unit scale, (n, c)."""
        raise NotImplementedError

    def hessian_root(self, f: Tensor) -> Tensor:
        """S with S Sᵀ = −∂²_f log p at unit scale, (n, c, k)."""
        raise NotImplementedError

    def unit_log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        """log p at unit scale up to constants, cut by weight: (n, g), so that ∂² log p = Σ_g w_g ∂² of column g."""
        return self.log_prob(f, y).unsqueeze(-1)

    def curvature_weights(self, factor: str = "exact") -> Tensor:
        """w (g,) for a given output factor."""
        raise NotImplementedError

    # -- the fit, from sums ---------------------------------------------------------------------------------------

    def statistics(self, f: Tensor, y: Tensor) -> dict[str, Tensor]:
        """Sums over the batch, in float64, from which the log-likelihood follows for every hyperparameter."""
        raise NotImplementedError

    def log_likelihood(self, statistics: dict[str, Tensor]) -> Tensor:
        """Σ_n log p(y_n | f_n), differentiable in the hyperparameters."""
        raise NotImplementedError
