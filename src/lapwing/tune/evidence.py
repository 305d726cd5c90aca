"""Maximize the evidence over log hyperparameters by its gradient (Eq. 6), prior and noise together.

Each is moved inside its bounds by log λ = low + (high − low)·sigmoid(u); L-BFGS with a strong Wolfe search on u, at the
trained weights from where the evidence's own fixed point is.
With a scalar prior one factorization serves every step; with groups, dense curvature is factorized at each.
At the tangent center v* is solved for again at each evaluation; its derivative drops out of the gradient (Eq. 21).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lapwing.curvature import State
from lapwing.errors import NotConverged
from lapwing.evidence import effective_dimension, log_evidence, scatter
from lapwing.likelihoods import Likelihood
from lapwing.priors import Prior
from lapwing.tune.bounds import EDGE, Box, Tuning, at_values, box, warn_bound
from lapwing.tune.tracking import Tracker
from lapwing.tune.watching import watched

TOLERANCE = 1e-6  # of the gradient in log space, relative to the number of parameters and data
LBFGS_STEPS = 200
SECANTS, CLOSE = 12, 1e-7  # steps towards a start, and how near, in log λ, is near enough


def evidence(
    state: State,
    prior: Prior,
    likelihood: Likelihood,
    fixed: tuple[str, ...] = (),
    tracker: Tracker | None = None,
    progress: bool = False,
) -> tuple[Prior, Likelihood, Tuning]:
    """The prior and likelihood that the evidence picks, at the trained weights or at the v* of a tracker, and how it
    went."""
    bounds, near = box(state, prior, likelihood, fixed), 0
    if tracker is None:
        bounds, near = _approached(bounds, state, prior, likelihood)
    else:
        bounds = tracker.started(bounds, prior, likelihood)
    u = {key: _to_free(value, bounds, key).requires_grad_() for key, value in bounds.start.items()}
    trace: list[float] = []
    scale = TOLERANCE * (state.layout.size + state.n)

    def objective() -> Tensor:
        return _log_evidence(state, *at_values(prior, likelihood, _to_log(u, bounds)), tracker)

    optimizer = torch.optim.LBFGS(
        list(u.values()),
        max_iter=LBFGS_STEPS,
        tolerance_grad=1e-2 * scale,
        tolerance_change=1e-13,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = objective()
        if not torch.isfinite(value):
            raise NotConverged(
                f"the log evidence became {float(value.detach())} while tuning {list(u)}; fix one of them with fixed=, "
                "or check the targets' scale"
            )
        (-value).backward()
        trace.append(float(value.detach()))
        watch(trace[-1])
        return -value

    with watched(progress) as watch:
        optimizer.step(closure)
    final = {key: value.detach() for key, value in _to_log(u, bounds).items()}
    slope = _slope(state, prior, likelihood, final, tracker)
    at_bound = bounds.at_bound(final)
    converged = bool(at_bound or bounds.at_floor(final)) or max(float(s.abs().max()) for s in slope.values()) <= max(
        1e-3, scale
    )
    warn_bound(at_bound)
    new_prior, new_likelihood = at_values(prior, likelihood, final)
    steps = near + optimizer.state[next(iter(u.values()))]["n_iter"]
    report = Tuning("evidence", "map", tuple(trace), steps, converged, at_bound, tuple(fixed))
    return (
        new_prior,
        new_likelihood,
        report if tracker is None else tracker.report(report, new_prior, new_likelihood, bounds.at_floor(final)),
    )


def _approached(bounds: Box, state: State, prior: Prior, likelihood: Likelihood) -> tuple[Box, int]:
    """A start near λ_g = γ_g(λ)/‖θ_g‖², where the evidence at the trained weights is highest if the noise stands still,
    and the steps that it took.

    r(x) = log γ(eˣ) − log ‖θ‖² − x falls by 1 to 2 for a step of 1 in x, since −γ ≤ dγ/dx ≤ 0: from P/‖θ‖², which is
    above the root, secants with slopes within those bounds come to it. While the noise moves, one step is enough."""
    name = next((name for name in prior.hyperparameters if name in bounds.start), None)
    if name is None or not prior.gaussian:
        return bounds, 0
    x, low, high = bounds.start[name], bounds.low[name], bounds.high[name]
    square = scatter(state, prior)

    def gap(x: Tensor) -> Tensor:
        now = at_values(prior, likelihood, {**bounds.start, name: x})
        return now[0].wanted(effective_dimension(state, *now), square)[name] - x

    r, slope, steps, settled = gap(x), torch.full_like(x, -2.0), 1, False
    while len(bounds.start) == 1 and steps < SECANTS and not settled:
        moved = (x - r / slope).clamp(low + EDGE / 2, high - EDGE / 2)
        new = gap(moved)
        found = (new - r) / (moved - x)
        slope = torch.where(found.isfinite(), found, slope).clamp(-2, -1)
        settled = bool(((new.abs() < CLOSE) | (moved == x)).all())
        x, r, steps = moved, new, steps + 1
    start = x if settled else (x - r / slope).clamp(low + 1, high - 1)  # away from bounds, where the search is slow
    return replace(bounds, start={**bounds.start, name: start}), steps


def _log_evidence(state: State, prior: Prior, likelihood: Likelihood, tracker: Tracker | None) -> Tensor:
    center = None if tracker is None else tracker.center(prior, likelihood)
    return log_evidence(state, prior, likelihood, center)


def _slope(
    state: State, prior: Prior, likelihood: Likelihood, log_values: dict[str, Tensor], tracker: Tracker | None
) -> dict[str, Tensor]:
    """∂ log Z / ∂ log hyperparameters."""
    moving = {k: v.clone().requires_grad_() for k, v in log_values.items()}
    value = _log_evidence(state, *at_values(prior, likelihood, moving), tracker)
    return dict(zip(moving, torch.autograd.grad(value, list(moving.values())), strict=True))


def _to_log(u: dict[str, Tensor], bounds: Box) -> dict[str, Tensor]:
    return {k: bounds.low[k] + (bounds.high[k] - bounds.low[k]) * torch.sigmoid(v) for k, v in u.items()}


def _to_free(log_value: Tensor, bounds: Box, key: str) -> Tensor:
    return torch.logit((log_value - bounds.low[key]) / (bounds.high[key] - bounds.low[key]))
