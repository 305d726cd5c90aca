"""What a structure needs, in bytes and seconds: tried on a batch where it is small enough (trial.py), else counted.

With N data, K cotangents an example, C outputs, P parameters, and a the seconds of one multiplication in float64:

    full (primal)   fit N·K·P²/2·a          tune eig(P)                   predict 1,000·C·P²·a
    full (dual)     fit N forward           tune (N·K)²·Q·a + eig(N·K)    predict 1,000·C·N·K·(Q + N·K)·a
                    Q = Σ_layers i + o where a gradient is an outer product, else its parameters
    block           as primal, layer by layer
    kron            fit (1 + K)/3 gradients + N·Σ_layers s·(i² + K·o²) float32 products    tune Σ_layers eig(i) + eig(o)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from lapwing import arguments, tree
from lapwing.curvature import Factor, Full, Probe
from lapwing.curvature.capture import Capture
from lapwing.curvature.cover import cover
from lapwing.curvature.full import GATHERED_ROWS
from lapwing.curvature.gram import panels
from lapwing.curvature.parts import Part
from lapwing.doctor import trial
from lapwing.doctor.reading import Batch, Sample
from lapwing.doctor.tangent import centered
from lapwing.likelihoods import Likelihood
from lapwing.tangent import TangentModel

ASSUMED = 10_000  # examples, where the data do not tell
TRY = 2**28  # bytes of state that a trial may make
TRY_DENSE = 1500  # side of a dense block that a trial may factorize
EVALUATIONS, WITH_NOISE = 4, 14  # of the evidence while tuning the prior alone, and with the noise
EVALUATION = 1e-3, 2.5e-4  # seconds of one beside its elements: once, and a part
HEAP = 1.4  # bytes that the process grows by for a byte of passing tensors: gaps, and copies inside kernels
PIECES = 1.7  # the same where many pieces pass


@dataclass(frozen=True)
class Rates:
    """Seconds, on this machine."""

    gradient: float  # of an example, in a batch
    forward: float
    read: float  # of an example, by the loader
    product: float  # of a multiplication and addition, float64
    product32: float
    element: float  # of a parameter in one evaluation of the evidence
    sweep: float  # of an element of a matrix in its product with a vector
    push: float = math.nan  # of an example's J v, in a pass over the data
    pull: float = math.nan  # of an example's Jᵀu


@dataclass(frozen=True)
class Need:
    """Bytes and seconds of a structure, before they are told in gradients."""

    memory: float
    fit: float
    tune: float
    predict: float
    note: str = ""
    solve: float = 0.0  # seconds of one solve with the precision
    factorize: float = 0.0  # seconds, before it, for each new prior or noise
    exact: bool = False  # whether the precision is that of the tangent model
    kept: float = 0.0  # bytes that stay between fit and prediction
    work: float = 0.0  # bytes beside them while tuning at the tangent MAP
    tangent: float = math.nan  # seconds of tuning at the tangent MAP
    each: float = math.nan  # of those, for each pass over the data, or each round where J is in memory


@dataclass(frozen=True)
class Problem:
    """A network, its data and its likelihood, as far as costs depend on them."""

    tangent: TangentModel
    likelihood: Likelihood
    factor: Factor
    seen: Probe
    counted: bool  # whether n is known; if not, it is ASSUMED
    batch: Batch  # to try things on
    batch_size: int  # that the fit will have
    parts: tuple[Part, ...]
    positions: dict[str, int]  # of each part
    columns: int  # cotangents an example
    working: int

    @property
    def n(self) -> int:
        """The number of examples."""
        return self.seen.n

    @property
    def primal(self) -> bool:
        """Which form structure='full' takes."""
        return not self.size > self.n * self.factor.columns(self.seen.outputs, self.seen.positions)

    def paired(self, part: Part) -> bool:
        """Whether an example's gradient of a part is an outer product."""
        b, _, _ = part.shape
        return not part.generic and b == 1 and not part.transposed and self.positions.get(part.name, 1) == 1

    @property
    def outputs(self) -> int:
        """Outputs of an example, at all positions."""
        return self.seen.outputs * self.seen.positions

    @property
    def weights(self) -> int:
        """The number of curvature weights."""
        return len(self.likelihood.curvature_weights(self.factor.kind))

    @property
    def size(self) -> int:
        """The number of parameters."""
        return self.seen.parameters

    @property
    def element(self) -> int:
        """Bytes of a number in float32 or better."""
        return torch.empty(0, dtype=torch.promote_types(self.tangent.dtype, torch.float32)).element_size()

    @property
    def copies(self) -> int:
        """Bytes of the weights that the tangent model copies."""
        held = [*self.tangent.params.values(), *self.tangent.constants.values()]
        return sum(t.numel() * t.element_size() for t in held)


