"""Kronecker operator: M = s · blockdiag_b(B_b ⊗ A_b) + D over matrices W (b, o, i), flattened row-major.

With B = U_B diag(m) U_Bᵀ and A = U_A diag(l) U_Aᵀ, the shift adds to the *products* of eigenvalues:

    uniform D = δ:                log|M| = Σ_{boi} log(s·m_bo·l_bi + δ)
    D = u ⊗ e (a value a row, or a value a column):   M = D^½ (s·B' ⊗ A' + I) D^½,
                                  B' = u^-½ B u^-½,  A' = e^-½ A e^-½
    D = δ (u ⊗ e), u ⊗ e fixed (the g-prior's unit):  M = (u ⊗ e)^½ (s·B' ⊗ A' + δ) (u ⊗ e)^½

    D = 1 ⊗ e, and the last input uncoupled from the others in A (`apart`), e one value for those and one for it:
                                  log|M| = Σ_{boi} log(s·m_bo·l_bi + e_bi), each eigenvector of A with its own value

Any other D cannot be absorbed. Eigenvalues come first (all that the evidence needs); eigenvectors when asked for.
A is (b, i, i), or its diagonal (b, i) where inputs are rows of the identity (embeddings). It is given as it was summed,
which may be in float32, and copied to float64 where that is needed: eigenvalues are not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from lapwing.errors import Unsupported
from lapwing.operators import linalg
from lapwing.operators.diagonal import Diagonal, shifted
from lapwing.operators.memo import KroneckerFactors


@dataclass(frozen=True, eq=False)
class KroneckerPlusDiagonal:
    """M = s·B ⊗ A + diag(d), for each block b."""

    a: Tensor  # (b, i, i) or (b, i)
    b: Tensor  # (b, o, o)
    factor: Tensor  # s, 0-dim
    diag: Diagonal | None = None
    name: str = "a layer"
    eps: float = torch.finfo(torch.float64).eps  # of the numbers that the factors were summed from
    rounding: float = 0.0  # of B, where terms of both signs cancel in it
    apart: bool = False  # A has no products of the last input (a bias's) with the others
    memo: KroneckerFactors = field(default_factory=KroneckerFactors)  # of A and B: shared by every s and single D

    @property
    def shape(self) -> tuple[int, int, int]:
        """(b, o, i)."""
        return self.b.shape[0], self.b.shape[-1], self.a.shape[-1]

    @property
    def size(self) -> int:
        """p = b·o·i."""
        b, o, i = self.shape
        return b * o * i

    @property
    def inputs(self) -> Tensor:
        """A in float64."""
        if self.a.dtype == self.b.dtype:
            return self.a
        if self.memo.inputs is None:
            self.memo.inputs = self.a.to(self.b)
        return self.memo.inputs

    @property
    def input_squares(self) -> Tensor:
        """The diagonal of A, (b, i)."""
        return (self.a if self.a.ndim == 2 else self.a.diagonal(dim1=-2, dim2=-1)).to(self.b)

    # -- the shift as u ⊗ e ---------------------------------------------------------------------------------------

    @cached_property
    def pattern(self) -> tuple[Tensor | None, Tensor | None]:
        """Which value of D each row (b, o) has, or else each column (b, i); neither for a single value."""
        b, o, i = self.shape
        d = self.diag
        if d is None:
            raise Unsupported(f"the Kronecker block of {self.name} has no prior yet; shift it first")
        if d.single:
            return None, None
        index = (torch.arange(d.size, device=d.values.device) if d.index is None else d.index).reshape(b, o, i)
        if bool((index == index[:, :, :1]).all()):
            return index[:, :, 0], None
        if bool((index == index[:, :1]).all()):
            return None, index[:, 0]
        raise Unsupported(
            f"a Kronecker block cannot absorb an element-wise prior on {self.name}; "
            "use a prior per layer or per unit, or structure='diag'"
        )

    @cached_property
    def unit(self) -> tuple[Tensor, Tensor]:
        """u (b, o) and e (b, i) with unit = u ⊗ e, from the row and column of its least entry."""
        b, o, i = self.shape
        assert self.diag is not None
        if self.diag.unit is None:
            one = torch.ones((), dtype=self.diag.values.dtype, device=self.diag.values.device)
            return one.expand(b, o), one.expand(b, i)
        unit = self.diag.unit.reshape(b, o, i)
        least, blocks = unit.flatten(1).argmin(1), torch.arange(b, device=unit.device)
        u, e = unit[blocks, :, least % i], unit[blocks, least // i]
        e = e / e.amin(1, keepdim=True)
        if bool(((u.unsqueeze(-1) * e.unsqueeze(-2) / unit - 1).abs() > 1e-9).any()):
            raise Unsupported(
                f"a Kronecker block cannot absorb prior precisions on {self.name} that are no product of a value a row "
                "and a value a column; use structure='diag', 'block' or 'full'"
            )
        return u, e

    @property
    def separated(self) -> tuple[Tensor, Tensor]:
        """u (b, o) and e (b, i) with D = u ⊗ e, or δ (u ⊗ e) for a single value δ; not kept, since one made under
        no_grad would lose its gradient."""
        by_row, by_column = self.pattern
        assert self.diag is not None
        u, e = self.unit
        values = self.diag.values
        return u if by_row is None else u * values[by_row], e if by_column is None else e * values[by_column]

    @cached_property
    def by_eigenvector(self) -> Tensor | None:
        """Which value of D each eigenvector of A has, (b, i), where an uncoupled last input has another value than the
        rest, who share one; else None."""
        if not self.apart or self.diag is None or self.diag.single or self.diag.unit is not None:
            return None
        _, by_column = self.pattern
        shared = by_column is not None and bool((by_column[:, :-1] == by_column[:, :1]).all())
        return by_column if shared else None

    @property
    def plain(self) -> bool:
        """Whether D leaves the eigenvectors of A and B as they are, so that nothing is whitened."""
        return self.diag is None or self.diag.uniform or self.by_eigenvector is not None

    @property
    def level(self) -> Tensor:
        """What D adds to (whitened) products of eigenvalues: a value for all, (1,), or for each of A's, (b, 1, i)."""
        assert self.diag is not None
        if self.by_eigenvector is not None:
            return self.diag.values[self.by_eigenvector].unsqueeze(-2)
        return self.diag.values if self.diag.single else torch.ones_like(self.diag.values[:1])

    def whitened(self) -> tuple[Tensor, Tensor]:
        """A' and B' for a shift that turns eigenvectors; A and B themselves for one that does not."""
        if self.plain:
            return self.inputs, self.b
        u, e = self.separated
        a = self.a / e if self.a.ndim == 2 else self.a * (e.rsqrt().unsqueeze(-1) * e.rsqrt().unsqueeze(-2))
        return a, self.b * (u.rsqrt().unsqueeze(-1) * u.rsqrt().unsqueeze(-2))

    def _fresh(self) -> bool:
        """Whether eigenvalues must be differentiable, or belong to this shift alone."""
        return self.b.requires_grad or not (self.plain or (self.diag is not None and self.diag.single))

    @property
    def eigenvalues(self) -> Tensor:
        """Products m·l of the (whitened) factors, (b, o, i), differentiable in D."""
        if self._fresh():
            a, b = self.whitened()
            l = linalg.clip(a if a.ndim == 2 else self._input_values(torch.linalg.eigvalsh, a), self.eps)
            return self._clip_outputs(torch.linalg.eigvalsh(b)).unsqueeze(-1) * l.unsqueeze(-2)
        kept = self.memo.spectrum(self.diag)
        if kept.eigenvalues is None:
            if kept.eigenvectors is not None:
                l, _, m, _ = kept.eigenvectors
            else:
                a, b = (self.a, self.b) if self.plain else self.whitened()
                l = a.to(self.b) if a.ndim == 2 else self._input_values(self._eigvalsh, a)
                m = self._eigvalsh(b)
            kept.eigenvalues = self._clip_outputs(m).unsqueeze(-1) * linalg.clip(l, self.eps).unsqueeze(-2)
        return kept.eigenvalues

    def _clip_outputs(self, m: Tensor) -> Tensor:
        """Eigenvalues of B or B' without what rounding took below zero."""
        if not self.rounding or self.plain:
            return linalg.clip(m, self.eps, self.rounding)
        return linalg.clip(m, self.eps, self.rounding / float(self.separated[0].detach().min()))

    def _eigvalsh(self, matrix: Tensor) -> Tensor:
        """Eigenvalues in the precision that the factor was summed in: in float32 that is half the time."""
        single = self.eps >= torch.finfo(torch.float32).eps
        return torch.linalg.eigvalsh(matrix.float() if single else matrix).to(self.b)

    def _input_values(self, eigvalsh: Callable[[Tensor], Tensor], a: Tensor) -> Tensor:
        """Eigenvalues (b, i) of A; that of an uncoupled input in the last place."""
        if not self.apart:
            return eigvalsh(a)
        return torch.cat([eigvalsh(a[:, :-1, :-1]), a[:, -1:, -1].to(self.b)], -1)

    def _input_vectors(self, a: Tensor) -> tuple[Tensor, Tensor]:
        """Eigenvalues (b, i) and eigenvectors (b, i, i) of A, in the order of `_input_values`."""
        if not self.apart:
            return torch.linalg.eigh(a)
        l, u = torch.linalg.eigh(a[:, :-1, :-1])
        vectors = nn.functional.pad(u, (0, 1, 0, 1))
        vectors[:, -1, -1] = 1
        return torch.cat([l, a[:, -1:, -1]], -1), vectors

    @cached_property
    def decomposition(self) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        """l (b, i), U_A (b, i, i) or None for the identity, m (b, o), U_B (b, o, o), of the whitened factors."""
        fresh, kept = self._fresh(), self.memo.spectrum(self.diag)
        if fresh or kept.eigenvectors is None:
            a, b = (t.detach() for t in self.whitened())
            l, ua = (a, None) if a.ndim == 2 else self._input_vectors(a)
            m, ub = torch.linalg.eigh(b)
            out = linalg.clip(l, self.eps), ua, self._clip_outputs(m), ub
            if fresh:
                return out
            kept.eigenvectors = out
        return kept.eigenvectors

    @cached_property
    def precision(self) -> Tensor:
        """The eigenvalues of M (`plain`) or of (u ⊗ e)^-½ M (u ⊗ e)^-½, (b, o, i), in the basis of `decomposition`,
        and like it without gradient: of the verbs only logdet is differentiable."""
        l, _, m, _ = self.decomposition
        return self.factor.detach() * m.unsqueeze(-1) * l.unsqueeze(-2) + self.level.detach()

    def scaling(self) -> Tensor:
        """(u ⊗ e)^-½ as (b, o, i) where D turns eigenvectors, else 1; without gradient."""
        self.pattern  # noqa: B018 - raises for a shift that cannot be absorbed
        if self.plain:
            return torch.ones((), dtype=self.b.dtype, device=self.b.device)
        u, e = (t.detach() for t in self.separated)
        return u.rsqrt().unsqueeze(-1) * e.rsqrt().unsqueeze(-2)

    def rotate(self, w: Tensor) -> Tensor:
        """U_Bᵀ W U_A for W (..., b, o, i)."""
        _, ua, _, ub = self.decomposition
        w = ub.mT @ w
        return w if ua is None else w @ ua

    def rotate_back(self, w: Tensor) -> Tensor:
        """U_B W U_Aᵀ for W (..., b, o, i)."""
        _, ua, _, ub = self.decomposition
        w = ub @ w
        return w if ua is None else w @ ua.mT

    def matrices(self, v: Tensor) -> Tensor:
        """Vectors (..., p) as matrices (..., b, o, i)."""
        return v.reshape(*v.shape[:-1], *self.shape)


