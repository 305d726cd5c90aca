"""The plan: what each structure would take in memory and time, and which one to use.

Times are told in gradients, so that they mean the same on every machine. A structure small enough is tried on a batch
(trial.py); one that is too large to try is counted, with N data, K cotangents an example, C outputs, P parameters, a
the seconds of one multiplication in float64, and n³-costs of LAPACK relative to a matrix product:

    full (primal)   fit N·K·P²/2·a          tune eig(P)              predict 1,000·C·P²·a
    full (dual)     fit N forward           tune (N·K)²·P·a + eig(N·K)    predict 1,000·C·N·K·(P + N·K)·a
    block           as primal, layer by layer
    kron            (1 + K)/3 gradients + Σ_layers S·(i² + K·o²) a float32 product     tune Σ eig(i) + eig(o)
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from lapwing import api, tree
from lapwing.curvature import BUDGET, Factor, Full, Probe
from lapwing.curvature.capture import Capture
from lapwing.curvature.cover import cover
from lapwing.curvature.parts import Part
from lapwing.doctor import trial
from lapwing.doctor.reading import Batch, Sample
from lapwing.doctor.report import Cost
from lapwing.likelihoods import Likelihood
from lapwing.tangent import TangentModel

NAMES = ("full (primal)", "full (dual)", "kron", "block", "diag")
TRY = 2**28  # bytes of state that a trial may make
PATIENCE = 1.0  # seconds of gradients that a trial may take, about
EVALUATIONS = 12  # of the evidence while tuning
EVALUATION = 3e-4, 1e-4  # seconds of one beside its elements: once, and a part
HEAP = 1.4  # bytes that the process grows by for a byte of passing tensors: gaps, and copies inside kernels
LIBRARIES = 16 * 2**20  # bytes of buffers that torch's libraries keep for themselves


@dataclass(frozen=True)
class Plan:
    costs: dict[str, Cost]
    choice: str  # a name of costs
    structure: str  # what to pass to laplace
    working: int  # the memory_budget to pass
    treatment: dict[str, str]
    epoch: float  # seconds of a gradient epoch


@dataclass(frozen=True)
class Rates:
    """Seconds, on this machine."""

    gradient: float  # of an example, in a batch
    forward: float
    read: float  # of an example, by the loader
    product: float  # of a multiplication and addition, float64
    product32: float
    element: float  # of a parameter in one evaluation of the evidence


@dataclass(frozen=True)
class Need:
    """Bytes and seconds of a structure, before they are told in gradients."""

    memory: float
    fit: float
    tune: float
    predict: float
    note: str = ""


@dataclass(frozen=True)
class Problem:
    tangent: TangentModel
    likelihood: Likelihood
    factor: Factor
    seen: Probe  # n is 0 where it is unknown
    batch: Batch  # to try things on
    batch_size: int  # that the fit will have
    parts: tuple[Part, ...]
    positions: dict[str, int]  # of each part
    working: int

    @property
    def n(self) -> float:
        return self.seen.n or math.nan

    @property
    def columns(self) -> int:
        return self.factor.columns(self.seen.outputs, self.seen.positions)

    @property
    def outputs(self) -> int:
        return self.seen.outputs * self.seen.positions

    @property
    def weights(self) -> int:
        return len(self.likelihood.curvature_weights(self.factor.kind))

    @property
    def size(self) -> int:
        return self.seen.parameters

    @property
    def copies(self) -> int:
        """Bytes of the weights that the tangent model copies."""
        held = [*self.tangent.params.values(), *self.tangent.constants.values()]
        return sum(t.numel() * t.element_size() for t in held)


def survey(tangent: TangentModel, likelihood: Likelihood, sample: Sample, working: int) -> Problem:
    x, y = sample.first
    few = tree.rows_of(x, slice(0, 4)) if tangent.separable(x) else x
    f = tangent(few)
    seen = Probe(sample.n or 0, f[0, ..., 0].numel(), f.shape[-1], tangent.layout.size, few)
    parts = cover(tangent, few)
    with torch.no_grad():
        views = Capture(tangent, parts).run(few).views()
    positions = {name: view.positions for name, view in views.items()}
    factor = api.as_factor("auto", seen, likelihood)
    return Problem(tangent, likelihood, factor, seen, (x, y), sample.batch, parts, positions, working)


def draw_up(
    tangent: TangentModel,
    last: TangentModel | None,
    likelihood: Likelihood,
    sample: Sample,
    limit: int,
    budget: int | None,
) -> Plan:
    """Plan every structure, and the last layer alone where there is one."""
    working = BUDGET if budget is None else max(2**16, budget // 2)
    problem = survey(tangent, likelihood, sample, working)
    rates = measure(problem, sample)
    unit = rates.gradient + rates.read
    needs = {name: _need(name, problem, rates) for name in NAMES}
    if last is not None and last.layout.size < tangent.layout.size:
        small = survey(last, likelihood, sample, working)
        name, _ = _preferred(small)
        needs["last_layer"] = replace(_need(name, small, rates), note=name.split()[0])
    costs = {
        name: Cost(
            memory=int(min(need.memory + problem.copies + LIBRARIES, 2**62)),
            fit=need.fit / (problem.n * unit),
            tune=need.tune / (problem.n * unit),
            predict=need.predict / (trial.THOUSAND * rates.gradient),
            fits=need.memory + problem.copies + LIBRARIES <= limit,
            note=need.note,
        )
        for name, need in needs.items()
        if not math.isnan(need.memory)
    }
    choice, structure = _choose(problem, costs)
    chosen = problem if choice != "last_layer" else survey(last, likelihood, sample, working)  # type: ignore[arg-type]
    costs[choice] = replace(costs[choice], note=f"{costs[choice].note}, recommended")
    return Plan(costs, choice, structure, working, _treatment(chosen, structure), problem.n * unit)


def _preferred(problem: Problem) -> tuple[str, str]:
    """The structure of the highest quality that is not out of proportion: a name of the plan, and of laplace."""
    rows = problem.n * problem.outputs
    if min(problem.size, rows if rows == rows else math.inf) <= api.SMALL:
        return ("full (dual)" if problem.size > problem.n * problem.columns else "full (primal)"), "full"
    return "kron", "kron"


def _choose(problem: Problem, costs: dict[str, Cost]) -> tuple[str, str]:
    options = dict([_preferred(problem), ("kron", "kron"), ("diag", "diag"), ("last_layer", "auto")])
    known = {name: structure for name, structure in options.items() if name in costs}
    for name, structure in known.items():
        if costs[name].fits:
            return name, structure
    least = min(known, key=lambda name: costs[name].memory)
    return least, known[least]


def _treatment(problem: Problem, structure: str) -> dict[str, str]:
    """What la.coverage will say."""
    chosen = api.as_structure(structure, problem.seen, problem.working)
    if isinstance(chosen, Full):
        form = "dual" if problem.size > problem.n * problem.columns else "primal"
        return replace(chosen, form=form).coverage((), problem.tangent) | _rest(problem)
    parts = chosen.parts(problem.tangent, problem.seen.inputs)
    return chosen.coverage(parts, problem.tangent) | _rest(problem)


def _rest(problem: Problem) -> dict[str, str]:
    names = (n for n, _ in problem.tangent.model.named_parameters())
    return {n: "frozen" for n in names if n not in problem.tangent.layout.shapes}


# -- what this machine can do --------------------------------------------------------------------------------------


def measure(problem: Problem, sample: Sample) -> Rates:
    tangent, (x, y) = problem.tangent, problem.batch
    device = tangent.device
    return Rates(
        gradient=trial.gradient_seconds(tangent, problem.likelihood, (x, y)),
        forward=trial.forward_seconds(tangent, x, len(y)),
        read=sample.seconds,
        product=trial.product_seconds(device, torch.float64),
        product32=trial.product_seconds(device, torch.float32),
        element=trial.element_seconds(device),
    )


def free_memory(device: torch.device) -> int:
    """Bytes that are free on the device; on Linux what the kernel calls available."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 8 * 2**30


