"""Root plus diagonal: M = Rᵀ W R + D, with R (m, p) of few rows and many columns.

The dual (kernel) form. With K = R D⁻¹ Rᵀ and B = I + W^½ K W^½ (both m × m), and for a W that mixes rows any root of it
in place of W^½ (mixed.py):

    log|M|   = log|B| + log|D|                                              Eq. 10
    M⁻¹      = D⁻¹ − D⁻¹RᵀW^½ B⁻¹ W^½R D⁻¹                                    Eq. 11
    X M⁻¹ Xᵀ = X D⁻¹Xᵀ − (W^½R D⁻¹Xᵀ)ᵀ B⁻¹ (W^½R D⁻¹Xᵀ)                        Eq. 12
    sample   = M⁻¹(RᵀW^½ ε₁ + D^½ ε₂)                                       Eq. 13

R is a tensor, or anything with `shape` and `block(start, stop)`, a range of its columns: it is then streamed and
never held whole. Where some columns of every row are an outer product g ⊗ a (a layer without shared positions),
inner products of rows need no columns at all: ⟨g ⊗ a, g' ⊗ a'⟩ = ⟨g, g'⟩⟨a, a'⟩. For few groups of D one Gram matrix
a group is kept, K = Σ_g K_g/d_g, so changing D costs no pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from lapwing.errors import Unsupported, warn
from lapwing.operators import linalg
from lapwing.operators.diagonal import Diagonal, shifted
from lapwing.operators.memo import RowGrams
from lapwing.operators.mixed import Mixed, back, half, trace

DIGITS = 100.0  # roundings of a difference within which it has hardly a right digit
GROUPS = 64  # Gram matrices kept at the most: past that, K is formed anew for each D


class RowSource(Protocol):
    """A matrix (m, p) that gives ranges of its columns."""

    @property
    def shape(self) -> tuple[int, int]:
        """(m, p)."""

    def block(self, start: int, stop: int) -> Tensor:
        """A range of columns, (m, stop − start)."""

    @property
    def held(self) -> bool:
        """Whether all columns are in memory."""

    @property
    def pairs(self) -> dict[str, Pair]:
        """Columns that are outer products, by a name for them."""

    def ranges(self, beside: int = 0, without: frozenset[str] = frozenset()) -> Iterator[tuple[int, int]]:
        """Column ranges that fit the memory budget, with `beside` other rows held at the same time, and without the
        columns of some pairs."""


@dataclass(frozen=True, eq=False)
class Pair:
    """Columns `index` (o·i,) of every row r that are g_r ⊗ a_r."""

    index: Tensor
    a: Tensor  # (m, i), float64
    g: Tensor  # (m, o), float64

    def products(self, other: Pair) -> Tensor:
        """Inner products of the rows over these columns, (m, m')."""
        return (self.a @ other.a.mT) * (self.g @ other.g.mT)

    def squares(self, c: int) -> Tensor:
        """Those among each c rows that follow one another, (m/c, c, c)."""
        a, g = (t.reshape(-1, c, t.shape[-1]) for t in (self.a, self.g))
        return (a @ a.mT) * (g @ g.mT)

    def group(self, d: Diagonal) -> int | None:
        """The group of a Diagonal that all these columns belong to, if there is one and it has one unit."""
        group = None if d.unit is not None else d.groups_at(self.index)
        return group if isinstance(group, int) else None


@dataclass(frozen=True, eq=False)
class HeldRows:
    """Rows that are in memory, of whose columns nothing else is known."""

    tensor: Tensor  # (m, p)
    held: bool = field(default=True, init=False)
    pairs: dict[str, Pair] = field(default_factory=dict, init=False)  # none; never written to

    @property
    def shape(self) -> tuple[int, int]:
        """(m, p)."""
        return self.tensor.shape[0], self.tensor.shape[1]

    def block(self, start: int, stop: int) -> Tensor:
        """A range of columns, (m, stop − start)."""
        return self.tensor[:, start:stop]

    def ranges(self, beside: int = 0, without: frozenset[str] = frozenset()) -> Iterator[tuple[int, int]]:
        """One range, of all columns."""
        yield 0, self.shape[1]


@dataclass(frozen=True, eq=False)
class RootPlusDiagonal:
    """M = Rᵀ W R + D, R (m, p), W (m, m), D (p, p)."""

    rows: RowSource
    weights: Diagonal | Mixed  # W, (m, m)
    diag: Diagonal | None = None  # D; the verbs that need M⁻¹ need it
    memo: RowGrams = field(default_factory=RowGrams)  # of R: shared by every W and D

    @property
    def size(self) -> int:
        """p."""
        return self.rows.shape[1]

    @property
    def m(self) -> int:
        """The number of rows of R."""
        return self.rows.shape[0]

    def blocks(self, beside: int = 0, without: frozenset[str] = frozenset()) -> Iterator[tuple[slice, Tensor]]:
        """Ranges of columns, and R there, (m, columns), in float64."""
        for start, stop in self.rows.ranges(beside, without):
            yield slice(start, stop), self.rows.block(start, stop).to(torch.float64)

    def precision(self) -> Diagonal:
        """D; an error where there is none."""
        if self.diag is None:
            raise Unsupported("Rᵀ W R alone is singular; shift it by a prior precision first")
        return self.diag

    @property
    def d(self) -> Tensor:
        """D's diagonal, (p,), without gradient, like the factor of B: of the verbs only logdet is differentiable."""
        return self.precision().dense().detach()

    @property
    def w(self) -> Diagonal | Mixed:
        """W, without gradient."""
        return replace(self.weights, values=self.weights.values.detach())

    def gram(self) -> Tensor:
        """K = R D⁻¹ Rᵀ, (m, m), differentiable in D; not kept, since one made under no_grad would lose that."""
        d = self.precision()
        if d.values.numel() <= GROUPS:
            return torch.einsum("g,gab->ab", 1 / d.values, self.group_grams(d))
        if self.rows.held:
            r = self.rows.block(0, self.size).to(torch.float64)
            return (r / d.dense()) @ r.mT
        if d.values.requires_grad:
            raise Unsupported(
                f"tuning {d.values.numel()} prior precisions in the dual form needs its rows in memory: raise "
                "memory_budget, use a layerwise prior, or structure='diag'"
            )
        dense, k = d.dense(), d.values.new_zeros(self.m, self.m)
        for columns, r in self.blocks():
            k += (r / dense[columns]) @ r.mT
        return k

    def group_grams(self, d: Diagonal) -> Tensor:
        """K_g = R_g unit⁻¹ R_gᵀ for the columns of each group, (g, m, m)."""
        index = None if d.index is None else hash(d.index.cpu().numpy().tobytes())
        key = d.values.numel(), index, d.unit_key
        if key not in self.memo.grams:
            grams = torch.zeros(d.values.numel(), self.m, self.m, dtype=d.values.dtype, device=d.values.device)
            paired = self.paired(self.rows, d)
            for name, group in paired.items():
                grams[group] += self.rows.pairs[name].products(self.rows.pairs[name])
            for columns, r in self.blocks(without=frozenset(paired)):
                r = r if d.unit is None else r * d.unit[columns].rsqrt()
                for g, mask in _groups(d, columns):
                    part = r if mask is None else r[:, mask]
                    grams[g] += part @ part.mT
            self.memo.grams[key] = grams
        return self.memo.grams[key]

    def paired(self, other: RowSource, d: Diagonal) -> dict[str, int]:
        """Pairs that both sides have and that lie in one group of d: name -> group."""
        groups = {name: pair.group(d) for name, pair in self.rows.pairs.items() if name in other.pairs}
        return {name: group for name, group in groups.items() if group is not None}

    @property
    def gram_eigenvalues(self) -> Tensor:
        """Eigenvalues of R unit⁻¹ Rᵀ, for uniform W and a single value of D."""
        kept, unit = self.memo.spectrum(self.diag), self.precision().unit
        if kept.eigenvalues is None:
            gram = self.group_grams(Diagonal(torch.ones_like(self.weights.values), self.size, unit=unit))[0]
            kept.eigenvalues = linalg.clip(torch.linalg.eigvalsh(gram))
        return kept.eigenvalues

    def inner(self) -> Tensor:
        """B = I + W^½ K W^½."""
        inner = half(self.weights, half(self.weights, self.gram()).mT)
        return torch.eye(len(inner), dtype=inner.dtype, device=inner.device) + inner

    @cached_property
    def inner_cholesky(self) -> Tensor:
        """The Cholesky factor of B (m, m), without gradient."""
        factor, jitter = linalg.cholesky(self.inner().detach())
        self.memo.jitter = max(self.memo.jitter, jitter)
        return factor

    def times(self, v: Tensor) -> Tensor:
        """v Rᵀ: (..., p) -> (..., m)."""
        return sum((v[..., columns] @ r.mT for columns, r in self.blocks()), v.new_zeros(()))

    def transpose_times(self, u: Tensor) -> Tensor:
        """u R: (..., m) -> (..., p)."""
        return torch.cat([u @ r for _, r in self.blocks()], dim=-1)


def _groups(d: Diagonal, columns: slice) -> Iterator[tuple[int, Tensor | None]]:
    """The groups that a range of columns touches, with their masks (None: the whole range)."""
    if d.single:
        yield 0, None
        return
    index = torch.arange(d.size)[columns] if d.index is None else d.index[columns]
    present = index.unique().tolist()
    for g in present:
        yield g, None if len(present) == 1 else index == g


@linalg.scale.register
def _(op: RootPlusDiagonal, s: Tensor) -> RootPlusDiagonal:
    return replace(op, weights=linalg.scale(op.weights, s), diag=None if op.diag is None else linalg.scale(op.diag, s))


linalg.shift.register(RootPlusDiagonal, shifted)


@linalg.mv.register
def _(op: RootPlusDiagonal, v: Tensor) -> Tensor:
    out = op.transpose_times(back(op.weights, half(op.weights, op.times(v))))
    return out if op.diag is None else out + op.diag.dense() * v


@linalg.solve.register
def _(op: RootPlusDiagonal, b: Tensor) -> Tensor:
    scaled, w = b / op.d, op.w  # Eq. 11
    seen = half(w, op.times(scaled))
    inner = torch.cholesky_solve(seen.reshape(-1, seen.shape[-1]).mT, op.inner_cholesky).mT
    return scaled - op.transpose_times(back(w, inner.reshape(seen.shape))) / op.d


@linalg.logdet.register
def _(op: RootPlusDiagonal) -> Tensor:
    d, w = op.precision(), op.weights
    wants_grad = torch.is_grad_enabled() and (d.values.requires_grad or w.values.requires_grad)
    if d.single and w.uniform and (wants_grad or op.memo.spectrum(d).eigenvalues is not None):
        return torch.log1p(w.values * op.gram_eigenvalues / d.values).sum() + d.logdet()
    if not wants_grad:
        return 2 * op.inner_cholesky.diagonal().log().sum() + d.logdet()  # Eq. 10
    return torch.linalg.cholesky(op.inner()).diagonal().log().sum() * 2 + d.logdet()


@linalg.draw.register
def _(op: RootPlusDiagonal, n: int, generator: torch.Generator) -> Tensor:
    e1 = linalg.standard_normal((n, len(op.inner_cholesky)), generator, op.d)
    e2 = linalg.standard_normal((n, op.size), generator, op.d)
    return linalg.solve(op, op.transpose_times(back(op.w, e1)) + op.d.sqrt() * e2)  # Eq. 13


@linalg.covariance.register
def _(op: RootPlusDiagonal, rows: Any) -> Tensor:
    """`rows` (n, c, p) as a tensor, or a pair (RowSource of n·c rows, c) that is streamed beside R."""
    if isinstance(rows, Tensor):
        c, rows = rows.shape[1], HeldRows(rows.reshape(-1, rows.shape[-1]))
    else:
        rows, c = rows
    nc, d = rows.shape[0], op.d
    prior = d.new_zeros(nc // c, c, c)
    cross = d.new_zeros(op.m, nc)
    paired = op.paired(rows, op.precision())
    for name, group in paired.items():
        precision = op.precision().values.detach()[group]
        cross += op.rows.pairs[name].products(rows.pairs[name]) / precision
        prior += rows.pairs[name].squares(c) / precision
    for columns, r in op.blocks(beside=nc, without=frozenset(paired)):
        x = rows.block(columns.start, columns.stop).to(torch.float64)
        scaled = x / d[columns]
        cross += r @ scaled.mT
        prior += torch.einsum("nap,nbp->nab", x.reshape(nc // c, c, -1), scaled.reshape(nc // c, c, -1))
    seen = torch.linalg.solve_triangular(op.inner_cholesky, half(op.w, cross.mT).mT, upper=False)
    seen = seen.reshape(-1, nc // c, c)
    found = prior - torch.einsum("mna,mnb->nab", seen, seen)  # Eq. 12
    _warn_canceled(found.diagonal(dim1=-2, dim2=-1), prior.diagonal(dim1=-2, dim2=-1), op.m)
    return found


def _warn_canceled(var: Tensor, before: Tensor, m: int) -> None:
    """Say so where a variance is no more than the rounding of the prior's, from which m rows are subtracted."""
    rounding = DIGITS * m**0.5 * torch.finfo(var.dtype).eps * before
    lost = int((var < rounding).sum())
    if lost and bool((before > 0).any()):
        warn(
            f"{lost} of {var.numel()} variances of outputs are below the rounding of what they are the difference of, "
            f"the prior's, {float(before.max()):.2g}, and the data's part of it: they have hardly a digit. Raise the "
            "prior precision, scale the inputs, or fit with lw.curvature.Full(form='primal')",
        )


@linalg.diagonal.register
def _(op: RootPlusDiagonal) -> Tensor:
    out = torch.cat([half(op.weights, r.mT).square().sum(-1) for _, r in op.blocks()])
    return out if op.diag is None else out + op.diag.dense()


@linalg.traces.register
def _(op: RootPlusDiagonal, groups: Diagonal) -> Tensor:
    if groups.values.numel() > GROUPS:
        return linalg.traces.dispatch(object)(op, groups)
    out = trace(op.weights, op.group_grams(groups))
    return out if op.diag is None else out + linalg.traces(op.diag, groups)


@linalg.to_dense.register
def _(op: RootPlusDiagonal) -> Tensor:
    r = half(op.weights, torch.cat([r for _, r in op.blocks()], dim=1).mT)
    out = r @ r.mT
    return out if op.diag is None else out + op.diag.dense().diag()


linalg.jitter.register(RootPlusDiagonal, lambda op: op.memo.jitter)
