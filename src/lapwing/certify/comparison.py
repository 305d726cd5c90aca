"""How far a structured curvature Ĝ is from the true GGN G, at the same prior and noise, by products with G alone.

With P = Ĝ + A (the posterior precision) and K = G + A (what it stands for), Eq. 22:

    trace     tr Ĝ / tr G                                tr G = Σ_n ‖J_nᵀS_n e_n‖² in expectation, e_n random signs
    log_det   log|P| − log|K| = log|P| − log|M| − tr log(M⁻¹K)    Lanczos in the inner product of M ≈ K
    variance  Σ tr(J P⁻¹ Jᵀ) / Σ tr(J K⁻¹ Jᵀ) − 1        at new inputs: those given; else training inputs, each under
                                                         P and K without its example (leave_one_out.py)
    variance_training                                    the same sums over the training inputs, under P and K

Sums over inputs are by j = Σ_n J_nᵀu_n, u random signs: mean jᵀP⁻¹j / mean jᵀK⁻¹j, K⁻¹j by conjugate gradients on M⁻¹.
M is P, or a Nyström sketch of G with A where that is nearer to K. What a solve leaves open widens the interval.

Ĝ = G gives 1, 0, 0 and 0. All k probes share their passes over the data; vectors are (k, p), and no array is outputs by
parameters. Source: Hutchinson 1990; Ubaru, Chen and Saad 2017; Gardner et al. 2018.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lapwing import data as loading
from lapwing import given
from lapwing.certify import inputs as new_inputs
from lapwing.certify.certificate import Certificate
from lapwing.certify.leave_one_out import random_signs
from lapwing.certify.reader import Reader, ratio, solved
from lapwing.curvature import Probe, State, accumulate, probe
from lapwing.curvature.accumulate import flat_outputs, flat_targets
from lapwing.curvature.layered import LayeredSum
from lapwing.curvature.lowrank import COPIES
from lapwing.curvature.matrix_free import LEAST, sketch_of, trace_of
from lapwing.errors import InvalidValue
from lapwing.likelihoods import Likelihood
from lapwing.operators import Diagonal as DiagonalOperator
from lapwing.operators import linalg, plus
from lapwing.operators.streamed import LANCZOS_VECTORS, WORK_VECTORS
from lapwing.posterior import condition, curvature, prior_precision
from lapwing.priors import Prior
from lapwing.solvers import Estimate, quadrature
from lapwing.solvers.estimate import FEWEST, exactly, mean_of, ratio_of
from lapwing.solvers.lanczos import SHORT

LANCZOS_STEPS = 500  # a pass over the data each
RANK = 256  # of the Nyström sketch, at the most
LEFT = 3  # times the last quarter's moves are left of a quadrature that falls no faster than the inverse of its steps


@torch.inference_mode(False)
@torch.no_grad()
def certify(
    state: State,
    prior: Prior,
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
    given.whole(n_probes, "n_probes", FEWEST)
    generator = generator or torch.Generator().manual_seed(0)
    reader = Reader(state, prior, likelihood, loading.as_batches(data, sharded=True), progress)
    posterior = condition(state, prior, likelihood)
    precision, training = posterior.precision, reader.pulled(n_probes, generator)  # a pass that checks the data
    if not bool(training.any()):
        raise InvalidValue("no output depends on the selected weights, so there is no curvature to certify")
    seen = probe(state.tangent, reader.batches)
    near = _near(reader, seen, precision, training, memory_budget)
    if inputs is None:
        around = posterior if near is precision else replace(posterior, precision=near, parts=())
        new = new_inputs.left_out(reader, seen, around, n_probes, generator, memory_budget // 4)
    else:
        new = new_inputs.given(reader, inputs, n_probes, generator)
    trace = _trace(reader, seen, n_probes, generator, memory_budget)
    log_det, moved = _log_det(reader, precision, near, n_probes, generator, memory_budget)
    true, residual, note = solved(reader, near, torch.cat([training, new.j]), new.extra(n_probes), memory_budget)
    ours, removed = new.ours(precision, prior)
    ends = [e[n_probes:] * new.weights for e in true]
    variance = ratio(ours * new.weights, *ends) if new.count else None
    at_training = ratio((training * linalg.solve(precision, training)).sum(-1), *(e[:n_probes] for e in true))
    notes = tuple(said for said in (moved, note, *new.notes(removed, ends[0])) if said)
    how = new.where, new.count, state.n, n_probes, reader.passes, residual, str(state.structure)
    return Certificate(trace, log_det, variance, at_training, *how, notes)


def _near(reader: Reader, seen: Probe, precision: linalg.Operator, pulled: Tensor, budget: int) -> linalg.Operator:
    """M: P, or a sketch of the true curvature with the prior, by which is nearer to K on a few vectors."""
    few = pulled[:FEWEST]

    def away(near: linalg.Operator) -> float:
        return float((few - reader.product(linalg.solve(near, few))).norm() / few.norm())

    own = away(precision)
    room = budget // (8 * COPIES * seen.parameters * len(reader.likelihood.curvature_weights("exact")))
    rank = min(RANK, seen.parameters, room)
    if own <= reader.tolerance or rank < min(LEAST, seen.parameters):
        return precision
    reader.passes += 1
    structure = sketch_of(rank, budget)
    state = accumulate(structure, reader.state.tangent, reader.likelihood, reader.batches, "exact", seen=seen)
    sketch = curvature(state.structure.companion(state), reader.likelihood)
    near = plus(sketch, prior_precision(reader.prior, reader.state))
    return near if away(near) < own else precision


def _trace(
    reader: Reader, seen: Probe, k: int, generator: torch.Generator, budget: int, exact: bool | None = None
) -> Estimate:
    """tr Ĝ / tr G: exactly where an example has no more columns than there are probes, else by signs per example."""
    state, likelihood, tangent = reader.state, reader.likelihood, reader.state.tangent
    own = float(_sum_diagonal(curvature(state, likelihood)))
    structure = trace_of(budget)
    if seen.outputs * seen.positions <= k if exact is None else exact:
        reader.passes += 1
        true = accumulate(structure, tangent, likelihood, reader.batches, "exact", progress=reader.progress, seen=seen)
        return exactly(own / float(_sum_diagonal(curvature(true, likelihood))))
    sums = LayeredSum(tangent, structure.parts(tangent, seen.inputs), k, structure)  # each probe kept apart
    column, own_signs = torch.arange(k, device=tangent.device), reader.ranks.own(generator)
    with reader.ranks.sharing_errors("the trace"):
        for x, y in reader.each("trace"):
            f = sums.forward(x)
            root = likelihood.scaled_root(flat_outputs(f), flat_targets(likelihood, f, y))  # (m, c, q)
            signs = random_signs((k, len(root), root.shape[-1]), own_signs, root)
            u = torch.einsum("mcq,kmq->kmc", root, signs).reshape(k, *f.shape).transpose(0, 1)
            sums.observe(x, y, f, u, column)
    reader.check()
    traces = torch.stack([total.sum(-1) for total in sums.finish()[0].values()]).sum(0)  # (k,)
    (traces,) = reader.ranks.total([traces], "the trace")
    return ratio_of(torch.full_like(traces, own), traces)


def _sum_diagonal(op: linalg.Operator) -> Tensor:
    return linalg.traces(op, DiagonalOperator(torch.ones(1, dtype=torch.float64), op.size)).sum()


def _log_det(
    reader: Reader, precision: linalg.Operator, near: linalg.Operator, k: int, generator: torch.Generator, budget: int
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

    found = [quadrature(step, some, lambda values: -values.log(), inner, LANCZOS_STEPS, window) for some in groups]
    apart = 0.0 if near is precision else float(linalg.logdet(precision) - linalg.logdet(near))
    estimate = mean_of(torch.cat([one.estimate.samples for one in found]) + apart)
    if all(one.settled for one in found):
        return estimate, ""
    left, (low, high) = LEFT * sum(one.moved for one in found) / len(found), estimate.interval
    wider = f"the interval of log_det is wider by {left:.2g} on each side"
    return estimate.wider(low - left, high + left), f"Lanczos has not settled in {LANCZOS_STEPS} steps; {wider}"
