"""How far a structured curvature Ĝ is from the true GGN G, at the same prior and noise, by products with G alone.

With P = Ĝ + A (the posterior precision) and K = G + A (what it stands for), Eq. 22:

    trace     tr Ĝ / tr G                                tr G = Σ_n ‖J_nᵀS_n e_n‖² in expectation, e_n random signs
    log_det   log|P| − log|K| = −tr log(P⁻¹K)            Lanczos in the inner product of P, from starts z ~ N(0, P⁻¹)
    variance  Σ_n tr(J_n P⁻¹ J_nᵀ) / Σ_n tr(J_n K⁻¹ J_nᵀ) − 1    over the training inputs; j = Σ_n J_nᵀu_n, u random
                                                         signs: mean jᵀP⁻¹j / mean jᵀK⁻¹j, K⁻¹j by CG on P⁻¹

Ĝ = G gives 1, 0 and 0. All k probes share their passes over the data; vectors are (k, p), and no array is outputs by
parameters. Source: Hutchinson 1990; Ubaru, Chen and Saad 2017; Gardner et al. 2018.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lapwing import data as loading
from lapwing import fixed
from lapwing.curvature import Diagonal, State, accumulate, probe
from lapwing.curvature.accumulate import flat_outputs, flat_targets
from lapwing.curvature.layered import LayeredSum
from lapwing.curvature.products import gauss_newton
from lapwing.distributed import Ranks
from lapwing.errors import InvalidValue, NotConverged
from lapwing.likelihoods import Likelihood
from lapwing.operators import Diagonal as DiagonalOperator
from lapwing.operators import linalg
from lapwing.operators.streamed import STEPS, WORK
from lapwing.posterior import condition, curvature
from lapwing.solvers import Estimate, cg, slq
from lapwing.solvers.estimate import FEWEST, exactly, mean_of, ratio_of
from lapwing.solvers.lanczos import SHORT

MAX_STEPS = 500  # of CG and of Lanczos, a pass over the data each
TOLERANCE = {torch.float64: 1e-6}  # of CG, by the network's dtype
COARSE = 1e-3  # where products are rounded to float32 or less


# -- the certificate ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Certificate:
    """Estimates with standard errors and 90 % intervals; 1, 0 and 0 if the structure is exact."""

    trace: Estimate  # tr Ĝ / tr G
    log_det: Estimate  # log|Ĝ + A| − log|G + A|
    variance: Estimate  # relative error of the predictive variances
    probes: int
    passes: int  # over the data
    residual: float  # the largest of CG, ‖j − K x‖ / ‖j‖
    structure: str

    def __repr__(self) -> str:
        title = f"Certificate of {self.structure} against the true curvature ({self._cost()})"
        return "\n".join([title, *(f"  {name:<9} {shown:<34} {words}" for name, shown, words in self._lines())])

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><th>{name}</th><td>{shown}</td><td>{words}</td></tr>" for name, shown, words in self._lines()
        )
        caption = f"Certificate of {self.structure} against the true curvature ({self._cost()})"
        return f"<table><caption>{caption}</caption>{rows}</table>"

    def _cost(self) -> str:
        return f"{self.probes} probes, {self.passes} passes over the data"

    def _lines(self) -> list[tuple[str, str, str]]:
        return [
            ("trace", _shown(self.trace), _percent(self.trace - 1, "total curvature is", ("too small", "too large"))),
            ("log_det", _shown(self.log_det), self._evidence()),
            ("variance", _shown(self.variance), self._error_bars()),
        ]

    def _evidence(self) -> str:
        """−½ log|·| enters the evidence."""
        nats = 0.5 * abs(self.log_det.value)
        if nats < 5e-4:
            return "the log evidence is that of the true curvature"
        how = "lower" if self.log_det.value > 0 else "higher"
        low, high = self.log_det.interval
        again = _between(0.5 * low, 0.5 * high, "nats", "{:.3g}")
        return f"the log evidence is {nats:.3g} nats {how} than with the true curvature{again}"

    def _error_bars(self) -> str:
        """Standard deviations, the square roots of variances."""
        low, high = ((1 + v) ** 0.5 - 1 for v in self.variance.interval)
        width = Estimate((1 + self.variance.value) ** 0.5 - 1, 0.0, (low, high), self.variance.samples)
        return _percent(width, "error bars are", ("too narrow", "too wide"))


def _shown(e: Estimate) -> str:
    if not len(e.samples):
        return f"{e.value:.4g} (exact)"
    return f"{e.value:.4g} ± {e.standard_error:.2g}, 90 % [{e.interval[0]:.4g}, {e.interval[1]:.4g}]"


def _percent(e: Estimate, what: str, signs: tuple[str, str]) -> str:
    if abs(e.value) < 5e-4:
        return f"{what} right"
    low, high = e.interval
    again = _between(100 * low, 100 * high, "%", "{:.1f}") if len(e.samples) else ""
    return f"{what} {100 * abs(e.value):.1f} % {signs[e.value > 0]}{again}"


def _between(low: float, high: float, unit: str, digits: str) -> str:
    """The interval in words: of the size, where its sign is sure."""
    if low * high <= 0:
        return ", which may be chance"
    ends = [digits.format(v) for v in sorted((abs(low), abs(high)))]
    return f" ({ends[0]} to {ends[1]} {unit})"


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
    inputs: Tensor = field(default_factory=lambda: torch.zeros(5, dtype=torch.float64))  # their sums

    @property
    def ranks(self) -> Ranks:
        return loading.ranks_of(self.batches)

    def product(self, v: Tensor) -> Tensor:
        """(G + A) v."""
        self.passes += 1
        gv = gauss_newton(self.state.tangent, self.likelihood, self.batches, v, self.progress)
        return gv + linalg.mv(self.prior.operator(), v)

    def each(self, label: str) -> Any:
        """One pass over this rank's data."""
        self.passes += 1
        self.n, self.inputs = 0, torch.zeros(5, dtype=torch.float64)
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
    generator: torch.Generator | None = None,
    progress: bool = False,
    memory_budget: int = 2**30,
) -> Certificate:
    """Compare the curvature of a state with the true GGN (exact factor) over the data that it was fitted to."""
    if not isinstance(n_probes, int) or n_probes < FEWEST:
        raise InvalidValue(f"n_probes must be a whole number, at least {FEWEST}; got {n_probes!r}")
    generator = generator or torch.Generator().manual_seed(0)
    reader = Reader(state, prior, likelihood, loading.as_batches(data, sharded=True), progress)
    precision = condition(state, prior, likelihood).precision
    pulled = _pulled(reader, n_probes, generator)  # first: it checks the data
    if not bool(pulled.any()):
        raise InvalidValue("no output depends on the selected weights, so there is no curvature to certify")
    trace = _trace(reader, n_probes, generator, memory_budget)
    log_det = _log_det(reader, precision, n_probes, generator, memory_budget)
    variance, residual = _variance(reader, precision, pulled)
    return Certificate(trace, log_det, variance, n_probes, reader.passes, residual, str(state.structure))


