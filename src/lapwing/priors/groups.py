"""Which weights of a network share a hyperparameter of their prior: one mechanism for every prior.

    per="all"     one for every weight (the default)
    per="layer"   one for each module that owns parameters: its weight and bias share it
    per="unit"    one for each slice along a parameter's first dimension; a module's equally long parameters share
    per="input"   one for each slice along a parameter's second dimension; a parameter without one has one for itself
    per="gate"    one for each gate of a layer of LSTM, GRU or RNN, weights and biases together; elsewhere as "layer"
    per="weight"  one each
    globs         one for each pattern; every selected parameter matches exactly one
    a callable    (name, shape) -> integer tensor of that shape: weights with equal integers share

A grouping is (names, index): the names of the g groups, and the group of each weight, (p,); index None: one, or one
each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lapwing import tree
from lapwing.errors import InvalidValue
from lapwing.tree import Layout, layer_of

Grouping = tuple[tuple[str, ...], Tensor | None]

GATED = re.compile(r"(weight|bias)_(ih|hh|hr)(_l\d+(?:_reverse)?)?$")
GATES = {4: "ifgo", 3: "rzn", 1: "h"}  # as torch orders them in LSTM, GRU and RNN


def check(per: Any) -> None:
    """Raise on what is no grouping."""
    if isinstance(per, tuple):
        if not all(isinstance(pattern, str) for pattern in per):
            raise InvalidValue(f"prior patterns are globs over parameter names, got {list(per)}")
    elif not callable(per) and not isinstance(per, Mapping) and per not in GRANULARITIES:
        raise InvalidValue(f"per must be one of {GRANULARITIES}, globs or a callable (name, shape); got {per!r}")


def resolved(per: Any, layout: Layout) -> Any:
    """The same grouping as data: a callable's integers, {parameter: tensor}, which files can hold."""
    return {name: _integers(per, name, shape) for name, shape in layout.shapes.items()} if callable(per) else per


def group(per: Any, layout: Layout) -> Grouping:
    """The groups of a network's weights."""
    if isinstance(per, Mapping):
        return _given(per, layout)
    return WORDS[per](layout) if isinstance(per, str) else _globs(per, layout)


# -- words -----------------------------------------------------------------------------------------------------------


def _layers(layout: Layout) -> Grouping:
    layers = list(dict.fromkeys(layer_of(n) for n in layout.names))
    number = {n: layers.index(layer_of(n)) for n in layout.names}
    names = tuple(_label(layer, layers) for layer in layers)
    return names, None if len(layers) == 1 else _constant_index(number, layout)


def _units(layout: Layout) -> Grouping:
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
        full[name] = _along(start[key] + torch.arange(length), shape, 0)
    return _used(names, full, layout)


def _inputs(layout: Layout) -> Grouping:
    names: list[str] = []
    full = {}
    for name, shape in layout.shapes.items():
        columns = shape[1] if len(shape) > 1 else 1
        full[name] = _along(len(names) + torch.arange(columns), shape, 1)
        names += [f"{name}[:, {j}]" for j in range(columns)] if len(shape) > 1 else [name]
    return _used(names, full, layout)


