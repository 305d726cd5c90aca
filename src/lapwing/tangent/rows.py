"""The rows uᵀJ of many examples as one matrix R (m, p) that is never held whole: columns are made on demand.

A range of columns is made by differentiating only the parameters that it touches, over all examples, in pieces of
examples that fit the memory budget. Each range costs one backward pass over the data.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapwing import tree
from lapwing.errors import InvalidValue
from lapwing.tangent.linearize import TangentModel


@dataclass(frozen=True, eq=False)
class StreamedRows:
    tangent: TangentModel
    batches: tuple[tuple[Any, Tensor], ...]  # (inputs, cotangents (n, k, ..., c))
    budget: int  # bytes

    @property
    def shape(self) -> tuple[int, int]:
        return sum(u.shape[0] * u.shape[1] for _, u in self.batches), self.tangent.layout.size

    @property
    def bytes(self) -> int:
        return self.shape[0] * self.shape[1] * 8

    def ranges(self, beside: int = 0) -> Iterator[tuple[int, int]]:
        """Column ranges such that two float64 copies of (m + beside) rows stay within the budget."""
        width = max(1, self.budget // (16 * (self.shape[0] + beside)))
        for s in _joined(self.tangent.layout.slices().values(), width):
            for start in range(s.start, s.stop, width):
                yield start, min(s.stop, start + width)

    def block(self, start: int, stop: int) -> Tensor:
        touched = {n: s for n, s in self.tangent.layout.slices().items() if s.start < stop and start < s.stop}
        first = next(iter(touched.values())).start
        width = sum(s.stop - s.start for s in touched.values())
        pieces = []
        for x, u in self.batches:
            for piece_x, piece_u in pieces_of(x, u, width * u.shape[1] * u.element_size(), self.budget // 4):
                rows = self.tangent.pulled(piece_x, piece_u, tuple(touched))
                pieces.append(rows[..., start - first : stop - first].reshape(-1, stop - start).clone())
        return torch.cat(pieces)


def _joined(slices: Any, width: int) -> Iterator[slice]:
    """Neighboring small parameters joined while they fit one range."""
    held: slice | None = None
    for s in slices:
        if held is None:
            held = s
        elif s.stop - held.start <= width:
            held = slice(held.start, s.stop)
        else:
            yield held
            held = s
    if held is not None:
        yield held


def pieces_of(x: Any, u: Tensor, bytes_each: int, budget: int) -> Iterator[tuple[Any, Tensor]]:
    """Cut a batch into pieces of examples of bytes_each that stay within the budget; a batch that cannot be cut
    (a graph under a forward hook) stays whole."""
    n = len(u)
    size = max(1, budget // max(1, bytes_each))
    try:
        separable = tree.batch_size(x) == n
    except InvalidValue:
        separable = False
    if size >= n or not separable:
        yield x, u
        return
    for start in range(0, n, size):
        index = slice(start, start + size)
        yield tree.rows_of(x, index), u[index]
