"""How far a structured curvature Ĝ is from the true GGN G, at the same prior and noise, by products with G alone.

With P = Ĝ + A (the posterior precision) and K = G + A (what it stands for), Eq. 22:

    trace     tr Ĝ / tr G                                tr G = Σ_n ‖J_nᵀS_n e_n‖² in expectation, e_n random signs
    log_det   log|P| − log|K| = log|P| − log|M| − tr log(M⁻¹K)    Lanczos in the inner product of M ≈ K
    variance  Σ tr(J P⁻¹ Jᵀ) / Σ tr(J K⁻¹ Jᵀ) − 1        at new inputs: those given; else training inputs, each under
                                                         P and K without its example (leave_one_out.py)
    variance_training                                    the same sums over the training inputs, under P and K

Sums over inputs are by j = Σ_n J_nᵀu_n, u random signs: mean jᵀP⁻¹j / mean jᵀK⁻¹j, K⁻¹j by conjugate gradients on M⁻¹.
M is P, or a Nyström sketch of G with A where that is nearer to K. A solve that stops at a residual r leaves
0 ≤ rᵀK⁻¹r ≤ rᵀA⁻¹r open, by which the interval is widened.

Ĝ = G gives 1, 0, 0 and 0. All k probes share their passes over the data; vectors are (k, p), and no array is outputs by
parameters. Source: Hutchinson 1990; Ubaru, Chen and Saad 2017; Gardner et al. 2018.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lapwing import data as loading
from lapwing import fixed, tree
from lapwing.certificate import Certificate
from lapwing.curvature import Diagonal, MatrixFree, Probe, State, accumulate, probe
from lapwing.curvature.accumulate import flat_outputs, flat_targets
from lapwing.curvature.layered import LayeredSum
from lapwing.curvature.lowrank import COPIES
from lapwing.curvature.matrix_free import FEW_COLUMNS, LEAST
from lapwing.curvature.products import gauss_newton
from lapwing.distributed import Ranks
from lapwing.errors import InvalidValue
from lapwing.leave_one_out import Examples, Sample, every, sample, sizes_of
from lapwing.leave_one_out import random_signs as _signs
from lapwing.likelihoods import Likelihood
from lapwing.operators import Diagonal as DiagonalOperator
from lapwing.operators import RootPlusDiagonal, linalg
from lapwing.operators.streamed import LANCZOS_VECTORS, WORK_VECTORS
from lapwing.posterior import Gaussian, condition, curvature, prior_precision
from lapwing.solvers import Estimate, cg, quadrature
from lapwing.solvers.estimate import FEWEST, exactly, mean_of, ratio_of
from lapwing.solvers.lanczos import SHORT

__all__ = ["Certificate", "Reader", "certify"]

MAX_STEPS = 500  # of CG and of Lanczos, a pass over the data each
TOLERANCE = {torch.float64: 1e-6}  # of CG, by the network's dtype
COARSE = 1e-3  # where products are rounded to float32 or less
RANK = 256  # of the Nyström sketch, at the most
HELD = 12  # vectors that a solve holds for each column
LEFT = 3  # times the last quarter's moves are left of a quadrature that falls no faster than the inverse of its steps
LARGE, OFTEN = 0.25, 8  # of a sum over inputs, and times its mean, from one of them, of which a note tells


# -- what it takes -----------------------------------------------------------------------------------------------


@dataclass
class Reader:
    """Products with the true curvature over the data, counted."""

    state: State
    prior: Any
    likelihood: Likelihood
    batches: Any
    progress: bool
    passes: int = field(default=0)
    n: int = 0  # examples in the last pass, on this rank
    inputs: Tensor = field(default_factory=fixed.no_sums)  # their sums

    @property
    def ranks(self) -> Ranks:
        """The processes that share the data."""
        return loading.ranks_of(self.batches)

    @property
    def tolerance(self) -> float:
        """Of the residual of a solve."""
        return TOLERANCE.get(self.state.tangent.dtype, COARSE)

    def product(self, v: Tensor) -> Tensor:
        """(G + A) v."""
        self.passes += 1
        gv = gauss_newton(self.state.tangent, self.likelihood, self.batches, v, self.progress)
        return gv + linalg.mv(prior_precision(self.prior, self.state), v)

    def each(self, label: str) -> Any:
        """One pass over this rank's data."""
        self.passes += 1
        self.n, self.inputs = 0, fixed.no_sums()
        for x, y in loading.passes(self.batches, self.state.tangent.device, self.progress, label):
            self.n += len(y)
            self.inputs += fixed.input_sums(x, len(y))
            yield x, y

    def check(self) -> None:
        """Raise unless the last pass was over as many examples as were fitted."""
        n = self.ranks.count(self.n, "the number of examples")
        if n != self.state.n:
            raise InvalidValue(
                f"the curvature was summed over {self.state.n} examples and the data hold {n}; "
                "certify with the data of the fit"
            )
        fixed.check_inputs(self.ranks.total([self.inputs], "sums of the inputs")[0], self.state.inputs)


