"""The tangent MAP: where the posterior of the tangent model h(x, v) = f(x, θ*) + J(x)(v − θ*) has its mode (Eq. 20),

    v* = argmin_v  −Σ_n log p(y_n | h(x_n, v)) + ½ ‖v − m‖²_A

convex, whatever the network. The trained weights θ* need not be near it: with normalization layers the network does not
depend on the scale of its weights, but the prior does, and θ* is no mode at all.

Each step adds a direction, P⁻¹ times the gradient with P = Ĝ + A the precision of the fitted structure, to those whose
images J d are known (`Space`), and goes to the minimum over all of them: conjugate gradients where the objective is
quadratic, and for other likelihoods too a method that forgets nothing. A step takes two passes, one for J d and one for
the gradient; the minimum takes none, and directions serve again when prior or noise change. With the full structure and
a Gaussian likelihood P is the Hessian, and one step is exact; otherwise P only says how many are needed, and where they
are many and the rows of J are in memory, P becomes the Hessian. Stationarity is measured in the norm of P⁻¹: a gain of
about ½‖g‖²_{P⁻¹} nats is left, or more where P overstates the curvature.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from lapwing import data as loading
from lapwing import fixed
from lapwing.curvature import BUDGET, State
from lapwing.curvature.accumulate import flat_outputs, flat_targets
from lapwing.curvature.cover import cover
from lapwing.curvature.products import output_curvature
from lapwing.curvature.rows import RowMaker
from lapwing.curvature.state import differing
from lapwing.distributed import Ranks
from lapwing.errors import InvalidValue, NotConverged, Unsupported
from lapwing.likelihoods import Likelihood
from lapwing.operators import Dense, Diagonal, HeldRows, RootPlusDiagonal, linalg
from lapwing.posterior import curvature
from lapwing.tangent import TangentModel

EXACT = 1e-10  # tolerance with the rows of J in memory
STREAMED = 2.5e-4  # with J by passes
SEARCH_STEPS = 500  # towards v*, at the most
PATIENCE = 20  # steps after which P becomes the Hessian
HESSIAN_SIDE = 4_000  # rows or columns of J, the fewer of them, up to which it does
NEWTON_STEPS = 50  # in the space of known directions
DEPENDENT = 1e-13  # share of the largest eigenvalue below which directions count as dependent
MAX_DIRECTIONS = 64  # that are known at a time
DIRECTION_BYTES = 2**29  # that they and their images may take; two are always kept
ROUNDING = 30  # of an output, in units of its last place
ROWS = 2**28  # bytes of rows, for one output, up to which they are kept


@dataclass(frozen=True, eq=False)
class Center:
    """v* and how it was found."""

    vector: Tensor  # v*, (p,), float64
    statistics: dict[str, Tensor]  # the likelihood's sums at h(x, v*)
    iterations: int  # steps, two passes each
    residual: float  # ‖gradient‖_{P⁻¹} / max(1, ‖v* − m‖_A)
    passes: int  # over the data
    outputs: Tensor | None = field(default=None, repr=False)  # h(x_n, v*), (m, c): to start the next from; not saved
    pulled: Tensor | None = field(default=None, repr=False)  # Σ_n J_nᵀ ∂ log p(y_n | h), (p,); not saved
    weights: Tensor | None = field(default=None, repr=False)  # the curvature weights that it was pulled at

    stretch: float = 1.0  # of Ĝ in P, by which it fits the curvature at v* rather than at the network's outputs
    space: Space | None = field(default=None, repr=False)  # to search again for other hyperparameters; not saved
    rounding: float = 0.0  # what rounding of the outputs leaves of the residual

    def alone(self) -> Center:
        """Without what belongs to one reading of the data."""
        return replace(self, outputs=None, pulled=None, weights=None, space=None)


# -- J over the data ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Jacobian:
    """J of all the data at once: outputs and targets in memory, J itself as rows where they fit, else by passes.

    Of data spread over ranks, each rank has its own rows of f and of J v; sums over rows are sums over ranks."""

    tangent: TangentModel
    batches: Iterable[Any]
    f: Tensor  # (m, c), float64: one row a position
    y: Tensor
    shapes: tuple[torch.Size, ...]  # of the outputs of each batch
    rows: Tensor | None  # (m·c, p), float64
    counter: Counter[str] = field(default_factory=Counter)

    @property
    def passes(self) -> int:
        """Passes over the data so far."""
        return self.counter["passes"]

    @property
    def ranks(self) -> Ranks:
        """The processes that share the data."""
        return loading.ranks_of(self.batches)

    @cached_property
    def counts(self) -> list[int]:
        """m·c of each rank."""
        return self.ranks.gather(self.f.numel(), "the number of outputs")

    def total(self, *sums: Tensor) -> list[Tensor]:
        """Sums over this rank's rows as sums over all."""
        return self.ranks.total(sums, "the tangent map")

    @property
    def eps(self) -> float:
        """Of the numbers that products with J are made in."""
        return torch.finfo(torch.float64 if self.rows is not None else self.tangent.dtype).eps

    def push(self, v: Tensor) -> Tensor:
        """J v, (p,) -> (m, c)."""
        if self.rows is not None:
            return (self.rows @ v).reshape(self.f.shape)
        v = self.ranks.same(v, "directions of the tangent map")
        with self.ranks.sharing_errors("a pass of the tangent map"):
            return torch.cat([self.f[:0], *(self._push(x, v) for x, _, _ in self._each())])

    def pull(self, u: Tensor) -> Tensor:
        """Jᵀu, (m, c) -> (p,)."""
        if self.rows is not None:
            return self.total(u.reshape(-1) @ self.rows)[0]
        pulled = torch.zeros(self.tangent.layout.size, dtype=torch.float64, device=self.f.device)
        with self.ranks.sharing_errors("a pass of the tangent map"):
            for x, index, shape in self._each():
                pulled += self._pull(x, u[index], shape)
        return self.total(pulled)[0]

    def statistics(self, likelihood: Likelihood, z: Tensor, state: State) -> dict[str, Tensor]:
        """The likelihood's sums at outputs z, (m, c)."""
        none = {key: torch.zeros_like(value) for key, value in state.statistics.items()}
        return self.ranks.totals(likelihood.statistics(z, self.y) if len(z) else none, "statistics")

    def column_squares(self, probes: int = 4) -> Tensor:
        """diag JᵀJ, (p,): exactly from rows, else an estimate with random signs, E(Jᵀε)² = diag JᵀJ."""
        if self.rows is not None:
            return self.total(torch.einsum("rp,rp->p", self.rows, self.rows))[0]
        generator = self.ranks.own(torch.Generator().manual_seed(0))
        squares = torch.zeros(self.tangent.layout.size, dtype=torch.float64, device=self.f.device)
        with self.ranks.sharing_errors("a pass of the tangent map"):
            for x, _, shape in self._each():
                signs = torch.randint(0, 2, (probes, *shape), generator=generator).to(self.f) * 2 - 1
                squares += self.tangent.vjps(x, signs).to(squares).square().mean(0)
        return self.total(squares)[0]

    def _push(self, x: Any, v: Tensor) -> Tensor:
        out = self.tangent.jvps(x, v.unsqueeze(0))[1][0].detach()
        return out.reshape(-1, out.shape[-1]).to(torch.float64)

    def _pull(self, x: Any, u: Tensor, shape: torch.Size) -> Tensor:
        return self.tangent.vjps(x, u.reshape(1, *shape))[0].to(torch.float64)

    def _each(self) -> Iterator[tuple[Any, slice, torch.Size]]:
        """The batches again, with the rows of f that are theirs; another order, or other data, is an error."""
        self.counter["passes"] += 1
        start, shapes = 0, iter(self.shapes)
        for x, y in loading.passes(self.batches, self.tangent.device, label="tangent map"):
            shape = next(shapes, torch.Size((0, 1)))
            index = slice(start, start + shape[:-1].numel())
            held = self.y[index]
            if y.numel() != held.numel() or not torch.equal(y.reshape(held.shape), held):
                raise InvalidValue(
                    "the data gave other targets, or another order of them, in another pass; the tangent center reads "
                    "them several times: give a loader that does the same in every pass (shuffle=False)"
                )
            yield x, index, shape
            start = index.stop
        if start != len(self.f):
            raise InvalidValue(f"the data gave {len(self.f)} rows of targets in one pass and {start} in another")


