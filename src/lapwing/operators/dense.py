"""Dense operator: M = s·H + diag(d) with H (p, p) in memory.

Two factorizations, each made once and only when asked for: the eigenvalues of H (of unit^-½ H unit^-½ where d has a
unit), shared by every s and every single value of d (so that tuning a scalar prior and the noise costs one), and the
Cholesky factor of M itself.

    log|M| = Σ_i log(s·l_i + d) + log|unit|            a single value d, Eq. 8
    ∂log|M|/∂d_i = (M⁻¹)_ii,  ∂log|M|/∂s = (p − Σ_i d_i (M⁻¹)_ii)/s        otherwise, Eq. 9
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lapwing.operators import linalg
from lapwing.operators.diagonal import Diagonal, shifted
from lapwing.operators.memo import Factorizations


@dataclass(frozen=True, eq=False)
class OuterRows:
    """Rows (n, c, p) of one layer without shared positions: at the columns `index` (o·i,) they are g ⊗ a."""

    index: Tensor
    a: Tensor  # (n, i), float64
    g: Tensor  # (n, c, o), float64


@dataclass(frozen=True, eq=False)
class Dense:
    """M = s·H + diag(d), H (p, p) in memory."""

    matrix: Tensor  # (p, p), float64
    factor: Tensor | None = None  # s, 0-dim; None is 1
    diag: Diagonal | None = None
    psd: bool = True  # H is positive semidefinite up to rounding
    memo: Factorizations = field(default_factory=Factorizations)  # of H: shared by every s and d
    columns: list[tuple[Tensor, Tensor]] = field(init=False, default_factory=list)  # of L⁻¹, last asked for

    @property
    def size(self) -> int:
        """p."""
        return self.matrix.shape[-1]

    @cached_property
    def cholesky(self) -> Tensor:
        """L (p, p) with M = L Lᵀ, without gradient."""
        factor, jitter = linalg.cholesky(linalg.to_dense(self).detach())
        self.memo.jitter = max(self.memo.jitter, jitter)
        return factor

    def root_columns(self, index: Tensor, i: int) -> Tensor:
        """Columns of L⁻¹, M = LLᵀ, for index (o·i,), as (o, i, p)."""
        if not self.columns or not torch.equal(self.columns[0][0], index):
            eye = torch.eye(self.size, dtype=self.matrix.dtype, device=self.matrix.device)
            root = torch.linalg.solve_triangular(self.cholesky, eye, upper=False)
            self.columns[:] = [(index, root.mT[index].reshape(-1, i, self.size))]
        return self.columns[0][1]

    @property
    def eigenvalues(self) -> Tensor:
        """Of H, in the unit of d."""
        kept = self.memo.spectrum(self.diag)
        if kept.eigenvalues is None:
            matrix = self.matrix.detach()
            if self.diag is not None and self.diag.unit is not None:
                root = self.diag.unit.rsqrt()
                matrix = root[:, None] * matrix * root
            values = torch.linalg.eigvalsh(matrix)
            kept.eigenvalues = linalg.clip(values) if self.psd else values
        return kept.eigenvalues


class _LogDet(torch.autograd.Function):
    """log|s·H + diag(d)| from a Cholesky factor of it, Eq. 9."""

    @staticmethod
    def forward(ctx: Any, s: Tensor, d: Tensor, cholesky: Tensor) -> Tensor:
        ctx.save_for_backward(s, d, cholesky)
        return 2 * cholesky.diagonal().log().sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        s, d, cholesky = ctx.saved_tensors
        inverse = torch.cholesky_inverse(cholesky).diagonal()
        return grad * (d.numel() - (d * inverse).sum()) / s, grad * inverse, None


@linalg.to_dense.register
def _(op: Dense) -> Tensor:
    if op.factor is None and op.diag is None:
        return op.matrix
    out = op.matrix.clone() if op.factor is None else op.factor * op.matrix
    if op.diag is not None:
        out.diagonal().add_(op.diag.dense())  # a matrix of its own for D would cost as much as M
    return out


@linalg.mv.register
def _(op: Dense, v: Tensor) -> Tensor:
    out = v @ op.matrix
    out = out if op.factor is None else op.factor * out
    return out if op.diag is None else out + op.diag.dense() * v


@linalg.scale.register
def _(op: Dense, s: Tensor) -> Dense:
    factor = s if op.factor is None else s * op.factor
    return replace(op, factor=factor, diag=None if op.diag is None else linalg.scale(op.diag, s))


linalg.shift.register(Dense, shifted)


@linalg.solve.register
def _(op: Dense, b: Tensor) -> Tensor:
    return torch.cholesky_solve(b.reshape(-1, op.size).mT, op.cholesky).mT.reshape(b.shape)


@linalg.logdet.register
def _(op: Dense) -> Tensor:
    if torch.is_grad_enabled() and op.matrix.requires_grad:  # H itself moves (noise per output): plain autograd
        return 2 * linalg.cholesky(linalg.to_dense(op))[0].diagonal().log().sum()
    s = op.matrix.new_ones(()) if op.factor is None else op.factor
    diag = Diagonal(op.matrix.new_zeros(1), op.size) if op.diag is None else op.diag
    wants_grad = torch.is_grad_enabled() and (s.requires_grad or diag.values.requires_grad)
    # One evaluation is cheapest by Cholesky; many (tuning) by the eigenvalues, which serve every s and single d.
    if diag.single and (wants_grad or op.memo.spectrum(op.diag).eigenvalues is not None):
        values = s * op.eigenvalues + diag.values
        if float(values.detach().min()) <= 0:
            raise linalg.not_positive_definite(float(values.detach().min()))
        return values.log().sum() if diag.unit is None else values.log().sum() + diag.unit.log().sum()
    return _LogDet.apply(s, diag.dense(), op.cholesky)


@linalg.draw.register
def _(op: Dense, n: int, generator: torch.Generator) -> Tensor:
    noise = linalg.standard_normal((op.size, n), generator, op.matrix)
    return torch.linalg.solve_triangular(op.cholesky.mT, noise, upper=True).mT


@linalg.covariance.register
def _(op: Dense, rows: Tensor | OuterRows) -> Tensor:
    if isinstance(rows, OuterRows):  # L⁻¹(g ⊗ a) from the few columns of L⁻¹ that each output has: O(o·i·p) an example
        half = torch.einsum("nco,onp->ncp", rows.g, rows.a @ op.root_columns(rows.index, rows.a.shape[1]))
        return half @ half.mT
    n, c, p = rows.shape
    half = torch.linalg.solve_triangular(op.cholesky, rows.reshape(n * c, p).mT, upper=False)  # (p, n c)
    half = half.reshape(p, n, c)
    return torch.einsum("pna,pnb->nab", half, half)


@linalg.diagonal.register
def _(op: Dense) -> Tensor:
    out = op.matrix.diagonal() if op.factor is None else op.factor * op.matrix.diagonal()
    return out if op.diag is None else out + op.diag.dense()


linalg.jitter.register(Dense, lambda op: op.memo.jitter)
