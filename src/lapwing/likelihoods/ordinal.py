"""Ordered classes y in {0, …, K−1} from one output, by cumulative logits: P(y ≤ k) = sigmoid(b_k − f), with b rising.

    E[−∂²_f log p] = Σ_k (∂_f p_k)² / p_k,     p_k = sigmoid(b_k − f) − sigmoid(b_{k−1} − f)

log p is concave in f; its Hessian depends on y, and the factor is its mean, the Fisher information. The cutpoints b
shape the curvature, so they are settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from lapwing.errors import InvalidValue
from lapwing.likelihoods.base import Likelihood
from lapwing.likelihoods.checks import check_labels


@dataclass(frozen=True)
class Ordinal(Likelihood):
    """Labels y (n,) of K ordered classes, between which f (n, 1) has K − 1 cutpoints."""

    outcome: ClassVar[str] = "labels"
    settings: ClassVar[tuple[str, ...]] = ("cutpoints",)
    event: ClassVar[int] = 0
    classes: ClassVar[bool] = True
    cutpoints: Any  # b (K − 1,), rising: numbers, a tensor once made

    def __post_init__(self) -> None:
        b = torch.as_tensor(self.cutpoints, dtype=torch.float64)
        if b.ndim != 1 or not b.numel() or not bool(torch.isfinite(b).all()) or not bool((b.diff() > 0).all()):
            raise InvalidValue(
                f"cutpoints must be finite numbers that rise, one less than there are classes; got {b.tolist()}"
            )
        object.__setattr__(self, "cutpoints", b)

    def validate(self, f: Tensor, y: Tensor) -> None:
        if f.shape[-1] != 1:
            raise InvalidValue(
                f"ordinal takes one output, got {f.shape[-1]}; for classes without an order use 'categorical'"
            )
        check_labels(f, y, len(self.cutpoints) + 1, self.name)

    def log_probs(self, f: Tensor) -> Tensor:
        """log p_k, (..., 1) -> (..., K)."""
        z = self.cutpoints.to(f) - f  # (..., K − 1)
        lower, upper = _log_sigmoid(z[..., :1]), _log_sigmoid(-z[..., -1:])
        # sigmoid(b) − sigmoid(a) = sigmoid(b) sigmoid(−a) (1 − e^{a−b}): nothing cancels far from the cutpoints
        gap = torch.log(-torch.expm1(-self.cutpoints.diff().to(f)))
        between = _log_sigmoid(z[..., 1:]) + _log_sigmoid(-z[..., :-1]) + gap
        return torch.cat([lower, between, upper], -1)

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return self.log_probs(f).gather(-1, y.long().unsqueeze(-1)).squeeze(-1)

    def sample(self, f: Tensor, generator: torch.Generator) -> Tensor:
        p = self.mean(f).reshape(-1, len(self.cutpoints) + 1).to(generator.device)
        return torch.multinomial(p, 1, generator=generator).reshape(f.shape[:-1]).to(f.device)

    def mean(self, f: Tensor) -> Tensor:
        return self.log_probs(f).exp()

    def slopes(self, f: Tensor) -> Tensor:
        """∂_f log p_k, (..., 1) -> (..., K)."""
        z = self.cutpoints.to(f) - f
        left, right = torch.sigmoid(z), torch.sigmoid(-z)  # ∂_f log sigmoid(±z) = ∓ sigmoid(∓z)
        return torch.cat([-right[..., :1], left[..., :-1] - right[..., 1:], left[..., -1:]], -1)

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        return self.slopes(f).gather(-1, y.long().unsqueeze(-1))

    def hessian_root(self, f: Tensor) -> Tensor:
        return (self.mean(f) * self.slopes(f).square()).sum(-1, keepdim=True).sqrt().unsqueeze(-1)


def _log_sigmoid(z: Tensor) -> Tensor:
    """To the last digit of float64; torch's own has no second derivative under vmap."""
    return -F.softplus(-z, threshold=40.0)