@linalg.scale.register
def _(op: KroneckerPlusDiagonal, s: Tensor) -> KroneckerPlusDiagonal:
    return replace(op, factor=op.factor * s, diag=None if op.diag is None else linalg.scale(op.diag, s))


linalg.shift.register(KroneckerPlusDiagonal, shifted)


@linalg.mv.register
def _(op: KroneckerPlusDiagonal, v: Tensor) -> Tensor:
    w = op.matrices(v)
    out = op.b @ (w * op.inputs.unsqueeze(-2) if op.a.ndim == 2 else w @ op.inputs)
    out = (op.factor * out).reshape(v.shape)
    return out if op.diag is None else out + op.diag.dense() * v


@linalg.solve.register
def _(op: KroneckerPlusDiagonal, b: Tensor) -> Tensor:
    scaling = op.scaling()
    return (scaling * op.rotate_back(op.rotate(scaling * op.matrices(b)) / op.precision)).reshape(b.shape)


@linalg.logdet.register
def _(op: KroneckerPlusDiagonal) -> Tensor:
    op.pattern  # noqa: B018 - raises for a shift that cannot be absorbed
    assert op.diag is not None
    if op.diag.single or op.plain:
        out = torch.log(op.factor * op.eigenvalues + op.level).sum()
        return out if op.diag.unit is None else out + op.diag.unit.log().sum()
    return torch.log1p(op.factor * op.eigenvalues).sum() + op.diag.dense().log().sum()


