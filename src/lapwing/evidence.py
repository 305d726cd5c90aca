"""The Laplace evidence of the tangent model, centered at v̄ (Eq. 5):

    log Z = log p(D | v̄) − ½ ‖v̄ − m‖²_A − ½ [log|G + A| − log|A|]

differentiable in every hyperparameter, and the effective dimension of each prior group (Eq. 7):

    γ_g = tr_g[G (G + A)⁻¹] = P_g − ∂ log|G + A| / ∂ log λ_g
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lapwing.curvature import State
from lapwing.operators import linalg
from lapwing.posterior import curvature


def log_det_ratio(state: State, prior: Any, likelihood: Any) -> Tensor:
    """log|G + A| − log|A|."""
    a = prior.operator()
    return linalg.logdet(linalg.shift(curvature(state, likelihood), a)) - a.logdet()


def scatter(state: State, prior: Any, center: Tensor | None = None) -> Tensor:
    """‖v̄_g − m_g‖² for each prior group, (g,)."""
    return prior.scatter(state.tangent.theta if center is None else center)


def log_evidence(state: State, prior: Any, likelihood: Any) -> Tensor:
    """log Z at the trained weights, 0-dim float64."""
    fit = likelihood.log_likelihood(state.statistics)
    quadratic = (prior.precision.reshape(-1) * scatter(state, prior)).sum()
    return fit - 0.5 * quadratic - 0.5 * log_det_ratio(state, prior, likelihood)


def effective_dimension(state: State, prior: Any, likelihood: Any) -> Tensor:
    """γ_g, how many directions of each prior group the data determine, (g,)."""
    with torch.enable_grad():
        log_precision = prior.precision.detach().log().requires_grad_()
        moving = prior.replace(precision=log_precision.exp())
        a = moving.operator()
        logdet = linalg.logdet(linalg.shift(curvature(state, likelihood), a))
        (slope,) = torch.autograd.grad(logdet, log_precision)
    return prior.counts() - slope.reshape(-1)


def noise_dimension(state: State, prior: Any, likelihood: Any) -> Tensor:
    """How many data the fit used up, as the noise sees it: −½ ∂ log|G + A| / ∂ log σ, in the shape of σ.

    Where curvature is ∝ σ⁻² that is γ, or γ_c = tr[σ_c⁻² G_c (G + A)⁻¹] for noise per output.
    """
    with torch.enable_grad():
        log_noise = likelihood.noise.detach().log().requires_grad_()
        moving = likelihood.replace(noise=log_noise.exp())
        logdet = linalg.logdet(linalg.shift(curvature(state, moving), prior.operator()))
        (slope,) = torch.autograd.grad(logdet, log_noise)
    return -0.5 * slope


def mean_curvature(state: State, prior: Any, likelihood: Any) -> Tensor:
    """The mean of diag G over each prior group, (g,)."""
    return (linalg.traces(curvature(state, likelihood), prior.groups()) / prior.counts()).detach()