# Times of LAPACK in matrix products of the same size: the smaller a matrix, the less of it is products.


def eigenvalues(n: int, rates: Rates) -> float:
    return (1.5 + 1000 / max(n, 1)) * n**3 * rates.product


def eigenvectors(n: int, rates: Rates) -> float:
    return (6 + 1300 / max(n, 1)) * n**3 * rates.product


def cholesky(n: int, rates: Rates) -> float:
    return (0.6 + 300 / max(n, 1)) * n**3 * rates.product


def _evaluations(size: int, parts: int, rates: Rates) -> float:
    return EVALUATIONS * (size * rates.element + EVALUATION[0] + parts * EVALUATION[1])


# -- the structures ------------------------------------------------------------------------------------------------


def _need(name: str, problem: Problem, rates: Rates) -> Need:
    if name == "full (primal)":
        return _primal(problem, rates)
    return _dual(problem, rates) if name == "full (dual)" else _layered(name, problem, rates)


def _primal(problem: Problem, rates: Rates) -> Need:
    n, k, p = problem.n, problem.columns, problem.size
    matrix = 8 * p**2
    rows = n * k * p * 2e-9 + n * rates.gradient * (1 + k) / 3
    predict_rows = trial.THOUSAND * problem.outputs
    return Need(
        memory=matrix * (problem.weights + 4) + min(problem.working, 12 * 2048 * p),
        fit=n * rates.read + rows + n * k * p**2 / 2 * rates.product,
        tune=eigenvalues(p, rates) + cholesky(p, rates) + _evaluations(p, 1, rates),
        predict=predict_rows * (0.75 * p**2 * rates.product + p * 4e-9),
        note="exact",
    )


