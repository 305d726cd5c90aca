"""The posterior of the tangent model under a prior and a noise: θ ~ N(v̄, (G + A)⁻¹)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lapwing.curvature import State
from lapwing.errors import InvalidValue, warn
from lapwing.likelihoods import Likelihood
from lapwing.operators import linalg, plus
from lapwing.posterior.gaussian import Gaussian
from lapwing.priors import Prior


def curvature(state: State, likelihood: Likelihood) -> Any:
    """G = Σ_g w_g G_g as an operator; one weight (one noise for all outputs) serves every G_g."""
    weights = likelihood.curvature_weights(state.factor.kind).to(state.tangent.device)
    return state.structure.operator(state, weights.expand(state.terms) if len(weights) == 1 else weights)


def placed(prior: Prior, state: State) -> Prior:
    """The prior at this state: one that looks at the curvature (the g-prior) sees it, at unit noise; others stay."""
    if not prior.of_curvature:
        return prior
    with torch.no_grad():
        eps = torch.finfo(torch.promote_types(state.tangent.dtype, torch.float32)).eps
        out = prior.at(state.structure.operator(state, state.unit_weights), state.tangent.theta, eps)
    dropped = out.counts_dropped()
    if dropped and not state.memo.said_dropped:
        state.memo.said_dropped = True
        warn(
            f"the g-prior drops {sum(dropped.values())} of {state.layout.size} weights, on which no output depends "
            "over these data; they stay at their trained values without variance "
            f"(see la.coverage of {', '.join(dropped)})",
        )
    return out


def prior_precision(prior: Prior, state: State, center: Tensor | None = None) -> Any:
    """A, that of the prior's local Gaussian at the trained weights, or at a center (p,)."""
    a = prior.quadratic(state.tangent.theta.to(torch.float64) if center is None else center)[0]
    if prior.gaussian:
        return a
    sound = torch.isfinite(a.dense()) & (a.dense() > 0)
    if not bool(sound.all()):
        first = next(name for name, s in state.layout.slices().items() if not bool(sound[s].all()))
        raise InvalidValue(
            f"{type(prior).__name__} has no finite, positive precision at {int((~sound).sum())} of "
            f"{state.layout.size} weights, the first in {first}: a density with a peak at 0 has an infinite one for a "
            "weight that is exactly 0; leave such weights out with subset=, or use a smooth prior"
        )
    return a


def condition(
    state: State, prior: Prior, likelihood: Likelihood, center: Tensor | None = None, temperature: float = 1.0
) -> Gaussian:
    """The posterior of the tangent model, centered at the trained weights unless told otherwise; its covariance times
    the temperature."""
    mean = state.tangent.theta.to(torch.float64) if center is None else center
    precision = plus(curvature(state, likelihood), prior_precision(prior, state, mean))
    if temperature != 1.0:
        precision = linalg.scale(precision, torch.tensor(1 / temperature, dtype=torch.float64, device=mean.device))
    return Gaussian(state.tangent, mean, precision, state.parts)
