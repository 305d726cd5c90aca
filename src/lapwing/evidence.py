"""The Laplace evidence of the tangent model, centered at v̄ (Eq. 5):

    log Z = log p(D | v̄) + log p(v̄) + (P/2) log 2π − ½ log|G + A|
          = log p(D | v̄) − ½ ‖v̄ − m‖²_A − ½ [log|G + A| − log|A|]        for a Gaussian prior

A = A(v̄) the precision of the prior's local Gaussian (`priors/base.py`); differentiable in every hyperparameter. And the
effective dimension of each prior group (Eq. 7):

    γ_g = tr_g[G (G + A)⁻¹] = P_g − ∂ log|G + A| / ∂ log λ_g
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapwing.center import Center
from lapwing.curvature import State
from lapwing.errors import InvalidValue
from lapwing.likelihoods import Likelihood
from lapwing.operators import linalg, plus
from lapwing.posterior import curvature, prior_precision
from lapwing.priors import Prior
from lapwing.solvers import Estimate
from lapwing.solvers.estimate import mean_of


def log_det_ratio(state: State, prior: Prior, likelihood: Likelihood) -> Tensor:
    """log|G + A| − log|A|."""
    a = prior_precision(prior, state)
    return linalg.logdet(plus(curvature(state, likelihood), a)) - linalg.logdet(a)


def scatter(state: State, prior: Prior, center: Center | None = None) -> Tensor:
    """‖v̄_g − m_g‖² for each prior group, (g,); v̄ is the trained weights unless a center is given."""
    if center is not None:
        return prior.scatter(center.vector)
    kept = state.memo.scatter
    if kept is None or kept[0] is not prior.grouping:  # one for each grouping, whatever the precisions
        kept = state.memo.scatter = prior.grouping, prior.scatter(state.tangent.theta)
    return kept[1]


@dataclass(frozen=True, eq=False)
class Evidence:
    """The terms of log Z = fit − quadratic − occam, each 0-dim float64."""

    log_evidence: Tensor
    fit: Tensor  # log p(D | v̄)
    quadratic: Tensor  # ½ ‖v̄ − m‖²_A, the price of leaving the prior mean; of other priors, `Prior.price`
    occam: Tensor  # ½ [log|G + A| − log|A|], that of how much the data shrink the posterior
    bound: str  # what the structure makes of the full curvature's evidence: BOUNDS
    estimate: Estimate | None = None  # log Z with its standard error, where the Occam term is an estimate


def decompose(state: State, prior: Prior, likelihood: Likelihood, center: Center | None = None) -> Evidence:
    """The evidence at the trained weights or at a center, by its terms.

    At the tangent MAP it is differentiable in the hyperparameters without a derivative of v*: v* maximizes
    fit − quadratic, and the Occam term does not depend on it (Eq. 21)."""
    fit = likelihood.log_likelihood(state.statistics if center is None else center.statistics)
    quadratic = _price(state, prior, center)
    a = prior_precision(prior, state, None if center is None else center.vector)
    precision = plus(curvature(state, likelihood), a)
    occam = 0.5 * (linalg.logdet(precision) - linalg.logdet(a))
    found = fit - quadratic - occam
    return Evidence(found, fit, quadratic, occam, bound(state), _estimate(precision, found))


def _price(state: State, prior: Prior, center: Center | None) -> Tensor:
    """½ log|A| − (P/2) log 2π − log p(v̄)."""
    return prior.price(state.tangent.theta.to(torch.float64) if center is None else center.vector)


def _estimate(precision: Any, found: Tensor) -> Estimate | None:
    """log Z by each probe of log|G + A|, where that was estimated."""
    estimate = linalg.log_determinant(precision)
    if estimate is None:
        return None
    probes = estimate.samples
    return mean_of(float(found.detach()) - 0.5 * (probes - probes.mean()))


def log_evidence(state: State, prior: Prior, likelihood: Likelihood, center: Center | None = None) -> Tensor:
    """log Z at the trained weights or at a center, 0-dim float64."""
    return decompose(state, prior, likelihood, center).log_evidence


def partitioned(
    states: Sequence[State], prior: Prior, likelihood: Likelihood, center: Center | None = None
) -> Evidence:
    """The evidence with the data cut into blocks, one state each, that the Occam term takes as independent:

        ½ Σ_b [log|G_b + A| − log|A|] = ½ Σ_b log|I + K_bb| ≥ ½ log|I + K|

    a lower bound of the evidence over all, which rises as blocks are merged; for exact blocks of few data the dual form
    makes each cheap. A center belongs to all the data."""
    if not states:
        raise InvalidValue("partitioned needs at least one state; accumulate one for each block of the data")
    keys = states[0].statistics
    statistics = {key: torch.stack([state.statistics[key] for state in states]).sum(0) for key in keys}
    fit = likelihood.log_likelihood(statistics if center is None else center.statistics)
    quadratic = _price(states[0], prior, center)
    occam = 0.5 * torch.stack([log_det_ratio(state, prior, likelihood) for state in states]).sum()
    kept = {bound(state) for state in states}
    label = BOUNDS["lower"] if kept <= {BOUNDS["exact"], BOUNDS["lower"]} else BOUNDS["neither"]
    return Evidence(fit - quadratic - occam, fit, quadratic, occam, kept.pop() if len(states) == 1 else label)


BOUNDS = {
    "exact": "exact",
    "lower": "lower bound of the full curvature's",
    "upper": "upper bound of the full curvature's",
    "estimate": "an estimate of the full curvature's",
    "neither": "neither a bound nor exact",
}


def bound(state: State) -> str:
    """log|G + A| only grows as blocks of G are dropped (Fischer, Hadamard), if what is kept is exact, and shrinks as
    eigenvalues are."""
    return BOUNDS[state.structure.bound if state.factor.kind == "exact" else "neither"]


def effective_dimension(state: State, prior: Prior, likelihood: Likelihood) -> Tensor:
    """γ_g, how many directions of each prior group the data determine, (g,): by log|G + A| as A_g is stretched."""
    with torch.enable_grad():
        stretch = torch.ones_like(prior.counts()).requires_grad_()
        a = prior.stretched(state.tangent.theta.to(torch.float64), stretch)
        (slope,) = torch.autograd.grad(linalg.logdet_slope(plus(curvature(state, likelihood), a)), stretch)
    return prior.counts() - slope


def noise_slope(state: State, prior: Prior, likelihood: Likelihood, name: str) -> Tensor:
    """∂ log|G + A| / ∂ a hyperparameter of the likelihood, in its shape: −2γ/σ where curvature is ∝ σ⁻²."""
    with torch.enable_grad():
        moving = likelihood.hyperparameters[name].detach().clone().requires_grad_()
        found = curvature(state, likelihood.replace(**{name: moving}))
        (slope,) = torch.autograd.grad(linalg.logdet_slope(plus(found, prior_precision(prior, state))), moving)
    return slope


def mean_curvature(state: State, prior: Prior, likelihood: Likelihood) -> Tensor:
    """The mean of diag G over each prior group, in the prior's unit, (g,)."""
    return prior.mean_curvature(curvature(state, likelihood)).detach()