def _dual(problem: Problem, rates: Rates) -> Need:
    n, k, p = problem.n, problem.columns, problem.size
    if n != n:
        return Need(math.nan, math.nan, math.nan, math.nan)
    m, new = int(n * k), trial.THOUSAND * problem.outputs
    rows = 8 * m * p
    held = rows <= problem.working
    inputs = sum(t.numel() * t.element_size() for t in tree.tensors(problem.batch[0])) / len(problem.batch[1]) * n
    make = m * p * 2e-9 + n * rates.gradient * (1 + k) / 3
    return Need(
        memory=inputs + (2 * rows if held else problem.working) + 5 * 8 * m**2 + 3 * 8 * m * new,
        fit=n * (rates.read + rates.forward),
        tune=make + m**2 * p * rates.product + eigenvalues(m, rates) + cholesky(m, rates) + _evaluations(m, 1, rates),
        predict=new * (m * (p + 0.75 * m) * rates.product + p * 4e-9) + (0 if held else make),
        note="exact",
    )


def _layered(name: str, problem: Problem, rates: Rates) -> Need:
    structure = api.STRUCTURES[name](memory_budget=problem.working)
    kinds = [_kind(structure, part) for part in problem.parts]
    parts = [replace(part, kind=kind) for part, kind in zip(problem.parts, kinds, strict=True)]
    state = sum(_state_bytes(part, problem) for part in parts)
    transient = max((_transient_bytes(part) for part in parts), default=0)
    vectors = sum(_factor_bytes(part) for part in parts)
    tune = sum(_tune_seconds(part, rates) for part in parts) + _evaluations(problem.size, len(parts), rates)
    note = {"kron": "A x B a layer", "block": "exact a layer", "diag": "exact"}[name]
    batch = _trial_batch(problem, rates)
    if state + transient + vectors > TRY or batch is None:
        fit, predict, work = _counted(parts, problem, rates)
        return Need(state + vectors + transient + work, fit, tune, predict, note)
    tried = trial.try_fit(structure, problem.tangent, problem.likelihood, problem.factor, problem.seen, batch)
    scale = problem.batch_size / len(batch[1])
    fit_peak = state + HEAP * (tried.peak - state) * max(1.0, scale)
    quick = rates.gradient * problem.outputs * trial.LARGEST < PATIENCE
    pushed = trial.try_predict(tried.state, problem.likelihood, batch[0], problem.working, quick)
    evidence = state + 6 * 8 * problem.size + transient
    return Need(
        memory=max(fit_peak, evidence, state + vectors + transient, state + vectors + HEAP * pushed.peak),
        fit=tried.once + problem.n * (tried.example + rates.read),
        tune=tune,
        predict=pushed.thousand,
        note=note,
    )