@torch.inference_mode(False)
def read(state: State, likelihood: Likelihood, batches: Iterable[Any], memory_budget: int = BUDGET) -> Jacobian:
    """The Jacobian of the data of the fit, by one pass; other data than those are an error."""
    if not likelihood.concave:
        raise Unsupported(
            f"{likelihood.name} is not concave in the network's outputs, so the tangent model may have several modes; "
            "use center='map', the trained weights"
        )
    tangent = state.tangent
    fs: list[Tensor] = []
    ys: list[Tensor] = []
    rows: list[Tensor] = []
    shapes: list[torch.Size] = []
    held, maker, ranks = False, None, loading.ranks_of(batches)
    inputs = fixed.no_sums()
    with ranks.sharing_errors("reading the data for the tangent map"):
        for x, y in loading.passes(batches, tangent.device, label="tangent map"):
            if maker is None:
                maker = RowMaker(tangent, cover(tangent, x))
            inputs += fixed.input_sums(x, len(y))
            record = maker.run(x)
            f = record.f.detach()
            if not fs:
                every = state.n * f[0].numel()
                size = 8 * every * tangent.layout.size
                # a product with rows reads them all; past a size, a run of the network, which has c of them, is quicker
                held = size <= memory_budget // 2 and size * f.shape[-1] <= ROWS
                if 48 * every > memory_budget * ranks.size:
                    raise InvalidValue(
                        f"the tangent center keeps outputs of all data in memory, {state.n} x {f[0].numel()} several "
                        "times, which is past memory_budget; raise it, or use center='map'"
                    )
            if held:
                pieces = maker.rows(record, x, _units(f), memory_budget // 8)
                rows += [piece.reshape(-1, tangent.layout.size).to(torch.float64) for piece in pieces]
            fs.append(flat_outputs(f).to(torch.float64))
            ys.append(flat_targets(f, y))
            shapes.append(f.shape)
    mine = (fs[0][:0], ys[0][:0], held) if fs else None
    no_f, no_y, held = ranks.first(mine, "the shapes of outputs and targets")  # a rank without data has none
    outputs, targets = torch.cat([no_f.to(tangent.device), *fs]), torch.cat([no_y.to(tangent.device), *ys])
    found = torch.cat([outputs.new_zeros(0, tangent.layout.size), *rows]) if held else None
    jacobian = Jacobian(tangent, batches, outputs, targets, tuple(shapes), found)
    jacobian.counter["passes"] += 1
    _check_same(state, likelihood, jacobian)
    fixed.check_inputs(ranks.total([inputs], "sums of the inputs")[0], state.inputs)
    return jacobian


def _check_same(state: State, likelihood: Likelihood, jacobian: Jacobian) -> None:
    ranks = jacobian.ranks
    n = ranks.count(sum(shape[0] for shape in jacobian.shapes), "the number of examples")
    apart = differing(jacobian.statistics(likelihood, jacobian.f, state), state.statistics)
    if n != state.n or apart:
        what = f"{n} examples, not {state.n}" if n != state.n else f"another {apart} of the network's outputs"
        raise InvalidValue(
            f"these are not the data of the fit: they have {what}. Give the same data, without augmentation, or use "
            "center='map', which reads none"
        )


def _units(f: Tensor) -> Tensor:
    """One cotangent for each output of an example, (n, q·c, ..., c)."""
    eye = torch.eye(f[0].numel(), dtype=f.dtype, device=f.device).reshape(-1, *f.shape[1:])
    return eye.expand(len(f), *eye.shape)


# -- the objective -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Objective:
    """−log joint density of the tangent model, as a function of v and the outputs z = h(·, v)."""

    jacobian: Jacobian
    likelihood: Likelihood
    precision: Any  # P = Ĝ + A, an operator
    a: Tensor  # diag A, (p,)
    m: Tensor  # prior mean, (p,)

    @property
    def weights(self) -> Tensor:
        """The curvature weights of the likelihood, (h,)."""
        return self.likelihood.curvature_weights("exact").to(self.a)

    def score(self, z: Tensor) -> Tensor:
        """∂ log p(y | z), (m, c)."""
        return self.likelihood.gradient(z, self.jacobian.y)

    def curved(self, z: Tensor, v: Tensor) -> Tensor:
        """−∂² log p(y | z) v, (k, m, c)."""
        return output_curvature(self.likelihood, z, self.jacobian.y, v)

    def gradient(self, v: Tensor, pulled: Tensor) -> Tensor:
        """Of the log joint density, uphill: Jᵀ score − A(v − m)."""
        return pulled - self.a * (v - self.m)

    @property
    def affordable(self) -> bool:
        """Whether the Hessian can be had, and factorized."""
        rows = self.jacobian.rows
        return rows is not None and min(sum(self.jacobian.counts), rows.shape[1]) <= HESSIAN_SIDE

    def root(self, z: Tensor) -> Any:
        """Σ J_nᵀ Λ(z_n) J_n from the rows of J, as an operator."""
        rows = self.jacobian.rows
        assert rows is not None
        root = self.likelihood.scaled_root(z, self.jacobian.y)  # (m, c, q)
        r = torch.einsum("mcq,mcp->mqp", root, rows.reshape(*z.shape, rows.shape[1])).flatten(0, 1)
        if sum(self.jacobian.counts) < r.shape[1]:
            r = torch.cat(self.jacobian.ranks.joined([r], "rows of the Hessian"))
            return RootPlusDiagonal(HeldRows(r), Diagonal(r.new_ones(1), len(r)))
        return Dense(self.jacobian.total(r.mT @ r)[0])

    def size(self, v: Tensor) -> float:
        """max(1, ‖v − m‖_A), what a residual is relative to: √γ at the precision that the evidence picks."""
        return max(1.0, float((self.a * (v - self.m).square()).sum().sqrt()))

    def rounding(self, v: Tensor, z: Tensor) -> float:
        """The residual that rounding of the outputs leaves: ‖Λ^½ δz‖ for δz of the last place of z."""
        jacobian = self.jacobian
        reach = torch.stack([z, jacobian.f])
        loss = (reach * torch.stack([self.curved(z, one.unsqueeze(0))[0] for one in reach])).sum()
        (loss,) = jacobian.total(loss)
        return ROUNDING * jacobian.eps * (float(loss.clamp(min=0).sqrt()) / self.size(v) + 1)


# -- what is known of J ------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Space:
    """Directions d of length 1 and their images J d: over v + Σ_i α_i d_i the objective takes no pass."""

    directions: Tensor  # (k, p)
    images: Tensor  # (k, m, c)
    most: int  # directions that are kept

    @classmethod
    def empty(cls, v: Tensor, z: Tensor, jacobian: Jacobian) -> Space:
        """No directions yet, with room for as many as memory allows."""
        most = min(MAX_DIRECTIONS, max(2, DIRECTION_BYTES // (8 * (v.numel() + max(jacobian.counts)))))
        return cls(v.new_zeros(0, *v.shape), z.new_zeros(0, *z.shape), most)

    def plus(self, d: Tensor, jd: Tensor) -> Space:
        """With one more, and without the oldest where there are too many."""
        first, length = max(0, len(self.directions) + 1 - self.most), d.norm()
        return Space(
            torch.cat([self.directions[first:], (d / length).unsqueeze(0)]),
            torch.cat([self.images[first:], (jd / length).unsqueeze(0)]),
            self.most,
        )

    def lowest(self, objective: Objective, v: Tensor, z: Tensor, tolerance: float) -> tuple[Tensor, Tensor] | None:
        """d and J d from v, whose h(·, v) is z, to the minimum over this space, by Newton's method, to a tenth of the
        tolerance; None where v is there already. As sums of known pairs, d and J d belong together to the last digit,
        which differences of v and of z would not."""
        moves, images = [], self.images.flatten(1)
        prior = (self.directions * objective.a) @ self.directions.mT
        for _ in range(NEWTON_STEPS if len(images) else 0):
            pushed = objective.curved(z, self.images).flatten(1)
            curved, slope = objective.jacobian.total(pushed @ images.mT, images @ objective.score(z).flatten())
            slope = slope - self.directions @ (objective.a * (v - objective.m))
            alpha = _semidefinite_solve(curved + prior, slope)
            if not float(alpha @ slope) > (0.1 * tolerance * objective.size(v)) ** 2:
                break
            d, jd = self.at(alpha)
            t = _step_length(objective, v, z, d, jd)
            v, z = v + t * d, z + t * jd
            moves.append(t * alpha)
        return self.at(torch.stack(moves).sum(0)) if moves else None

    def at(self, alpha: Tensor) -> tuple[Tensor, Tensor]:
        """Σ α d and Σ α J d."""
        return alpha @ self.directions, torch.tensordot(alpha, self.images, 1)


def _semidefinite_solve(matrix: Tensor, b: Tensor) -> Tensor:
    """x of least size (in units of the diagonal) with M x = b: directions may depend on one another."""
    unit = matrix.diagonal().clamp(min=torch.finfo(matrix.dtype).tiny).rsqrt()
    values, vectors = torch.linalg.eigh(unit.unsqueeze(-1) * matrix * unit)
    inverse = torch.where(values > DEPENDENT * values[-1], 1 / values, 0)
    return unit * (vectors @ (inverse * (vectors.mT @ (unit * b))))


# -- its minimum -------------------------------------------------------------------------------------------------


def check_gaussian(prior: Any) -> None:
    """Raise for a prior whose A moves with v: the objective is quadratic in the prior, and convex, for Gaussians."""
    if not prior.gaussian:
        raise Unsupported(
            f"the tangent center needs a Gaussian prior, and {type(prior).__name__} is none; use center='map', the "
            "trained weights: la.tuned(center='map')"
        )


@torch.no_grad()
def tangent_map(
    state: State,
    prior: Any,
    likelihood: Likelihood,
    jacobian: Jacobian,
    start: Center | None = None,
    *,
    tolerance: float | None = None,
    strict: bool = True,
    steps: int | None = None,
) -> Center:
    """v* for this prior and noise, from `start` (the trained weights unless given) to a residual of `tolerance`.

    Raises NotConverged where that is not reached in so many steps; with strict=False the residual says so.
    """
    check_gaussian(prior)
    a, likelihood = _detached(prior.operator()), _detached(likelihood)
    structure, stretch = curvature(state, likelihood), 1.0 if start is None else start.stretch
    precision = linalg.shift(stretched(structure, stretch), a)
    objective = Objective(jacobian, likelihood, precision, a.dense(), prior.mean_vector())
    tolerance = tolerance or (EXACT if jacobian.rows is not None else STREAMED)
    theta, made = state.tangent.theta.to(torch.float64), jacobian.passes
    v = theta if start is None else start.vector
    z = _outputs(jacobian, start, v, theta)
    space = Space.empty(v, z, jacobian) if start is None or start.space is None else start.space
    away = space.lowest(objective, v, z, tolerance)
    if away is not None:
        v, z, start = v + away[0], z + away[1], None
    pulled = _pulled(objective, start, z)
    residual, step, steps = float("inf"), 0, SEARCH_STEPS if steps is None else steps
    for step in range(steps + 1):
        g = objective.gradient(v, pulled)
        ahead = linalg.solve(objective.precision, g)
        residual = float((g * ahead).sum().clamp(min=0).sqrt()) / objective.size(v)
        if not residual < float("inf"):
            raise NotConverged(f"the gradient of the tangent model became {residual}; check targets, weights and noise")
        rounding = objective.rounding(v, z)
        goal = max(tolerance, rounding)
        if residual <= goal or step == steps:
            break
        away = space.plus(ahead, jacobian.push(ahead)).lowest(objective, v, z, goal)
        if away is None:  # rounding hides what is left
            break
        space = space.plus(*away)
        v, z = v + away[0], z + away[1]
        pulled = jacobian.pull(objective.score(z))
        ratio = _stretch(likelihood, z, jacobian)
        if not 0.5 < ratio / stretch < 2:  # worth a factorization
            stretch = ratio
            objective = replace(objective, precision=linalg.shift(stretched(structure, stretch), a))
        if step % PATIENCE == PATIENCE - 1 and objective.affordable:
            objective = replace(objective, precision=linalg.shift(objective.root(z), a))
    if strict and residual > goal:
        raise NotConverged(
            f"the tangent MAP ended at a residual of {residual:.3g} after {step} steps, for a tolerance of "
            f"{tolerance:.3g}; use a structure closer to the full curvature ('kron' for 'diag', 'full' for 'kron'), a "
            "larger prior precision or noise, a network in float64, or center='map'"
        )
    statistics = jacobian.statistics(likelihood, z, state)
    passes = jacobian.passes - made
    return Center(v, statistics, step, residual, passes, z, pulled, objective.weights, stretch, space, rounding)


def stretched(structure: Any, stretch: float) -> Any:
    """Ĝ times a number: the same operator where that is 1."""
    return structure if stretch == 1 else linalg.scale(structure, torch.tensor(stretch, dtype=torch.float64))


def _stretch(likelihood: Likelihood, z: Tensor, jacobian: Jacobian) -> float:
    """tr Λ(z) / tr Λ(f), summed over data: Ĝ was taken at f, where a confident network has next to no curvature."""
    if likelihood.quadratic:
        return 1.0
    traces = [float(likelihood.curvature_trace(outputs, jacobian.y).sum()) for outputs in (z, jacobian.f)]
    here, there = jacobian.total(torch.tensor(traces, dtype=torch.float64))[0].tolist()
    return min(max(here / there, 1e-6), 1e6) if there > 0 else 1.0


def _detached(thing: Any) -> Any:
    """The same diagonal or likelihood with hyperparameters that carry no gradient."""
    if isinstance(thing, Likelihood):
        return thing.replace(**{k: value.detach() for k, value in thing.hyperparameters.items()})
    return replace(thing, values=thing.values.detach())


def _outputs(jacobian: Jacobian, start: Center | None, v: Tensor, theta: Tensor) -> Tensor:
    if start is None:
        return jacobian.f
    return start.outputs if start.outputs is not None else jacobian.f + jacobian.push(v - theta)


def _pulled(objective: Objective, start: Center | None, z: Tensor) -> Tensor:
    """Jᵀ score at the start; what is known of it for another noise serves, where one weight is all that differs."""
    now, known = objective.weights, None if start is None else start.weights
    if start is not None and start.pulled is not None and known is not None:
        ratio = now / known
        if bool((ratio == ratio[0]).all()):
            return start.pulled * ratio[0]
    return objective.jacobian.pull(objective.score(z))


def _step_length(objective: Objective, v: Tensor, z: Tensor, d: Tensor, jd: Tensor) -> float:
    """t along d. The slope of a convex objective is monotone in t: the search is for where it is nearly zero, first at
    t = 1, and takes a t short of the minimum, or beyond it by little and with a gain."""

    def look(t: float) -> tuple[float, float]:
        """The slope, NaN beyond the likelihood's domain, and the value."""
        there, outputs = v + t * d - objective.m, z + t * jd
        score = (objective.score(outputs) * jd).sum()
        score, fit = objective.jacobian.total(score, objective.likelihood.log_prob(outputs, objective.jacobian.y).sum())
        value = float(fit - 0.5 * (objective.a * there.square()).sum())
        return float((objective.a * there * d).sum() - score) if value > -float("inf") else float("nan"), value

    start, here = look(0.0)
    at_zero, low, high, t = -start, 0.0, float("inf"), 1.0
    for _ in range(100):
        now, value = look(t)
        if -0.5 * at_zero <= now <= 0:
            break
        if 0 < now <= 0.1 * at_zero and value >= here - 1e-12 * abs(here):
            break
        low, high = (t, high) if now < 0 else (low, t)  # NaN, beyond the likelihood's domain, is too far
        t = 2 * t if high == float("inf") else 0.5 * (low + high)
    return t
