"""What a structure is: how G is stored, and the facts about it that the rest of the house asks for.

    resolved(probe, factor)      itself, with every automatic choice made
    start(...)                   an accumulator, which the one loop over data (accumulate.py) feeds
    operator(state, weights)     Σ_h w_h G_h as an operator, without the prior
    coverage(parts, tangent)     how each parameter is treated, in words

Those four a structure must have. The rest are facts, which one leaves as they are here unless they are others: nobody
asks for a structure's class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from torch import Tensor

from lapwing import given, registry
from lapwing.curvature.factor import Factor
from lapwing.curvature.parts import Part
from lapwing.errors import InvalidValue
from lapwing.likelihoods import Likelihood
from lapwing.operators import linalg
from lapwing.packing import Expected
from lapwing.tangent import TangentModel
from lapwing.tree import Layout

if TYPE_CHECKING:
    from lapwing.curvature.accumulate import Pass
    from lapwing.curvature.checkpoint import FitCheckpoint
    from lapwing.curvature.state import State

BUDGET = 2**30  # bytes of working memory, unless the user says otherwise
Kept = tuple[dict[str, Expected], dict[str, Expected]]  # what a structure's sums and basis are like, by their names


def register(cls: type) -> type:
    """A structure that files can name: a class decorator, above @dataclass. `Layered`'s subclasses need none."""
    registry.enter("structure", cls)
    return cls


@dataclass(frozen=True)
class Probe:
    """What one batch tells about a problem."""

    n: int  # examples in all
    positions: int
    outputs: int
    parameters: int
    inputs: Any  # a few examples of the first batch
    terms: int = 1  # h, of Σ_h w_h G_h: more than one where outputs have a noise of their own
    sums: Tensor | None = None  # of all inputs (fixed.py), if a pass was needed to count them; else NaN


class Accumulator(Protocol):
    """What changes while the loop over data runs, and only then."""

    tangent: TangentModel

    def forward(self, x: Any) -> Tensor:
        """The outputs f (n, ..., c) of a batch."""
        return self.tangent(x)

    def observe(self, x: Any, y: Tensor, f: Tensor, u: Tensor, column: Tensor) -> None:
        """Add a batch: inputs x, targets y, outputs f (n, ..., c), cotangents u (n, K, ..., c) and the output of
        each column."""

    def finish(self) -> tuple[dict[str, Tensor], tuple[tuple[Any, Tensor], ...]]:
        """The sums by their names, and the batches that are kept: none of either, unless it says otherwise."""
        return {}, ()


class Structure:
    """A frozen dataclass that says how G is stored; derive yours from it."""

    streams: ClassVar[bool] = False  # each product reads the data again, and posteriors are samples
    exact_factor_is_free: ClassVar[bool] = False  # so that factor="auto" is "exact", however many outputs there are
    samples_past: ClassVar[int | None] = None  # examples past which factor="auto" samples one column of each
    diagonal: ClassVar[bool] = False  # it keeps diag G alone: weights are independent
    bound: ClassVar[str] = "neither"  # what its evidence is of the full curvature's, under an exact factor:
    # "exact", "lower", "upper", "estimate" or "neither"; a subclass that keeps something else of G says so again
    shell: ClassVar[str] = "laplace"  # the kind of a file that holds its state
    memory_budget: int = BUDGET  # bytes of working memory

    def __post_init__(self) -> None:
        budget = given.memory(self.memory_budget, f"memory_budget of {type(self).__name__}")
        object.__setattr__(self, "memory_budget", budget)  # a whole number of bytes, as an int

    def resolved(self, probe: Probe, factor: Factor) -> Structure:
        """The structure as it will be fitted to such data, or an error where it cannot be."""
        raise NotImplementedError

    def start(self, tangent: TangentModel, likelihood: Likelihood, factor: Factor, probe: Probe) -> Accumulator:
        """An empty accumulator for a pass over the data."""
        raise NotImplementedError

    def operator(self, state: State, weights: Tensor) -> linalg.Operator:
        """Σ_h w_h G_h as an operator, for curvature weights w (h,). Where `state.paired`, they have both signs."""
        raise NotImplementedError

    def coverage(self, parts: tuple[Part, ...], tangent: TangentModel) -> dict[str, str]:
        """How each parameter is treated, in words."""
        raise NotImplementedError

    @property
    def first(self) -> Structure | None:
        """The structure of the pass before, where there is one, in whose basis this one's sums are."""
        return None

    def start_in(
        self, basis: State, tangent: TangentModel, likelihood: Likelihood, factor: Factor, probe: Probe
    ) -> Accumulator:
        """`start`, in the basis of a state of `first` or of this structure; the accumulator keeps it as `basis`."""
        raise NotImplementedError

    @property
    def keeps_rows(self) -> bool:
        """Whether its state keeps the data, inputs with cotangents, from which rows of J are made (the dual form)."""
        return False

    def streamed(self, one: Pass, checkpoint: FitCheckpoint | None) -> State:
        """Of one that `streams`, in place of a pass of its own: its state, which holds the place of the data."""
        raise NotImplementedError

    def companion(self, state: State) -> State:
        """The state that stands for it where a factorization is needed: itself, unless it streams."""
        return state

    def gathered(self, state: State, precision: linalg.Operator) -> State:
        """The state with the samples of a precision that was made of it, all of them on this rank; itself without."""
        return state

    def formed(self, primal: bool) -> Structure:
        """Itself, primal or dual, where it is one of the two."""
        return self

    def parts(self, tangent: TangentModel, x: Any) -> tuple[Part, ...]:
        """The parts of the network, where each is treated for itself; none where the network is treated as a whole."""
        return ()

    def keeps(self, layout: Layout, parts: tuple[Part, ...], terms: int, factor: Factor) -> Kept | None:
        """What the sums and the basis of a state must look like, by their names: files are held to it. None: any
        finite numbers."""
        return None

    def captured(self, state: State, weights: Tensor) -> tuple[float, dict[str, float]] | None:
        """tr Ĝ / tr G, and the same for each parameter, where it keeps less than the trace and knows how much less."""
        return None

    def cores(self, state: State) -> dict[str, Tensor]:
        """For sums that are no squares, by their names: matrices (..., k, k) made of them that no data make indefinite.
        Data that are taken out are held to it (removal.py)."""
        return {}


def same_terms(basis: int, likelihood: int) -> None:
    """Raise unless a basis is of as many curvature weights as the likelihood has."""
    if basis != likelihood:
        raise InvalidValue(
            f"the basis has {basis} curvature weights and the likelihood {likelihood}; fit both with the same one"
        )


def covered(structure: Structure, parts: tuple[Part, ...], tangent: TangentModel) -> dict[str, str]:
    """How each selected parameter is treated; those without elements need no treatment."""
    return structure.coverage(parts, tangent) | dict.fromkeys(tangent.layout.empty, "no elements")
