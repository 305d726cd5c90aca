"""MacKay's fixed point: λ_g ← γ_g / ‖v̄_g − m_g‖²,  σ² ← SSE / (N·C − γ), per output SSE_c / (N − γ_c)   (Eq. 7)

A stationary point of the evidence. At the tangent center v̄ = v* is solved for again at each step, loosely while the
hyperparameters still move, and steps in log λ are lengthened or shortened by the secant of the last two. At the trained
weights ‖v̄‖ does not move with λ, and the map λ ↦ γ(λ)/‖v̄‖² can circle; so where a step turns back, the next goes half
as far.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lapwing.center import Center
from lapwing.curvature import State
from lapwing.errors import NotConverged
from lapwing.evidence import effective_dimension, log_evidence, noise_slope, scatter
from lapwing.likelihoods import Likelihood
from lapwing.priors import Gaussian
from lapwing.tune.bounds import Box, Tuning, at_values, box, warn_bound
from lapwing.tune.tracking import Tracker
from lapwing.tune.watching import Watch, unwatched, watched

TOLERANCE = 1e-3
FIXED_POINT_STEPS = 500
ROUNDS, BETWEEN = 200, 12  # solves for v*, and steps that predict it in between
REACH, BELIEF = 3.0, 1.5  # of a prediction, in log λ; and how far off in log ‖v*‖² it may be
SLOWEST, FASTEST, ROUND = 0.25, 4.0, 2.0  # paces of a step, in units of the fixed point's own
Outcome = tuple[dict[str, Tensor], list[float], bool]  # log hyperparameters, the log evidence on the way, settled


def mackay(
    state: State,
    prior: Gaussian,
    likelihood: Likelihood,
    fixed: tuple[str, ...] = (),
    tolerance: float = TOLERANCE,
    tracker: Tracker | None = None,
    progress: bool = False,
) -> tuple[Gaussian, Likelihood, Tuning]:
    """Iterate to |γ_g − λ_g ‖v̄_g‖²| ≤ tolerance · max(1, γ_g), and σ to the same relative change; at the trained
    weights, or at the v* of a tracker."""
    bounds = box(state, prior, likelihood, fixed)
    bounds = bounds if tracker is None else tracker.started(bounds, prior, likelihood)
    with watched(progress) as watch:
        loop = FixedPoint(state, prior, likelihood, 1.0 if tracker is None else FASTEST, watch)
        if tracker is None:
            values, trace, settled = loop.run(bounds, lambda *_: None, tolerance, FIXED_POINT_STEPS)
        elif tracker.held:
            values, trace, settled = loop.run(bounds, tracker.center, tolerance, FIXED_POINT_STEPS)
        else:
            values, trace, settled = _rounds(loop, bounds, tracker, tolerance)
    at_bound = bounds.at_bound(values)
    warn_bound(at_bound)
    found = at_values(prior, likelihood, values)
    report = Tuning("mackay", "map", tuple(trace), len(trace), settled, at_bound, tuple(fixed))
    return *found, report if tracker is None else tracker.report(report, *found, bounds.at_floor(values))


@dataclass(frozen=True, eq=False)
class FixedPoint:
    """The map of hyperparameters to where MacKay's update wants them, for one state."""

    state: State
    prior: Gaussian
    likelihood: Likelihood
    most: float  # the fastest pace
    watch: Watch = unwatched  # called with the log evidence of each step

    def run(self, bounds: Box, center_of: Callable[..., Center | None], tolerance: float, steps: int) -> Outcome:
        """Log hyperparameters from the start of the bounds to their fixed point, the log evidence on the way, and
        whether it was reached. center_of(prior, likelihood, residual) gives v̄."""
        values, stride, gap = dict(bounds.start), Stride(self.most), 1.0
        trace: list[float] = []
        for _ in range(steps):
            center = center_of(*self.at(values), residual_wanted(gap, tolerance))
            wanted, gap = self.look(bounds, values, center)
            trace.append(self.value(values, center))
            if gap <= tolerance and _precise(center, tolerance):
                return values, trace, True
            if gap > tolerance:  # else once more here, with a better v*
                values = stride.towards(wanted, values, bounds)
        return values, trace, False

    def at(self, values: dict[str, Tensor]) -> tuple[Gaussian, Likelihood]:
        """The prior and likelihood at log hyperparameters."""
        return at_values(self.prior, self.likelihood, values)

    def value(self, values: dict[str, Tensor], center: Center | None) -> float:
        """The log evidence there."""
        with torch.no_grad():
            found = float(log_evidence(self.state, *self.at(values), center))
        self.watch(found)
        return found

    def look(self, bounds: Box, values: dict[str, Tensor], center: Center | None) -> tuple[dict[str, Tensor], float]:
        """Where the fixed point wants the hyperparameters, and how far that is."""
        return update(self.state, *self.at(values), bounds, values, center)


