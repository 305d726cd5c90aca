"""Operators in whitened coordinates φ = L⁻¹θ (`whitening.py`), in which a prior with correlated weights is diagonal:

    M = H + A,  A = L⁻ᵀ D L⁻¹           M = L⁻ᵀ N L⁻¹,  N = LᵀHL + D
    log|M| = log|N| − 2 log|L|,  M⁻¹ = L N⁻¹ Lᵀ,  a draw is L φ,  X M⁻¹ Xᵀ = (XL) N⁻¹ (XL)ᵀ

`plus(H, A)` is what a posterior is made by: `linalg.shift` where A is diagonal, else this. `whiten(H, L)` gives LᵀHL in
H's own structure: of a matrix, of rows, of a Kronecker product whose L is one too, of blocks that L does not cut. Other
structures, and other L, refuse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import singledispatch
from typing import Any

import torch
from torch import Tensor

from lapwing.errors import Unsupported
from lapwing.operators import linalg
from lapwing.operators.blocks import Blocks
from lapwing.operators.dense import Dense
from lapwing.operators.kronecker import KroneckerPlusDiagonal
from lapwing.operators.memo import KroneckerFactors, RowGrams
from lapwing.operators.root import HeldRows, Pair, RootPlusDiagonal, RowSource
from lapwing.operators.whitening import WhiteBlock, Whitening

WORDS = {  # what has no LᵀHL of its own kind
    "Diagonal": "structure='diag', or a diagonal block of another",
    "EigenPlusDiagonal": "structure='ekfac'",
    "Streamed": "structure='matrix_free'",
}


@dataclass(frozen=True, eq=False)
class Whitened:
    """M = L⁻ᵀ N L⁻¹."""

    inner: Any  # N
    root: Whitening  # L

    @property
    def size(self) -> int:
        """p."""
        return self.root.size


# -- H + A ---------------------------------------------------------------------------------------------------------


def plus(op: Any, a: Any) -> Any:
    """H + A for the precision A of a prior: a Diagonal, or one in whitened coordinates."""
    return _plus_whitened(op, a) if isinstance(a, Whitened) else linalg.shift(op, a)


@singledispatch
def _plus_whitened(op: Any, a: Whitened) -> Any:
    return Whitened(linalg.shift(whiten(op, a.root), a.inner), a.root)


@_plus_whitened.register
def _(op: Blocks, a: Whitened) -> Blocks:
    shifted = linalg.shift(whiten(op, a.root), a.inner)
    roots = (a.root.at(index) for index in op.index)
    parts = (Whitened(part, root) if root.blocks else part for part, root in zip(shifted.parts, roots, strict=True))
    return replace(shifted, parts=tuple(parts))


# -- LᵀHL ----------------------------------------------------------------------------------------------------------


def whiten(op: Any, root: Whitening) -> Any:
    """LᵀHL, an operator of H's kind."""
    return _whiten(op, root) if root.blocks else op


@singledispatch
def _whiten(op: Any, root: Whitening) -> Any:
    raise refused(root.blocks[0].name, WORDS.get(type(op).__name__, f"a {type(op).__name__} curvature"))


def refused(name: str, what: str) -> Unsupported:
    """The error of a structure that cannot hold a prior's correlations."""
    return Unsupported(
        f"the correlated prior of {name} cannot be held by {what}; use structure='full' or 'block', or "
        "lw.priors.Gaussian, under which weights are independent"
    )


@_whiten.register
def _(op: Blocks, root: Whitening) -> Blocks:
    pieces = zip(op.parts, op.index, strict=True)
    return replace(op, parts=tuple(whiten(part, root.at(index)) for part, index in pieces))


@_whiten.register
def _(op: Dense, root: Whitening) -> Dense:
    if op.diag is not None:
        raise Unsupported("whiten takes a curvature without a prior; whiten it before shift")
    kept = op.memo.whitened.get(root.key)
    if kept is None:
        kept = Dense(root.both_sides(op.matrix), psd=op.psd)
        if not op.matrix.requires_grad:
            op.memo.whitened[root.key] = kept
    return replace(kept, factor=op.factor)


@_whiten.register
def _(op: RootPlusDiagonal, root: Whitening) -> RootPlusDiagonal:
    if op.diag is not None:
        raise Unsupported("whiten takes a curvature without a prior; whiten it before shift")
    if root.key not in op.memo.whitened:
        op.memo.whitened[root.key] = white_rows(op.rows, root), RowGrams()
    rows, memo = op.memo.whitened[root.key]
    return RootPlusDiagonal(rows, op.weights, memo=memo)


@_whiten.register
def _(op: KroneckerPlusDiagonal, root: Whitening) -> KroneckerPlusDiagonal:
    """(L_B ⊗ L_A)ᵀ(B ⊗ A)(L_B ⊗ L_A) = L_BᵀBL_B ⊗ L_AᵀAL_A."""
    if root.key not in op.memo.whitened:
        op.memo.whitened[root.key] = KroneckerFactors()
    l_b, l_a = _factors(op, root)
    a = (torch.diag_embed(op.inputs) if op.a.ndim == 2 else op.inputs)[0]
    a, b = l_a.mT @ a @ l_a, l_b.mT @ op.b[0] @ l_b
    rounding = op.rounding * float(torch.linalg.matrix_norm(l_b, 2)) ** 2
    memo = op.memo.whitened[root.key] if not op.b.requires_grad else KroneckerFactors()
    return replace(op, a=a.unsqueeze(0), b=b.unsqueeze(0), rounding=rounding, apart=False, memo=memo)


