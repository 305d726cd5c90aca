"""Lapwing equals laplace-torch 0.3 where both compute the same thing, and what differs by convention.

Compared, for `full` and `diag`, all weights and the last layer, on a tanh MLP regressor, a ReLU MLP classifier and a
small CNN: the posterior precision, the log evidence, its gradient in prior precision and noise, the functional
covariance and the probit and bridge predictives; to 1e-7 relative, in float64. Our `full` takes the primal form for the
MLPs and the dual form for the CNN, which has more weights than rows.

Conventions, theirs and ours
----------------------------
*Noise.* `sigma_noise` and `noise` are both standard deviations. Theirs is one number for all outputs; ours may be
one for each. Both keep the curvature at unit noise; theirs is multiplied by `_H_factor = 1/(σ² T)`. Their temperature
T is 1 throughout: for T ≠ 1 they scale the fit term by 1/T too but not its normalizer, so that "evidence" belongs
to no density, and Lapwing has no counterpart.

*Loss.* They accumulate `MSELoss(reduction="sum")` times a factor of ½, or the summed cross entropy, and turn it into a
log-likelihood afterwards (with −NC·log(σ√2π) for regression). Ours are sums of log-likelihoods from the start. The
sums agree; N is taken from `len(loader.dataset)` by them (wrong under `drop_last`) and counted by us.

*Evidence.* log p(D|θ*) − ½(log|H + A| − log|A|) − ½‖θ* − m‖²_A in both, at the trained weights. For the last layer,
‖θ*‖² runs over that layer's weights only, in both.

*Prior.* A precision, mean zero. Their "layerwise" is one precision for each parameter *tensor*, so a weight and its
bias differ; our "layerwise" is one for each module. Theirs is spelled `{name: precision}` here.

*Tuning.* Theirs is 100 steps of Adam at a rate of 0.1 on log λ, with the noise left where it is. Ours maximizes over λ
and σ together, until the gradient vanishes: so their gradient must vanish at our optimum.

*Order of parameters.* Both follow `named_parameters()`, each tensor flattened row by row; for the last layer that
is the weight (o, i) and then the bias.

*dtype.* They accumulate and factorize in the network's dtype, and build an identity in torch's default dtype, so a
float64 network needs `torch.set_default_dtype(torch.float64)`. We accumulate and factorize in float64 always.

*Regression predictive.* `la(x)` of theirs is (f, Var f) without the noise: our `f_mean` and `covariance`. Our `total`
is with the noise.

*Classification predictive.* Their default link is our `link="probit"`, which counts the variance of a common shift
of all logits; their "bridge" is our `link="bridge"`.

*State.* Their queries mutate (`log_marginal_likelihood(prior_precision=...)` sets the prior; BackPACK leaves hooks
on the network), so they get a copy of the network here.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from laplace import Laplace
from laplace.curvature import BackPackGGN, CurvlinopsGGN
from torch import Tensor

import lapwing as lw
from lapwing.operators import linalg

RTOL = 1e-7
PRIOR, NOISE = 0.37, 0.23
BACKENDS = {"curvlinops": CurvlinopsGGN, "backpack": BackPackGGN}
STRUCTURES = ["full", "diag"]
SUBSETS = ["all", "last_layer"]


def close(ours: Tensor, theirs: Tensor, rtol: float = RTOL) -> None:
    """Equal to rtol relative to the largest entry (entries that cancel to zero carry no relative digits)."""
    theirs = theirs.detach()
    assert float(theirs.abs().max()) > 0
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=rtol * float(theirs.abs().max()))


def likelihood(case: Any, noise: float = NOISE) -> Any:
    return lw.likelihoods.Gaussian(noise) if case.likelihood == "gaussian" else lw.likelihoods.Categorical()


def fit_ours(case: Any, structure: str, subset: str, prior: Any = PRIOR, noise: float = NOISE) -> Any:
    how = {"structure": structure, "subset": subset, "prior": prior, "factor": "exact"}
    return lw.laplace(case.model, case.loader, likelihood(case, noise), **how)


def fit_theirs(
    case: Any, structure: str, subset: str, backend: str = "curvlinops", prior: Any = PRIOR, noise: float = NOISE
) -> Any:
    sigma = {"sigma_noise": noise} if case.likelihood == "gaussian" else {}
    peer = Laplace(
        copy.deepcopy(case.model),
        case.theirs,
        subset_of_weights=subset,
        hessian_structure=structure,
        prior_precision=prior,
        backend=BACKENDS[backend],
        **sigma,
    )
    peer.fit(case.loader)
    return peer


EVERY = [(s, w, b) for s in STRUCTURES for w in SUBSETS for b in BACKENDS]


@pytest.mark.parametrize(("structure", "subset", "backend"), EVERY)
def test_posterior_precision(case: Any, structure: str, subset: str, backend: str) -> None:
    ours = fit_ours(case, structure, subset).posterior.precision
    theirs = fit_theirs(case, structure, subset, backend).posterior_precision
    close(linalg.diagonal(ours) if structure == "diag" else linalg.to_dense(ours), theirs)


@pytest.mark.parametrize(("structure", "subset", "backend"), EVERY)
def test_log_evidence(case: Any, structure: str, subset: str, backend: str) -> None:
    ours = fit_ours(case, structure, subset)
    theirs = fit_theirs(case, structure, subset, backend)
    close(ours.log_evidence(), theirs.log_marginal_likelihood())
    # and where the prior moves after the fit
    moved = theirs.log_marginal_likelihood(prior_precision=torch.tensor(11.0))
    close(ours.log_evidence(prior=11.0), moved)


@pytest.mark.parametrize(("structure", "subset", "backend"), EVERY)
def test_functional_covariance(case: Any, structure: str, subset: str, backend: str) -> None:
    ours = fit_ours(case, structure, subset).predict(case.unseen)
    f, cov = fit_theirs(case, structure, subset, backend)._glm_predictive_distribution(case.unseen)
    close(ours.f_mean, f)
    close(ours.covariance, cov)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("subset", SUBSETS)
def test_joint_functional_covariance(regression: Any, structure: str, subset: str) -> None:
    ours = fit_ours(regression, structure, subset).predict(regression.unseen, joint=True)
    f, cov = fit_theirs(regression, structure, subset)(regression.unseen, joint=True)
    close(ours.f_mean.flatten(), f)
    close(ours.covariance.reshape(cov.shape), cov)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("subset", SUBSETS)
def test_regression_predictive_leaves_the_noise_out(regression: Any, structure: str, subset: str) -> None:
    ours = fit_ours(regression, structure, subset).predict(regression.unseen)
    _, cov = fit_theirs(regression, structure, subset)(regression.unseen)
    variance = cov.diagonal(dim1=-2, dim2=-1)
    close(ours.epistemic, variance)
    close(ours.total, variance + NOISE**2)


@pytest.mark.parametrize("link", ["probit", "bridge"])
@pytest.mark.parametrize(("structure", "subset", "backend"), EVERY)
def test_class_probabilities(classification: Any, structure: str, subset: str, backend: str, link: str) -> None:
    ours = fit_ours(classification, structure, subset).predict(classification.unseen, link=link)
    theirs = fit_theirs(classification, structure, subset, backend)(classification.unseen, link_approx=link)
    close(ours.mean, theirs)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("subset", SUBSETS)
def test_a_precision_for_each_parameter_tensor(case: Any, structure: str, subset: str) -> None:
    """Their "layerwise" (all weights) is one precision a tensor; the last layer takes one a weight instead."""
    if subset == "all":
        values = {n: 0.1 + 0.3 * i for i, (n, _) in enumerate(case.model.named_parameters())}
        prior: Any = torch.tensor(list(values.values()))
    else:
        values = {n: 0.2 + 0.5 * i for i, n in enumerate(case.last)}
        shapes = dict(case.model.named_parameters())
        prior = torch.cat([torch.full((shapes[n].numel(),), v) for n, v in values.items()])
    ours = fit_ours(case, structure, subset, prior=values)
    theirs = fit_theirs(case, structure, subset, prior=prior)
    close(ours.log_evidence(), theirs.log_marginal_likelihood())
    close(ours.predict(case.unseen).covariance, theirs._glm_predictive_distribution(case.unseen)[1])


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("subset", SUBSETS)
def test_evidence_gradient(regression: Any, structure: str, subset: str) -> None:
    """In prior precision and noise, through two different automatic derivatives."""
    ours, theirs = fit_ours(regression, structure, subset), fit_theirs(regression, structure, subset)
    hyper = [torch.tensor(v, requires_grad=True) for v in (1.9, 0.41)]
    mine = ours.log_evidence(prior=hyper[0], likelihood=lw.likelihoods.Gaussian(hyper[1]))
    (a, b), (c, d) = (
        torch.autograd.grad(value, hyper)
        for value in (mine, theirs.log_marginal_likelihood(prior_precision=hyper[0], sigma_noise=hyper[1]))
    )
    close(a, c)
    close(b, d)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("subset", SUBSETS)
def test_their_evidence_is_stationary_at_our_optimum(regression: Any, structure: str, subset: str) -> None:
    """The learned prior and noise: their gradient vanishes there, and everything agrees there too."""
    tuned = fit_ours(regression, structure, subset).tuned(center="map")
    noise, prior = float(tuned.likelihood.noise), float(tuned.prior.precision)
    assert tuned.tuning.converged
    assert not tuned.tuning.at_bound
    theirs = fit_theirs(regression, structure, subset, prior=prior, noise=noise)
    close(tuned.log_evidence(), theirs.log_marginal_likelihood())
    close(tuned.predict(regression.unseen).covariance, theirs(regression.unseen)[1])
    logs = [torch.tensor(v).log().requires_grad_() for v in (prior, noise)]
    value = theirs.log_marginal_likelihood(prior_precision=logs[0].exp(), sigma_noise=logs[1].exp())
    slopes = torch.stack(torch.autograd.grad(value, logs))
    assert float(slopes.abs().max()) < 1e-3  # in nats; away from the optimum it is of the order of n
    assert value.item() > float(theirs.log_marginal_likelihood(torch.tensor(1.2 * prior), torch.tensor(noise)))
    assert value.item() > float(theirs.log_marginal_likelihood(torch.tensor(prior), torch.tensor(1.05 * noise)))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_their_tuning_ends_at_our_precision(case: Any, structure: str) -> None:
    """With the noise held, and Adam given the steps that it needs."""
    fixed = ("noise",) if case.likelihood == "gaussian" else ()
    tuned = fit_ours(case, structure, "all").tuned(fixed=fixed, center="map")
    theirs = fit_theirs(case, structure, "all")
    theirs.optimize_prior_precision(method="marglik", n_steps=600, lr=0.05)
    close(tuned.prior.precision.reshape(1), theirs.prior_precision, rtol=1e-4)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_float32_networks_agree_to_single_precision(case: Any, structure: str) -> None:
    """They factorize in float32 and we in float64: the evidence agrees as far as float32 carries."""
    single = copy.deepcopy(case.model).float()
    y = case.targets.float() if case.likelihood == "gaussian" else case.targets
    data = torch.utils.data.TensorDataset(case.inputs.float(), y)
    loader = torch.utils.data.DataLoader(data, batch_size=7)
    ours = lw.laplace(single, loader, likelihood(case), structure=structure, prior=PRIOR, factor="exact")
    torch.set_default_dtype(torch.float32)
    sigma = {"sigma_noise": NOISE} if case.likelihood == "gaussian" else {}
    theirs = Laplace(copy.deepcopy(single), case.theirs, "all", structure, prior_precision=PRIOR, **sigma)
    theirs.fit(loader)
    close(ours.log_evidence(), theirs.log_marginal_likelihood().double(), rtol=1e-5)
    cov = theirs._glm_predictive_distribution(case.unseen.float())[1]
    close(ours.predict(case.unseen.float()).covariance, cov, rtol=1e-4)
