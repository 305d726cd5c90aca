"""MacKay's fixed point: λ_g ← γ_g / ‖v̄_g − m_g‖²,  σ² ← SSE / (N·C − γ), per output SSE_c / (N − γ_c)   (Eq. 7)

A stationary point of the evidence. At the tangent center v̄ = v* is solved for again at each step, loosely while the
hyperparameters still move. At the trained weights ‖v̄‖ does not move with λ, and the map λ ↦ γ(λ)/‖v̄‖² can circle; so
where a step turns back, the next goes half as far in log λ.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lapwing.center import Center
from lapwing.curvature import State
from lapwing.errors import NotConverged
from lapwing.evidence import effective_dimension, log_evidence, noise_dimension, scatter
from lapwing.tune.bounds import Tuning, at_values, box, warn_bound
from lapwing.tune.tracking import Tracker

TOLERANCE = 1e-3
STEPS = 500


def mackay(
    state: State,
    prior: Any,
    likelihood: Any,
    fixed: tuple[str, ...] = (),
    tolerance: float = TOLERANCE,
    tracker: Tracker | None = None,
) -> tuple[Any, Any, Tuning]:
    """Iterate to |γ_g − λ_g ‖v̄_g‖²| ≤ tolerance · max(1, γ_g), and σ to the same relative change; at the trained
    weights, or at the v* of a tracker."""
    bounds = box(state, prior, likelihood, fixed)
    bounds = bounds if tracker is None else tracker.started(bounds, prior)
    values, step = dict(bounds.start), {k: torch.zeros_like(v) for k, v in bounds.start.items()}
    damping = {k: torch.ones_like(v) for k, v in bounds.start.items()}
    trace: list[float] = []
    settled, center, gap = False, None, 1.0
    for _ in range(STEPS):
        now = at_values(prior, likelihood, values)
        if tracker is not None:
            center = tracker.center(*now, tolerance=max(0.1 * tolerance, min(0.1, 0.1 * gap)))
        square = scatter(state, prior, center)
        gamma = effective_dimension(state, *now)
        with torch.no_grad():
            trace.append(float(log_evidence(state, *now, center)))
        wanted = {
            k: v.clamp(bounds.low[k], bounds.high[k])
            for k, v in _targets(state, gamma, square, values, *now, center).items()
        }
        _check_finite(wanted)
        gap = _gap(gamma, square, values, wanted)
        settled = gap <= tolerance
        if settled:
            break
        for key, target in wanted.items():
            move = target - values[key]
            damping[key] = torch.where(move * step[key] < 0, damping[key] * 0.5, (damping[key] * 1.2).clamp(max=1.0))
            step[key] = damping[key] * move
            values[key] = values[key] + step[key]
    at_bound = bounds.at_bound(values)
    warn_bound(at_bound)
    found = at_values(prior, likelihood, values)
    report = Tuning("mackay", "map", tuple(trace), len(trace), settled, at_bound, tuple(fixed))
    return *found, report if tracker is None else tracker.report(report, *found)


def _targets(
    state: State,
    gamma: Tensor,
    square: Tensor,
    values: dict[str, Tensor],
    prior: Any,
    likelihood: Any,
    center: Center | None,
) -> dict[str, Tensor]:
    tiny = torch.finfo(torch.float64).tiny
    out = {}
    if "precision" in values:
        out["precision"] = (gamma.clamp(min=tiny) / square.clamp(min=tiny)).log()
    if "noise" in values:
        statistics = state.statistics if center is None else center.statistics
        sse, count = statistics["sse"], statistics["count"]
        if not likelihood.per_output:
            sse, count = sse.sum(), count.sum()
        free = (count - noise_dimension(state, prior, likelihood)).clamp(min=1e-3)
        out["noise"] = 0.5 * (sse.clamp(min=tiny) / free).log()
    return out


def _gap(gamma: Tensor, square: Tensor, values: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """How far the hyperparameters are from their targets: |γ_g − λ_g‖v̄_g‖²| / max(1, γ_g), and |Δ log σ|."""
    gaps = [torch.zeros(1, dtype=torch.float64)]
    if "precision" in values:
        gap = (gamma - values["precision"].exp() * square).abs() / gamma.clamp(min=1)
        at_target = (wanted["precision"] - values["precision"]).abs() < 1e-12
        gaps.append(torch.where(at_target, 0.0, gap).reshape(-1))
    if "noise" in values:
        gaps.append((wanted["noise"] - values["noise"]).abs().reshape(-1))
    return float(torch.cat([gap.cpu() for gap in gaps]).max())


def _check_finite(wanted: dict[str, Tensor]) -> None:
    for key, value in wanted.items():
        if not bool(torch.isfinite(value).all()):
            raise NotConverged(f"MacKay's update of {key} is not finite; check the weights and the curvature")