def _trace(reader: Reader, k: int, generator: torch.Generator, budget: int, exact: bool | None = None) -> Estimate:
    """tr Ĝ / tr G: exactly where an example has no more columns than there are probes, else by signs per example."""
    state, likelihood, tangent = reader.state, reader.likelihood, reader.state.tangent
    own = float(_sum_diagonal(curvature(state, likelihood)))
    seen = probe(tangent, reader.batches)
    structure = Diagonal(memory_budget=budget)
    if seen.outputs * seen.positions <= k if exact is None else exact:
        reader.passes += 1
        true = accumulate(structure, tangent, likelihood, reader.batches, "exact", progress=reader.progress, seen=seen)
        return exactly(own / float(_sum_diagonal(curvature(true, likelihood))))
    sums = LayeredSum(tangent, structure.parts(tangent, seen.inputs), k, structure)  # each probe kept apart
    column, own_signs = torch.arange(k, device=tangent.device), reader.ranks.own(generator)
    with reader.ranks.told("the trace"):
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


def _log_det(reader: Reader, precision: Any, k: int, generator: torch.Generator, budget: int) -> Estimate:
    """−tr log(P⁻¹K), the probes in as few groups as their Lanczos vectors fit the memory budget; where those of the
    fewest do not, only the last vectors are kept."""
    starts = linalg.draw(precision, k, generator)
    room = budget // (8 * starts.shape[-1])  # vectors
    groups = starts.tensor_split(max(1, min(k // FEWEST, -(-k // max(1, room // STEPS)))))
    window = max(SHORT, room // len(groups[0]) - WORK)

    def step(v: Tensor) -> Tensor:
        return linalg.solve(precision, reader.product(v))

    def inner(v: Tensor) -> Tensor:
        return linalg.mv(precision, v)

    found = [slq(step, some, lambda values: -values.log(), inner, MAX_STEPS, window)[0] for some in groups]
    return mean_of(torch.cat([estimate.samples for estimate in found]))


def _pulled(reader: Reader, k: int, generator: torch.Generator) -> Tensor:
    """j = Σ_n J_nᵀu_n for k vectors of signs over all outputs, (k, p)."""
    tangent = reader.state.tangent
    total = torch.zeros(k, tangent.layout.size, dtype=torch.float64, device=tangent.device)
    own = reader.ranks.own(generator)
    with reader.ranks.told("vectors of signs"):
        for x, _ in reader.each("predictions"):
            f = tangent(x)
            total += tangent.vjps(x, _signs((k, *f.shape), own, f)).to(total)
    reader.check()
    return reader.ranks.total([total], "vectors of signs")[0]


def _variance(reader: Reader, precision: Any, pulled: Tensor) -> tuple[Estimate, float]:
    def solve(v: Tensor) -> Tensor:
        return linalg.solve(precision, v)

    tolerance = TOLERANCE.get(reader.state.tangent.dtype, COARSE)
    solution = cg(reader.product, pulled, solve, tolerance=tolerance, max_steps=MAX_STEPS)
    residual = float(solution.residual.max())
    if not solution.converged:
        raise NotConverged(
            f"the solve with the true curvature stopped at a residual of {residual:.2g} after {solution.steps} steps, "
            f"above {tolerance:g}: the structure is too far from the true curvature to certify its predictions this "
            "way; raise the prior precision, use a closer structure (kron rather than diag), or a float64 network"
        )
    ours, true = (pulled * solve(pulled)).sum(-1), (pulled * solution.x).sum(-1)
    return ratio_of(ours, true) - 1, residual


def _signs(shape: tuple[int, ...], generator: torch.Generator, like: Tensor) -> Tensor:
    draws = torch.randint(0, 2, shape, generator=generator, device=generator.device)
    return (2 * draws - 1).to(like)
