"""Prior and noise (or temperature) by held-out data, where evidence is not to be trusted: a subnetwork, a likelihood
that is wrong.

    Eq. 24: minimize over (c, t)   −(1/M) Σ_m log p(y_m | x_m),   f(x_m) ~ N(f(x_m, θ*), t · J (G + c·A)⁻¹ Jᵀ)

c is one factor on all prior precisions against the curvature as given; t scales the covariance. What t is:

    Gaussian noise     σ² ← t σ², λ ← (c/t) λ:   (G/(tσ²) + (c/t) A)⁻¹ = t (G/σ² + c A)⁻¹, so t *is* the noise
                       (t² in place of t for the empirical factor, whose curvature goes with σ⁻⁴)
    otherwise          a posterior temperature, (G + c A)/t, kept in `la.temperature`; 1 is Bayes. The likelihood is as
                       it was, and no logit is rescaled: only error bars move.

c within [1e-6, 1e6] × tr(A⁻¹G)/P, σ within [1e-6, 1e3] × the targets' standard deviation, temperatures within
[1e-3, 1e3]. In log space: a grid over the bounds, then golden sections about its best; t is searched inside each c,
where it costs no new posterior. Gradient-free, deterministic, and never worse than the start, which is tried first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lapwing.curvature import BUDGET, State
from lapwing.data import passes, ranks_of
from lapwing.errors import InvalidValue, NotConverged
from lapwing.likelihoods import Likelihood
from lapwing.operators import linalg
from lapwing.posterior import condition, curvature
from lapwing.predictive import Prediction, predict
from lapwing.priors import Prior
from lapwing.tune.bounds import EDGE, Tuning, warn_bound
from lapwing.tune.watching import watched

SPACING = math.log(10.0)  # of the grid
TOLERANCE = 0.02  # nats of log c and log t
TEMPERATURES = (1e-3, 1e3)
GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Best:
    """A point of the search and its value."""

    value: float  # the objective
    log_c: float
    log_t: float


def validation(
    state: State,
    prior: Prior,
    likelihood: Likelihood,
    batches: Iterable[Any],
    fixed: tuple[str, ...] = (),
    temperature: float = 1.0,
    memory_budget: int = BUDGET,
    progress: bool = False,
) -> tuple[Prior, Likelihood, float, Tuning]:
    """The prior, likelihood and temperature that held-out data pick; `trace`: their mean log-likelihood, best yet."""
    noise, own = likelihood.deviation, tuple(prior.hyperparameters)
    other = noise or "temperature"
    _check_fixed(fixed, (*own, other))
    held = any(name in fixed for name in own)
    power = 2 if noise and state.factor.kind == "empirical" else 1
    tied = bool(noise) and held  # λ stays, so c moves with t
    bounds_c, bounds_t = _bounds(state, prior, likelihood)
    start = 0.0 if noise else math.log(temperature)
    evaluations: list[Best] = []

    def at(log_c: float) -> Best:
        """The best t for a c."""
        scored = _held_out(state, prior, likelihood, batches, log_c, power, memory_budget)
        if tied:
            found = Best(scored(log_c / power), log_c, log_c / power)
        elif other in fixed:
            found = Best(scored(start), log_c, start)
        else:
            log_t, value = search(scored, *bounds_t, start)
            found = Best(value, log_c, log_t)
        evaluations.append(found)
        watch(found.value)
        return found

    with watched(progress, "held-out NLL") as watch:
        if held and not tied:
            at(0.0)
        else:
            low, high = (power * b for b in bounds_t) if tied else bounds_c
            search(lambda log_c: at(log_c).value, low, high, 0.0)
    best = min(evaluations, key=lambda one: one.value)
    at_bound = _at_bound(best, bounds_c, bounds_t, () if held else own, () if other in fixed else (other,))
    narrow = max(best.log_c - bounds_c[1], bounds_t[0] - best.log_t) > -(TOLERANCE + EDGE)  # no error bars at all
    plain = likelihood.classes and narrow
    warn_bound(at_bound, *(("held-out data prefer the plain network",) if plain else ()))
    trace = [-min(one.value for one in evaluations[: i + 1]) for i in range(len(evaluations))]
    tuning = Tuning("validation", "", tuple(trace), len(trace), True, at_bound, fixed, passes=len(trace))
    factor, t = math.exp(best.log_c), math.exp(best.log_t)
    if not noise:
        return prior.scaled(factor), likelihood, t, tuning
    return prior.scaled(factor / t**power), _with_noise(likelihood, t), 1.0, tuning


def search(function: Callable[[float], float], low: float, high: float, start: float) -> tuple[float, float]:
    """The least value of a function on [low, high] and where it is: a grid, then golden sections about its best."""
    steps = max(2, math.ceil((high - low) / SPACING))
    grid = [low + (high - low) * i / steps for i in range(steps + 1)]
    tried = {x: function(x) for x in sorted({*grid, min(max(start, low), high)})}
    points = sorted(tried)
    place = points.index(min(tried, key=lambda x: tried[x]))
    a, b = points[max(place - 1, 0)], points[min(place + 1, len(points) - 1)]
    inner = [b - GOLDEN * (b - a), a + GOLDEN * (b - a)]
    values = [function(x) for x in inner]
    while b - a > TOLERANCE:
        tried |= dict(zip(inner, values, strict=True))
        if values[0] <= values[1]:
            b, inner, values = inner[1], [inner[1] - GOLDEN * (inner[1] - a), inner[0]], [math.nan, values[0]]
            values[0] = function(inner[0])
        else:
            a, inner, values = inner[0], [inner[1], inner[0] + GOLDEN * (b - inner[0])], [values[1], math.nan]
            values[1] = function(inner[1])
    tried |= dict(zip(inner, values, strict=True))
    best = min(tried, key=lambda x: tried[x])
    return best, tried[best]


def _held_out(
    state: State, prior: Prior, likelihood: Likelihood, batches: Iterable[Any], log_c: float, power: int, budget: int
) -> Callable[[float], float]:
    """log t -> mean held-out −log p under the posterior of one c, whose predictions are made here, once."""
    ranks = ranks_of(batches)
    with torch.no_grad():
        posterior = condition(state, prior.scaled(math.exp(log_c)), likelihood)
        # where it is solved for, a solve of all ranks; then each predicts its own held-out data
        posterior = replace(posterior, precision=linalg.gathered(posterior.precision))
        with ranks.sharing_errors("predicting the held-out data"):
            made = [
                (predict(posterior, likelihood.plain, x, memory_budget=budget), y)
                for x, y in passes(batches, state.tangent.device, label="held out")
            ]

    def scored(log_t: float) -> float:
        t = math.exp(log_t)
        used = _with_noise(likelihood, t)
        each = [_scored(pred, t**power, used.plain, y) for pred, y in made]
        sums = torch.tensor([[float(one.sum()), len(one)] for one in each], dtype=torch.float64).reshape(-1, 2).sum(0)
        fit, count = ranks.total([sums], "the held-out log-likelihood")[0].tolist()
        value = -fit / count
        if not math.isfinite(value):
            raise NotConverged(
                f"the held-out log-likelihood is {-value} at {math.exp(log_c):.3g} times the prior precision and a "
                f"{likelihood.deviation or 'temperature'} factor {t:.3g}; check the held-out targets"
            )
        return value

    return scored


def _with_noise(likelihood: Likelihood, t: float) -> Likelihood:
    """The likelihood with its variance times t, if it has a noise."""
    name = likelihood.deviation
    return (
        likelihood.replace(**{name: likelihood.hyperparameters[name].detach() * math.sqrt(t)}) if name else likelihood
    )


def _scored(pred: Prediction, t: float, likelihood: Likelihood, y: Tensor) -> Tensor:
    """log p of each row, with the outputs' variances times t."""
    pred = replace(pred, likelihood=likelihood, outputs=pred.outputs.scaled(t))
    return pred.log_prob(y).reshape(-1).double()