def update(
    state: State,
    prior: Gaussian,
    likelihood: Likelihood,
    bounds: Box,
    values: dict[str, Tensor],
    center: Center | None = None,
) -> tuple[dict[str, Tensor], float]:
    """Where the fixed point wants log hyperparameters that are at values now, in their bounds, and how far it is: as
    the prior says, |γ_g − λ_g‖v̄_g‖²| / max(1, γ_g), where it is not at its target (a bound, maybe); and |Δ log σ|."""
    found = effective_dimension(state, prior, likelihood), scatter(state, prior, center)
    wanted = {name: value for name, value in prior.wanted(*found).items() if name in values}
    for name in likelihood.hyperparameters:
        if name in values:
            slope = noise_slope(state, prior, likelihood, name)
            wanted |= likelihood.wanted(state.statistics if center is None else center.statistics, slope)
    of_prior, gaps = prior.gap(*found), [torch.zeros(1, dtype=torch.float64)]
    for key, value in wanted.items():
        wanted[key] = value.clamp(bounds.low[key], bounds.high[key])
        if not bool(torch.isfinite(wanted[key]).all()):
            raise NotConverged(f"MacKay's update of {key} is not finite; check the weights and the curvature")
        gap = (wanted[key] - values[key]).abs()
        gap = torch.where(gap < 1e-12, 0.0, of_prior[key]) if key in of_prior else gap
        gaps.append(gap.reshape(-1).cpu())
    return wanted, float(torch.cat(gaps).max())


def residual_wanted(gap: float, tolerance: float) -> float:
    """How precise v* has to be: a residual r is an error of 2 r in λ‖v*‖², relative."""
    return max(0.25 * tolerance, min(0.25, 0.25 * gap))


def _precise(center: Center | None, tolerance: float) -> bool:
    return center is None or center.residual <= max(residual_wanted(0.0, tolerance), center.rounding)


def _rounds(loop: FixedPoint, bounds: Box, tracker: Tracker, tolerance: float) -> Outcome:
    """Where v* takes passes over the data: in between, steps towards the fixed point of what the structure predicts of
    v*, which take none. The fixed points are the same, as the prediction is exact where it is made. The first is made
    at the trained weights, before any v* is solved for."""
    values, stride, gap, believed = dict(bounds.start), Stride(ROUND), 1.0, True
    trace: list[float] = []
    for number in range(ROUNDS):
        now = loop.at(values)
        guess = tracker.predicted(*now) if number else None
        center = tracker.center(*now, residual_wanted(gap, tolerance) if number else math.inf)
        if guess is not None:
            believed = _agree(scatter(loop.state, loop.prior, guess), scatter(loop.state, loop.prior, center))
        target, gap = loop.look(bounds, values, center)
        trace.append(loop.value(values, center))
        if center.residual <= max(tracker.tolerance, center.rounding):
            ahead = loop.look(bounds, values, tracker.predicted(*now))[1]  # what is left of v* may be all of the gap
            if min(gap, ahead) <= tolerance:
                return values, trace, True
        if gap > tolerance:  # else once more here, with a better v*
            if believed:
                target = _predicted(loop, bounds, tracker, values, 0.25 * gap)
            values = stride.towards(target, values, bounds)
    return values, trace, False


def _agree(guess: Tensor, found: Tensor) -> bool:
    """Whether ‖v*‖² was predicted within a factor, in every group: else the next step does without."""
    tiny = torch.finfo(torch.float64).tiny
    return bool(((guess.clamp(min=tiny) / found.clamp(min=tiny)).log().abs() < BELIEF).all())


def _predicted(
    loop: FixedPoint, bounds: Box, tracker: Tracker, values: dict[str, Tensor], tolerance: float
) -> dict[str, Tensor]:
    """Steps on what is predicted, no further than a prediction reaches."""
    near = Box(
        {k: torch.maximum(low, values[k] - REACH) for k, low in bounds.low.items()},
        {k: torch.minimum(high, values[k] + REACH) for k, high in bounds.high.items()},
        values,
        bounds.names,
    )
    stride = Stride(loop.most)
    for _ in range(BETWEEN):
        wanted, gap = loop.look(near, values, tracker.predicted(*loop.at(values)))
        if gap <= tolerance:
            break
        values = stride.towards(wanted, values, near)
    return values


@dataclass
class Stride:
    """How far to go towards a target, for each hyperparameter: a pace of 1 is all the way. Mutable inside one search.

    With most = 1: half as far where a move turns back. At v*, which answers to λ, moves can shrink slowly; so by the
    secant of the last two moves, −step·move/(move − last)."""

    most: float
    pace: dict[str, Tensor] = field(default_factory=dict)
    move: dict[str, Tensor] = field(default_factory=dict)
    step: dict[str, Tensor] = field(default_factory=dict)

    def towards(self, target: dict[str, Tensor], values: dict[str, Tensor], bounds: Box) -> dict[str, Tensor]:
        """The values after a step towards a target, inside their bounds."""
        out = {}
        for key, now in values.items():
            move = target[key] - now
            self.pace[key] = self._pace(key, move) if key in self.move else torch.ones_like(now)
            out[key] = (now + self.pace[key] * move).clamp(bounds.low[key], bounds.high[key])
            self.move[key], self.step[key] = move, out[key] - now
        return out

    def _pace(self, key: str, move: Tensor) -> Tensor:
        pace, step = self.pace[key], self.step[key]
        if self.most == 1.0:
            return torch.where(move * step < 0, pace * 0.5, (pace * 1.2).clamp(max=1.0))
        slope = (move - self.move[key]) / step
        return torch.where(slope < 0, -1 / slope, 2 * pace).nan_to_num(nan=1.0).clamp(SLOWEST, self.most)
