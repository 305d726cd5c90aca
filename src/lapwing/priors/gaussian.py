"""Gaussian prior θ ~ N(m, A⁻¹) with a diagonal precision A of any granularity.

    per="all"     one precision for every weight (the default)
    per="layer"   one for each module that owns parameters: its weight and bias share it
    per="unit"    one for each slice along a parameter's first dimension; a module's equally long parameters share
    per="weight"  one each
    {glob: λ}     one for each pattern; every selected parameter matches exactly one

A prior is made loose (`Gaussian(2.0, per="layer")`) and *bound* to a network's layout, which fixes the groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapwing import given, registry, tree
from lapwing.errors import InvalidValue
from lapwing.operators import Diagonal
from lapwing.tree import Layout, layer_of

GRANULARITIES = ("all", "layer", "unit", "weight")


@dataclass(frozen=True, eq=False)
class Gaussian:
    bound: ClassVar[tuple[str, ...]] = ("names", "index", "layout", "cache")  # by a network; not in files
    precision: Any = 1.0  # λ: a float, a tensor (), (g,), or a mapping {glob: float}
    per: Any = "all"
    mean: Any = 0.0  # m: a float, or {parameter: tensor}
    names: tuple[str, ...] = ()  # of the groups, once bound; () for per='weight'
    index: Tensor | None = None  # (p,) group of each weight, once bound; None: one group, or one each
    layout: Layout | None = None
    cache: dict[Any, Any] = field(default_factory=dict, repr=False)  # of the groups: shared by every precision

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        registry.enter("prior", cls)

    def __post_init__(self) -> None:
        if isinstance(self.precision, Mapping):
            object.__setattr__(self, "per", tuple(self.precision))
            values = [given.real(v, f"the prior precision of {pattern}") for pattern, v in self.precision.items()]
            if not values:
                raise InvalidValue("the prior's mapping of patterns is empty; give {glob: precision}")
            object.__setattr__(self, "precision", torch.stack(values))
        elif self.per not in GRANULARITIES and not isinstance(self.per, tuple):
            raise InvalidValue(f"per must be one of {GRANULARITIES}, got {self.per!r}")
        if isinstance(self.per, tuple) and not all(isinstance(pattern, str) for pattern in self.per):
            raise InvalidValue(f"prior patterns are globs over parameter names, got {list(self.per)}")
        value = given.real(self.precision, "a prior precision")
        if not bool((torch.isfinite(value) & (value > 0)).all()):
            raise InvalidValue(f"prior precision must be positive and finite, got {_short(value)}")
        object.__setattr__(self, "precision", value)

    # -- hyperparameters ------------------------------------------------------------------------------------------

    @property
    def hyperparameters(self) -> dict[str, Tensor]:
        return {"precision": self.precision}

    def replace(self, **hyperparameters: Any) -> Gaussian:
        kept = self.cache if set(hyperparameters) <= {"precision"} else {}
        return replace(self, **hyperparameters, cache=kept)

    def named(self) -> dict[str, float]:
        """The precision of each group, by name."""
        layout = self._bound()
        names = self.names or [f"{n}[{i}]" for n in layout.names for i in range(layout.numel(n))]
        return dict(zip(names, self.precision.reshape(-1).tolist(), strict=True))

    # -- binding --------------------------------------------------------------------------------------------------

    def bind(self, layout: Layout, device: torch.device | None = None) -> Gaussian:
        """Fix the groups for a network; a scalar precision is repeated for each group."""
        names, index = _group(self.per, layout)
        groups = len(names) or layout.size
        value = self.precision.to(device)
        if value.ndim == 0 and self.per != "all":
            value = value.expand(groups)
        if value.numel() != groups:
            raise InvalidValue(f"{value.numel()} prior precisions for {groups} groups of per={self.per!r}")
        index = None if index is None else index.to(device)
        self._check_mean(layout)
        return replace(self, precision=value, names=names, index=index, layout=layout, cache={})

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

    def _bound(self) -> Layout:
        if self.layout is None:
            raise InvalidValue("this prior is not bound to a network yet; use la.prior, or prior.bind(tangent.layout)")
        return self.layout

    # -- what the flow needs --------------------------------------------------------------------------------------

    def operator(self) -> Diagonal:
        """A, the prior's precision."""
        return Diagonal(self.precision.reshape(-1), self._bound().size, self.index, cache=self.cache)

    def groups(self) -> Diagonal:
        """Which group each weight belongs to: a Diagonal of the groups' precisions λ_g alone."""
        return self.operator()

    def counts(self) -> Tensor:
        """How many weights each group has, (g,)."""
        return self.groups().counts().detach()

    def mean_vector(self) -> Tensor:
        """m, (p,)."""
        layout = self._bound()
        if isinstance(self.mean, Mapping):
            return layout.flatten(self.mean).to(self.precision)
        return torch.full((layout.size,), float(self.mean), dtype=torch.float64, device=self.precision.device)

    def scatter(self, vector: Tensor) -> Tensor:
        """Σ_{i in g} (θ_i − m_i)² for each group, (g,): ‖θ − m‖²_A is Σ_g λ_g times it."""
        return self.groups().sums((vector.to(torch.float64) - self.mean_vector()).square())

    def log_prob(self, params: Mapping[str, Tensor]) -> Tensor:
        """log N(θ; m, A⁻¹)."""
        a = self.operator()
        quadratic = (self.precision.reshape(-1) * self.scatter(self._bound().flatten(params))).sum()
        return 0.5 * (a.logdet() - a.size * torch.log(torch.tensor(2 * torch.pi, dtype=torch.float64)) - quadratic)


