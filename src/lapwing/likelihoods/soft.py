"""Softmax classes with targets that are no single label: log p → Σ_c t_c log p_c, a cross-entropy with probabilities t.

    SoftLabels             y = t (n, c) itself: several raters, a teacher's probabilities
    Labels                 y = t where it is floating point, else labels
    LabelSmoothing(ε)      t = (1 − ε)·one-hot(y) + ε/c

−∂²_f log p = diag(p) − p pᵀ, as for labels, since log p is linear in t. Such a cross-entropy is no density of t, so its
evidence compares only with that of the same targets. Predictions of smoothed labels are of labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from lapwing.errors import InvalidValue
from lapwing.likelihoods.base import Likelihood
from lapwing.likelihoods.categorical import Categorical
from lapwing.likelihoods.checks import check_same_shape

SUM = 1e-4  # how far from 1 probabilities may add up


@dataclass(frozen=True)
class SoftLabels(Categorical):
    """Probabilities y (n, c) in place of labels."""

    outcome: ClassVar[str] = ""
    event: ClassVar[int] = 1

    def validate(self, f: Tensor, y: Tensor) -> None:
        if f.shape[-1] < 2:
            raise InvalidValue(f"softlabels needs at least 2 outputs, got {f.shape[-1]}")
        if not y.is_floating_point():
            raise InvalidValue(f"softlabels targets are probabilities, got {y.dtype}; for labels use 'categorical'")
        check_same_shape(f, y)
        total = y.sum(-1)
        if not bool((y >= 0).all()) or not bool(((total - 1).abs() <= SUM).all()):
            raise InvalidValue(
                "soft targets must be probabilities: not negative, and each row adds up to 1; got values from "
                f"{float(y.min()):.4g} and sums from {float(total.min()):.4g} to {float(total.max()):.4g}"
            )

    def target_hint(self, f: Tensor, y: Tensor) -> str:
        return ""

    def target_note(self, y: Tensor, outputs: int) -> str:
        return ""

    def constant(self, y: Tensor, outputs: int = 0) -> Tensor:
        return y.double().mean(0).clamp(min=torch.finfo(torch.float64).tiny).log()

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return (y.to(f) * torch.log_softmax(f, -1)).sum(-1)

    def class_log_prob(self, mean: Tensor, y: Tensor) -> Tensor:
        return torch.xlogy(y.to(mean), mean).sum(-1)

    def sample(self, f: Tensor, generator: torch.Generator) -> Tensor:
        return F.one_hot(super().sample(f, generator), f.shape[-1]).to(f)

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        return y.to(f) - y.to(f).sum(-1, keepdim=True) * torch.softmax(f, -1)


@dataclass(frozen=True)
class Labels(Categorical):
    """Labels y (n,), or probabilities y (n, c), which are floating point."""

    soft: ClassVar[bool] = True

    def validate(self, f: Tensor, y: Tensor) -> None:
        if y.is_floating_point() and y.ndim == f.ndim:
            SoftLabels().validate(f, y)
        else:
            super().validate(f, y)

    def target_hint(self, f: Tensor, y: Tensor) -> str:
        if not y.is_floating_point() or y.shape != f.shape or not bool((y >= 0).all()):
            return super().target_hint(f, y)
        if bool(((y == 0) | (y == 1)).all()):
            return ". For any number of labels a row use likelihood='bernoulli' or 'dirichlet_bernoulli'"
        return ". Divide each row by its sum"

    def target_note(self, y: Tensor, outputs: int) -> str:
        return _form(y).target_note(y, outputs)

    def constant(self, y: Tensor, outputs: int = 0) -> Tensor | None:
        return _form(y).constant(y, outputs)

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return _form(y).log_prob(f, y)

    def class_log_prob(self, mean: Tensor, y: Tensor) -> Tensor:
        return _form(y).class_log_prob(mean, y)

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        return _form(y).score(f, y)


def _form(y: Tensor) -> Categorical:
    """What targets are of, by their dtype."""
    return SoftLabels() if y.is_floating_point() else Categorical()


@dataclass(frozen=True)
class LabelSmoothing(Categorical):
    """Labels y (n,), of which a share ε is spread over all classes."""

    settings: ClassVar[tuple[str, ...]] = ("smoothing",)
    smoothing: Tensor | float = 0.1  # ε

    def __post_init__(self) -> None:
        super().__post_init__()
        if not bool((torch.as_tensor(self.smoothing) < 1).all()):
            raise InvalidValue(f"smoothing lies between 0 and 1, got {self.smoothing}")

    @property
    def density(self) -> str:
        return self.kind

    @property
    def plain(self) -> Likelihood:
        return Categorical()

    def constant(self, y: Tensor, outputs: int = 0) -> Tensor | None:
        return None  # labels alone do not tell the number of classes, which smoothing needs

    def _epsilon(self, f: Tensor) -> Tensor:
        return torch.as_tensor(self.smoothing).to(f)

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        eps, log_p = self._epsilon(f), torch.log_softmax(f, -1)
        return (1 - eps) * super().log_prob(f, y) + eps * log_p.mean(-1)

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        eps = self._epsilon(f)
        return (1 - eps) * super().score(f, y) + eps * (1 / f.shape[-1] - torch.softmax(f, -1))

    def sampled_scores(self, f: Tensor, y: Tensor, k: int, generator: torch.Generator) -> Tensor:
        """Of labels: those of smoothed ones do not have mean zero."""
        return Categorical().sampled_scores(f, y, k, generator)