def survey(tangent: TangentModel, likelihood: Likelihood, sample: Sample, working: int) -> Problem:
    """The problem of fitting this network to these data; `working` are the bytes of memory_budget."""
    x, y = sample.first
    few = tree.rows_of(x, slice(0, 4)) if tangent.separable(x) else x
    f = tangent(few)
    seen = Probe(sample.n or ASSUMED, f[0, ..., 0].numel(), f.shape[-1], tangent.layout.size, few)
    parts = cover(tangent, few)
    with torch.no_grad():
        views = Capture(tangent, parts).run(few).views()
    positions = {name: view.positions for name, view in views.items()}
    factor = arguments.as_factor("auto", seen, likelihood)
    columns = factor.columns(seen.outputs, seen.positions)
    if factor.kind == "exact":  # a softmax has one less than outputs
        columns = likelihood.columns(seen.outputs) * seen.positions
    return Problem(
        tangent, likelihood, factor, seen, bool(sample.n), (x, y), sample.batch, parts, positions, columns, working
    )


def measure(problem: Problem, sample: Sample) -> Rates:
    """What this machine takes for a gradient, a forward pass, a product and the like."""
    tangent, (x, y) = problem.tangent, problem.batch
    device = tangent.device
    return Rates(
        gradient=trial.gradient_seconds(tangent, problem.likelihood, (x, y)),
        forward=trial.forward_seconds(tangent, x, len(y)),
        read=sample.seconds,
        product=trial.product_seconds(device, torch.float64),
        product32=trial.product_seconds(device, torch.float32),
        element=trial.element_seconds(device),
        sweep=trial.sweep_seconds(device),
    )


def with_products(rates: Rates, problem: Problem) -> Rates:
    """With those of products with J, which go by the weights that are Bayesian."""
    push, pull = trial.jacobian_seconds(problem.tangent, problem.batch)
    return replace(rates, push=push, pull=pull)


# Times of LAPACK in matrix products of the same size: the smaller a matrix, the less of it is products.


def eigenvalues(n: int, rates: Rates) -> float:
    """Seconds for the eigenvalues of an n × n matrix."""
    return (1.5 + 1000 / max(n, 1)) * n**3 * rates.product


def eigenvectors(n: int, rates: Rates) -> float:
    """Seconds for its eigenvectors too."""
    return (5 + 1500 / max(n, 1)) * n**3 * rates.product


def cholesky(n: int, rates: Rates) -> float:
    """Seconds for the Cholesky factor of an n × n matrix."""
    return (0.6 + 300 / max(n, 1)) * n**3 * rates.product


def _evaluations(problem: Problem, size: int, parts: int, rates: Rates) -> float:
    count = WITH_NOISE if problem.likelihood.hyperparameters else EVALUATIONS
    return count * (3 * size * rates.element + EVALUATION[0] + parts * EVALUATION[1])


# -- the structures ------------------------------------------------------------------------------------------------


def need(name: str, problem: Problem, rates: Rates) -> Need:
    """Bytes and seconds of a structure, by its name."""
    return centered(_uncentered(name, problem, rates), problem, rates)


def _uncentered(name: str, problem: Problem, rates: Rates) -> Need:
    if name == "full (primal)":
        return _primal(problem, rates)
    return _dual(problem, rates) if name == "full (dual)" else _layered(name, problem, rates)


