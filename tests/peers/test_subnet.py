"""Lapwing's subnetworks equal laplace-torch 0.3's SubnetLaplace: the same indices, and over them the same posterior
precision and functional covariance, for `full` and `diag`.

Theirs takes a LongTensor of indices into the flattened parameters; ours takes masks, or one bool vector. Both choose by
largest magnitude or by largest marginal variance of a diagonal posterior; where weights tie (dead units), theirs takes
what `argsort` gives and ours the first, so the indices are compared on a network without ties.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from laplace import DiagLaplace, Laplace
from laplace.curvature import CurvlinopsGGN
from laplace.utils import LargestMagnitudeSubnetMask, LargestVarianceDiagLaplaceSubnetMask
from torch import Tensor

import lapwing as lw
from lapwing.operators import linalg

PRIOR, NOISE, K = 0.37, 0.23, 23


def close(ours: Tensor, theirs: Tensor, rtol: float = 1e-7) -> None:
    torch.testing.assert_close(ours, theirs.detach(), rtol=rtol, atol=rtol * float(theirs.detach().abs().max()))


def ours(case: Any, structure: str, subset: Any) -> Any:
    likelihood = lw.likelihoods.Gaussian(NOISE) if case.likelihood == "gaussian" else lw.likelihoods.Categorical()
    return lw.laplace(
        case.model, case.loader, likelihood, structure=structure, subset=subset, prior=PRIOR, factor="exact"
    )


def noise(case: Any) -> dict[str, float]:
    return {"sigma_noise": NOISE} if case.likelihood == "gaussian" else {}


def theirs(case: Any, structure: str, indices: Tensor) -> Any:
    peer = Laplace(
        copy.deepcopy(case.model),
        case.theirs,
        subset_of_weights="subnetwork",
        hessian_structure=structure,
        subnetwork_indices=indices,
        prior_precision=PRIOR,
        backend=CurvlinopsGGN,
        **noise(case),
    )
    peer.fit(case.loader)
    return peer


def indices(case: Any, masks: dict[str, Tensor]) -> Tensor:
    zero = {n: torch.zeros(p.shape, dtype=torch.bool) for n, p in case.model.named_parameters()}
    return torch.cat([m.reshape(-1) for m in {**zero, **masks}.values()]).nonzero()[:, 0]


def test_the_largest_weights(case: Any) -> None:
    mask = LargestMagnitudeSubnetMask(case.model, n_params_subnet=K)
    assert torch.equal(indices(case, lw.subsets.largest_magnitude(case.model, K)), mask.select().sort().values)


def test_the_largest_variances(regression: Any) -> None:
    case = regression  # tanh: no dead units, no ties
    model = copy.deepcopy(case.model)
    diag = DiagLaplace(model, case.theirs, prior_precision=PRIOR, backend=CurvlinopsGGN, **noise(case))
    mask = LargestVarianceDiagLaplaceSubnetMask(model, n_params_subnet=K, diag_laplace_model=diag)
    found = lw.subsets.largest_variance(ours(case, "diag", "all"), K)
    assert torch.equal(indices(case, found), mask.select(case.loader).sort().values)


@pytest.mark.parametrize("structure", ["full", "diag"])
def test_the_posterior_over_a_subnetwork(case: Any, structure: str) -> None:
    masks = lw.subsets.random(case.model, K, torch.Generator().manual_seed(1))
    mine, peer = ours(case, structure, masks), theirs(case, structure, indices(case, masks))
    precision = mine.posterior.precision
    if structure == "diag":
        close(linalg.diagonal(precision), peer.posterior_precision)
    else:
        close(linalg.to_dense(precision), peer.posterior_precision)
    _, covariance = peer._glm_predictive_distribution(case.unseen)
    close(mine.predict(case.unseen).covariance, covariance)
