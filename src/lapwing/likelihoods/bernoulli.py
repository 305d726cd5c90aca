"""Independent binary outputs (multilabel): y_c in {0, 1}, p = sigmoid(f).

−∂²_f log p = diag(p(1 − p)),   S = diag(√(p(1 − p)))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from lapwing.errors import InvalidValue
from lapwing.likelihoods.base import Likelihood
from lapwing.likelihoods.checks import check_same_shape


@dataclass(frozen=True)
class Bernoulli(Likelihood):
    """y ∈ {0, 1} for each output, with logits f (n, c)."""

    response: ClassVar[str] = "sigmoid"
    classes: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True

    def validate(self, f: Tensor, y: Tensor) -> None:
        check_same_shape(f, y)
        if not bool(((y == 0) | (y == 1)).all()):
            raise InvalidValue("bernoulli targets must be 0 or 1 (bool, integer or float)")

    def constant(self, y: Tensor, outputs: int = 0) -> Tensor:
        return torch.logit(y.double().mean(0).clamp(1e-6, 1 - 1e-6))

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return -F.binary_cross_entropy_with_logits(f, y.to(f), reduction="none").sum(-1)

    def sample(self, f: Tensor, generator: torch.Generator) -> Tensor:
        u = torch.rand(f.shape, generator=generator, dtype=f.dtype, device=generator.device).to(f.device)
        return (u < torch.sigmoid(f)).to(f)

    def mean(self, f: Tensor) -> Tensor:
        return torch.sigmoid(f)

    def class_probs(self, mean: Tensor) -> Tensor:
        """(..., c, 2); a probability that rounds to 1 does not make the other class impossible."""
        least = torch.finfo(mean.dtype).eps / 2
        return torch.stack([1 - mean.clamp(max=1 - least), mean], -1)

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        return y.to(f) - torch.sigmoid(f)

    def hessian_root(self, f: Tensor) -> Tensor:
        return torch.diag_embed((torch.sigmoid(f) * torch.sigmoid(-f)).sqrt())
