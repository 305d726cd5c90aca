"""Each training example predicted by a posterior of all the others, in closed form (Eq. 26).

With outputs z_n and covariances C_n of example n under all data, its score g_n = ∂ log p(y_n | z_n) and its curvature
Λ_n = S Sᵀ:

    C₋ₙ = (C_n⁻¹ − Λ_n)⁻¹ = C_n + C_n S (I − SᵀC_n S)⁻¹ SᵀC_n,      z₋ₙ = z_n − C₋ₙ g_n

Exact for the tangent model, at its mode, of a quadratic likelihood under the exact curvature; else one Newton step away
from it. Leverages, the eigenvalues of SᵀC_n S, are below one there; a structured covariance may have them above, and is
refused: it does not hold the example that is to be taken out.

It is of the linear model, not of the network: its features J have seen the label that is left out, so its score is too
good, by an amount that ranks settings usefully and is no estimate of the error on new data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapwing.center import Center
from lapwing.curvature.accumulate import flat_outputs, flat_targets
from lapwing.data import passes
from lapwing.errors import InvalidValue
from lapwing.likelihoods import Likelihood
from lapwing.outputs import Normal
from lapwing.posterior import Gaussian
from lapwing.predictive.about import about
from lapwing.predictive.prediction import Prediction

MOST = 1 - 1e-9  # of a leverage


@dataclass(frozen=True, eq=False)
class LeaveOneOut:
    """At m rows of training outputs, each left out: `mean` (m, c) and `covariance` (m, c, c) in float64, and `score`,
    log p(y_m | all others), (m,)."""

    mean: Tensor
    covariance: Tensor
    score: Tensor
    leverage: Tensor  # the largest of each row, (m,)

    def __repr__(self) -> str:
        return (
            f"LeaveOneOut({len(self.score):,} rows; mean log score {float(self.score.mean()):.4g}, largest leverage "
            f"{float(self.leverage.max()):.3g})"
        )


@torch.inference_mode(False)
@torch.no_grad()
def leave_one_out(
    posterior: Gaussian, likelihood: Likelihood, batches: Any, center: Center | None = None, progress: bool = False
) -> LeaveOneOut:
    """By one pass over the data of the fit; about the network's outputs, or about those of a center."""
    means, covs, scores, most = [], [], [], []
    for x, y in passes(batches, posterior.tangent.device, progress, "leave one out"):
        made = posterior.outputs(x)
        fitted = flat_outputs(made.mean).double()
        made = made if center is None else about(made, posterior.tangent, x, center)
        z, C = flat_outputs(made.mean).double(), made.marginal.double().reshape(-1, *made.marginal.shape[-2:])
        targets = flat_targets(likelihood, made.mean, y)
        mean, cov, leverage = left_out(likelihood, z, C, targets, fitted)
        means.append(mean)
        covs.append(cov)
        most.append(leverage)
        scores.append(Prediction(likelihood.predictive, Normal(mean, cov)).log_prob(targets))
    return LeaveOneOut(torch.cat(means), torch.cat(covs), torch.cat(scores), torch.cat(most))


def left_out(likelihood: Likelihood, z: Tensor, C: Tensor, y: Tensor, fitted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """z₋ₙ (m, c), C₋ₙ (m, c, c) and the largest leverages (m,), from rows z (m, c), C (m, c, c) and their targets.
    fitted: the outputs (m, c) that the curvature was taken at; it is what is taken out."""
    S, g = likelihood.scaled_root(fitted, y), likelihood.gradient(z, y)
    CS = C @ S
    inner = S.mT @ CS
    leverage = torch.linalg.eigvalsh(inner)[..., -1]
    if not bool((leverage < MOST).all()):
        raise InvalidValue(
            f"{int((leverage >= MOST).sum())} of {len(leverage)} training rows have leverages up to "
            f"{float(leverage.max()):.3g}, where a posterior that has the example in it has less than 1: its structure "
            "does not hold single examples; use structure='full'"
        )
    eye = torch.eye(inner.shape[-1], dtype=inner.dtype, device=inner.device)
    cov = C + CS @ torch.linalg.solve(eye - inner, CS.mT)
    cov = 0.5 * (cov + cov.mT)
    return z - (cov @ g.unsqueeze(-1)).squeeze(-1), cov, leverage
