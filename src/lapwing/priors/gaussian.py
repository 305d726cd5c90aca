"""Gaussian prior θ ~ N(m, A⁻¹) with a diagonal precision A = diag(λ_g) of any granularity (`groups.py`).

    Gaussian(2.0)                     one precision for every weight
    Gaussian(2.0, per="layer")        one for each group; a tensor (g,) gives each its own
    Gaussian({"fc1.*": 1.0, "*": 2})  one for each pattern

MacKay's fixed point: λ_g = γ_g / ‖θ_g − m_g‖²  (Eq. 7).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from lapwing import given
from lapwing.errors import InvalidValue
from lapwing.operators import Diagonal, linalg
from lapwing.priors.base import Prior
from lapwing.tree import Layout

G = TypeVar("G", bound="Gaussian")
TINY = torch.finfo(torch.float64).tiny


@dataclass(frozen=True, eq=False)
class Gaussian(Prior):
    """θ ~ N(m, diag(λ)⁻¹), one precision λ for all weights or one for each group; m = 0 unless a mean is given."""

    gaussian: ClassVar[bool] = True
    precision: Any = 1.0  # λ: a float, a tensor (), (g,), or a mapping {glob: float}
    per: Any = "all"
    mean: Any = 0.0  # m: a float, or {parameter: tensor}

    @classmethod
    def _moving(cls) -> list[str]:
        return ["precision"]  # other fields of a subclass are settings

    def bind(self: G, layout: Layout, device: torch.device | None = None) -> G:
        """Fix the groups for a network; a scalar precision is repeated for each group."""
        self._check_mean(layout)
        return super().bind(layout, device)

    def _check_mean(self, layout: Layout) -> None:
        if isinstance(self.mean, Mapping):
            for name, value in self.mean.items():
                if not isinstance(value, Tensor):
                    raise InvalidValue(f"the prior mean of {name} must be a tensor, got {type(value).__name__}")
            mean = layout.flatten(self.mean)  # raises where names differ
            for name, value in self.mean.items():
                if value.shape != layout.shape(name):
                    shapes = f"{tuple(value.shape)}, not {tuple(layout.shape(name))}"
                    raise InvalidValue(f"the prior mean of {name} has shape {shapes}; give one value for each weight")
        else:
            mean = given.real(self.mean, "a prior mean")
            if mean.ndim:
                raise InvalidValue(f"a prior mean is a float or {{parameter: tensor}}, got shape {tuple(mean.shape)}")
        if not bool(torch.isfinite(mean).all()):
            raise InvalidValue("the prior mean holds NaN or infinite values; give finite ones")

    # -- the density ----------------------------------------------------------------------------------------------

    def operator(self) -> Any:
        """A, the prior's precision, an operator: a Diagonal where weights are independent."""
        return Diagonal(self.precision.reshape(-1), self._bound().size, self.index, grouping=self.grouping)

    def groups(self) -> Diagonal:
        """Which group each weight belongs to: a Diagonal of the groups' precisions λ_g alone."""
        return Gaussian.operator(self)

    def mean_vector(self) -> Tensor:
        """m, (p,)."""
        layout = self._bound()
        if isinstance(self.mean, Mapping):
            return layout.flatten(self.mean).to(self.precision)
        return torch.full((layout.size,), float(self.mean), dtype=torch.float64, device=self.precision.device)

    def quadratic(self, v: Tensor) -> tuple[Any, Tensor]:
        """A and A·m, the same at every v."""
        a = self.operator()
        return a, linalg.mv(a, self.mean_vector())

    def scatter(self, vector: Tensor) -> Tensor:
        """Σ_{i in g} (θ_i − m_i)² for each group, (g,): ‖θ − m‖²_A is Σ_g λ_g times it."""
        return self.groups().sums((vector.to(torch.float64) - self.mean_vector()).square())

    def price(self, v: Tensor) -> Tensor:
        """½ ‖v − m‖²_A."""
        return 0.5 * (self.precision.reshape(-1) * self.scatter(v)).sum()

    def log_prob(self, weights: Mapping[str, Tensor]) -> Tensor:
        """log N(θ; m, A⁻¹)."""
        return self.log_density(self.vector(weights))

    def log_density(self, v: Tensor) -> Tensor:
        a = self.operator()
        return 0.5 * (linalg.logdet(a) - a.size * math.log(2 * math.pi)) - self.price(v)

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        return self.mean_vector() + linalg.draw(self.operator(), n, generator)

    # -- what the search and the evidence ask -----------------------------------------------------------------------

    def limits(self, curvature: Tensor, v: Tensor) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
        """λ_g in [1e-6, 1e6] × mean(diag G_g); where there is no curvature, that of the others, or λ itself."""
        typical = torch.stack([_somewhere(each, self.precision.detach().reshape(-1)) for each in curvature])
        low, high = (typical.amin(0) * 1e-6).log(), (typical.amax(0) * 1e6).log()
        # The evidence falls in λ beyond P/‖θ‖², whatever the curvature: start there (it scales with the weights).
        guess = self.counts() / self.scatter(v).clamp(min=TINY)
        return {"precision": (low, high, guess.log().clamp(low + 1, high - 1))}

    def balanced(self, squares: Tensor, variance: float) -> dict[str, Tensor]:
        """λ_g = Σ_{i in g} [JᵀJ]_ii / unit_i over the variance, A = λ_g unit_i."""
        groups = self.groups()
        unit = self.operator().dense().detach() / groups.dense().detach()
        return {"precision": (groups.sums(squares / unit) / variance).clamp(min=TINY).log()}

    def wanted(self, gamma: Tensor, square: Tensor) -> dict[str, Tensor]:
        return {"precision": gamma.clamp(min=TINY).log() - square.clamp(min=TINY).log()}

    def gap(self, gamma: Tensor, square: Tensor) -> dict[str, Tensor]:
        """|γ_g − λ_g‖v_g − m_g‖²| / max(1, γ_g)."""
        return {"precision": (gamma - self.precision.reshape(-1) * square).abs() / gamma.clamp(min=1)}

    def scaled(self: G, c: float) -> G:
        return self.replace(precision=self.precision.detach() * c)

    def stretched(self, v: Tensor, s: Tensor) -> Any:
        a = self.operator()
        return replace(a, values=a.values.detach() * s)

    def mean_curvature(self, curvature: Any) -> Tensor:
        return linalg.traces(curvature, self.operator()) / self.counts()

    def ratio(self, curvature: Any, v: Tensor) -> Tensor:
        relative, counts = self.mean_curvature(curvature) / self.precision.detach().reshape(-1), self.counts()
        return (relative * counts).sum() / counts.sum()

    def facts(self) -> dict[str, Tensor]:
        return {**super().facts(), "mean": Gaussian.mean_vector(self)}  # before a g-prior holds weights in place


def from_weight_decay(weight_decay: float, n: int) -> Gaussian:
    """The prior that training with weight decay stands for, λ = weight_decay · n for n examples: an optimizer adds
    weight_decay · θ to the gradient of the *mean* loss. (AdamW's decay is another: it is no gradient.)"""
    decay, n = given.real(weight_decay, "weight_decay"), given.whole(n, "the number of examples", 1)
    if decay.ndim or not 0 < float(decay) < math.inf:
        raise InvalidValue(
            f"weight_decay must be a positive number, got {decay.tolist()}; without one there is no prior"
        )
    return Gaussian(decay * n)


def _somewhere(typical: Tensor, otherwise: Tensor) -> Tensor:
    """mean(diag G_g), for a group without curvature the largest of the others', and where there is none at all the
    precision that was given."""
    if not bool((typical > 0).any()):
        typical = otherwise.expand(typical.shape)
    return torch.where(typical > 0, typical, typical.max()).clamp(min=TINY**0.5)