registry.enter("prior", Gaussian)


def _group(per: Any, layout: Layout) -> tuple[tuple[str, ...], Tensor | None]:
    if per == "all":
        return ("all",), None
    if per == "layer":
        layers = list(dict.fromkeys(layer_of(n) for n in layout.names))
        number = {n: layers.index(layer_of(n)) for n in layout.names}
        return tuple(_label(layer, layers) for layer in layers), (
            None if len(layers) == 1 else _constant_index(number, layout)
        )
    if per == "weight":
        return (), None  # named on request: they can be millions
    if per == "unit":
        return _units(layout)
    meant = [tree.chosen(pattern, layout.names) for pattern in per]
    number = {name: _match(name, per, meant) for name in layout.names}
    unused = [pattern for i, pattern in enumerate(per) if i not in number.values()]
    if unused:
        raise InvalidValue(f"prior patterns {unused} match no selected parameter; they are {list(layout.names)}")
    return tuple(per), None if len(per) == 1 else _constant_index(number, layout)


def _constant_index(number: dict[str, int], layout: Layout) -> Tensor:
    return torch.cat([torch.full((layout.numel(n),), number[n]) for n in layout.names])


def _units(layout: Layout) -> tuple[tuple[str, ...], Tensor]:
    names: list[str] = []
    layers = [layer_of(name) for name in layout.names]
    start: dict[tuple[str, int], int] = {}
    full = {}
    for name, shape in layout.shapes.items():
        length = shape[0] if len(shape) else 1
        layer = _label(layer_of(name), layers)
        key = layer, length
        if key not in start:
            label = name if any(other == layer for other, _ in start) else layer  # a layer's other lengths
            start[key] = len(names)
            names += [f"{label}[{i}]" for i in range(length)]
        unit = start[key] + torch.arange(length)
        full[name] = unit.reshape(-1, *[1] * (len(shape) - 1)).expand(shape) if len(shape) else unit.reshape(())
    index = layout.gather(full)
    used, index = index.unique(return_inverse=True)  # a mask may leave units without a weight
    return tuple(names[i] for i in used.tolist()), index


def _label(layer: str, layers: list[str]) -> str:
    """What a layer's group is called: "(root)" for the parameters of the model itself, unless a layer has that name."""
    if layer:
        return layer
    label = "(root)"
    while label in layers:
        label = f"({label})"
    return label


def _match(name: str, patterns: tuple[str, ...], meant: list[list[str]]) -> int:
    hits = [i for i, names in enumerate(meant) if name in names]
    if len(hits) != 1:
        found = [patterns[i] for i in hits] or "none"
        raise InvalidValue(
            f"parameter {name} must match exactly one prior pattern, matches {found}; patterns are globs over "
            f"named_parameters() names: {list(patterns)}"
        )
    return hits[0]


def _short(value: Tensor) -> str:
    return str(value.tolist()) if value.numel() <= 8 else f"{value.numel()} values, least {float(value.min())}"