def _gates(layout: Layout) -> Grouping:
    labels = {name: _gates_of(name, layout) for name in layout.names}
    if not any(len(found) > 1 for found in labels.values()):
        raise InvalidValue(
            "per='gate' is for the gates of nn.LSTM, nn.GRU and their cells, and no selected parameter has any; use "
            "per='layer'"
        )
    names = list(dict.fromkeys(label for found in labels.values() for label in found))
    full = {}
    for name, shape in layout.shapes.items():
        rows = shape[0] if len(shape) else 1
        gates = torch.tensor([names.index(label) for label in labels[name]])
        full[name] = _along(gates.repeat_interleave(rows // len(gates)), shape, 0)
    return _used(names, full, layout)


def _gates_of(name: str, layout: Layout) -> list[str]:
    """The groups of equal blocks of a parameter's rows; one for all where it has no gates."""
    layer, layers = layer_of(name), [layer_of(n) for n in layout.names]
    found, dot = GATED.match(name.rpartition(".")[2]), f"{layer}." if layer else ""
    if found is None:
        return [_label(layer, layers)]
    place = found[3] or ""
    label = f"{_label(layer, layers)}{place}"
    if found[2] == "hr":
        return [f"{label}[projection]"]
    recurrent, projection = layout.shapes.get(f"{dot}weight_hh{place}"), layout.shapes.get(f"{dot}weight_hr{place}")
    if recurrent is None or len(recurrent) != 2:
        raise InvalidValue(f"per='gate' tells the gates of {name} by {dot}weight_hh{place}, which is not selected")
    hidden = recurrent[1] if projection is None else projection[1]
    gates = recurrent[0] // hidden
    if gates not in GATES or gates * hidden != recurrent[0]:
        raise InvalidValue(f"per='gate' knows 4, 3 or 1 gates a layer; {dot}weight_hh{place} is {tuple(recurrent)}")
    return [f"{label}[{gate}]" for gate in GATES[gates]]


WORDS: dict[str, Callable[[Layout], Grouping]] = {
    "all": lambda layout: (("all",), None),
    "layer": _layers,
    "unit": _units,
    "input": _inputs,
    "gate": _gates,
    "weight": lambda layout: ((), None),  # named on request: they can be millions
}
GRANULARITIES = tuple(WORDS)


# -- globs and integers ----------------------------------------------------------------------------------------------


def _globs(patterns: tuple[str, ...], layout: Layout) -> Grouping:
    meant = [tree.chosen(pattern, layout.names) for pattern in patterns]
    number = {name: _match(name, patterns, meant) for name in layout.names}
    unused = [pattern for i, pattern in enumerate(patterns) if i not in number.values()]
    if unused:
        raise InvalidValue(f"prior patterns {unused} match no selected parameter; they are {list(layout.names)}")
    return tuple(patterns), None if len(patterns) == 1 else _constant_index(number, layout)


def _match(name: str, patterns: tuple[str, ...], meant: list[list[str]]) -> int:
    hits = [i for i, names in enumerate(meant) if name in names]
    if len(hits) != 1:
        found = [patterns[i] for i in hits] or "none"
        raise InvalidValue(
            f"parameter {name} must match exactly one prior pattern, matches {found}; patterns are globs over "
            f"named_parameters() names: {list(patterns)}"
        )
    return hits[0]


def _integers(per: Callable[[str, torch.Size], Any], name: str, shape: torch.Size) -> Tensor:
    found = per(name, shape)
    odd = not isinstance(found, Tensor) or found.is_floating_point() or found.is_complex() or found.dtype == torch.bool
    if odd or found.shape != shape:
        got = f"{found.dtype} of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise InvalidValue(f"per({name!r}, shape) must give an integer tensor of shape {tuple(shape)}, got {got}")
    return found.detach().to("cpu", torch.int64, copy=True)


def _given(numbers: Mapping[str, Tensor], layout: Layout) -> Grouping:
    wrong = [n for n, s in layout.shapes.items() if n not in numbers or numbers[n].shape != s]
    if wrong or set(numbers) != set(layout.shapes):
        raise InvalidValue(f"the groups are of other parameters than {list(layout.names)}; bind the prior anew")
    used, index = layout.gather({name: number.cpu() for name, number in numbers.items()}).unique(return_inverse=True)
    return tuple(str(i) for i in used.tolist()), None if len(used) == 1 else index


# -- indices ---------------------------------------------------------------------------------------------------------


def _constant_index(number: dict[str, int], layout: Layout) -> Tensor:
    return torch.cat([torch.full((layout.numel(n),), number[n]) for n in layout.names])


def _along(numbers: Tensor, shape: torch.Size, dim: int) -> Tensor:
    """Numbers along one dimension of a shape, the same along the others."""
    if dim >= len(shape):
        return numbers[0].expand(shape)
    return numbers.reshape([-1 if i == dim else 1 for i in range(len(shape))]).expand(shape)


def _used(names: list[str], full: dict[str, Tensor], layout: Layout) -> Grouping:
    """The groups that have a weight: a mask may leave some without."""
    used, index = layout.gather(full).unique(return_inverse=True)
    return tuple(names[i] for i in used.tolist()), index


def _label(layer: str, layers: list[str]) -> str:
    """What a layer's group is called: "(root)" for the parameters of the model itself, unless a layer has that name."""
    if layer:
        return layer
    label = "(root)"
    while label in layers:
        label = f"({label})"
    return label
