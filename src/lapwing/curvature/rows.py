"""Rows uᵀJ(x_n) of the Jacobian, from layer inputs and output gradients where a rule speaks for a parameter.

`RowMaker` gives them for a batch, (n, K, p). `StreamedRows` is the matrix R (m, p) of many batches that is never
held whole: a range of its columns is made on demand, by one backward pass over the data down to the layers it
touches, in pieces of examples that fit the memory budget.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lapwing.curvature.capture import Capture, Changed, Record
from lapwing.curvature.cover import cover
from lapwing.curvature.parts import Part
from lapwing.curvature.rules import DenseInputs
from lapwing.operators import OuterRows
from lapwing.operators.root import Pair
from lapwing.tangent import TangentModel

ALL = slice(None)


class RowMaker:
    """Rows of the parameters `names` (all by default) for batches of one network."""

    def __init__(self, tangent: TangentModel, parts: tuple[Part, ...], names: tuple[str, ...] | None = None) -> None:
        self.tangent = tangent
        self.names = names or tangent.layout.names
        self.parts = tuple(_only(part, self.names) for part in parts if any(n in self.names for n in part.parameters))
        self.generic = tuple(n for part in self.parts if part.generic for n in part.parameters)
        self.capture = Capture(tangent, tuple(part for part in self.parts if not part.generic))
        self.width = sum(tangent.layout.numel(n) for n in self.names)

    def run(self, x: Any) -> Record:
        """A run of the network; of its outputs alone, if this batch uses the layers in another way than the probe."""
        try:
            return self.capture.run(x)
        except Changed:
            return self._outputs(x)

    def _outputs(self, x: Any) -> Record:
        return Capture(self.tangent, ()).run(x)

    def rows(self, record: Record, x: Any, u: Tensor, budget: int, columns: slice = ALL) -> Iterator[Tensor]:
        """Pieces (n', K, p') of the rows of one batch, in order, for cotangents u (n, K, ..., c); of a range of their
        columns, if told."""
        u = u.to(record.f)
        try:
            views = record.views()
        except Changed:
            record, views = self._outputs(x), {}
        gradients = record.pull(u)
        if record.called and self._narrow(columns):
            yield from self._some_outputs(gradients, views, budget, columns)
            return
        generic = self.generic if record.parts else self.names
        each = u.shape[1] * self.width * u.element_size()
        start = 0
        for piece, cotangent in self.tangent.pieces(x, u, budget // max(1, each)):
            index = slice(start, start + len(cotangent))
            start = index.stop
            found: dict[str, Tensor] = {}
            for part in record.called:
                g = gradients[part.name][:, index]
                found |= part.split(views[part.name].chunk(index).outer(g))
            if generic:
                flat = self.tangent.pulled(piece, cotangent, generic).transpose(0, 1)
                sizes = [self.tangent.layout.numel(n) for n in generic]
                found |= dict(zip(generic, flat.split(sizes, -1), strict=True))
            yield self._assemble(found, cotangent)[..., columns]

    def outer(self, record: Record, u: Tensor) -> OuterRows | None:
        """The rows of one batch for cotangents u (n, K, ..., c) as outer products, where the network's selected
        parameters are those of one layer without shared positions (a last layer)."""
        if len(self.parts) != 1 or len(record.called) != 1 or self.parts[0].shape[0] != 1:
            return None
        part = self.parts[0]
        try:
            view = record.views()[part.name]
        except Changed:
            return None
        if not isinstance(view, DenseInputs) or view.positions > 1:
            return None
        g = record.pull(u)[part.name][:, :, 0, 0].transpose(0, 1)  # (n, K, o)
        return OuterRows(self.index, view.a[:, 0, 0].to(torch.float64), g.to(torch.float64))

    def head(self, record: Record) -> OuterRows | None:
        """The rows of all outputs, each position as an example, where the selected parameters are those of a head
        that nothing follows."""
        if len(self.parts) != 1 or self.parts[0].shape[0] != 1 or not record.is_output(self.parts[0]):
            return None
        view = record.views()[self.parts[0].name].apart()
        if not isinstance(view, DenseInputs):
            return None
        c = record.f.shape[-1]
        g = torch.eye(c, dtype=torch.float64, device=record.f.device).expand(len(view.a), c, c)
        return OuterRows(self.index, view.a[:, 0, 0].to(torch.float64), g)

    @cached_property
    def index(self) -> Tensor:
        """Where the columns of the one part lie in the flat vector, (p,)."""
        return self.parts[0].index(self.tangent.layout).to(self.tangent.device)

    def _narrow(self, columns: slice) -> bool:
        """Whether a range of columns is of one weight (o, i), so that it needs some of the layer's outputs only."""
        part = self.parts[0]
        lone = len(self.names) == 1 and not part.generic and part.weight == self.names[0]
        return lone and part.shape[0] == 1 and not part.transposed and columns != ALL

    def _some_outputs(
        self, gradients: dict[str, Tensor], views: dict[str, Any], budget: int, columns: slice
    ) -> Iterator[Tensor]:
        part, name = self.parts[0], self.names[0]
        inputs = self.width // part.shape[1]
        first = columns.start // inputs
        g = gradients[part.name][..., first : -(-columns.stop // inputs)]
        step = max(1, budget // (len(g) * g.shape[-1] * (inputs + 1) * g.element_size()))
        within = slice(columns.start - first * inputs, columns.stop - first * inputs)
        for start in range(0, g.shape[1], step):
            index = slice(start, start + step)
            rows = part.split(views[part.name].chunk(index).outer(g[:, index]))[name]
            yield rows[..., within].transpose(0, 1)

    def _assemble(self, found: dict[str, Tensor], u: Tensor) -> Tensor:
        out = u.new_zeros(u.shape[1], u.shape[0], self.width)
        start = 0
        for n in self.names:
            stop = start + self.tangent.layout.numel(n)
            if n in found:  # a layer that was not called on this batch has gradient zero
                out[..., start:stop] = found[n]
            start = stop
        return out.transpose(0, 1)


def _only(part: Part, names: tuple[str, ...]) -> Part:
    """A layer with the weight or the bias left out that is not among the names: its rows are not made either."""
    weight, bias = (n if n in names else None for n in (part.weight, part.bias))
    b, o, i = part.shape
    inputs = i - (part.weight is not None and part.bias is not None)
    width = (inputs if weight is not None else 0) + (bias is not None)
    return replace(part, weight=weight, bias=bias, shape=(b, o, width))


@dataclass(frozen=True, eq=False)
class StreamedRows:
    """The rows uᵀJ of the data, (m, p), made anew from the batches for each range of columns."""

    tangent: TangentModel
    batches: tuple[tuple[Any, Tensor], ...]  # (inputs, cotangents (n, K, ..., c))
    budget: int  # bytes

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The parts of the network."""
        return cover(self.tangent, self.batches[0][0])

    @property
    def shape(self) -> tuple[int, int]:
        """(m, p)."""
        return sum(u.shape[0] * u.shape[1] for _, u in self.batches), self.tangent.layout.size

    @property
    def held(self) -> bool:
        """Whether all columns fit the budget; they are then made once."""
        return self.shape[0] * self.shape[1] * 8 <= self.budget

    @cached_property
    def whole(self) -> Tensor:
        """All of them, (m, p), in float64."""
        return self._make(0, self.shape[1]).to(torch.float64)

    @cached_property
    def pairs(self) -> dict[str, Pair]:
        """Layers without shared positions, whose rows are outer products; none where those do not fit the budget."""
        parts = tuple(part for part in self.parts if not part.generic and part.shape[0] == 1)
        capture = Capture(self.tangent, parts)
        found: dict[str, list[tuple[Tensor, Tensor]]] = {part.name: [] for part in parts}
        for x, u in self.batches:
            try:
                record = capture.run(x)
                views = record.views()
            except Changed:  # this batch uses its layers in another way than the probe
                return {}
            gradients = record.pull(u)
            for part in parts:
                view = views.get(part.name)
                if not isinstance(view, DenseInputs) or view.positions > 1:
                    found.pop(part.name, None)
                elif part.name in found:
                    a = view.a[:, 0, 0].to(torch.float64).repeat_interleave(u.shape[1], 0)
                    g = gradients[part.name][:, :, 0, 0].transpose(0, 1).to(torch.float64)  # (n, K, o)
                    found[part.name].append((a, g.flatten(0, 1)))
            if 8 * sum(a.numel() + g.numel() for held in found.values() for a, g in held) > self.budget:
                return {}
        index = {part.name: part.index(self.tangent.layout).to(self.tangent.device) for part in parts}
        return {
            name: Pair(index[name], torch.cat([a for a, _ in held]), torch.cat([g for _, g in held]))
            for name, held in found.items()
        }

    def ranges(self, beside: int = 0, without: frozenset[str] = frozenset()) -> Iterator[tuple[int, int]]:
        """Column ranges such that two float64 copies of (m + beside) rows stay within the budget."""
        width = max(1, self.budget // (16 * (self.shape[0] + beside)))
        left_out = {n for part in self.parts if part.name in without for n in part.parameters} if without else set()
        if self.held and not left_out and beside * self.shape[1] * 8 <= self.budget:
            yield 0, self.shape[1]
            return
        for s in _joined([s for n, s in self.tangent.layout.slices().items() if n not in left_out], width):
            for start in range(s.start, s.stop, width):
                yield start, min(s.stop, start + width)

    def block(self, start: int, stop: int) -> Tensor:
        """A range of their columns, (m, stop − start)."""
        return self.whole[:, start:stop] if self.held else self._make(start, stop)

    def _make(self, start: int, stop: int) -> Tensor:
        touched = {n: s for n, s in self.tangent.layout.slices().items() if s.start < stop and start < s.stop}
        first = next(iter(touched.values())).start
        maker = RowMaker(self.tangent, self.parts, tuple(touched))
        columns = slice(start - first, stop - first)
        pieces = [
            rows.reshape(-1, stop - start)
            for x, u in self.batches
            for rows in maker.rows(maker.run(x), x, u, self.budget // 4, columns)
        ]
        return torch.cat(pieces)


def _joined(slices: Any, width: int) -> Iterator[slice]:
    """Neighboring small parameters joined while they fit one range."""
    held: slice | None = None
    for s in slices:
        if held is None:
            held = s
        elif s.start == held.stop and s.stop - held.start <= width:
            held = slice(held.start, s.stop)
        else:
            yield held
            held = s
    if held is not None:
        yield held