@linalg.draw.register
def _(op: KroneckerPlusDiagonal, n: int, generator: torch.Generator) -> Tensor:
    noise = op.matrices(linalg.standard_normal((n, op.size), generator, op.b))
    return (op.scaling() * op.rotate_back(noise * op.precision.rsqrt())).reshape(n, op.size)


@linalg.covariance.register
def _(op: KroneckerPlusDiagonal, rows: Tensor) -> Tensor:
    half = (op.rotate(op.scaling() * op.matrices(rows)) * op.precision.rsqrt()).flatten(2)
    return half @ half.mT


@linalg.diagonal.register
def _(op: KroneckerPlusDiagonal) -> Tensor:
    a = op.input_squares
    out = op.factor * (op.b.diagonal(dim1=-2, dim2=-1).unsqueeze(-1) * a.unsqueeze(-2)).reshape(-1)
    return out if op.diag is None else out + op.diag.dense()


@linalg.to_dense.register
def _(op: KroneckerPlusDiagonal) -> Tensor:
    a = torch.diag_embed(op.inputs) if op.a.ndim == 2 else op.inputs
    out = op.factor * torch.block_diag(*[torch.kron(b, a) for b, a in zip(op.b, a, strict=True)])
    return out if op.diag is None else out + op.diag.dense().diag()
