"""The one loop over data: batches in, a State out, for every structure and every output factor.

A structure gives an *accumulator*, mutable only inside this loop:

    forward(x) -> f              run the network on a batch
    observe(x, y, f, u, column)  add Σ_n J_nᵀ u_n u_nᵀ J_n for cotangents u (n, K, ..., c)
    finish() -> (sums, batches)  what the State keeps
    mutable                      the names of its attributes that change, for checkpoints (checkpoint.py)
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from lapwing import data as loading
from lapwing import fixed, given, tree
from lapwing.curvature.applied import check_applied, looks_applied
from lapwing.curvature.checkpoint import FitCheckpoint, FitJournal, as_checkpoint, identity
from lapwing.curvature.factor import Factor, cotangents, output_factor
from lapwing.curvature.overflow import check_sums
from lapwing.curvature.state import State, merged
from lapwing.curvature.structure import Probe, Structure, covered
from lapwing.distributed import Ranks
from lapwing.errors import InvalidValue
from lapwing.likelihoods import Likelihood
from lapwing.tangent import TangentModel

PROBE_EXAMPLES = 4  # that a probe keeps
SUSPECT_EXAMPLES = 32  # that it looks at where it has a suspicion


@torch.inference_mode(False)
def probe(tangent: TangentModel, batches: Iterable[Any], likelihood: Likelihood | None = None) -> Probe:
    """Look at the first batch, and count the examples (by a pass, where the data cannot tell). Data whose examples
    change when they are read again are refused, and outputs to which the likelihood's link was applied already."""
    ranks, first = loading.ranks_of(batches), loading.first_inputs(batches, tangent.device)
    some = first
    if tangent.separable(first):
        first, some = (tree.rows_of(first, slice(0, n)) for n in (PROBE_EXAMPLES, SUSPECT_EXAMPLES))
    f = tangent(first)
    if likelihood is not None and looks_applied(likelihood, flat_outputs(f)):
        check_applied(tangent, likelihood, flat_outputs(tangent(some)), some)
    with ranks.sharing_errors("counting the examples"):
        fixed.check_examples(batches)
        n, sums = loading.examples(batches), torch.full((5,), torch.nan, dtype=torch.float64)
        if n is None:
            n, sums = fixed.count(batches, tangent.device)
    counts = ranks.meet("the number of examples", words=torch.cat([torch.tensor([n]), sums.view(torch.int64)]))
    n, sums = sum(int(one[0]) for one in counts), torch.stack([one[1:].view(torch.float64) for one in counts]).sum(0)
    return Probe(n, f[0, ..., 0].numel(), f.shape[-1], tangent.layout.size, first, sums=sums)


@dataclass
class Running:
    """What a pass has so far."""

    mutable: ClassVar[tuple[str, ...]] = ("accumulator", "n", "targets", "inputs", "statistics")
    accumulator: Any
    n: int = 0
    targets: int = 0
    inputs: Tensor = field(default_factory=fixed.no_sums)
    statistics: dict[str, Tensor] = field(default_factory=dict)
    sums: dict[str, Tensor] = field(default_factory=dict)  # in the end
    batches: tuple[Any, ...] = ()

    def read(self, x: Any, y: Any) -> None:
        """Inputs as they come, before any are left out."""
        self.inputs = self.inputs + fixed.input_sums(x, len(y) if isinstance(y, Tensor) and y.ndim else 0)

    def check(self) -> None:
        """Whether a pass can go on from these (checkpoint.py)."""
        tensors = all(isinstance(value, Tensor) for value in self.statistics.values())
        if not tensors or not 0 <= self.targets < 2**64:
            raise InvalidValue(f"{self.n} examples with a digest {self.targets} and statistics {list(self.statistics)}")

    def count(self, y: Tensor, statistics: dict[str, Tensor]) -> None:
        """Count the examples of a batch, and add their statistics and the digest of their targets."""
        self.n += len(y)
        self.targets = (self.targets + tree.digest(y)) % 2**64
        for key, value in statistics.items():
            self.statistics[key] = self.statistics[key] + value if key in self.statistics else value


