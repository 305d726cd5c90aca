"""Steps uphill on the evidence at the current weights, with the curvature G fixed (Eq. 5):

    log Z(λ, σ) = log p(D | θ, σ) − ½ ‖θ − m‖²_A − ½ [log|w G + A| − log|A|],      A = diag λ_g,  w = σ⁻²

by Adam on (log λ, log σ), with a rate that falls to 0, inside the bounds of `tune/bounds.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lapwing.curvature import State
from lapwing.errors import NotConverged
from lapwing.evidence import log_evidence, scatter
from lapwing.likelihoods import Likelihood
from lapwing.operators import linalg
from lapwing.priors import Gaussian
from lapwing.tune.bounds import Box, at_values


@torch.inference_mode(False)
def climb(
    state: State, prior: Gaussian, likelihood: Likelihood, bounds: Box, steps: int, lr: float
) -> tuple[Gaussian, Likelihood, tuple[str, ...]]:
    """The prior and likelihood after some steps of Adam from where they are, and the names of those at a bound."""
    now = {**prior.coordinates(), **likelihood.coordinates()}
    values = {
        key: now[key].reshape(start.shape).clamp(bounds.low[key], bounds.high[key]).requires_grad_()
        for key, start in bounds.start.items()
    }
    value_at = fixed_curvature(state, prior, likelihood)
    optimizer = torch.optim.Adam(list(values.values()), lr=lr, maximize=True)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * (1 - step / steps)
        optimizer.zero_grad()
        with torch.enable_grad():
            value = value_at(*at_values(prior, likelihood, values))
            finite(float(value.detach()), [*values])
            value.backward()
        optimizer.step()
        with torch.no_grad():
            for key, log_value in values.items():
                log_value.clamp_(bounds.low[key], bounds.high[key])
    final = {key: log_value.detach() for key, log_value in values.items()}
    return *at_values(prior, likelihood, final), bounds.at_bound(final)


def fixed_curvature(state: State, prior: Gaussian, likelihood: Likelihood) -> Callable[[Gaussian, Likelihood], Tensor]:
    """(prior, likelihood) ↦ log Z with what does not move made once. Noise per output mixes the curvature anew."""
    if len(likelihood.curvature_weights(state.factor.kind)) > 1 or state.terms > 1:
        return lambda prior, likelihood: log_evidence(state, prior, likelihood)
    unit = state.structure.operator(state, torch.ones(1, dtype=torch.float64, device=state.tangent.device))
    diagonal = linalg.diagonal(unit) if linalg.is_diagonal(unit) else None
    square = scatter(state, prior)

    def value_at(prior: Gaussian, likelihood: Likelihood) -> Tensor:
        a, w = prior.operator(), likelihood.curvature_weights(state.factor.kind)[0].to(square.device)
        if diagonal is None:
            ratio = linalg.logdet(linalg.shift(linalg.scale(unit, w), a)) - a.logdet()
        else:  # as many hyperparameters as weights, maybe: few kernels a step
            ratio = torch.log1p(w * diagonal / a.dense()).sum()
        quadratic = (prior.precision.reshape(-1) * square).sum()
        return likelihood.log_likelihood(state.statistics) - 0.5 * quadratic - 0.5 * ratio

    return value_at


def finite(value: float, names: list[str]) -> float:
    """The log evidence, which must be finite."""
    if not math.isfinite(value):
        raise NotConverged(
            f"the log evidence became {value} while tuning {names}; hold one of them with fixed=, or check the scale "
            "of the targets. Nothing was changed"
        )
    return value
