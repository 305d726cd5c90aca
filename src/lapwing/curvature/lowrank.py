"""Low rank: G ≈ Ĝ = Rᵀ R, R (k, p), with the prior whole in the complement; precision Rᵀ R + A by Woodbury.

    Y = Ω G = Σ_n Σ_j (Ω r) rᵀ,    r = J_nᵀ u_j,        Ĝ = Yᵀ (Ω Yᵀ)⁺ Y                            Eq. 14c

One pass: Ω (k, p) is pseudorandom, the same for all, so that sketches of shards add. Each pass more takes Ω from the
range of the last sketch (subspace iteration), and comes nearer to the top k eigenpairs of G: such sums add only with a
shared Ω, which the state keeps. Always Ĝ ⪯ G. Beside it, tr G of each parameter is summed exactly, which tells how much
Ĝ has of it. Noise per output gives one sketch an output, of rank k each. A covariance of noise gives one in all: with
the same Ω for every column the sketch of Σ_h w_h G_h is Σ_h w_h Y_h, whatever the signs of w, and its Ĝ lies in the
span V of all Y_h,

    Ĝ = Vᵀ L Lᵀ V,      Lᵀ = C⁻¹ Σ_h w_h Y_h Vᵀ,      C Cᵀ = Σ_h w_h Ω Y_hᵀ
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapwing import given, tree
from lapwing.curvature.cost import Needs, Task
from lapwing.curvature.cover import cover
from lapwing.curvature.factor import Factor
from lapwing.curvature.memory import physical_memory
from lapwing.curvature.parts import Part
from lapwing.curvature.rows import RowMaker
from lapwing.curvature.state import State
from lapwing.curvature.structure import BUDGET, Accumulator, Kept, Probe, Structure, register, same_terms
from lapwing.errors import InvalidValue
from lapwing.likelihoods import Likelihood
from lapwing.operators import Diagonal, HeldRows, Mixed, RootPlusDiagonal, linalg
from lapwing.operators.memo import RowGrams
from lapwing.packing import Expected
from lapwing.solvers.nystrom import Subspace, from_sketch, mixed_root, span_of
from lapwing.splitmix import GOLDEN, mixed, unsigned_shift
from lapwing.tangent import TangentModel

COPIES = 6  # of (k, p) in float64 that are held at once, at the most


@dataclass(eq=False)
class SketchMemo(RowGrams):
    """What is kept of a sketch: the root that it gives, of all weights (h·k, p) or of pairs of outputs, and the root's
    Gram matrices."""

    root: Tensor | None = None
    span: Subspace | None = None


@register
@dataclass(frozen=True)
class LowRank(Structure):
    """A sketch of G, of so high a rank, by so many passes over the data."""

    bound: ClassVar[str] = "upper"
    rank: int = 100
    passes: int = 1  # over the data
    memory_budget: int = field(default=BUDGET, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        given.whole(self.rank, "the rank of lowrank", 1)
        given.whole(self.passes, "the passes of lowrank", 1)

    def __str__(self) -> str:
        return f"lowrank (rank {self.rank}{f', {self.passes} passes' if self.passes > 1 else ''})"

    @property
    def first(self) -> LowRank | None:
        """The structure of the passes before the last, from whose sketch that takes its test vectors."""
        return replace(self, passes=self.passes - 1) if self.passes > 1 else None

    def resolved(self, probe: Probe, factor: Factor) -> LowRank:
        """The structure as it will be fitted to such data, or an error where it cannot be."""
        if factor.kind == "hessian":
            raise InvalidValue("structure='lowrank' needs a curvature without negative eigenvalues; use factor='exact'")
        rank = min(self.rank, probe.parameters)
        size = 8 * COPIES * rank * probe.parameters * probe.terms
        if size > physical_memory():
            each = f", one for each of {probe.terms} curvature weights," if probe.terms > 1 else ""
            raise InvalidValue(
                f"a sketch of rank {rank} of {probe.parameters:,} parameters{each} takes {size / 1e9:.3g} GB; use a "
                "smaller rank, subset=, or structure='kron' or 'diag'"
            )
        return replace(self, rank=rank)

    def start(self, tangent: TangentModel, likelihood: Likelihood, factor: Factor, probe: Probe) -> Accumulator:
        """An empty accumulator for a pass over the data."""
        tests = pseudorandom(self.rank, tangent).expand(probe.terms, -1, -1)
        return SketchSum(tangent, cover(tangent, probe.inputs), tests, {}, self.memory_budget)

    def start_in(
        self, basis: State, tangent: TangentModel, likelihood: Likelihood, factor: Factor, probe: Probe
    ) -> Accumulator:
        """One whose test vectors are those of a state, or span its sketch's range."""
        tests = self._tests(basis, likelihood.curvature_weights(factor.kind))
        same_terms(len(tests), probe.terms)
        return SketchSum(tangent, cover(tangent, probe.inputs), tests, {"tests": tests}, self.memory_budget)

    def _tests(self, basis: State, weights: Tensor) -> Tensor:
        """Ω of a state of this structure; or, from one of a pass fewer, an orthonormal basis of its sketch's range (of
        each weight's; of pairs, of that at these weights)."""
        if not isinstance(basis, State) or basis.structure not in (self, self.first):
            raise InvalidValue(f"basis must be a state of structure {self} or {self.first}, got {basis!r}")
        if basis.structure == self:
            return basis.basis["tests"]
        sketch = basis.sums["sketch"]
        if basis.paired:
            one = torch.einsum("h,hkp->kp", weights.detach().to(sketch), sketch)
            return _range(one).expand_as(sketch)  # once: equal members of a batch may get other bases
        return _range(sketch)

    def operator(self, state: State, weights: Tensor) -> RootPlusDiagonal:
        """Σ_h w_h G_h as an operator, for curvature weights w (h,)."""
        if state.paired:
            return self._together(state, weights)
        memo = state.factorizations(SketchMemo)
        if memo.root is None:
            pairs = zip(state.sums["sketch"], self.tests(state), strict=True)
            memo.root = torch.cat([from_sketch(sketch, test, _eps(state)).root for sketch, test in pairs])
        root = memo.root
        index = torch.arange(len(weights), device=weights.device).repeat_interleave(len(root) // len(weights))
        own = Diagonal(weights, len(root), None if len(weights) == 1 else index)
        return RootPlusDiagonal(HeldRows(root), own, memo=memo)

    def _together(self, state: State, weights: Tensor) -> RootPlusDiagonal:
        """Vᵀ L Lᵀ V; without a gradient to carry, by the k rows Lᵀ V."""
        memo = state.factorizations(SketchMemo)
        memo.span = span = memo.span or span_of(state.sums["sketch"], self.tests(state)[0], _eps(state))
        L = mixed_root(span, weights)
        if L.requires_grad:
            return RootPlusDiagonal(HeldRows(span.V), Mixed(L), memo=memo)
        return RootPlusDiagonal(HeldRows(L.mT @ span.V), Diagonal(L.new_ones(1), L.shape[1]))

    def tests(self, state: State) -> Tensor:
        """Ω (h, k, p)."""
        if state.basis:
            return state.basis["tests"]
        return pseudorandom(self.rank, state.tangent).expand(state.terms, -1, -1)

    def cores(self, state: State) -> dict[str, Tensor]:
        """Ω G Ωᵀ (h, k, k)."""
        core = state.sums["sketch"] @ self.tests(state).mT
        return {"sketch": (core + core.mT) / 2}

    def keeps(self, layout: tree.Layout, parts: tuple[Part, ...], terms: int, factor: Factor) -> Kept:
        """What the sums and the basis of a state must look like, by their names: files are held to it."""
        if parts:
            raise InvalidValue(f"{self} has no parts, and this has {len(parts)}")
        sketch = Expected(((terms, min(self.rank, layout.size), layout.size),))
        trace = Expected(((terms, len(layout.names)),), squares=True)
        tests = {"tests": replace(sketch, orthonormal=True)} if self.passes > 1 else {}
        return {"sketch": sketch, "trace": trace}, tests

    def coverage(self, parts: tuple[Part, ...], tangent: TangentModel) -> dict[str, str]:
        """How each parameter is treated, in words."""
        return dict.fromkeys(tangent.layout.names, f"rank {self.rank} of the whole network, and the prior")

    def captured(self, state: State, weights: Tensor) -> tuple[float, dict[str, float]]:
        """tr Ĝ / tr G, and the same for each parameter; 1 where there is no curvature."""
        op = self.operator(state, weights.detach())
        entries = linalg.diagonal(op)
        own = torch.stack([entries[columns].sum() for columns in state.layout.slices().values()])
        true = weights.detach() @ state.sums["trace"]  # (parameters,)
        shares = torch.where(true > 0, own / true, 1.0).clamp(max=1.0).tolist()  # more than all of it is rounding
        total = float(own.sum() / true.sum()) if bool(true.any()) else 1.0
        return total, dict(zip(state.layout.names, shares, strict=True))

    def needs(self, task: Task) -> Needs:
        """What it takes, counted (cost.py)."""
        held = 8 * min(self.rank, task.size) * task.size * task.terms
        note = f"rank {self.rank} of the whole"
        return Needs(COPIES * held, state=held, kept=3 * held, passes=self.passes, by_batch=False, note=note)


def _range(sketch: Tensor) -> Tensor:
    """Orthonormal rows that span those of Y (..., k, p)."""
    return torch.linalg.qr(sketch.mT)[0].mT.contiguous()


def _eps(state: State) -> float:
    """Of the products that its sketch was summed from, with the digits that removals have cost."""
    return torch.finfo(state.tangent.sum_dtype).eps * 10**state.lost


class SketchSum(Accumulator):
    """Y (h, k, p) and tr G (h, parameters), one each a curvature weight, in float64; products in the network's dtype,
    float32 or better."""

    mutable = "sketch", "trace", "each"

    def __init__(
        self,
        tangent: TangentModel,
        parts: tuple[Part, ...],
        tests: Tensor,  # Ω (h, k, p)
        basis: dict[str, Tensor],
        budget: int,
    ) -> None:
        self.tangent, self.maker, self.budget, self.basis = tangent, RowMaker(tangent, parts), budget, basis
        self.each: int | None = None  # bytes of an example's rows, and of the gradients that they are made from
        self.tests = tests.to(tangent.sum_dtype)
        self.slices = list(tangent.layout.slices().values())
        self.sketch = torch.zeros(tests.shape, dtype=torch.float64, device=tangent.device)
        self.trace = torch.zeros(len(tests), len(self.slices), dtype=torch.float64, device=tangent.device)

    def check(self) -> None:
        """Raise unless what was read from a checkpoint can be a size."""
        if self.each is not None and (type(self.each) is not int or self.each < 1):
            raise InvalidValue(f"an example's rows cannot take {self.each!r} bytes")

    def observe(self, x: Any, y: Tensor, f: Tensor, u: Tensor, column: Tensor) -> None:
        """Add a batch: inputs x, targets y, outputs f (n, ..., c), cotangents u (n, K, ..., c) and the output of
        each column."""
        part = self.budget // 8  # rows are there three times while the next are made, beside Y and Ω
        for piece, some in self.tangent.pieces(x, u, 2 * part // self._bytes(x, u)):
            for rows in self.maker.rows(self.maker.run(piece), piece, some, part):  # (n, K, p)
                self._add(rows.transpose(0, 1))

    def _bytes(self, x: Any, u: Tensor) -> int:
        if self.each is None:
            one = self.maker.run(tree.rows_of(x, slice(0, 1)) if self.tangent.separable(x) else x)
            self.each = 2 * u.shape[1] * (self.tests.shape[-1] * self.tests.element_size() + one.column_bytes)
        return self.each

    def _add(self, rows: Tensor) -> None:
        """Rows (K, n, p), as they lie in memory."""
        terms = len(self.sketch)
        for h, tests in enumerate(self.tests):
            mine = rows[h::terms].reshape(-1, rows.shape[-1]).to(tests)
            self.sketch[h] += (mine @ tests.mT).mT @ mine
            lengths = [torch.linalg.vector_norm(mine[:, columns], dtype=torch.float64) for columns in self.slices]
            self.trace[h] += torch.stack(lengths).square()

    def finish(self) -> tuple[dict[str, Tensor], tuple[Any, ...]]:
        """The sums by their names, and the batches that are kept."""
        return {"sketch": self.sketch, "trace": self.trace}, ()


def pseudorandom(k: int, tangent: TangentModel) -> Tensor:
    """Ω (k, p): entry (i, j) is uniform in [−½, ½), a hash of i and j (splitmix64), bit for bit the same on every
    machine, so that no state needs to keep it."""
    p = tangent.layout.size
    out = torch.empty(k, p, dtype=torch.float64)
    for i, row in enumerate(out):
        z = mixed((torch.arange(1, p + 1) + i * p) * GOLDEN)
        row[:] = unsigned_shift(z, 11).to(torch.float64) * 2.0**-53 - 0.5
    return out.to(tangent.device)