def _primal(problem: Problem, rates: Rates) -> Need:
    n, k, p = problem.n, problem.columns, problem.size
    matrix, new = 8 * p**2, trial.THOUSAND * problem.outputs
    lower = 0.5 + 0.5 * min(1.0, panels(p).step / p)  # the lower triangle, in panels
    passes = n * (rates.read + rates.gradient * (1 + k) / 3) + n * k * p * rates.element
    need = Need(
        memory=matrix * problem.weights + max(matrix + HEAP * min(problem.working, 12 * GATHERED_ROWS * p), 3 * matrix),
        fit=passes + n * k * p**2 * lower * rates.product + 8 * p**2 * rates.element,
        tune=eigenvalues(p, rates) + cholesky(p, rates) + _evaluations(problem, p, 1, rates),
        predict=new * (0.75 * p**2 * rates.product + p * rates.element) + trial.THOUSAND * rates.gradient,
        note="exact",
        solve=p**2 * rates.sweep,
        factorize=cholesky(p, rates),
        exact=problem.factor.kind == "exact",
        kept=matrix * (problem.weights + 2),
    )
    if p > TRY_DENSE:
        return need
    structure = Full("primal", problem.working)
    tried = trial.try_fit(structure, problem.tangent, problem.likelihood, problem.factor, problem.seen, problem.batch)
    pushed = trial.try_predict(tried.state, problem.likelihood, problem.batch[0], problem.working)
    fit = tried.once + n * (tried.example + rates.read)
    return replace(need, fit=fit, predict=pushed.thousand, memory=max(need.memory, matrix + _held(pushed)))


def _dual(problem: Problem, rates: Rates) -> Need:
    """Layers without shared positions need no columns of the rows: ⟨g ⊗ a, g' ⊗ a'⟩ = ⟨g, g'⟩⟨a, a'⟩."""
    n, k, p = problem.n, problem.columns, problem.size
    k = problem.outputs if problem.likelihood.paired else k  # columns of pairs are not kept
    m, new = n * k, trial.THOUSAND * problem.outputs
    paired = [part for part in problem.parts if problem.paired(part)]
    sides = sum(part.shape[1] + part.shape[2] for part in paired)
    if 8 * m * sides > problem.working:
        paired, sides = [], 0
    wide = p - sum(part.size for part in paired)  # columns that must be made
    held = 8 * m * p <= problem.working
    rows = 0 if not wide else 16 * m * p if held else problem.working
    inputs = sum(t.numel() * t.element_size() for t in tree.tensors(problem.batch[0])) / len(problem.batch[1]) * n
    make = n * rates.gradient * (1 + k) / 3 + m * wide * rates.element
    structure = Full("dual", problem.working)
    tried = trial.try_fit(structure, problem.tangent, problem.likelihood, problem.factor, problem.seen, problem.batch)
    columns, passing = sides + wide, (2 + 4 * len(paired)) * rates.element
    return Need(
        memory=inputs + 8 * sides * (m + new) + rows + 8 * max(5 * m**2, 2 * m**2 + 7 * m * new),
        fit=tried.once + n * (tried.example + rates.read),
        tune=2 * tried.once
        + make
        + m**2 * (columns * rates.product + passing)
        + eigenvalues(m, rates)
        + cholesky(m, rates)
        + _evaluations(problem, m, 1, rates),
        predict=new * m * ((columns + 0.75 * m) * rates.product + passing)
        + new * wide * rates.element
        + trial.THOUSAND * rates.gradient * (1 + problem.outputs) / 3
        + (0 if held or not wide else make),
        note="exact",
        solve=2 * m * p * rates.sweep + (0 if held or not wide else make),
        factorize=cholesky(m, rates),
        exact=problem.factor.kind == "exact",
        kept=inputs + 8 * sides * m + rows / 2 + 24 * m**2,
    )


