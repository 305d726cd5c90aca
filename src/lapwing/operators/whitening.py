"""Whitening: θ = L φ, under which weights with the covariance L Lᵀ become independent weights φ of variance 1.

    L = ⊕_b L_b on blocks of entries, 1 elsewhere,      L_b = L_B ⊗ L_A of matrices (o, i), row-major (o = 1: L_A)

Both factors are lower triangular. Shapes: p entries, q = o·i of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from lapwing.errors import Unsupported


@dataclass(frozen=True, eq=False)
class WhiteBlock:
    """L_B ⊗ L_A over the entries `index` of a vector."""

    index: Tensor  # (q,)
    outputs: Tensor  # L_B (o, o)
    inputs: Tensor  # L_A (i, i)
    name: str = "a layer"

    @property
    def logdet(self) -> Tensor:
        """log|L_B ⊗ L_A|, 0-dim."""
        o, i = len(self.outputs), len(self.inputs)
        return i * self.outputs.diagonal().log().sum() + o * self.inputs.diagonal().log().sum()

    def matrices(self, v: Tensor) -> Tensor:
        """Entries (..., q) as matrices (..., o, i)."""
        return v.reshape(*v.shape[:-1], len(self.outputs), len(self.inputs))


@dataclass(frozen=True, eq=False)
class Whitening:
    """L (p, p); `key` names it, also where it is cut to some entries."""

    size: int
    blocks: tuple[WhiteBlock, ...]
    key: int = field(default=0)

    @cached_property
    def _order(self) -> tuple[Tensor, Tensor]:
        """The entries of no block, and where each entry lies once blocks and those are put together."""
        taken = torch.cat([b.index for b in self.blocks])
        free = torch.ones(self.size, dtype=torch.bool, device=taken.device).index_fill(0, taken, False)
        rest = free.nonzero().flatten()
        return rest, torch.cat([taken, rest]).argsort()

    def _each(self, v: Tensor, act: Callable[[WhiteBlock, Tensor], Tensor]) -> Tensor:
        """v (..., p) with what `act` makes of each block's matrices (..., o, i)."""
        if not self.blocks:
            return v
        rest, order = self._order
        pieces = [act(b, b.matrices(v[..., b.index])).flatten(-2) for b in self.blocks]
        return torch.cat([*pieces, v[..., rest]], -1)[..., order]

    def times(self, v: Tensor) -> Tensor:
        """L v for v (..., p)."""
        return self._each(v, lambda b, w: b.outputs @ w @ b.inputs.mT)

    def transpose_times(self, v: Tensor) -> Tensor:
        """Lᵀ v for v (..., p): of rows of a Jacobian, J L."""
        return self._each(v, lambda b, w: b.outputs.mT @ w @ b.inputs)

    def solve(self, v: Tensor) -> Tensor:
        """L⁻¹ v for v (..., p)."""
        return self._each(v, lambda b, w: _right(b.inputs.mT, _left(b.outputs, w, False), True))

    def transpose_solve(self, v: Tensor) -> Tensor:
        """L⁻ᵀ v for v (..., p)."""
        return self._each(v, lambda b, w: _right(b.inputs, _left(b.outputs.mT, w, True), False))

    def both_sides(self, matrix: Tensor) -> Tensor:
        """Lᵀ H L of a symmetric H (p, p)."""
        return self.transpose_times(self.transpose_times(matrix).mT)

    @property
    def logdet(self) -> Tensor:
        """log|L|, 0-dim."""
        return torch.stack([b.logdet for b in self.blocks]).sum() if self.blocks else torch.zeros(()).double()

    def at(self, index: Tensor) -> Whitening:
        """L on some entries (m,), whose blocks must lie within them: their entries are then places in `index`."""
        where = torch.full((self.size,), -1, device=index.device)
        where[index] = torch.arange(len(index), device=index.device)
        held = [(b, where[b.index]) for b in self.blocks]
        cut = [b.name for b, own in held if bool((own < 0).any()) and bool((own >= 0).any())]
        if cut:
            raise Unsupported(
                f"the prior correlates the weights of {cut[0]}, which this structure treats apart; use "
                "structure='full' or 'lowrank', or a covariance for each layer"
            )
        kept = tuple(WhiteBlock(own, b.outputs, b.inputs, b.name) for b, own in held if bool((own >= 0).all()))
        return Whitening(len(index), kept, self.key)

    def cuts(self, place: int) -> bool:
        """Whether a block has entries on both sides of a place in the vector."""
        return any(int(b.index.min()) < place <= int(b.index.max()) for b in self.blocks)


def _left(factor: Tensor, w: Tensor, upper: bool) -> Tensor:
    """F⁻¹ W."""
    return torch.linalg.solve_triangular(factor.expand(*w.shape[:-2], *factor.shape), w, upper=upper)


def _right(factor: Tensor, w: Tensor, upper: bool) -> Tensor:
    """W F⁻¹."""
    return torch.linalg.solve_triangular(factor.expand(*w.shape[:-2], *factor.shape), w, upper=upper, left=False)
