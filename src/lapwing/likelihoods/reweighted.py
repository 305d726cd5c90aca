"""Rows that count for more or less than one:  log p → w_n log p(y_n | f_n),  and so Λ_n → w_n Λ_n.

    Weighted(base)                 w_n comes with the targets, as `weighted.pack(y, w)`
    ClassWeighted(base, weights)   w_n = weights[y_n]
    Ignoring(base, index)          w_n = 0 where y_n is the index: such rows say nothing, whatever the network's outputs

Any likelihood can be a base, another of these too: Ignoring(ClassWeighted(Categorical(), weights)). Predictions are of
targets that count as one. Hyperparameters are the base's; sums over rows are weighted sums, so tuning needs no pass.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.func import vmap

from lapwing.errors import InvalidValue
from lapwing.likelihoods.base import Likelihood
from lapwing.likelihoods.categorical import Categorical
from lapwing.likelihoods.checks import as_positive
from lapwing.solvers.noise import Placed

FACTS = (  # what a class says of itself, and one that wraps another says of that
    *("concave", "event", "soft", "paired", "quadratic", "response"),
    *("classes", "normal", "elementwise", "deviation", "counts"),
)


def answer_by_base(cls: type[Likelihood], *names: str) -> None:
    """Let a likelihood that wraps another, its `base`, answer for these attributes and methods with the base's."""
    for name in names:
        setattr(cls, name, property(functools.partial(_of_base, name), doc=f"`{name}` of the base likelihood."))


def _of_base(name: str, likelihood: Any) -> Any:
    return getattr(likelihood.base, name)


@dataclass(frozen=True)
class Reweighted(Likelihood):
    """w_n log p(y_n | f_n) of a base likelihood; what is not weighted is the base's."""

    base: Likelihood

    def parted(self, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The base's targets, and w (n,)."""
        raise NotImplementedError

    def __post_init__(self) -> None:
        if not isinstance(self.base, Likelihood):
            raise InvalidValue(f"{self.name} wraps a likelihood object, got {self.base!r}")

    @property
    def hyperparameters(self) -> dict[str, Tensor]:
        return self.base.hyperparameters

    @property
    def kind(self) -> str:
        own = "".join(f", {k}={getattr(v, 'tolist', lambda v=v: v)()}" for k, v in self._own().items())
        return f"{self.name}({self.base.kind}{own})"

    @property
    def density(self) -> str:
        return self.kind

    @property
    def plain(self) -> Likelihood:
        return self.base.plain

    @property
    def predictive(self) -> Likelihood:
        return replace(self, base=self.base.predictive)

    @property
    def unit(self) -> Any:
        return replace(self, base=self.base.unit)

    def replace(self, **hyperparameters: Any) -> Any:
        return replace(self, base=self.base.replace(**hyperparameters))

    def moved(self, coordinates: dict[str, Tensor]) -> Any:
        return replace(self, base=self.base.moved(coordinates))

    def at_values(self, values: Mapping[str, Tensor]) -> Any:
        return replace(self, base=self.base.at_values(values))

    def to(self, device: torch.device) -> Any:
        own = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in self._own().items()}
        return replace(self, base=self.base.to(device), **own)

    def _own(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "base"}

    # -- the observations -----------------------------------------------------------------------------------------

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        y, w = self.parted(f, y)
        return torch.where(w > 0, w * self.base.log_prob(f, y), 0.0)

    def class_log_prob(self, mean: Tensor, y: Tensor) -> Tensor:
        y, w = self.parted(mean, y)
        return torch.where(w > 0, w * self.base.class_log_prob(mean, y), 0.0)

    # -- the curvature ---------------------------------------------------------------------------------------------

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        y, w = self.parted(f, y)
        return w.unsqueeze(-1) * self.base.score(f, y)

    def gradient(self, f: Tensor, y: Tensor) -> Tensor:
        y, w = self.parted(f, y)
        return w.unsqueeze(-1) * self.base.gradient(f, y)

    def unit_log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        y, w = self.parted(f, y)
        return w.unsqueeze(-1) * self.base.unit_log_prob(f, y)

    def curvature_root(self, f: Tensor, y: Tensor) -> Tensor:
        y, w = self.parted(f, y)
        return w.sqrt()[:, None, None] * self.base.curvature_root(f, y)

    def scaled_root(self, f: Tensor, y: Tensor) -> Tensor:
        y, w = self.parted(f, y)
        return w.sqrt()[:, None, None] * self.base.scaled_root(f, y)

    def curvature_product(self, f: Tensor, y: Tensor, v: Tensor) -> Tensor:
        y, w = self.parted(f, y)
        return w.unsqueeze(-1) * self.base.curvature_product(f, y, v)

    def curvature_trace(self, f: Tensor, y: Tensor) -> Tensor:
        y, w = self.parted(f, y)
        return w * self.base.curvature_trace(f, y)

    def curvature_noise(self, f: Tensor, y: Tensor, k: int, generator: torch.Generator | Placed) -> Tensor:
        y, w = self.parted(f, y)
        return w.sqrt().unsqueeze(-1) * self.base.curvature_noise(f, y, k, generator)

    def sampled_scores(self, f: Tensor, y: Tensor, k: int, generator: torch.Generator) -> Tensor:
        y, w = self.parted(f, y)
        return w.sqrt()[:, None, None] * self.base.sampled_scores(f, y, k, generator)

    # -- the fit ---------------------------------------------------------------------------------------------------

    def statistics(self, f: Tensor, y: Tensor) -> dict[str, Tensor]:
        """The base's, row by row, summed with the weights; and the sum of those."""
        y, w = self.parted(f.double(), y)
        each = vmap(lambda f, y: self.base.statistics(f.unsqueeze(0), y.unsqueeze(0)))(f, y)
        sums = {key: torch.einsum("n,n...->...", w, torch.where(_like(w > 0, v), v, 0.0)) for key, v in each.items()}
        return {**sums, "weight": w.sum()}

    def shapes(self, statistics: dict[str, Tensor]) -> dict[str, tuple[int, ...]] | None:
        base = self.base.shapes(statistics)
        return None if base is None else {**base, "weight": ()}

    def check(self, statistics: dict[str, Tensor]) -> None:
        if not float(statistics.get("weight", 0.0)) > 0:
            raise InvalidValue(
                f"every target is ignored or has the weight 0 under {self.kind}; there is nothing to fit"
            )
        self.base.check(statistics)


