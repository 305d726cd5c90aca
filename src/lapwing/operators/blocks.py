"""Block operator: M = ⊕_j M_j, each block on its own entries of the vector.

`index` (p_j,) says where a block's entries stand; together the blocks cover every entry once. Each verb is the same
verb on the blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lapwing.operators import linalg
from lapwing.operators.diagonal import Diagonal
from lapwing.operators.memo import BlockGroups


@dataclass(frozen=True, eq=False)
class Blocks:
    """Operators on the diagonal, each for its own entries of a vector."""

    parts: tuple[linalg.Operator, ...]
    index: tuple[Tensor, ...]  # (p_j,) each
    memo: BlockGroups = field(default_factory=BlockGroups)  # of the index: shared by every scale and shift

    @property
    def size(self) -> int:
        """p."""
        return sum(len(i) for i in self.index)

    def pieces(self, v: Tensor) -> Iterator[tuple[linalg.Operator, Tensor]]:
        """Each operator with its entries of v (..., p)."""
        for op, index in zip(self.parts, self.index, strict=True):
            yield op, v[..., index]

    def groups(self, d: Diagonal) -> list[Tensor | int]:
        """Of each block's entries; diagonals that share a grouping share them."""
        if self.memo.grouping is not d.grouping:
            self.memo.grouping, self.memo.groups = d.grouping, [d.groups_at(index) for index in self.index]
        return self.memo.groups

    def join(self, pieces: list[Tensor]) -> Tensor:
        """A vector (..., p) from its pieces, one an operator."""
        out = pieces[0].new_empty(*pieces[0].shape[:-1], self.size)
        for index, piece in zip(self.index, pieces, strict=True):
            out[..., index] = piece
        return out


@linalg.shift.register
def _(op: Blocks, d: Diagonal) -> Blocks:
    blocks = zip(op.parts, op.index, op.groups(d), strict=True)
    return Blocks(tuple(linalg.shift(part, d.at(index, groups)) for part, index, groups in blocks), op.index, op.memo)


@linalg.scale.register
def _(op: Blocks, s: Tensor) -> Blocks:
    return Blocks(tuple(linalg.scale(part, s) for part in op.parts), op.index, op.memo)


@linalg.mv.register
def _(op: Blocks, v: Tensor) -> Tensor:
    return op.join([linalg.mv(part, piece) for part, piece in op.pieces(v)])


@linalg.solve.register
def _(op: Blocks, b: Tensor) -> Tensor:
    return op.join([linalg.solve(part, piece) for part, piece in op.pieces(b)])


@linalg.logdet.register
def _(op: Blocks) -> Tensor:
    return torch.stack([linalg.logdet(part) for part in op.parts]).sum()


@linalg.draw.register
def _(op: Blocks, n: int, generator: torch.Generator) -> Tensor:
    return op.join([linalg.draw(part, n, generator) for part in op.parts])


@linalg.covariance.register
def _(op: Blocks, rows: Tensor) -> Tensor:
    return torch.stack([linalg.covariance(part, piece) for part, piece in op.pieces(rows)]).sum(0)


@linalg.diagonal.register
def _(op: Blocks) -> Tensor:
    return op.join([linalg.diagonal(part) for part in op.parts])


@linalg.to_dense.register
def _(op: Blocks) -> Tensor:
    out = torch.zeros(op.size, op.size, dtype=torch.float64, device=op.index[0].device)
    for part, index in zip(op.parts, op.index, strict=True):
        out[index.unsqueeze(-1), index] = linalg.to_dense(part)
    return out


@linalg.is_diagonal.register
def _(op: Blocks) -> bool:
    return all(linalg.is_diagonal(part) for part in op.parts)


@linalg.jitter.register
def _(op: Blocks) -> float:
    return max(linalg.jitter(part) for part in op.parts)
