"""The exact curvature: G = Σ_n J_nᵀ S_n S_nᵀ J_n, as a P × P matrix (primal) or by its NC rows (dual).

Primal keeps G_g, one lower-triangular sum a curvature weight, accumulated in float64 from buffered rows R = SᵀJ.
Dual keeps inputs and cotangents and makes R when the operator needs it: whole, where it fits the memory budget,
else by ranges of columns. form="auto" takes the smaller of P and NC.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapwing import tree
from lapwing.curvature.cost import Needs, Task, of_matrix, of_rows
from lapwing.curvature.cover import cover
from lapwing.curvature.factor import Factor
from lapwing.curvature.gram import add_gram, mirrored
from lapwing.curvature.hessian import HessianSum
from lapwing.curvature.memory import physical_memory
from lapwing.curvature.parts import Part
from lapwing.curvature.rows import RowMaker, StreamedRows
from lapwing.curvature.state import State
from lapwing.curvature.structure import BUDGET, Accumulator, Kept, Probe, Structure, register
from lapwing.errors import InvalidValue
from lapwing.likelihoods import Likelihood, polarization
from lapwing.operators import Dense, Diagonal, Mixed, OuterRows, RootPlusDiagonal
from lapwing.operators.memo import Factorizations, RowGrams
from lapwing.packing import Expected
from lapwing.tangent import TangentModel

GATHERED_ROWS = 2048  # rows of J gathered before they are multiplied


@dataclass(eq=False)
class DualMemo(RowGrams):
    """What is kept of a dual state: its rows, and their Gram matrices."""

    rows: StreamedRows | None = None


@register
@dataclass(frozen=True)
class Full(Structure):
    """The whole curvature: as a matrix (p, p), primal, or as rows of the data, dual; "auto" takes the smaller."""

    bound: ClassVar[str] = "exact"
    form: str = "auto"  # "primal", "dual" or "auto"
    memory_budget: int = field(default=BUDGET, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.form not in ("auto", "primal", "dual"):
            raise InvalidValue(f"form must be 'auto', 'primal' or 'dual', got {self.form!r}")

    def __str__(self) -> str:
        return "full" if self.form == "auto" else f"full ({self.form})"

    def resolved(self, probe: Probe, factor: Factor) -> Full:
        """The structure as it will be fitted to such data, or an error where it cannot be."""
        rows = probe.n * factor.columns(probe.outputs, probe.positions)
        form = self.form
        if factor.kind == "hessian":
            if form == "dual":
                raise InvalidValue("factor='hessian' has no root, so no dual form; use form='primal'")
            form = "primal"
        elif form == "auto":
            form = self.formed(probe.parameters <= rows).form
        side = probe.parameters if form == "primal" else rows
        if 16 * side**2 > physical_memory():
            raise InvalidValue(
                f"structure='full' ({form}) needs a {side} x {side} matrix, {8 * side**2 / 1e9:.3g} GB twice; "
                "use structure='kron' or 'diag', subset='last_layer', or fewer data"
            )
        return replace(self, form=form)

    def formed(self, primal: bool) -> Full:
        """Itself, primal or dual."""
        return replace(self, form="primal" if primal else "dual")

    @property
    def keeps_rows(self) -> bool:
        """Whether it is dual."""
        return self.form == "dual"

    def start(self, tangent: TangentModel, likelihood: Likelihood, factor: Factor, probe: Probe) -> Accumulator:
        """An empty accumulator for a pass over the data."""
        if factor.kind == "hessian":
            return HessianSum(tangent, likelihood, probe.terms)
        if self.form == "dual":
            return DualRows(tangent, likelihood.paired)
        return GramSum(tangent, cover(tangent, probe.inputs), probe.terms, self.memory_budget)

    def operator(self, state: State, weights: Tensor) -> Dense | RootPlusDiagonal:
        """Σ_h w_h G_h as an operator, for curvature weights w (h,)."""
        if self.form == "primal":
            gram = state.sums["gram"]
            psd = state.factor.kind != "hessian"
            if len(weights) == 1:
                return Dense(gram[0], weights[0], psd=psd, memo=state.factorizations(Factorizations))
            return Dense(torch.einsum("h,hab->ab", weights, gram), psd=psd)
        memo = state.factorizations(DualMemo)
        memo.rows = memo.rows or StreamedRows(state.tangent, state.batches, self.memory_budget)
        return RootPlusDiagonal(memo.rows, _row_weights(state, weights), memo=memo)

    def keeps(self, layout: tree.Layout, parts: tuple[Any, ...], terms: int, factor: Factor) -> Kept:
        """What the sums and the basis of a state must look like, by their names: files are held to it."""
        if parts or self.form == "auto":
            raise InvalidValue(f"{self} has no parts and is primal or dual, and this is {self.form} with {len(parts)}")
        gram = Expected(((terms, layout.size, layout.size),), squares=factor.kind != "hessian", gram=True)
        return ({"gram": gram} if self.form == "primal" else {}), {}

    def coverage(self, parts: tuple[Any, ...], tangent: TangentModel) -> dict[str, str]:
        """How each parameter is treated, in words."""
        return dict.fromkeys(tangent.layout.names, f"exact ({self.form})")

    def needs(self, task: Task) -> Needs:
        """What it takes, counted (cost.py)."""
        return of_rows(task) if self.form == "dual" else of_matrix(task, GATHERED_ROWS)


def _row_weights(state: State, weights: Tensor) -> Diagonal | Mixed:
    """W (m, m): one weight for all rows, or one a column; for weights of pairs the matrix that they are, at each
    position."""
    m = sum(u.shape[0] * u.shape[1] for _, u in state.batches)
    if state.paired:
        root = torch.linalg.cholesky(polarization.matrix_of(weights))
        return Mixed(root, m // len(root))
    if len(weights) == 1:
        return Diagonal(weights, m)
    parts = [torch.arange(u.shape[1]).remainder(len(weights)).expand(u.shape[0], -1) for _, u in state.batches]
    return Diagonal(weights, m, torch.cat([part.reshape(-1) for part in parts]).to(weights.device))


def check_batches(tangent: TangentModel, batches: Iterable[tuple[Any, Tensor]]) -> None:
    """Raise unless the network takes the inputs and its outputs have the shape of their cotangents (n, K, ..., c)."""
    for i, (x, u) in enumerate(batches):
        f = tangent(x)
        if u.ndim < 3 or f.shape != (len(u), *u.shape[2:]) or f.dtype != u.dtype:
            cotangents = f"{u.dtype} {tuple(u.shape)}"
            raise InvalidValue(f"batch {i} has outputs {f.dtype} {tuple(f.shape)} and cotangents {cotangents}")


class GramSum(Accumulator):
    """G += RᵀR over batches, lower triangle, float64.

    The rows of one layer without shared positions (a last layer) are outer products g ⊗ a, and never made: with
    Λ_n = Σ_k g gᵀ the block of outputs (o, q) is Σ_n Λ_n[o, q] a aᵀ, a K-th of the multiplications."""

    mutable = "gram", "held", "outer"

    def __init__(self, tangent: TangentModel, parts: tuple[Part, ...], terms: int, budget: int) -> None:
        p = tangent.layout.size
        self.tangent, self.maker, self.terms, self.budget = tangent, RowMaker(tangent, parts), terms, budget
        self.gram = torch.zeros(terms, p, p, dtype=torch.float64, device=tangent.device)
        self.held: list[Tensor] = []  # (n, K, p) rows waiting to be multiplied
        self.outer: Tensor | None = None  # what came from outer products, in the order of the layer (o, i)

    def check(self) -> None:
        """That what it goes on from are rows, and outer products of the whole."""
        rows = all(isinstance(r, Tensor) and r.ndim == 3 and r.shape[2] == self.maker.width for r in self.held)
        if not rows or (self.outer is not None and getattr(self.outer, "shape", None) != self.gram.shape):
            raise InvalidValue(f"rows must be (n, K, {self.maker.width}), and outer products {tuple(self.gram.shape)}")

    def forward(self, x: Any) -> Tensor:
        """The outputs f (n, ..., c) of a batch."""
        self.record = self.maker.run(x)
        return self.record.f.detach()

    def observe(self, x: Any, y: Tensor, f: Tensor, u: Tensor, column: Tensor) -> None:
        """Add a batch: inputs x, targets y, outputs f (n, ..., c), cotangents u (n, K, ..., c) and the output of
        each column."""
        outer = self.maker.outer(self.record, u)
        if outer is not None:
            self._add_outer(outer)
        else:
            most = max(1, min(GATHERED_ROWS, self.budget // (32 * self.maker.width)))
            for rows in self.maker.rows(self.record, x, u, self.budget // 4):
                self.held.append(rows)
                if sum(r.shape[0] * r.shape[1] for r in self.held) >= most:
                    self.flush()
        del self.record

    def _add_outer(self, rows: OuterRows) -> None:
        self.outer = torch.zeros_like(self.gram) if self.outer is None else self.outer
        n, i = rows.a.shape
        for total, g in zip(self.outer, (rows.g[:, h :: self.terms] for h in range(self.terms)), strict=True):
            middle = g.mT @ g  # (n, o, o)
            for o in range(middle.shape[1]):
                right = middle[:, o, : o + 1, None] * rows.a[:, None]  # (n, o + 1, i)
                total[o * i : (o + 1) * i, : (o + 1) * i].addmm_(rows.a.mT, right.reshape(n, -1))

    def flush(self) -> None:
        """Multiply the rows that wait, and add them to the Gram matrices (h, p, p)."""
        if not self.held:
            return
        rows = torch.cat(self.held).to(torch.float64)  # (n, K, p)
        self.held = []
        for h in range(self.terms):
            mine = rows if self.terms == 1 else rows[:, h :: self.terms]
            add_gram(self.gram[h], mine.reshape(-1, rows.shape[-1]))

    def finish(self) -> tuple[dict[str, Tensor], tuple[Any, ...]]:
        """The sums by their names, and the batches that are kept."""
        self.flush()
        gram = mirrored(self.gram)
        if self.outer is not None:
            place = torch.argsort(self.maker.index)
            gram += mirrored(self.outer)[:, place][:, :, place]
        return {"gram": gram}, ()


class DualRows(Accumulator):
    """Keeps inputs and cotangents; the rows are made when the operator asks. Of columns of pairs, which are sums of
    those of single outputs, none are kept."""

    mutable = ("batches",)

    def __init__(self, tangent: TangentModel, paired: bool) -> None:
        self.tangent, self.paired = tangent, paired
        self.batches: list[tuple[Any, Tensor]] = []

    def check(self) -> None:
        """Raise unless what was read from a checkpoint can be batches."""
        if not all(isinstance(one, tuple) and len(one) == 2 and isinstance(one[1], Tensor) for one in self.batches):
            raise InvalidValue("batches must be pairs of inputs and cotangents")
        check_batches(self.tangent, self.batches)

    def observe(self, x: Any, y: Tensor, f: Tensor, u: Tensor, column: Tensor) -> None:
        """Keep the inputs and cotangents of a batch."""
        u = u[:, column < f.shape[-1]] if self.paired else u
        kept = tree.map_tensors(lambda t: t.detach().clone(), x)
        self.batches.append((kept, u.to(f).contiguous()))

    def finish(self) -> tuple[dict[str, Tensor], tuple[tuple[Any, Tensor], ...]]:
        """The sums by their names, and the batches that are kept."""
        return {}, tuple(self.batches)