def _kind(structure: Any, part: Part) -> str:
    if part.kind == "unused":
        return "unused"
    return "dense" if str(structure) == "block" else structure.kind_of(part)  # block refuses what is too large


def _trial_batch(problem: Problem, rates: Rates) -> Batch | None:
    """As many examples of the first batch as a trial has the time for; None if not even a few."""
    x, y = problem.batch
    each = rates.gradient * (1 + problem.columns)
    n = min(len(y), int(PATIENCE / max(each, 1e-9)))
    if n >= len(y) or not problem.tangent.separable(x):
        return (x, y) if each * len(y) < 4 * PATIENCE else None
    if n < 2:
        return None
    return tree.rows_of(x, slice(0, n)), y[:n]


def _state_bytes(part: Part, problem: Problem) -> int:
    b, o, i = part.shape
    h = problem.weights
    return {"kron": 8 * b * (i**2 + h * o**2), "dense": 8 * h * part.size**2, "diagonal": 8 * h * part.size}.get(
        part.kind, 0
    )


def _factor_bytes(part: Part) -> int:
    """Eigenvectors or a Cholesky factor, and the precision in their basis."""
    b, o, i = part.shape
    return {"kron": 8 * b * (i**2 + o**2 + o * i), "dense": 8 * part.size**2}.get(part.kind, 0)


def _transient_bytes(part: Part) -> int:
    """Copies while one part is factorized."""
    b, o, i = part.shape
    return {"kron": 24 * b * max(i, o) ** 2, "dense": 24 * part.size**2}.get(part.kind, 0)


def _tune_seconds(part: Part, rates: Rates) -> float:
    """Eigenvalues for the evidence, then what predictions need."""
    b, o, i = part.shape
    if part.kind == "kron":
        return b * sum(eigenvalues(n, rates) + eigenvectors(n, rates) for n in (o, i))
    return eigenvalues(part.size, rates) + cholesky(part.size, rates) if part.kind == "dense" else 0.0


def _counted(parts: list[Part], problem: Problem, rates: Rates) -> tuple[float, float, float]:
    """Seconds of fit and of 1,000 predictions, and bytes of work, for what is too large to try."""
    n, k, c, e = problem.n, problem.columns, problem.outputs, 4
    products = predict = columns = 0.0
    for part in parts:
        b, o, i = part.shape
        s = problem.positions.get(part.name, 1)
        columns += s * b * o * e
        if part.kind == "kron":
            products += s * b * (i**2 + k * o**2) * rates.product32
            predict += (
                s * b * (i**2 + c * o**2) * rates.product32 + c * (s if s > 1 else 1) * b * o * i * rates.product32
            )
        elif part.kind == "dense":
            products += k * part.size**2 * rates.product
            predict += 0.75 * c * part.size**2 * rates.product
        else:
            products += (k * s if s > 1 else 1) * part.size * rates.product32
            predict += c * (s if s > 1 else 1) * part.size * rates.product32
    fit = n * (rates.read + rates.gradient * (1 + k) / 3 + products)
    thousand = trial.THOUSAND * (rates.gradient * (1 + c) / 3 + predict)
    return fit, thousand, min(problem.working, 3 * problem.batch_size * columns * k)