def _factors(op: KroneckerPlusDiagonal, root: Whitening) -> tuple[Tensor, Tensor]:
    """L_B (o, o) and L_A (i, i) in the order of the layer's matrix, whose columns a convolution orders anew."""
    groups, o, i = op.shape
    block = root.blocks[0]
    what = f"the Kronecker block of {op.name}, unless it is a product (B, A) of the whole layer, bias included"
    if groups != 1 or len(root.blocks) != 1 or block.index.numel() != o * i or len(block.inputs) != i:
        raise refused(block.name, what)
    places = block.matrices(block.index)  # where entry (row, column) of the prior's matrix lies in the layer's
    columns = places[0] % i
    if not torch.equal(places, torch.arange(o, device=places.device).unsqueeze(1) * i + columns):
        raise refused(block.name, what)
    l_a = torch.empty_like(block.inputs)
    l_a[columns.unsqueeze(1), columns] = block.inputs
    return block.outputs, l_a


# -- rows ----------------------------------------------------------------------------------------------------------


def white_rows(rows: RowSource, root: Whitening) -> RowSource:
    """R L."""
    return HeldRows(root.transpose_times(rows.tensor)) if isinstance(rows, HeldRows) else WhiteRows(rows, root)


@dataclass(frozen=True, eq=False)
class WhiteRows:
    """R L by ranges of columns that cut no block of L."""

    rows: RowSource
    root: Whitening

    @property
    def shape(self) -> tuple[int, int]:
        """(m, p)."""
        return self.rows.shape

    @property
    def held(self) -> bool:
        """Whether all columns are in memory."""
        return self.rows.held

    @property
    def pairs(self) -> dict[str, Pair]:
        """None: whitened columns are no outer products."""
        return {}

    def block(self, start: int, stop: int) -> Tensor:
        """A range of columns that `ranges` gives, or all, (m, stop − start)."""
        own = self.root.at(torch.arange(start, stop, device=self.root.blocks[0].index.device))
        return own.transpose_times(self.rows.block(start, stop).to(torch.float64))

    def ranges(self, beside: int = 0, without: frozenset[str] = frozenset()) -> Iterator[tuple[int, int]]:
        """Those of R, joined where they would cut a block."""
        first: int | None = None
        for start, stop in self.rows.ranges(beside):
            first = start if first is None else first
            if not self.root.cuts(stop):
                yield first, stop
                first = None


# -- the verbs -----------------------------------------------------------------------------------------------------


@linalg.mv.register
def _(op: Whitened, v: Tensor) -> Tensor:
    return op.root.transpose_solve(linalg.mv(op.inner, op.root.solve(v)))


@linalg.scale.register
def _(op: Whitened, s: Tensor) -> Whitened:
    return replace(op, inner=linalg.scale(op.inner, s))


@linalg.solve.register
def _(op: Whitened, b: Tensor) -> Tensor:
    return op.root.times(linalg.solve(op.inner, op.root.transpose_times(b)))


@linalg.logdet.register
def _(op: Whitened) -> Tensor:
    return linalg.logdet(op.inner) - 2 * op.root.logdet


@linalg.draw.register
def _(op: Whitened, n: int, generator: torch.Generator) -> Tensor:
    return op.root.times(linalg.draw(op.inner, n, generator))


@linalg.covariance.register
def _(op: Whitened, rows: Any) -> Tensor:
    """`rows` (n, c, p), or a pair (RowSource of n·c rows, c) where N takes those."""
    white: Callable[[Any], Any] = op.root.transpose_times
    return linalg.covariance(op.inner, white(rows) if isinstance(rows, Tensor) else _white_pair(rows, op.root))


def _white_pair(rows: tuple[RowSource, int], root: Whitening) -> tuple[RowSource, int]:
    return white_rows(rows[0], root), rows[1]


@linalg.to_dense.register
def _(op: Whitened) -> Tensor:
    half = op.root.transpose_solve(linalg.to_dense(op.inner))
    return op.root.transpose_solve(half.mT)


@linalg.diagonal.register
def _(op: Whitened) -> Tensor:
    if not linalg.is_diagonal(op.inner):
        return linalg.to_dense(op).diagonal()
    d, out = linalg.diagonal(op.inner), linalg.diagonal(op.inner).clone()
    for b in op.root.blocks:
        out = out.index_copy(0, b.index, _of_block(b, d[b.index]))
    return out


def _of_block(block: WhiteBlock, d: Tensor) -> Tensor:
    """diag(L⁻ᵀ D L⁻¹) of a block's entries (q,)."""
    b, a = (torch.linalg.inv(factor).square() for factor in (block.outputs, block.inputs))
    return (b.mT @ block.matrices(d) @ a).reshape(-1)


linalg.jitter.register(Whitened, lambda op: linalg.jitter(op.inner))