@torch.inference_mode(False)
def accumulate(
    structure: Structure,
    tangent: TangentModel,
    likelihood: Likelihood,
    data: Any,
    factor: Factor | str = "exact",
    *,
    generator: torch.Generator | None = None,
    progress: bool = False,
    seen: Probe | None = None,
    basis: State | None = None,
    checkpoint: str | os.PathLike[str] | FitCheckpoint | None = None,
    every: int | None = None,
) -> State:
    """Accumulate the curvature of a network over data in one pass, or in two where the structure says so.

    basis: for a structure of two passes, a state whose basis to use in place of a first pass: states add only in a
    shared one. checkpoint: a file that is written after every `every` batches (100), taken up where it is there, and
    removed in the end."""
    factor = Factor(factor) if isinstance(factor, str) else factor
    generator = given.generator(generator)
    if not isinstance(structure, Structure):
        raise InvalidValue(
            f"structure must be an object, such as lw.curvature.Kronecker(), of a class that derives from "
            f"lw.curvature.Structure; got {structure!r}"
        )
    batches = loading.as_batches(data, sharded=True)
    terms = len(likelihood.curvature_weights(factor.kind))  # raises for a factor that it does not have
    seen = replace(seen or probe(tangent, batches, likelihood), terms=terms)
    structure = structure.resolved(seen, factor)
    first = structure.first
    if first is None and basis is not None:
        raise InvalidValue(f"basis= is for structures of two passes, such as 'ekfac'; got structure {structure}")
    foreign = basis is not None  # of other data, perhaps
    place = as_checkpoint(checkpoint, every)
    one = Pass(structure, tangent, likelihood, batches, factor, generator, progress, seen)
    if structure.streams:
        return check_sums(structure.streamed(one, place), batches)
    journal = None if place is None else one.journal(place, basis)
    with nullcontext() if journal is None else journal:  # with its lock
        if first is not None:
            basis = basis if basis is not None or journal is None else journal.basis(one.empty, one.ranks)
            basis = basis or one.by(first, factor, None if place is None else place.within())
        accumulator, before = one.begun(basis), None if foreign or basis is None else basis.inputs
        del basis  # its memory, before the pass
        state = merged(one.state(one.run(accumulator, journal)), one.ranks)
        for inputs in (seen.sums, before):
            fixed.check_inputs(state.inputs, inputs)
        likelihood.check(state.statistics)
        if journal is not None:
            journal.done()
    return check_sums(state, batches)


