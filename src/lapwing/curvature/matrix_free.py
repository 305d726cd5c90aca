"""The exact curvature, never formed: a structure that keeps the data's place, and products for sums (data_root.py).

The state holds a reference to the data, and the sums of a coarser structure, fitted in the same pass, that serves as
preconditioner; posterior, evidence and predictions are samples of one linear system (operators/streamed.py). Memory is
that of the samples, whatever the numbers of data and outputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapwing import given
from lapwing.curvature.accumulate import Pass
from lapwing.curvature.checkpoint import FitCheckpoint
from lapwing.curvature.cost import Needs, Task
from lapwing.curvature.data_root import source
from lapwing.curvature.factor import Factor
from lapwing.curvature.layered import Diagonal, Kronecker
from lapwing.curvature.lowrank import COPIES, LowRank
from lapwing.curvature.parts import Part
from lapwing.curvature.state import Memo, State
from lapwing.curvature.structure import BUDGET, Accumulator, Kept, Probe, Structure, covered, register
from lapwing.errors import InvalidValue
from lapwing.likelihoods import Likelihood
from lapwing.operators import Diagonal as DiagonalOperator
from lapwing.operators import SolvePlan, Streamed, linalg
from lapwing.operators.streamed import Remembered
from lapwing.tangent import TangentModel
from lapwing.tree import Layout

FINE, COARSE, STOCHASTIC = 1e-6, 1e-3, 2e-2  # tolerances: of a float64 network, of a coarser one, and of SGD
PRECONDITIONERS = ("kron", "diag", "nystrom", "none")
RANK, LEAST = 100, 8  # of a Nyström preconditioner: the most, and the least that "auto" takes
FEW_COLUMNS = 16  # of the exact output factor, up to which a Nyström preconditioner takes it


@dataclass(eq=False)
class MatrixFreeMemo:
    """What is kept of a streamed state: of its preconditioner, and of its samples."""

    companion: Memo = field(default_factory=Memo)
    samples: Remembered = field(default_factory=Remembered)


@register
@dataclass(frozen=True)
class MatrixFree(Structure):
    """samples: draws of the posterior that are kept. solver: "cg", or "sgd" for data too many to stream at each step.
    preconditioner: "nystrom", "kron", "diag", "none", or "auto": nystrom, and none where the memory budget has no room
    for a rank of 8. tolerance: of a solve's residual; 0 goes by the dtype. seed: of the samples' noise; −1 takes it
    from the fit's generator. rank: of nystrom; 0 is what the memory budget has room for, at most a quarter of the
    parameters and 100."""

    streams: ClassVar[bool] = True
    exact_factor_is_free: ClassVar[bool] = True
    bound: ClassVar[str] = "estimate"
    samples: int = 32
    solver: str = "cg"
    preconditioner: str = "auto"
    tolerance: float = 0.0
    max_steps: int = 500
    seed: int = -1
    rank: int = 0
    memory_budget: int = field(default=BUDGET, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.solver not in ("cg", "sgd"):
            raise InvalidValue(f"solver must be 'cg' or 'sgd', got {self.solver!r}")
        if self.preconditioner not in ("auto", *PRECONDITIONERS):
            raise InvalidValue(
                f"preconditioner must be 'auto' or one of {list(PRECONDITIONERS)}, got {self.preconditioner!r}"
            )
        for name, least in (("samples", 4), ("max_steps", 1), ("rank", 0)):  # 4 samples, for error bars
            given.whole(getattr(self, name), f"{name} of matrix_free", least)
        if not isinstance(self.tolerance, (int, float)) or not self.tolerance >= 0:
            raise InvalidValue(f"the tolerance of matrix_free must not be negative, got {self.tolerance!r}")

    def __str__(self) -> str:
        return "matrix_free"

    @property
    def near(self) -> Structure:
        """The structure of the preconditioner."""
        if self.preconditioner == "none":
            return Nothing()
        if self.preconditioner == "nystrom":
            return LowRank(self.rank, memory_budget=self.memory_budget)
        return (Kronecker if self.preconditioner == "kron" else Diagonal)(memory_budget=self.memory_budget)

    def resolved(self, probe: Probe, factor: Factor) -> MatrixFree:
        """The structure as it will be fitted to such data, or an error where it cannot be."""
        if factor.kind != "exact":
            raise InvalidValue(
                f"matrix_free multiplies by the exact output curvature, at no extra cost; got factor='{factor.kind}': "
                "use factor='exact' (or 'auto')"
            )
        if self.preconditioner not in ("auto", "nystrom"):
            return self
        room = self.memory_budget // (8 * COPIES * probe.parameters * probe.terms)
        rank = self.rank or max(1, min(RANK, probe.parameters // 4, room))
        fits = self.preconditioner == "nystrom" or bool(self.rank) or room >= LEAST
        return replace(self, preconditioner="nystrom", rank=rank) if fits else replace(self, preconditioner="none")

    def streamed(self, one: Pass, checkpoint: FitCheckpoint | None) -> State:
        """The state: that of the preconditioner, by one pass, and where the data are."""
        seed = self.seed if self.seed >= 0 else int(torch.randint(2**31, (), generator=one.generator))
        terms = len(one.likelihood.curvature_weights("exact"))
        near = self.near_factor(terms, one.seen.outputs * one.seen.positions)
        state = one.by(self.near, near if near.kind in one.likelihood.factors else Factor("exact"), checkpoint)
        return replace(
            state,
            structure=replace(self, seed=seed),
            factor=Factor("exact"),
            terms=terms,
            source=source(state, one.likelihood, terms, one.batches, self.memory_budget),
            coverage=covered(self, state.parts, one.tangent),
        )

    def near_factor(self, terms: int, columns: int) -> Factor:
        """Of the preconditioner. The range of G is all that Nyström is about, so it takes the exact factor where that
        has few columns; the others take one sampled score an example. Noise per output needs the exact one."""
        if terms > 1:
            return Factor("exact")
        if self.preconditioner == "nystrom":
            return Factor("exact") if columns <= FEW_COLUMNS else Factor("monte_carlo")
        return Factor("monte_carlo", 1)

    def companion(self, state: State) -> State:
        """The state of the preconditioner alone."""
        return replace(state, structure=self.near, source=None, memo=state.factorizations(MatrixFreeMemo).companion)

    def operator(self, state: State, weights: Tensor) -> Streamed:
        """Σ_h w_h G_h as an operator, for curvature weights w (h,)."""
        near = self.companion(state)
        usual = FINE if state.tangent.dtype == torch.float64 else COARSE
        tolerance = self.tolerance or (STOCHASTIC if self.solver == "sgd" else usual)
        how = self.samples, self.solver, self.preconditioner, tolerance, self.max_steps, self.seed, self.memory_budget
        companion = near.structure.operator(near, weights.detach())
        memo = state.factorizations(MatrixFreeMemo).samples
        return Streamed(state.source, weights, companion, SolvePlan(*how), memo=memo)

    def gathered(self, state: State, precision: linalg.Operator) -> State:
        """The state with the samples of a precision made of it, once they are all on this rank."""
        memo = replace(state.factorizations(MatrixFreeMemo), samples=linalg.gathered(precision).memo)
        return replace(state, memo=replace(state.memo, own=memo))

    def coverage(self, parts: tuple[Part, ...], tangent: TangentModel) -> dict[str, str]:
        """How each parameter is treated, in words."""
        return dict.fromkeys(tangent.layout.names, "exact, by products")

    def keeps(self, layout: Layout, parts: tuple[Part, ...], terms: int, factor: Factor) -> Kept | None:
        """What the sums and the basis of a state must look like, by their names: files are held to it."""
        if self.preconditioner == "auto" or self.seed < 0:
            raise InvalidValue("matrix_free has chosen its preconditioner and its seed by the end of a fit")
        return self.near.keeps(layout, parts, terms, factor)

    def needs(self, task: Task) -> Needs:
        """What it takes, counted (cost.py)."""
        near, note = getattr(self.near, "needs", lambda task: Needs())(task), "exact, by passes that cannot be counted"
        return Needs(near.memory, kept=near.kept, exact=True, note=note, grows=True)


# -- without a preconditioner, and in the place of the true curvature -----------------------------------------------


@register
@dataclass(frozen=True)
class Nothing(Structure):
    """G ≈ 0: what the prior alone knows."""

    def __str__(self) -> str:
        return "none"

    def resolved(self, probe: Probe, factor: Factor) -> Nothing:
        """The structure as it will be fitted to such data, or an error where it cannot be."""
        return self

    def start(self, tangent: TangentModel, likelihood: Likelihood, factor: Factor, probe: Probe) -> Accumulator:
        """An empty accumulator for a pass over the data."""
        return OutputsOnly(tangent)

    def operator(self, state: State, weights: Tensor) -> DiagonalOperator:
        """Zero, as an operator."""
        return DiagonalOperator(weights.new_zeros(1), state.layout.size)

    def coverage(self, parts: tuple[Part, ...], tangent: TangentModel) -> dict[str, str]:
        """How each parameter is treated, in words."""
        return dict.fromkeys(tangent.layout.names, "nothing")

    def keeps(self, layout: Layout, parts: tuple[Part, ...], terms: int, factor: Factor) -> Kept:
        """What the sums and the basis of a state must look like, by their names: files are held to it."""
        return {}, {}


class OutputsOnly(Accumulator):
    """It runs the network, for the likelihood's statistics, and sums nothing."""

    mutable = ()

    def __init__(self, tangent: TangentModel) -> None:
        self.tangent = tangent

    def observe(self, x: Any, y: Tensor, f: Tensor, u: Tensor, column: Tensor) -> None:
        """Add nothing."""


def sketch_of(rank: int, memory_budget: int) -> Structure:
    """Products with the exact curvature, whose companion is a Nyström sketch of it."""
    return MatrixFree(preconditioner="nystrom", rank=rank, memory_budget=memory_budget)


def trace_of(memory_budget: int) -> Diagonal:
    """The exact diagonal."""
    return Diagonal(memory_budget=memory_budget)