def _layered(name: str, problem: Problem, rates: Rates) -> Need:
    structure = arguments.STRUCTURES[name](memory_budget=problem.working)
    kinds = [_kind(structure, part) for part in problem.parts]
    parts = [replace(part, kind=kind) for part, kind in zip(problem.parts, kinds, strict=True)]
    state = sum(_state_bytes(part, problem) for part in parts)
    transient = max((_transient_bytes(part) for part in parts), default=0)
    vectors = sum(_factor_bytes(part, problem) for part in parts)
    tune = sum(_tune_seconds(part, problem, rates) for part in parts) + _evaluations(
        problem, problem.size, len(parts), rates
    )
    note = {"kron": "Kronecker factors", "block": "exact per layer", "diag": "exact diagonal"}[name]
    solve = sum(_solve_seconds(part, rates) for part in parts)
    factorize = sum(cholesky(part.size, rates) for part in parts if part.kind == "dense")
    largest = max((part.size for part in parts if part.kind == "dense"), default=0)
    if state + transient + vectors > TRY or largest > TRY_DENSE:
        fit, predict, work = _counted(parts, problem, rates)
        memory = state + vectors + transient + work
        return Need(memory, fit, tune, predict, note, solve, factorize, kept=state + vectors)
    tried = trial.try_fit(structure, problem.tangent, problem.likelihood, problem.factor, problem.seen, problem.batch)
    pushed = trial.try_predict(tried.state, problem.likelihood, problem.batch[0], problem.working)
    work = HEAP * (tried.peak - state) * max(1.0, problem.batch_size / tried.examples)
    evidence = 6 * 8 * problem.size + transient
    return Need(
        memory=state + max(work, evidence, vectors + transient, vectors + _held(pushed)),
        fit=tried.once + problem.n * (tried.example + rates.read),
        tune=tune,
        predict=pushed.thousand,
        note=note,
        solve=solve,
        factorize=factorize,
        kept=state + vectors,
    )


def _held(pushed: trial.PredictTrial) -> float:
    return PIECES * pushed.work + pushed.handed_out


def _kind(structure: Any, part: Part) -> str:
    if part.kind == "unused":
        return "unused"
    return "dense" if str(structure) == "block" else structure.kind_of(part)  # block refuses what is too large


def _state_bytes(part: Part, problem: Problem) -> int:
    b, o, i = part.shape
    h = problem.weights
    kron = problem.element * b * (i**2 + h * o**2)  # summed in the model's precision, float32 at the least
    return {"kron": kron, "dense": 8 * h * part.size**2, "diagonal": 8 * h * part.size}.get(part.kind, 0)


def _factor_bytes(part: Part, problem: Problem) -> int:
    """Eigenvectors or a Cholesky factor, the precision in their basis, and factors made double."""
    b, o, i = part.shape
    copies = 1 if problem.element == 8 else 2
    return {"kron": 8 * b * (copies * (i**2 + o**2) + o * i), "dense": 8 * part.size**2}.get(part.kind, 0)


def _transient_bytes(part: Part) -> int:
    """Copies while one part is factorized."""
    b, o, i = part.shape
    return {"kron": 24 * b * max(i, o) ** 2, "dense": 24 * part.size**2}.get(part.kind, 0)


def _tune_seconds(part: Part, problem: Problem, rates: Rates) -> float:
    """Eigenvalues for the evidence, then what predictions need."""
    b, o, i = part.shape
    if part.kind == "kron":
        single = 1.0 if problem.element == 8 else 0.7  # float32 saves less here than in products
        return b * sum(single * eigenvalues(n, rates) + eigenvectors(n, rates) for n in (o, i))
    return eigenvalues(part.size, rates) + cholesky(part.size, rates) if part.kind == "dense" else 0.0


def _solve_seconds(part: Part, rates: Rates) -> float:
    """Of one vector, with what was factorized."""
    b, o, i = part.shape
    if part.kind == "kron":  # into the eigenbasis and back
        return 2 * b * o * i * (o + i) * rates.product + 4 * part.size * rates.element
    return part.size**2 * rates.sweep if part.kind == "dense" else part.size * rates.element


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
