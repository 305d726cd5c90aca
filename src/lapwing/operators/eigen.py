"""Eigenvalue-corrected Kronecker operator: M = U diag(v) Uᵀ + δ over matrices W (b, o, i), flattened row-major.

U = blockdiag_b(U_B ⊗ U_A) is orthogonal, a Kronecker product like the eigenvectors of B ⊗ A; the eigenvalues
v (b, o, i) are any numbers, not products:

    M vec(W) = vec(U_B (v ∘ U_Bᵀ W U_A) U_Aᵀ) + δ vec(W),      log|M| = Σ_{boi} log(v_boi + δ)                  Eq. 14b

Only one δ for the whole matrix keeps U; a D that varies within it would turn the eigenvectors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lapwing.errors import Unsupported
from lapwing.operators import linalg
from lapwing.operators.diagonal import Diagonal, shifted


@dataclass(frozen=True, eq=False)
class EigenPlusDiagonal:
    """M = (U_B ⊗ U_A) diag(v) (U_B ⊗ U_A)ᵀ + diag(d), for each block b."""

    values: Tensor  # v (b, o, i), not negative
    ua: Tensor | None  # U_A (b, i, i); None is the identity
    ub: Tensor  # U_B (b, o, o)
    diag: Diagonal | None = None
    name: str = "a layer"

    @property
    def size(self) -> int:
        """p = b·o·i."""
        return self.values.numel()

    @property
    def shifted(self) -> Tensor:
        """The eigenvalues of M, (b, o, i), differentiable in v and δ."""
        if self.diag is None:
            raise Unsupported(f"the eigenvalue-corrected block of {self.name} has no prior yet; shift it first")
        if not self.diag.uniform:
            raise Unsupported(
                f"an eigenvalue-corrected Kronecker block cannot absorb a prior that varies within {self.name}; use "
                "one precision, or one a layer (prior='layerwise'), or structure='kron' for one a unit, 'block' or "
                "'diag' for any other"
            )
        return self.values + self.diag.values

    @property
    def precision(self) -> Tensor:
        """`shifted`, without gradient: of the verbs only logdet is differentiable."""
        return self.shifted.detach()

    def rotate(self, w: Tensor) -> Tensor:
        """U_Bᵀ W U_A for W (..., b, o, i)."""
        w = self.ub.mT @ w
        return w if self.ua is None else w @ self.ua

    def rotate_back(self, w: Tensor) -> Tensor:
        """U_B W U_Aᵀ for W (..., b, o, i)."""
        w = self.ub @ w
        return w if self.ua is None else w @ self.ua.mT

    def matrices(self, v: Tensor) -> Tensor:
        """Vectors (..., p) as matrices (..., b, o, i)."""
        return v.reshape(*v.shape[:-1], *self.values.shape)


@linalg.scale.register
def _(op: EigenPlusDiagonal, s: Tensor) -> EigenPlusDiagonal:
    return replace(op, values=op.values * s, diag=None if op.diag is None else linalg.scale(op.diag, s))


linalg.shift.register(EigenPlusDiagonal, shifted)


@linalg.mv.register
def _(op: EigenPlusDiagonal, v: Tensor) -> Tensor:
    out = op.rotate_back(op.values * op.rotate(op.matrices(v))).reshape(v.shape)
    return out if op.diag is None else out + op.diag.dense() * v


@linalg.solve.register
def _(op: EigenPlusDiagonal, b: Tensor) -> Tensor:
    return op.rotate_back(op.rotate(op.matrices(b)) / op.precision).reshape(b.shape)


@linalg.logdet.register
def _(op: EigenPlusDiagonal) -> Tensor:
    return op.shifted.log().sum()


@linalg.draw.register
def _(op: EigenPlusDiagonal, n: int, generator: torch.Generator) -> Tensor:
    noise = op.matrices(linalg.standard_normal((n, op.size), generator, op.ub))
    return op.rotate_back(noise * op.precision.rsqrt()).reshape(n, op.size)


@linalg.covariance.register
def _(op: EigenPlusDiagonal, rows: Tensor) -> Tensor:
    half = (op.rotate(op.matrices(rows)) * op.precision.rsqrt()).flatten(2)
    return half @ half.mT


@linalg.diagonal.register
def _(op: EigenPlusDiagonal) -> Tensor:
    out = op.ub.square() @ op.values
    out = (out if op.ua is None else out @ op.ua.square().mT).reshape(-1)
    return out if op.diag is None else out + op.diag.dense()


@linalg.to_dense.register
def _(op: EigenPlusDiagonal) -> Tensor:
    b, o, i = op.values.shape
    ua = torch.eye(i, dtype=op.ub.dtype, device=op.ub.device).expand(b, i, i) if op.ua is None else op.ua
    u = torch.einsum("bop,bij->boipj", op.ub, ua).reshape(b, o * i, o * i)
    out = torch.block_diag(*(u * op.values.reshape(b, 1, -1) @ u.mT))
    return out if op.diag is None else out + op.diag.dense().diag()
