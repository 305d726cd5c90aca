"""Parts: how the parameter vector is cut, one part a layer, and how each is treated.

A part is a matrix W (b, o, i) (see rules/view.py) of a layer's selected weight and bias, or the vector of a
parameter that no rule speaks for. `kind` says what is kept of its curvature:

    kron      (1/count) B ⊗ A                  dense     the exact block                 diagonal  its exact diagonal
    unused    nothing: no output depends on it, so its posterior is its prior
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lapwing.curvature.rules import DenseInputs, OneHotInputs, rule_for
from lapwing.curvature.rules.base import with_ones
from lapwing.errors import InvalidValue
from lapwing.tree import Layout

KINDS = ("kron", "dense", "diagonal", "unused")


@dataclass(frozen=True)
class Part:
    """A weight and its bias, or a parameter that no rule speaks for, and how its curvature is treated."""

    name: str  # the module (and the site in it), or the parameter if generic
    kind: str
    weight: str | None
    bias: str | None
    shape: tuple[int, int, int]  # (b, o, i), the bias counted in i
    transposed: bool = False
    kernel: int = 1  # kernel offsets: the inputs are (offsets, channels) of a weight stored (o, channels, offsets)
    generic: bool = False
    clone: bool = False  # the module's output is changed in place later, so keep a copy
    reason: str = ""
    site: str = ""  # of a module that is several linear maps

    @property
    def module(self) -> str:
        """The path of the module."""
        return self.name[: -len(self.site)].rstrip(".") if self.site else self.name

    @property
    def size(self) -> int:
        """The number of its parameters, b·o·i."""
        b, o, i = self.shape
        return b * o * i

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of its parameters."""
        return tuple(n for n in (self.weight, self.bias) if n is not None)

    def index(self, layout: Layout) -> Tensor:
        """Where W[b, o, i], row-major, stands in the parameter vector, (b·o·i,)."""
        slices = layout.slices()
        columns = []
        b, o, i = self.shape
        if self.weight is not None:
            s = slices[self.weight]
            inner = i - (self.bias is not None)
            where = torch.arange(s.start, s.stop)
            if self.transposed:
                stored = where.reshape(b, inner // self.kernel, o, self.kernel).permute(0, 2, 3, 1)
            else:
                stored = where.reshape(b, o, inner // self.kernel, self.kernel).mT
            columns.append(stored.reshape(b, o, inner))  # (b, o, offsets, channels)
        if self.bias is not None:
            s = slices[self.bias]
            columns.append(torch.arange(s.start, s.stop).reshape(b, o, 1))
        return torch.cat(columns, -1).reshape(-1)

    def split(self, matrix: Tensor) -> dict[str, Tensor]:
        """(..., b, o, i) as {parameter: (..., elements)}, in the order that the parameters are stored."""
        out = {}
        inner = self.shape[2] - (self.bias is not None and self.weight is not None)
        if self.weight is not None:
            w = matrix[..., :inner].unflatten(-1, (self.kernel, -1))  # (..., b, o, offsets, channels)
            out[self.weight] = (w.movedim(-1, -3) if self.transposed else w.mT).flatten(-4)
        if self.bias is not None:
            out[self.bias] = matrix[..., -1].flatten(-2)
        return out

    def view(self, model: nn.Module, x: Tensor, n: int) -> Any:
        """The layer's inputs, with a 1 for the bias."""
        b, _, i = self.shape
        weight, bias = self.weight is not None, self.bias is not None
        if self.site:
            return DenseInputs(with_ones(x.detach(), n, b, x.shape[-1], weight, bias))
        module = model.get_submodule(self.name)
        rule = rule_for(module)
        assert rule is not None
        a = rule.inputs(module, x.detach(), n)
        if isinstance(a, OneHotInputs):
            return a
        b, _, i = rule.shape(module)
        return DenseInputs(with_ones(a, n, b, i, weight, bias))

    def reader(self, model: nn.Module, n: int) -> Callable[[Tensor], Tensor]:
        """What takes output gradients (k, *output) of n examples as (k, n, s, b, o)."""
        if self.site:
            return lambda g: g.reshape(len(g), n, -1, *g.shape[-2:])
        module = model.get_submodule(self.name)
        rule = rule_for(module)
        assert rule is not None
        return lambda g: rule.outputs(module, g, n)


def check_parts(parts: tuple[Part, ...], layout: Layout) -> None:
    """Raise unless the parts have every parameter once, in its size."""
    names = [name for part in parts for name in part.parameters]
    if sorted(names) != sorted(layout.names) or len({part.name for part in parts}) < len(parts):
        raise InvalidValue(f"its parts are of the parameters {names}, not each of {list(layout.names)} once")
    for part in parts:
        b, o, i = part.shape
        inner = i - (part.bias is not None)
        sizes = {part.weight: b * o * inner, part.bias: b * o}
        fits = all(layout.numel(name) == sizes[name] for name in part.parameters) and (part.weight or not inner)
        plain = not part.generic or (part.name, part.bias, b, o) == (part.weight, None, 1, 1)
        sized = min(part.shape) >= 1 and part.kernel >= 1 and inner % part.kernel == 0
        if part.kind not in KINDS or not (sized and fits and plain):
            raise InvalidValue(f"its part {part.name} does not fit its parameters: {part}")