def _like(mask: Tensor, value: Tensor) -> Tensor:
    return mask.reshape(-1, *[1] * (value.ndim - 1))


answer_by_base(
    Reweighted,
    *FACTS,
    *("inside", "sample", "mean", "variance", "noise_covariance", "cdf", "class_probs"),  # a target that counts as one
    *("hessian_root", "factors", "columns", "curvature_weights", "log_likelihood"),
    *("coordinates", "limits", "floors", "wanted", "output_variance"),  # what a search moves
    *("noise", "per_output", "residual_noise", "target_scale"),  # of a Gaussian
)


@dataclass(frozen=True)
class Weighted(Reweighted):
    """A weight for each example, which comes with its target: [y | w]."""

    event: ClassVar[int] = 1  # [y | w]

    def pack(self, y: Tensor, w: Tensor) -> Tensor:
        """Targets with the weights of their rows, in one tensor to fit to: (..., t + 1), or (..., 2) for labels."""
        rows = y.shape[: y.ndim - self.base.event_of(y)]
        if w.shape != rows:
            raise InvalidValue(
                f"weights of shape {tuple(w.shape)} for targets {tuple(y.shape)}; give one weight for each row of "
                f"outputs, {tuple(rows)}"
            )
        if not bool((torch.isfinite(w) & (w >= 0)).all()):
            raise InvalidValue("weights must be finite and not negative")
        dtype = torch.promote_types(y.dtype, w.dtype) if y.is_floating_point() else torch.float64
        y = y.unsqueeze(-1) if self.base.event_of(y) == 0 else y
        return torch.cat([y.to(dtype), w.unsqueeze(-1).to(dtype)], -1)

    def validate(self, f: Tensor, y: Tensor) -> None:
        if y.ndim != f.ndim or not y.is_floating_point() or (self._hard(y) and y.shape[-1] != 2):
            raise InvalidValue(
                f"weighted targets come from weighted.pack(y, w), got {y.dtype} of shape {tuple(y.shape)}"
            )
        w = y[..., -1]
        if not bool((torch.isfinite(w) & (w >= 0)).all()):
            raise InvalidValue("weights (the last column of the targets) must be finite and not negative")
        if self._hard(y) and not bool((y[..., 0] == y[..., 0].round()).all()):
            raise InvalidValue("labels (the first column of the targets) must be whole numbers")
        self.base.validate(f, self.parted(f, y)[0])

    def kept(self, y: Tensor) -> Tensor:
        return _any(y[..., -1] > 0)

    def parted(self, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        w = y[..., -1].to(f)
        return (y[..., 0].long(), w) if self._hard(y) else (y[..., :-1].to(f), w)

    def _hard(self, y: Tensor) -> bool:
        """Whether packed targets are of labels; those of probabilities have 3 columns at the least."""
        return self.base.event == 0 and not (self.base.soft and y.shape[-1] > 2)


@dataclass(frozen=True)
class ClassWeighted(Reweighted):
    """As `weight=` of torch's cross entropy, for labels."""

    base: Likelihood = field(default_factory=Categorical)
    weights: Any = (1.0, 1.0)  # (classes,), a tensor once made

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_labels(self)
        object.__setattr__(self, "weights", as_positive("weights", self.weights))

    def validate(self, f: Tensor, y: Tensor) -> None:
        _check_hard(self, y)
        self.base.validate(f, y)
        classes = self.base.mean(f[:1]).shape[-1]
        if len(self.weights) != classes:
            raise InvalidValue(f"{len(self.weights)} class weights for {classes} classes; give one each")

    def parted(self, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return y, self.weights.to(f)[y.long()]


@dataclass(frozen=True)
class Ignoring(Reweighted):
    """As `ignore_index=` of torch's cross entropy, for labels."""

    base: Likelihood = field(default_factory=Categorical)
    index: int = -100

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_labels(self)
        if not isinstance(self.index, int):
            raise InvalidValue(f"index is the whole number that stands for no label, got {self.index!r}")

    @property
    def plain(self) -> Likelihood:
        """Held-out labels may be ignored too."""
        return replace(self, base=self.base.plain)

    def validate(self, f: Tensor, y: Tensor) -> None:
        _check_hard(self, y)
        self.base.validate(f, self.parted(f, y)[0])

    def kept(self, y: Tensor) -> Tensor:
        return _any(y != self.index)

    def parted(self, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = y == self.index
        return torch.where(out, torch.zeros_like(y), y), (~out).to(f)


def _any(rows: Tensor) -> Tensor:
    """Of each example, over its positions."""
    return rows.reshape(len(rows), -1).any(1)


def _check_labels(likelihood: Reweighted) -> None:
    if likelihood.base.event:
        raise InvalidValue(
            f"{likelihood.name} is for labels, got {likelihood.base.name}; use Weighted, with a weight for each row"
        )


def _check_hard(likelihood: Reweighted, y: Tensor) -> None:
    if likelihood.soft and y.is_floating_point():
        raise InvalidValue(
            f"{likelihood.name} is for integer labels, got {y.dtype}; weigh rows of probabilities by Weighted"
        )