@dataclass(frozen=True, eq=False)
class Pass:
    """What one pass over the data is made of."""

    structure: Structure
    tangent: TangentModel
    likelihood: Likelihood
    batches: Any
    factor: Factor
    generator: torch.Generator
    progress: bool
    seen: Probe

    def by(self, structure: Structure, factor: Factor, checkpoint: FitCheckpoint | None) -> State:
        """The state of another structure over the same data."""
        options: dict[str, Any] = {"generator": self.generator, "progress": self.progress, "seen": self.seen}
        options["checkpoint"] = checkpoint
        return accumulate(structure, self.tangent, self.likelihood, self.batches, factor, **options)

    @property
    def ranks(self) -> Ranks:
        """The processes that share the data."""
        return loading.ranks_of(self.batches)

    @property
    def empty(self) -> State:
        """A state of no data."""
        terms = len(self.likelihood.curvature_weights(self.factor.kind))
        kind, paired = self.likelihood.kind, self.likelihood.paired
        return State(self.structure, self.factor, kind, terms, self.tangent, {}, 0, {}, {}, paired=paired)

    def journal(self, place: FitCheckpoint, basis: State | None) -> FitJournal:
        """The journal of this pass, in an open checkpoint."""
        inputs = self.seen.inputs
        first = tree.rows_of(inputs, slice(0, 1)) if self.tangent.separable(inputs) else inputs
        fit = identity(self, first, basis)
        return place.opened(_pass_names(self.structure, basis), fit, self.tangent(first), self.ranks)

    def begun(self, basis: State | None) -> Any:
        """An accumulator, in the basis of a first pass where there was one."""
        start, ranks = (self.tangent, self.likelihood, self.factor, self.seen), self.ranks
        if basis is None:
            return self.structure.start(*start)
        accumulator: Any = self.structure.start_in(basis, *start)
        if ranks.agrees(accumulator.basis):
            return accumulator
        # one rank's eigenvectors need not be another's
        shared = replace(basis, structure=self.structure, basis=ranks.lead(accumulator.basis))
        return self.structure.start_in(shared, *start)

    def run(self, accumulator: Any, journal: FitJournal | None) -> Running:
        """The loop."""
        seen, ranks, factor, likelihood = self.seen, self.ranks, self.factor, self.likelihood
        if journal is not None:
            journal.begin(self.generator)
        own = ranks.own(self.generator)
        each = factor.columns(seen.outputs, seen.positions) * seen.positions * seen.outputs  # numbers of u, an example
        size = max(1, self.structure.memory_budget // 4 // (4 * each))
        with ranks.sharing_errors(f"the pass of {self.structure}"):
            running, label = Running(accumulator), str(self.structure)
            if journal is not None:
                journal.resume(running, own, likelihood, self.tangent.device)
                label += journal.label
            stream: Iterable[Any] = loading.passes(self.batches, self.tangent.device, self.progress, label)
            if journal is not None:
                stream = journal.through(stream, running, own)
            for x, y in (piece for batch in stream for piece in self._pieces(batch, size)):
                loading.check_finite(x, "the inputs")
                running.read(x, y)
                x, y = self._without_ignored(x, y, running)
                if isinstance(y, Tensor) and y.ndim and not len(y):
                    continue
                f = accumulator.forward(x)
                _check_outputs(f, y)
                flat, targets = check_targets(likelihood, f, y)
                running.count(y, likelihood.statistics(flat, targets))
                u, column = cotangents(factor, output_factor(factor, likelihood, flat, targets, own), len(f))
                u = u.reshape(*u.shape[:2], *f.shape[1:]) if factor.kind != "hessian" else u
                accumulator.observe(x, y, f, u, column)
            running.sums, running.batches = accumulator.finish()
        return running

    def _pieces(self, batch: tuple[Any, Any], size: int) -> Iterable[tuple[Any, Any]]:
        """A batch in pieces of at most `size` examples, where it can be cut: cotangents are as many as outputs."""
        return self.tangent.pieces(*batch, size) if isinstance(batch[1], Tensor) and batch[1].ndim else [batch]

    def _without_ignored(self, x: Any, y: Any, running: Running) -> tuple[Any, Any]:
        """A batch without examples whose every target is ignored: they count, and no factor of the curvature sees
        them."""
        rows = self.likelihood.kept(y) if isinstance(y, Tensor) and y.ndim else None
        if rows is None or bool(rows.all()) or not self.tangent.separable(x):
            return x, y
        running.count(y[~rows], {})
        return tree.map_tensors(lambda t: t[rows], x), y[rows]

    def state(self, running: Running) -> State:
        """The state of a pass that has ended."""
        parts = getattr(running.accumulator, "parts", ())
        return replace(
            self.empty,
            fingerprints=self.tangent.fingerprints(),
            n=running.n,
            statistics=running.statistics,
            sums=running.sums,
            basis=getattr(running.accumulator, "basis", {}),
            batches=running.batches,
            parts=parts,
            coverage=covered(self.structure, parts, self.tangent),
            targets=running.targets,
            inputs=running.inputs,
        )


def _pass_names(structure: Structure, basis: State | None) -> list[str]:
    """The structures of this pass and, without a basis, of those before it."""
    first = structure.first if basis is None else None
    return [repr(structure), *(_pass_names(first, None) if first is not None else [])]


def flat_outputs(f: Tensor) -> Tensor:
    """Outputs (n, ..., c) as rows (n·q, c), in float32 or better."""
    return f.reshape(-1, f.shape[-1]).to(torch.promote_types(f.dtype, torch.float32))


def flat_targets(likelihood: Likelihood, f: Tensor, y: Tensor) -> Tensor:
    """Targets (n, ..., t) or (n, ...) with their positions flattened like the outputs'; shapes that do not fit are left
    for validate."""
    q, y = f.ndim - 1, likelihood.aligned(f, y)
    return y.reshape(-1, *y.shape[q:]) if y.shape[:q] == f.shape[:q] else y


def check_targets(likelihood: Likelihood, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs and targets as rows, once the likelihood takes them; what targets that it refuses seem to be is said."""
    flat, targets = flat_outputs(f), flat_targets(likelihood, f, y)
    try:
        likelihood.validate(flat, targets)
    except InvalidValue as error:
        raise InvalidValue(f"{error}{likelihood.target_hint(f, y)}") from error
    return flat, targets


def _check_outputs(f: Tensor, y: Any) -> None:
    if not isinstance(y, Tensor):
        raise InvalidValue(f"targets must be a tensor, got {type(y).__name__}")
    if f.shape[0] != (y.shape[0] if y.ndim else 0):
        raise InvalidValue(f"the model gives {f.shape[0]} outputs for {tuple(y.shape)} targets; batch sizes must agree")
    if not torch.isfinite(f).all():
        raise InvalidValue("the network's outputs hold NaN or infinite values; check weights and inputs")
