"""The empirical tangent kernel of a network, at its weights:

    K[n, a, m, b] = Σ_p ∂f_a(x_n)/∂θ_p A_p⁻¹ ∂f_b(x'_m)/∂θ_p = J(x) A⁻¹ J(x')ᵀ,     A = 1 unless a prior is given

Rows of a layer without shared positions are g ⊗ a, and never made: its part of K is ⟨g, g'⟩⟨a, a'⟩. Rows of the other
layers are made for a block of examples of the first set, which is held, and for pieces of the second, which are made
again for each block: one block, and one backward pass an output of an example, where the first set's rows fit half of
the memory budget. Where both sets are one, each pair is taken once. Rows and products are in the network's dtype, sums
in float64. Shapes: n and m inputs, c outputs, p parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lapwing import tree
from lapwing.arguments import as_budget
from lapwing.curvature.cover import cover
from lapwing.curvature.gram import add_gram, mirrored
from lapwing.curvature.rows import RowMaker, StreamedRows
from lapwing.errors import InvalidValue, Unsupported
from lapwing.operators.root import Pair
from lapwing.posterior.base import check_inputs
from lapwing.push import LARGEST
from lapwing.tangent import TangentModel


@torch.inference_mode(False)
@torch.no_grad()
def kernel(
    tangent: TangentModel,
    x1: Any,
    x2: Any = None,
    *,
    per_output: bool = False,
    memory_budget: float | None = None,
) -> Tensor:
    """J(x1) J(x2)ᵀ of a linearized network (`lw.linearize`) over its selected weights, (n₁, c, n₂, c) in float64; of
    outputs with positions, (n₁, ..., c, n₂, ..., c). x2=None is x1.

    per_output: of each output with itself alone, (c, n₁, n₂). memory_budget: bytes for rows (1 GiB); with less, inputs
    of x2 are gone through more than once."""
    first = Side(tangent, _given(tangent, x1), as_budget(memory_budget))
    second = None if x2 is None else replace(first, x=_given(tangent, x2))
    return products(first, second, per_output)


@dataclass(frozen=True, eq=False)
class Side:
    """Inputs at which rows of J are made, over a memory budget; `precision` (p,) is that of a prior, None for 1."""

    tangent: TangentModel
    x: Any
    budget: int
    precision: Tensor | None = None

    @cached_property
    def f(self) -> Tensor:
        """The outputs, (n, ..., c)."""
        return torch.cat([self.tangent(piece) for piece in self.pieces(LARGEST)])

    @cached_property
    def pairs(self) -> dict[str, Pair]:
        """Layers whose rows are outer products, those of all outputs of an example one after the other."""
        eye = self.cotangents(range(self.f[0].numel()))
        pieces = list(self.pieces(LARGEST))
        counts = [len(self.f)] if len(pieces) == 1 else [tree.batch_size(piece) for piece in pieces]
        batches = tuple((x, eye.expand(n, *eye.shape)) for x, n in zip(pieces, counts, strict=True))
        found = StreamedRows(self.tangent, batches, self.budget).pairs
        return {name: pair for name, pair in found.items() if self.scale(pair) is not None}

    def scale(self, pair: Pair) -> float | None:
        """1 / the precision of a layer's weights; None where they have several."""
        if self.precision is None:
            return 1.0
        own = self.precision[pair.index]
        return 1 / float(own[0]) if bool((own == own[0]).all()) else None

    def cotangents(self, outputs: range) -> Tensor:
        """Rows of the identity, (k, ..., c)."""
        eye = torch.eye(self.f[0].numel(), dtype=self.f.dtype, device=self.f.device)
        return eye[outputs.start : outputs.stop].reshape(-1, *self.f.shape[1:])

    def pieces(self, size: int) -> Iterator[Any]:
        """The inputs in pieces of so many examples; whole, where they cannot be cut."""
        if not self.tangent.separable(self.x):
            yield self.x
            return
        for start in range(0, tree.batch_size(self.x), size):
            yield tree.rows_of(self.x, slice(start, start + size))

    def maker(self, without: frozenset[str]) -> RowMaker | None:
        """Of rows of all parameters but those of some layers; None where no other is left."""
        parts = cover(self.tangent, self.x)
        out = {name for part in parts if part.name in without for name in part.parameters}
        names = tuple(name for name in self.tangent.layout.names if name not in out)
        return RowMaker(self.tangent, parts, names) if names else None

    def rows(self, maker: RowMaker, outputs: range, size: int) -> Iterator[tuple[slice, Tensor]]:
        """Rows of some outputs in pieces of the inputs, (n', k, p'), scaled by A^-½."""
        u, scale, start = self.cotangents(outputs), self._root(maker), 0
        for piece in self.pieces(size):
            parts: list[Tensor] = []
            for x in replace(self, x=piece).pieces(LARGEST):
                record = maker.run(x)
                parts += maker.rows(record, x, u.expand(len(record.f), *u.shape), self.budget // 4)
            rows = parts[0] if len(parts) == 1 else torch.cat(parts)
            yield slice(start, start + len(rows)), rows if scale is None else rows * scale
            start += len(rows)

    def _root(self, maker: RowMaker) -> Tensor | None:
        if self.precision is None:
            return None
        slices = self.tangent.layout.slices()
        return torch.cat([self.precision[slices[name]] for name in maker.names]).rsqrt().to(self.f)


def products(first: Side, second: Side | None, per_output: bool = False) -> Tensor:
    """J A⁻¹ Jᵀ between two sides; second=None is the first."""
    f, other = first.f, first.f if second is None else second.f
    if per_output and f.ndim != 2:
        raise Unsupported(
            f"per_output=True is for outputs (n, c), and these are {tuple(f.shape)}; without it, K is of all of them"
        )
    q, r = f[0].numel(), other[0].numel()
    shape = (q, len(f), len(other)) if per_output else (len(f), q, len(other), r)
    total = torch.zeros(shape, dtype=torch.float64, device=f.device)
    paired = first.pairs.keys() & (first if second is None else second).pairs.keys()
    for name in paired:
        one, two = first.pairs[name], (first if second is None else second).pairs[name]
        total += _of_pair(one, two, q if per_output else 0).reshape(shape) * (first.scale(one) or 0.0)
    maker = first.maker(frozenset(paired))
    if maker is not None:
        _add_rows(total, first, second, maker, per_output)
    return total if per_output else total.reshape(*f.shape, *other.shape)


def own_products(side: Side) -> Tensor:
    """J A⁻¹ Jᵀ of each input with itself, (n, q, q) over all q outputs of an example."""
    q = side.f[0].numel()
    total = torch.zeros(len(side.f), q, q, dtype=torch.float64, device=side.f.device)
    for pair in side.pairs.values():
        total += pair.squares(q) * (side.scale(pair) or 0.0)
    maker = side.maker(frozenset(side.pairs))
    if maker is not None:
        piece = max(1, min(LARGEST, side.budget // (4 * q * maker.width * side.f.element_size())))
        for i, rows in side.rows(maker, range(q), piece):
            total[i] += rows @ rows.mT
    return total


def _of_pair(one: Pair, two: Pair, outputs: int) -> Tensor:
    """⟨g, g'⟩⟨a, a'⟩ of all rows, (n·c, m·c); or of each of so many outputs, (c, n, m)."""
    if not outputs:
        return one.products(two)
    a, b = (pair.a[::outputs] for pair in (one, two))
    g, h = (pair.g.unflatten(0, (-1, outputs)).transpose(0, 1) for pair in (one, two))  # (c, n, o)
    return (a @ b.mT) * (g @ h.mT)


def _add_rows(total: Tensor, first: Side, second: Side | None, maker: RowMaker, per_output: bool) -> None:
    """Add the products of rows: blocks of the first side are held, and the second goes by in pieces."""
    n, q, each = len(first.f), first.f[0].numel(), maker.width * first.f.element_size()
    count = max(1, min(q, first.budget // (2 * n * each))) if per_output else q  # outputs at once
    block = max(1, first.budget // (2 * count * each))
    piece = max(1, min(LARGEST, first.budget // (4 * count * each)))
    for start in range(0, q, count):
        outputs = range(start, min(q, start + count))
        for i, held in first.rows(maker, outputs, block):
            if second is None:
                _put(total, i, i, outputs, _own(held, per_output), per_output)
            theirs = outputs if per_output or second is None else range(second.f[0].numel())
            for j, rows in _others(first, second, maker, theirs, piece, i.stop):
                found = _between(held, rows, per_output)
                _put(total, i, j, outputs, found, per_output)
                if second is None:
                    _put(total, j, i, outputs, found.mT if per_output else found.permute(2, 3, 0, 1), per_output)


def _others(
    first: Side, second: Side | None, maker: RowMaker, outputs: range, piece: int, after: int
) -> Iterator[tuple[slice, Tensor]]:
    """Rows of the second side; where it is the first, of those after the block that is held."""
    if second is not None:
        yield from second.rows(maker, outputs, piece)
    elif after < len(first.f):
        rest = replace(first, x=tree.rows_of(first.x, slice(after, None)))
        for j, rows in rest.rows(maker, outputs, piece):
            yield slice(j.start + after, j.stop + after), rows


def _between(one: Tensor, two: Tensor, per_output: bool) -> Tensor:
    """Products of rows (n, k, p) and (m, l, p): (n, k, m, l), or (k, n, m)."""
    if per_output:
        return one.transpose(0, 1) @ two.permute(1, 2, 0)
    return (one.flatten(0, 1) @ two.flatten(0, 1).mT).reshape(*one.shape[:2], *two.shape[:2])


def _own(rows: Tensor, per_output: bool) -> Tensor:
    """Those of rows (n, k, p) with themselves: the lower triangle, mirrored."""
    n, k, _ = rows.shape
    sets = rows.unbind(1) if per_output else [rows.flatten(0, 1)]
    out = rows.new_zeros(len(sets), len(sets[0]), len(sets[0]))
    for total, one in zip(out, sets, strict=True):
        add_gram(total, one.mT)
    found = mirrored(out)
    return found if per_output else found[0].reshape(n, k, n, k)


def _put(total: Tensor, i: slice, j: slice, outputs: range, found: Tensor, per_output: bool) -> None:
    if per_output:
        total[outputs.start : outputs.stop, i, j] += found
    else:
        total[i, :, j] += found


def _given(tangent: TangentModel, x: Any) -> Any:
    """Inputs on the network's device, some and finite."""
    if not isinstance(tangent, TangentModel):
        raise InvalidValue(f"lw.gp.kernel takes lw.linearize(model), got {type(tangent).__name__}")
    check_inputs(x)
    return tree.moved(x, tangent.device)