@torch.inference_mode(False)
@torch.no_grad()
def certify(
    state: State,
    prior: Any,
    likelihood: Likelihood,
    data: Any,
    n_probes: int = 32,
    *,
    inputs: Any = None,
    generator: torch.Generator | None = None,
    progress: bool = False,
    memory_budget: int = 2**30,
) -> Certificate:
    """Compare the curvature of a state with the true GGN (exact factor) over the data that it was fitted to. inputs:
    new ones, at which to compare variances; without them, up to n_probes training inputs, each left out."""
    if not isinstance(n_probes, int) or n_probes < FEWEST:
        raise InvalidValue(f"n_probes must be a whole number, at least {FEWEST}; got {n_probes!r}")
    generator = generator or torch.Generator().manual_seed(0)
    reader = Reader(state, prior, likelihood, loading.as_batches(data, sharded=True), progress)
    precision = condition(state, prior, likelihood).precision
    training = _pulled(reader, n_probes, generator)  # first: it checks the data
    if not bool(training.any()):
        raise InvalidValue("no output depends on the selected weights, so there is no curvature to certify")
    seen = probe(state.tangent, reader.batches)
    near = _near(reader, seen, precision, training, memory_budget)
    new = (
        _given(reader, inputs, n_probes, generator)
        if inputs is not None
        else _left_out(reader, seen, near, n_probes, generator, memory_budget // 4)
    )
    trace = _trace(reader, seen, n_probes, generator, memory_budget)
    log_det, moved = _log_det(reader, precision, near, n_probes, generator, memory_budget)
    solved = _solved(reader, near, torch.cat([training, new.j]), new.extra(n_probes), memory_budget)
    ours, removed = new.ours(precision, prior)
    ends = [e[n_probes:] * new.weights for e in solved.ends]
    variance = _ratio(ours * new.weights, *ends) if new.count else None
    at_training = _ratio((training * linalg.solve(precision, training)).sum(-1), *(e[:n_probes] for e in solved.ends))
    return Certificate(
        trace,
        log_det,
        variance,
        at_training,
        new.where,
        new.count,
        state.n,
        n_probes,
        reader.passes,
        solved.residual,
        str(state.structure),
        tuple(note for note in (moved, solved.note, *_notes(new, removed, ends[0])) if note),
    )


# -- inputs ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Inputs:
    """New inputs, as vectors j (k, p): of all that were given, or each of a training input that is left out."""

    where: str
    count: int
    j: Tensor
    weights: Tensor  # (k,), of each in a sum
    examples: Examples | None = None
    numbers: Tensor | None = None  # (k,): the same where it is the same example

    def extra(self, before: int) -> Callable[[Tensor, Tensor], Tensor] | None:
        """What makes K v of rows of a solve, the first `before` of which are others, that without their examples."""
        examples = self.examples
        return None if examples is None else lambda v, rows: examples.gone(v, rows - before)

    def ours(self, precision: Any, prior: Any) -> tuple[Tensor, bool]:
        """The structure's variances (k,), and whether examples were taken out of it, where that was to be."""
        if self.examples is None:
            return (self.j * linalg.solve(precision, self.j)).sum(-1), True
        return self.examples.ours(prior, self.j)


def _given(reader: Reader, x: Any, k: int, generator: torch.Generator) -> Inputs:
    """j = Σ_n J(x_n)ᵀu_n over inputs that a user gave, the same on every rank."""
    tangent = reader.state.tangent
    with reader.ranks.sharing_errors("reading the inputs"):
        x = tree.map_tensors(lambda t: t.to(tangent.device), loading.inputs_of(x))
        loading.check_finite(x, "the inputs")
        n = tree.batch_size(x)
        if not n:
            raise InvalidValue("the inputs hold no example to certify at; give at least one")
        cuts = range(0, n, loading.BATCH) if tangent.separable(x) else range(1)
        pieces = [tree.rows_of(x, slice(i, i + loading.BATCH)) for i in cuts] if len(cuts) > 1 else [x]
        total = torch.zeros(k, tangent.layout.size, dtype=torch.float64, device=tangent.device)
        for piece in pieces:
            f = tangent(piece)
            total += tangent.vjps(piece, _signs((k, *f.shape), generator, f)).to(total)
        if not bool(total.any()):
            raise InvalidValue("no output at these inputs depends on the selected weights; give others")
    return Inputs("inputs", n, reader.ranks.same(total, "vectors of signs at the inputs"), torch.ones_like(total[:, 0]))


def _left_out(reader: Reader, seen: Probe, near: Any, k: int, generator: torch.Generator, budget: int) -> Inputs:
    """j = J_nᵀu of k training inputs, or of all where they are no more; of none where an example cannot be left out."""
    state, ranks, likelihood = reader.state, reader.ranks, reader.likelihood
    device, own = state.tangent.device, reader.n
    found = Sample({}, torch.zeros(0), torch.zeros(0))
    if state.tangent.separable(seen.inputs) and state.n >= FEWEST:
        parts = () if isinstance(near, RootPlusDiagonal) else state.parts
        posterior = Gaussian(state.tangent.theta.to(torch.float64), near, state.layout, parts)

        def sizes(x: Any, y: Tensor) -> Tensor:
            return sizes_of(posterior, state.tangent, likelihood, x, y, budget)

        few = seen.outputs * seen.positions <= FEW_COLUMNS
        start = sum(ranks.gather(own, "examples of each rank")[: ranks.rank])
        with ranks.sharing_errors("examples"):
            batches = reader.each("examples")
            found = (
                every(batches, state.n, start)
                if state.n <= k
                else sample(batches, sizes if few else None, k, ranks, generator)
            )
        reader.check()
    examples = Examples(state, likelihood, ranks, found.held, len(found.weights), budget)
    j, count = examples.pulled(ranks.own(generator)), len(found.numbers.unique())
    return Inputs("leave-one-out", count, j, found.weights.to(device), examples, found.numbers.to(device))


def _notes(new: Inputs, removed: bool, true: Tensor) -> list[str]:
    if new.numbers is None:
        return []
    if not new.count:
        return ["examples that run as one batch, or fewer than four, cannot be left out one by one: give inputs="]
    notes = []
    if not removed:
        notes.append(
            "the structure keeps the examples that the true posterior leaves out (a sampled factor, or too dear to "
            "factorize for each), so it looks narrower than it is at new inputs"
        )
    of_each = torch.stack([true[new.numbers == number].sum() for number in new.numbers.unique()])
    share = float(of_each.max() / true.sum())
    if share > max(LARGE, OFTEN / new.count):
        notes.append(
            f"one training input has {100 * share:.0f} % of the variance by leave-one-out, which speaks of inputs like "
            "that one; inputs= asks about others"
        )
    return notes


# -- estimates ---------------------------------------------------------------------------------------------------


def _near(reader: Reader, seen: Probe, precision: Any, pulled: Tensor, budget: int) -> Any:
    """M: P, or a sketch of the true curvature with the prior, by which is nearer to K on a few vectors."""
    few = pulled[:FEWEST]

    def away(near: Any) -> float:
        return float((few - reader.product(linalg.solve(near, few))).norm() / few.norm())

    own = away(precision)
    room = budget // (8 * COPIES * seen.parameters * len(reader.likelihood.curvature_weights("exact")))
    rank = min(RANK, seen.parameters, room)
    if own <= reader.tolerance or rank < min(LEAST, seen.parameters):
        return precision
    reader.passes += 1
    structure = MatrixFree(preconditioner="nystrom", rank=rank, memory_budget=budget)
    state = accumulate(structure, reader.state.tangent, reader.likelihood, reader.batches, "exact", seen=seen)
    sketch = curvature(state.structure.companion(state), reader.likelihood)
    near = linalg.shift(sketch, prior_precision(reader.prior, reader.state))
    return near if away(near) < own else precision


def _trace(
    reader: Reader, seen: Probe, k: int, generator: torch.Generator, budget: int, exact: bool | None = None
) -> Estimate:
    """tr Ĝ / tr G: exactly where an example has no more columns than there are probes, else by signs per example."""
    state, likelihood, tangent = reader.state, reader.likelihood, reader.state.tangent
    own = float(_sum_diagonal(curvature(state, likelihood)))
    structure = Diagonal(memory_budget=budget)
    if seen.outputs * seen.positions <= k if exact is None else exact:
        reader.passes += 1
        true = accumulate(structure, tangent, likelihood, reader.batches, "exact", progress=reader.progress, seen=seen)
        return exactly(own / float(_sum_diagonal(curvature(true, likelihood))))
    sums = LayeredSum(tangent, structure.parts(tangent, seen.inputs), k, structure)  # each probe kept apart
    column, own_signs = torch.arange(k, device=tangent.device), reader.ranks.own(generator)
    with reader.ranks.sharing_errors("the trace"):
        for x, y in reader.each("trace"):
            f = sums.forward(x)
            root = likelihood.scaled_root(flat_outputs(f), flat_targets(f, y))  # (m, c, q)
            signs = _signs((k, len(root), root.shape[-1]), own_signs, root)
            u = torch.einsum("mcq,kmq->kmc", root, signs).reshape(k, *f.shape).transpose(0, 1)
            sums.observe(x, y, f, u, column)
    reader.check()
    traces = torch.stack([total.sum(-1) for total in sums.finish()[0].values()]).sum(0)  # (k,)
    (traces,) = reader.ranks.total([traces], "the trace")
    return ratio_of(torch.full_like(traces, own), traces)


def _sum_diagonal(op: Any) -> Tensor:
    return linalg.traces(op, DiagonalOperator(torch.ones(1, dtype=torch.float64), op.size)).sum()


def _log_det(
    reader: Reader, precision: Any, near: Any, k: int, generator: torch.Generator, budget: int
) -> tuple[Estimate, str]:
    """log|P| − log|M| − tr log(M⁻¹K), the probes in as few groups as their Lanczos vectors fit the memory budget; where
    those of the fewest do not, only the last vectors are kept. And a note, where it has not settled."""
    starts = linalg.draw(near, k, generator)
    room = budget // (8 * starts.shape[-1])  # vectors
    groups = starts.tensor_split(max(1, min(k // FEWEST, -(-k // max(1, room // LANCZOS_VECTORS)))))
    window = max(SHORT, room // len(groups[0]) - WORK_VECTORS)

    def step(v: Tensor) -> Tensor:
        return linalg.solve(near, reader.product(v))

    def inner(v: Tensor) -> Tensor:
        return linalg.mv(near, v)

    found = [quadrature(step, some, lambda values: -values.log(), inner, MAX_STEPS, window) for some in groups]
    apart = 0.0 if near is precision else float(linalg.logdet(precision) - linalg.logdet(near))
    estimate = mean_of(torch.cat([one.estimate.samples for one in found]) + apart)
    if all(one.settled for one in found):
        return estimate, ""
    left, (low, high) = LEFT * sum(one.moved for one in found) / len(found), estimate.interval
    note = f"Lanczos has not settled in {MAX_STEPS} steps; the interval of log_det is wider by {left:.2g} on each side"
    return estimate.wider(low - left, high + left), note


def _pulled(reader: Reader, k: int, generator: torch.Generator) -> Tensor:
    """j = Σ_n J_nᵀu_n for k vectors of signs over all outputs, (k, p)."""
    tangent = reader.state.tangent
    total = torch.zeros(k, tangent.layout.size, dtype=torch.float64, device=tangent.device)
    own = reader.ranks.own(generator)
    with reader.ranks.sharing_errors("vectors of signs"):
        for x, _ in reader.each("predictions"):
            f = tangent(x)
            total += tangent.vjps(x, _signs((k, *f.shape), own, f)).to(total)
    reader.check()
    return reader.ranks.total([total], "vectors of signs")[0]


@dataclass(frozen=True, eq=False)
class Solved:
    """bᵀK⁻¹b, (k,), between two ends, which are one where conjugate gradients converged."""

    ends: tuple[Tensor, Tensor]
    residual: float
    note: str


def _solved(
    reader: Reader, near: Any, b: Tensor, extra: Callable[[Tensor, Tensor], Tensor] | None, budget: int
) -> Solved:
    """Columns in as few groups as fit the memory budget."""
    low, high, worst, steps, converged = [], [], 0.0, 0, True
    for rows in torch.arange(len(b)).split(max(1, budget // (8 * HELD * b.shape[-1]))):
        some, more = b[rows], None if extra is None else _of(extra, rows)
        found = cg(
            reader.product,
            some,
            lambda v: linalg.solve(near, v),
            tolerance=reader.tolerance,
            max_steps=MAX_STEPS,
            extra=more,
        )
        value, gap = (some * found.x).sum(-1), torch.zeros_like(some[:, 0])
        if not found.converged:
            image = reader.product(found.x)
            r = some - (image if more is None else image + more(found.x, torch.arange(len(some))))
            a = prior_precision(reader.prior, reader.state)
            value, gap = value + (r * found.x).sum(-1), (r * linalg.solve(a, r)).sum(-1)
        low.append(value)
        high.append(value + gap)
        worst, steps = max(worst, float(found.residual.max())), max(steps, found.steps)
        converged = converged and found.converged
    note = f"conjugate gradients stopped at a residual of {worst:.2g} after {steps} steps, above {reader.tolerance:g}; "
    note += "intervals of variances hold whatever that leaves open"
    return Solved((torch.cat(low), torch.cat(high)), worst, "" if converged else note)


def _of(extra: Callable[[Tensor, Tensor], Tensor], rows: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """extra, for rows that are numbered within a group."""
    return lambda v, some: extra(v, rows[some.cpu()])


def _ratio(ours: Tensor, low: Tensor, high: Tensor) -> Estimate:
    """mean(ours) / mean(true) − 1, the true ones between low and high."""
    return (ratio_of(ours, low) - 1).wider(*(ratio_of(ours, high) - 1).interval)
