"""What a prior p(θ) over the weights offers the rest of the house.

    log_prob(weights)   log p(θ), differentiable in weights and hyperparameters
    quadratic(v)        A and A·m of the Gaussian that stands for p near v:  log p(θ) ≈ −½ (θ − m)ᵀ A (θ − m) + const
    sample(n, ...)      draws, (n, p)
    lift(q)             for samplers: weights and log-density at coordinates q, with scales that are sampled

A is constant for a Gaussian. For a scale mixture p(w) = ∫ N(w; 0, s) p(s) ds it is A = E[1/s | v] = −p'(v)/(v p(v)):
the Gaussian with this A has the gradient of log p at v.

Fields are hyperparameters, positive float64 tensors of one value a group, but for those that `settings` names. A search
moves them in `coordinates` (logarithms unless told otherwise), inside `limits`. A prior is made loose and *bound* to a
network's layout, which fixes the groups (`groups.py`). Shapes: p weights, g groups.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from lapwing import given, registry
from lapwing.errors import InvalidValue, Unsupported
from lapwing.operators import Diagonal, linalg
from lapwing.operators.memo import Grouping
from lapwing.priors import groups
from lapwing.tree import Layout

P = TypeVar("P", bound="Prior")


class Lifted(NamedTuple):
    """Where a sampler is: log p(θ, scales), and log|∂(θ, scales)/∂q|, which no temperature divides."""

    weights: Tensor  # (p,)
    log_prob: Tensor  # 0-dim
    log_jacobian: Tensor  # 0-dim
    scales: dict[str, Tensor]  # those that were sampled, by name


RANGE = math.log(1e6)  # a search may move a hyperparameter by this factor, unless the prior knows better


@dataclass(frozen=True, eq=False)
class Prior:
    """Base class. A subclass gives `log_prob` and `quadratic`; `sample` where it has draws."""

    unsaved: ClassVar[tuple[str, ...]] = ("names", "index", "layout", "grouping")  # by a network; not in files
    settings: ClassVar[tuple[str, ...]] = ("per", "mean")  # fields that are no hyperparameters
    gaussian: ClassVar[bool] = False  # A does not move with v
    proper: ClassVar[bool] = True  # its density integrates to a number: it has draws, an evidence, a posterior
    independent: ClassVar[bool] = True  # A is diagonal
    discrete: ClassVar[bool] = False  # weights take a few values: its density has no gradient
    of_curvature: ClassVar[bool] = False  # it is made of the curvature, which its method `at` is shown
    per = "all"  # the grouping; without a type, so that a subclass makes it a field, in its own order
    names: tuple[str, ...] = field(default=(), kw_only=True)  # of the groups, once bound; () for per='weight'
    index: Tensor | None = field(default=None, kw_only=True)  # (p,) group of each weight; None: one group, or one each
    layout: Layout | None = field(default=None, kw_only=True)
    grouping: Grouping = field(default_factory=Grouping, repr=False, kw_only=True)  # what follows from the groups alone

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        registry.enter("prior", cls)

    def __post_init__(self) -> None:
        for name in self._moving():
            self._set(name, getattr(self, name))
        groups.check(self.per)

    def _set(self, name: str, value: Any) -> None:
        """Check a hyperparameter; {glob: value} says its groups too."""
        if isinstance(value, Mapping):
            values = [given.real(v, f"the prior {name} of {pattern}") for pattern, v in value.items()]
            if not values:
                raise InvalidValue(f"the prior's mapping of patterns is empty; give {{glob: {name}}}")
            object.__setattr__(self, "per", tuple(value))
            value = torch.stack(values)
        value = given.real(value, f"a prior {name}")
        if not bool((torch.isfinite(value) & (value > 0)).all()):
            raise InvalidValue(f"prior {name} must be positive and finite, got {_short(value)}")
        object.__setattr__(self, name, value)

    @classmethod
    def _moving(cls) -> list[str]:
        return [f.name for f in fields(cls) if f.name not in (*cls.unsaved, *cls.settings)]

    # -- the density ----------------------------------------------------------------------------------------------

    def log_prob(self, weights: Mapping[str, Tensor]) -> Tensor:
        """log p(θ) of {parameter: tensor}, 0-dim float64."""
        raise NotImplementedError(f"{type(self).__name__} has no log_prob(weights)")

    def log_density(self, v: Tensor) -> Tensor:
        """log p(θ) of a vector (p,), 0-dim float64."""
        return self.log_prob(self._bound().unflatten(v))

    def penalty(self, model: nn.Module) -> Tensor:
        """−log p(θ) of a model's weights, 0-dim, differentiable in them: to add to the *sum* of losses over the data,
        or divided by their number to a mean loss."""
        if self.discrete:
            raise Unsupported(f"{type(self).__name__} weights have no slope to train by; use lw.samplers.metropolis")
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        bound = self._fitting(_layout_of(named))
        return -bound.log_prob({name: named[name] for name in bound._bound().names})

    def quadratic(self, v: Tensor) -> tuple[Any, Tensor]:
        """A and A·m (p,) at v (p,). A is an operator, differentiable in the hyperparameters: a Diagonal, where weights
        are `independent`."""
        raise NotImplementedError(f"{type(self).__name__} has no quadratic(v)")

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        """n weight vectors, (n, p), of a bound prior."""
        raise Unsupported(f"{type(self).__name__} has no draws: it is improper, or lacks a method sample(n, generator)")

    def draw(
        self, model_or_layout: nn.Module | Layout, n: int = 1, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """n networks, {parameter: (n, *shape)}: in a model's own dtypes, or of a layout in float64."""
        n, generator = given.whole(n, "the number of draws", 1), given.generator(generator)
        if not isinstance(model_or_layout, (nn.Module, Layout)):
            raise InvalidValue(f"draw takes a torch.nn.Module or a layout, got {type(model_or_layout).__name__}")
        named = dict(model_or_layout.named_parameters()) if isinstance(model_or_layout, nn.Module) else {}
        layout = model_or_layout if isinstance(model_or_layout, Layout) else _layout_of(named)
        vectors = self._fitting(layout).sample(n, generator)
        return {k: w.to(named[k]) if k in named else w for k, w in layout.unflatten(vectors).items()}

    def _fitting(self: P, layout: Layout) -> P:
        """Bound to this layout."""
        return self if self.layout is not None and self.layout.same_as(layout) else self.bind(layout)

    # -- what a sampler walks on ----------------------------------------------------------------------------------

    @property
    def scales(self) -> int:
        """How many scales are sampled with the weights: as many coordinates more than weights."""
        return 0

    def lift(self, q: Tensor) -> Lifted:
        """Weights and log-densities at coordinates q (p + scales,)."""
        return Lifted(q, self.log_density(q), torch.zeros((), dtype=torch.float64, device=q.device), {})

    def lower(self, v: Tensor) -> Tensor:
        """Coordinates (p + scales,) at which the weights are v (p,)."""
        return v

    def nearest(self, v: Tensor) -> Tensor:
        """The weights (p,) nearest to v that the prior allows: v, unless it is discrete."""
        return v

    def flipped(self, v: Tensor, which: Tensor) -> Tensor:
        """Weights v with others where `which` says so: the move of a discrete prior."""
        raise Unsupported(f"{type(self).__name__} has no values to flip between; it is not discrete")

    # -- hyperparameters ------------------------------------------------------------------------------------------

    @property
    def hyperparameters(self) -> dict[str, Tensor]:
        """{name: tensor}, one value for each group once bound."""
        return {name: getattr(self, name) for name in self._moving()}

    def replace(self: P, **hyperparameters: Any) -> P:
        """The same prior at other hyperparameters."""
        kept = self.grouping if set(hyperparameters) <= set(self._moving()) else Grouping()
        return replace(self, **hyperparameters, grouping=kept)

    def labels(self) -> dict[str, tuple[str, ...]]:
        """What each value of each hyperparameter is called."""
        return dict.fromkeys(self._moving(), self.names)

    # -- what a search moves --------------------------------------------------------------------------------------

    def coordinates(self) -> dict[str, Tensor]:
        """The hyperparameters without bounds to keep: their logarithms, (g,)."""
        return {name: value.detach().reshape(-1).log() for name, value in self.hyperparameters.items()}

    def moved(self: P, coordinates: Mapping[str, Tensor]) -> P:
        """The prior at these coordinates."""
        shapes = {name: value.shape for name, value in self.hyperparameters.items()}
        return self.replace(**{name: value.exp().reshape(shapes[name]) for name, value in coordinates.items()})

    def limits(self, curvature: Tensor, v: Tensor) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
        """{name: (low, high, start)} of the coordinates, each (g,). curvature (k, g): the mean of diag G over each
        group at k values of the noise; v (p,): the trained weights."""
        return {name: (now - RANGE, now + RANGE, now) for name, now in self.coordinates().items()}

    def balanced(self, squares: Tensor, variance: float) -> dict[str, Tensor]:
        """Coordinates to start from, where diag JᵀJ (p,) is known: each group gives the outputs this prior variance, in
        sum over all of them. A prior may know none."""
        return {}

    def scatter(self, v: Tensor) -> Tensor:
        """‖v_g − m_g‖² in the prior's unit, (g,): what MacKay's fixed point compares with γ_g."""
        raise self._no_fixed_point()

    def wanted(self, gamma: Tensor, square: Tensor) -> dict[str, Tensor]:
        """The coordinates at MacKay's fixed point, for γ_g and ‖v_g − m_g‖², both (g,)."""
        raise self._no_fixed_point()

    def gap(self, gamma: Tensor, square: Tensor) -> dict[str, Tensor]:
        """How far each hyperparameter is from MacKay's fixed point, in directions relative to max(1, γ_g), (g,)."""
        raise self._no_fixed_point()

    def counts_dropped(self) -> dict[str, int]:
        """How many weights of each parameter it leaves out; only parameters with some."""
        return {}

    def at(self: P, curvature: Any, theta: Tensor, eps: float) -> P:
        """This prior once it has seen a curvature (an operator, at unit noise), the trained weights (p,) and the
        rounding of the network's dtype: itself, unless it is `of_curvature`."""
        return self

    def put_back(self: P, theta: Tensor) -> P:
        """As a file has it, at the trained weights (p,): checked, with what it had seen."""
        return self

    def scaled(self: P, c: float) -> P:
        """This prior with A times c, which held-out data can choose."""
        raise Unsupported(
            f"{type(self).__name__} does not say which of {self._moving()} makes A c times as large; give it a method "
            "scaled(c), or tune by method='evidence'"
        )

    def _no_fixed_point(self) -> Unsupported:
        return Unsupported(
            f"{type(self).__name__} is no Gaussian prior, so MacKay's fixed point is not one of its evidence; use "
            "tuned(method='evidence', center='map')"
        )

    # -- binding --------------------------------------------------------------------------------------------------

    def bind(self: P, layout: Layout, device: torch.device | None = None) -> P:
        """Fix the groups for a network; a hyperparameter of one value is repeated for each group."""
        per = groups.resolved(self.per, layout)
        names, index = groups.group(per, layout)
        count, values = len(names) or layout.size, {}
        shown = repr(per) if isinstance(per, (str, tuple)) else "a function"
        for name, value in self.hyperparameters.items():
            value = value.to(device)
            if value.ndim == 0 and not (isinstance(per, str) and per == "all"):
                value = value.expand(count)
            if value.numel() != count:
                raise InvalidValue(f"{value.numel()} prior {name}s for {count} groups of per={shown}")
            values[name] = value
        index = None if index is None else index.to(device)
        own = {"per": per} if per is not self.per else {}
        return replace(self, **values, **own, names=names, index=index, layout=layout, grouping=Grouping())

    def _bound(self) -> Layout:
        if self.layout is None:
            raise InvalidValue("this prior is not bound to a network yet; use la.prior, or prior.bind(tangent.layout)")
        return self.layout

    def groups(self) -> Diagonal:
        """Which group each weight belongs to: a Diagonal of ones."""
        layout = self._bound()
        device = next((value.device for value in self.hyperparameters.values()), None)
        ones = torch.ones(len(self.names) or layout.size, dtype=torch.float64, device=device)
        return Diagonal(ones, layout.size, self.index, grouping=self.grouping)

    def counts(self) -> Tensor:
        """How many weights each group has, (g,)."""
        return self.groups().counts().detach()

    def named(self) -> dict[str, float]:
        """The first hyperparameter of each group, by the group's name."""
        layout = self._bound()
        if not self._moving():
            return {}
        names = self.names or [f"{n}[{i}]" for n in layout.names for i in range(layout.numel(n))]
        return dict(zip(names, getattr(self, self._moving()[0]).reshape(-1).tolist(), strict=True))

    # -- for those who write a prior ------------------------------------------------------------------------------

    def vector(self, weights: Mapping[str, Tensor]) -> Tensor:
        """{parameter: tensor} as one vector, (p,), float64."""
        return self._bound().flatten(weights).to(torch.float64)

    def each(self, value: Tensor) -> Tensor:
        """A hyperparameter's value for each weight, (p,)."""
        return Diagonal(value.reshape(-1), self._bound().size, self.index).dense()

    # -- what the evidence needs ----------------------------------------------------------------------------------

    def price(self, v: Tensor) -> Tensor:
        """½ log|A(v)| − (P/2) log 2π − log p(v): of a Gaussian, ½ ‖v − m‖²_A."""
        a, layout = self.quadratic(v)[0], self._bound()
        return 0.5 * (a.logdet() - layout.size * math.log(2 * math.pi)) - self.log_prob(layout.unflatten(v))

    def stretched(self, v: Tensor, s: Tensor) -> Any:
        """A(v) with the part of each group times s_g, (g,)."""
        a = self.quadratic(v)[0].dense().detach()
        return Diagonal(a * Diagonal(s, a.numel(), self.index).dense(), a.numel())

    def mean_curvature(self, curvature: Any) -> Tensor:
        """The mean of diag G over each group, in the prior's own unit, (g,)."""
        return linalg.traces(curvature, self.groups()) / self.counts()

    def ratio(self, curvature: Any, v: Tensor) -> Tensor:
        """tr(A⁻¹G)/P: how much sharper the data are than the prior."""
        return (linalg.diagonal(curvature) / self.quadratic(v)[0].dense()).mean()

    def facts(self) -> dict[str, Tensor]:
        """The tensors that make it what it is, for others to compare with theirs."""
        groups = {} if self.index is None else {"groups": self.index}
        kept = [f.name for f in fields(self) if f.name in self.settings and f.name not in Prior.settings]
        return {**self.hyperparameters, **groups, **{k: given.real(getattr(self, k), k) for k in kept}}

    @property
    def kind(self) -> str:
        """What it is called in messages: its class and grouping."""
        return f"{type(self).__name__} per {self.per if isinstance(self.per, (str, tuple)) else 'a function'}"


def _layout_of(named: Mapping[str, Tensor]) -> Layout:
    """Of all parameters that require a gradient."""
    taken = {name: p for name, p in named.items() if p.requires_grad}
    if not taken:
        raise InvalidValue("the model has no parameter that requires a gradient, so there is nothing to draw")
    empty = tuple(name for name, p in taken.items() if not p.numel())
    return Layout({name: p.shape for name, p in taken.items() if p.numel()}, {}, empty)


def _short(value: Tensor) -> str:
    return str(value.tolist()) if value.numel() <= 8 else f"{value.numel()} values, least {float(value.min())}"
