"""MacKay's fixed point with sampled traces: γ_g from samples z of the posterior, not from a factorization (Eq. 7)

    γ̂_g = mean_k z_gᵀ(Gz)_g,    λ_g ← γ̂_g / ‖v̄_g − m_g‖²,    σ² ← SSE / (N·C − γ̂)

an EM step whose E step is the samples. They are of the same base noise at every step, rescaled, so that γ̂ is one smooth
function of the hyperparameters with one fixed point, and each solve starts from the last. Nothing is gained by coming
closer than a part of γ̂'s own standard error. Source: Antorán et al. 2023.
"""

from __future__ import annotations

from torch import Tensor

from lapwing.curvature import State
from lapwing.errors import Unsupported
from lapwing.likelihoods import Likelihood
from lapwing.operators import linalg
from lapwing.posterior import curvature
from lapwing.priors import Gaussian
from lapwing.tune.bounds import Box, Tuning, box, warn_bound
from lapwing.tune.fixed_point import FASTEST, TOLERANCE, FixedPoint, Stride, residual_wanted
from lapwing.tune.tracking import Tracker
from lapwing.tune.watching import watched

EM_STEPS = 100
SHARE = 0.05  # of the standard error of γ̂, within which the fixed point is met


def em(
    state: State,
    prior: Gaussian,
    likelihood: Likelihood,
    fixed: tuple[str, ...] = (),
    tolerance: float = TOLERANCE,
    tracker: Tracker | None = None,
    progress: bool = False,
) -> tuple[Gaussian, Likelihood, Tuning]:
    """The prior and likelihood of the fixed point, at the trained weights or at the v* of a tracker."""
    if not state.structure.streams:
        raise Unsupported(f"em takes traces from samples; structure '{state.structure}' has exact ones: use mackay")
    bounds = box(state, prior, likelihood, fixed)
    bounds = bounds if tracker is None else tracker.started(bounds, prior, likelihood)
    with watched(progress, "distance to the fixed point") as watch:
        loop = FixedPoint(state, prior, likelihood, 1.0 if tracker is None else FASTEST, watch)
        values, steps, settled = _run(loop, bounds, tracker, tolerance)
    at_bound = bounds.at_bound(values)
    warn_bound(at_bound)
    found = loop.at(values)
    report = Tuning("em", "map", (), steps, settled, at_bound, tuple(fixed))
    return *found, report if tracker is None else tracker.report(report, *found, bounds.at_floor(values))


def _run(
    loop: FixedPoint, bounds: Box, tracker: Tracker | None, tolerance: float
) -> tuple[dict[str, Tensor], int, bool]:
    values, stride, gap = dict(bounds.start), Stride(loop.most), 1.0
    for step in range(1, EM_STEPS + 1):
        now = loop.at(values)
        center, precise = None, True
        if tracker is not None:
            center = tracker.center(*now, residual_wanted(gap, tolerance))
            precise = center.residual <= max(tracker.tolerance, residual_wanted(0.0, tolerance), center.rounding)
        wanted, gap = loop.look(bounds, values, center)
        loop.watch(gap)
        near = max(tolerance, SHARE * _relative_error(loop, now))
        if gap <= near and precise:
            return values, step, True
        if gap > near:  # else once more here, with a better v*
            values = stride.towards(wanted, values, bounds)
    return values, EM_STEPS, False


def _relative_error(loop: FixedPoint, now: tuple[Gaussian, Likelihood]) -> float:
    """The standard error of γ̂, of max(1, γ̂): the least over groups."""
    prior, likelihood = now
    gamma = linalg.shift(curvature(loop.state, likelihood), prior.operator()).samples.gamma  # (k, g)
    error = gamma.std(0) / len(gamma) ** 0.5
    return float((error / gamma.mean(0).clamp(min=1)).min())