def _bounds(state: State, prior: Prior, likelihood: Likelihood) -> tuple[tuple[float, float], tuple[float, float]]:
    """Of log c and of log t."""
    with torch.no_grad():
        ratio = float(prior.ratio(curvature(state, likelihood), state.tangent.theta.to(torch.float64)))  # tr(A⁻¹G)/P
    middle = math.log(ratio) if ratio > 0 else 0.0
    of_c = middle - 6 * SPACING, middle + 6 * SPACING
    if not likelihood.deviation:
        return of_c, (math.log(TEMPERATURES[0]), math.log(TEMPERATURES[1]))
    noise = likelihood.hyperparameters[likelihood.deviation].detach()
    relative = (likelihood.target_scale(state.statistics) / noise).log()
    return of_c, (2 * float(relative.max()) + 2 * math.log(1e-6), 2 * float(relative.min()) + 2 * math.log(1e3))


def _check_fixed(fixed: tuple[str, ...], known: tuple[str, ...]) -> None:
    unknown = [name for name in fixed if name not in known]
    if unknown:
        raise InvalidValue(f"fixed={unknown} names nothing that validation moves; it moves {list(known)}")
    if set(known) <= set(fixed):
        raise InvalidValue(f"both {list(known)} are fixed; there is nothing to tune")


def _at_bound(
    best: Best,
    bounds_c: tuple[float, float],
    bounds_t: tuple[float, float],
    by_c: tuple[str, ...],
    by_t: tuple[str, ...],
) -> tuple[str, ...]:
    """Of the hyperparameters that c moves and of those that t does."""
    near = TOLERANCE + EDGE
    found = by_c if min(best.log_c - bounds_c[0], bounds_c[1] - best.log_c) < near else ()
    return found + by_t if min(best.log_t - bounds_t[0], bounds_t[1] - best.log_t) < near else found
