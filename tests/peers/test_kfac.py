"""Our Kronecker-factored curvature equals curvlinops' and laplace-torch's where conventions agree, and how they differ.

Conventions, theirs and ours (H_l ≈ (1/count) B ⊗ A for each layer, a weight (o, i) flattened row by row)
---------------------------------------------------------------------------------------------------------
*Bias.* We join a layer's bias to its weight, as one more input that is always 1, so that A is (i+1) x (i+1) and the
block holds the products of weight and bias too. curvlinops does the same with `separate_weight_and_bias=False`
(not its default): equal. laplace-torch, and curvlinops by default, give the bias a block B of its own and drop the
products: equal to ours with those entries set to zero, and equal in everything for networks without biases.

*Shared positions.* `Kronecker(sharing="expand")` (our default) and `"reduce"` are curvlinops' `kfac_approx`; equal for
both. laplace-torch passes the choice on to curvlinops (its argument is called `asdl_fisher_kwargs`): equal. BackPACK's
convolutions are neither: A is summed over positions, as in expand but divided by N rather than by NT, and B is
the outer product of gradients summed over positions, as in reduce. For linear layers all agree.

*Scale.* curvlinops' factors are those of the *loss* it is given: for `MSELoss(reduction="sum")` that is twice the
curvature of ½‖y − f‖² with the exact factor, and four times with the empirical one. laplace-torch multiplies by ½ in
both cases, so its empirical Fisher for regression is twice the Fisher of its own likelihood (and, with noise, scaled
by 1/σ² where the outer product of scores has 1/σ⁴). Ours is the sum of outer products of the scores.

*Names.* Their `type-2` is our factor="exact", `empirical` is "empirical", `mc` is "monte_carlo" (other draws, the same
mean; their default is 1 sample, ours 8).

*Batches.* laplace-torch weighs A of each batch by its share of N and adds both factors up; we keep both sums and N:
the same, for any cut into batches.

*Prior.* Added to the products of eigenvalues by both (their `damping=True` is another approximation). Their evidence
loses the gradient of the log-determinant in the noise (`KronDecomposed.__mul__` turns the scale into a Python float);
ours is compared with finite differences of their value.

*Clipping.* Both set eigenvalues below zero, which are rounding, to zero.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from curvlinops import KFACLinearOperator
from laplace import Laplace
from laplace.curvature import BackPackGGN, CurvlinopsGGN
from torch import Tensor, nn

import lapwing as lw
from lapwing.operators import linalg
from lapwing.posterior import curvature

RTOL = 1e-7
PRIOR, NOISE = 0.37, 0.23
SHARING = ["expand", "reduce"]


def close(ours: Tensor, theirs: Tensor, rtol: float = RTOL) -> None:
    """Equal to rtol relative to the largest entry."""
    theirs = theirs.detach()
    assert float(theirs.abs().max()) > 0
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=rtol * float(theirs.abs().max()))


def fit_ours(case: Any, sharing: str = "expand", noise: float = NOISE, **how: Any) -> Any:
    likelihood = lw.likelihoods.Gaussian(noise) if case.likelihood == "gaussian" else lw.likelihoods.Categorical()
    how = {"prior": PRIOR, "factor": "exact", "structure": lw.curvature.Kronecker(sharing=sharing)} | how
    return lw.laplace(case.model, case.loader, likelihood, **how)


def fit_theirs(
    case: Any, sharing: str = "expand", backend: Any = CurvlinopsGGN, noise: float = NOISE, **how: Any
) -> Any:
    sigma = {"sigma_noise": noise} if case.likelihood == "gaussian" else {}
    choice = {"asdl_fisher_kwargs": {"kfac_approx": sharing}} if sharing != "expand" else {}
    how = {"subset_of_weights": "all", "prior_precision": PRIOR} | how
    peer = Laplace(
        copy.deepcopy(case.model), case.theirs, hessian_structure="kron", backend=backend, **sigma, **choice, **how
    )
    peer.fit(case.loader)
    return peer


def dense(la: Any) -> Tensor:
    """Our curvature without the prior, at the likelihood's noise, (p, p)."""
    return linalg.to_dense(curvature(la.state, la.likelihood))


def curvlinops(case: Any, sharing: str, factor: str, separate: bool, samples: int = 1, seed: int = 0) -> Tensor:
    """curvlinops' matrix (p, p), turned from the loss it is given to our unit-noise likelihood."""
    gaussian = case.likelihood == "gaussian"
    model = copy.deepcopy(case.model)
    op = KFACLinearOperator(
        model,
        (nn.MSELoss if gaussian else nn.CrossEntropyLoss)(reduction="sum"),
        list(model.parameters()),
        case.loader,
        fisher_type={"exact": "type-2", "monte_carlo": "mc", "empirical": "empirical"}[factor],
        mc_samples=samples,
        seed=seed,
        kfac_approx=sharing,
        separate_weight_and_bias=separate,
    )
    # ∂²(y − f)² = 2; (∂(y − f)²)² = 4 (y − f)², which under the y that its loss implies, of variance ½, is 2 again
    scale = {"exact": 2, "monte_carlo": 2, "empirical": 4}[factor] if gaussian else 1
    p = sum(t.numel() for t in model.parameters())
    return torch.as_tensor(op @ torch.eye(p)) / scale


def without_products(case: Any, matrix: Tensor) -> Tensor:
    """The matrix with the products of two different parameter tensors set to zero."""
    out, start = torch.zeros_like(matrix), 0
    for p in case.model.parameters():
        mine = slice(start, start + p.numel())
        out[mine, mine] = matrix[mine, mine]
        start = mine.stop
    return out


# -- curvlinops --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", ["exact", "empirical"])
@pytest.mark.parametrize("sharing", SHARING)
def test_curvlinops_joint_blocks(case: Any, sharing: str, factor: str) -> None:
    ours = dense(fit_ours(case, sharing, noise=1.0, factor=factor))
    close(ours, curvlinops(case, sharing, factor, separate=False))


@pytest.mark.parametrize("factor", ["exact", "empirical"])
@pytest.mark.parametrize("sharing", SHARING)
def test_curvlinops_separate_blocks_are_ours_without_products(case: Any, sharing: str, factor: str) -> None:
    ours = dense(fit_ours(case, sharing, noise=1.0, factor=factor))
    theirs = curvlinops(case, sharing, factor, separate=True)
    close(without_products(case, ours), theirs)
    assert float((ours - theirs).abs().max()) > 1e-3 * float(theirs.abs().max())  # the products are not nothing


@pytest.mark.parametrize("sharing", SHARING)
def test_monte_carlo_factors_have_the_same_mean(case: Any, sharing: str) -> None:
    """Other draws, so another matrix; but the traces of both scatter around the exact one, by their standard error."""
    exact = float(dense(fit_ours(case, sharing, noise=1.0)).trace())
    factor = lw.curvature.Factor("monte_carlo", 16)
    ours, theirs = [], []
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        la = fit_ours(case, sharing, noise=1.0, factor=factor, generator=generator)
        ours.append(float(dense(la).trace()))
        theirs.append(float(curvlinops(case, sharing, "monte_carlo", False, samples=16, seed=seed).trace()))
    for traces in map(torch.tensor, (ours, theirs)):
        error = float(traces.std() / len(traces) ** 0.5)
        assert error < 0.1 * exact
        assert abs(float(traces.mean()) - exact) < 4 * error


# -- laplace-torch: networks without biases, where everything agrees -----------------------------------------------


def agreeing(case: Any) -> list[Any]:
    """The backends whose factors are ours."""
    return [CurvlinopsGGN] if case.name == "cnn" else [CurvlinopsGGN, BackPackGGN]


@pytest.mark.parametrize("sharing", SHARING)
def test_posterior_without_biases(case_without_bias: Any, sharing: str) -> None:
    case = case_without_bias
    ours = fit_ours(case, sharing)
    for backend in agreeing(case) if sharing == "expand" else [CurvlinopsGGN]:
        theirs = fit_theirs(case, sharing, backend)
        close(linalg.to_dense(ours.posterior.precision), theirs.posterior_precision.to_matrix())
        close(ours.log_evidence(), theirs.log_marginal_likelihood())
        close(ours.log_evidence(prior=11.0), theirs.log_marginal_likelihood(prior_precision=torch.tensor(11.0)))


@pytest.mark.parametrize("sharing", SHARING)
def test_functional_covariance_without_biases(case_without_bias: Any, sharing: str) -> None:
    case = case_without_bias
    prediction = fit_ours(case, sharing).predict(case.unseen)
    for backend in agreeing(case) if sharing == "expand" else [CurvlinopsGGN]:
        f, cov = fit_theirs(case, sharing, backend)._glm_predictive_distribution(case.unseen)
        close(prediction.f_mean, f)
        close(prediction.covariance, cov)


def test_predictive_without_biases(case_without_bias: Any) -> None:
    case = case_without_bias
    ours, theirs = fit_ours(case), fit_theirs(case)
    if case.likelihood == "gaussian":
        f, cov = theirs(case.unseen, joint=True)
        prediction = ours.predict(case.unseen, joint=True)
        close(prediction.f_mean.flatten(), f)
        close(prediction.covariance.reshape(cov.shape), cov)
    else:
        for link in ("probit", "bridge"):
            close(ours.predict(case.unseen, link=link).mean, theirs(case.unseen, link_approx=link))


def test_last_layer_without_bias(case_without_bias: Any) -> None:
    case = case_without_bias
    ours = fit_ours(case, subset="last_layer")
    for backend in (CurvlinopsGGN, BackPackGGN):  # the last layer is linear in every network
        theirs = fit_theirs(case, backend=backend, subset_of_weights="last_layer")
        close(linalg.to_dense(ours.posterior.precision), theirs.posterior_precision.to_matrix())
        close(ours.log_evidence(), theirs.log_marginal_likelihood())
        close(ours.predict(case.unseen).covariance, theirs._glm_predictive_distribution(case.unseen)[1])


def test_a_precision_for_each_layer_without_biases(case_without_bias: Any) -> None:
    case = case_without_bias
    values = {n: 0.1 + 0.6 * i for i, (n, _) in enumerate(case.model.named_parameters())}
    ours, theirs = fit_ours(case, prior=values), fit_theirs(case, prior_precision=torch.tensor(list(values.values())))
    close(ours.log_evidence(), theirs.log_marginal_likelihood())
    close(ours.predict(case.unseen).covariance, theirs._glm_predictive_distribution(case.unseen)[1])


def test_their_tuning_ends_at_our_precision(case_without_bias: Any) -> None:
    case = case_without_bias
    tuned = fit_ours(case).tuned(fixed=("noise",) if case.likelihood == "gaussian" else (), center="map")
    theirs = fit_theirs(case)
    theirs.optimize_prior_precision(method="marglik", n_steps=600, lr=0.05)
    close(tuned.prior.precision.reshape(1), theirs.prior_precision, rtol=1e-4)


def test_evidence_gradient_is_the_slope_of_their_evidence(regression_without_bias: Any) -> None:
    """Finite differences of their value: their own gradient in the noise lacks the log-determinant."""
    case = regression_without_bias
    prior, noise = (torch.tensor(v, requires_grad=True) for v in (1.9, 0.41))
    value = fit_ours(case).log_evidence(prior=prior, likelihood=lw.likelihoods.Gaussian(noise))
    by_prior, by_noise = torch.autograd.grad(value, [prior, noise])
    theirs, h = fit_theirs(case), 1e-5

    def at(a: float, b: float) -> float:
        return float(theirs.log_marginal_likelihood(torch.tensor(a), torch.tensor(b)))

    close(by_prior, torch.tensor((at(1.9 + h, 0.41) - at(1.9 - h, 0.41)) / (2 * h)), rtol=1e-6)
    close(by_noise, torch.tensor((at(1.9, 0.41 + h) - at(1.9, 0.41 - h)) / (2 * h)), rtol=1e-6)


# -- laplace-torch: with biases, and BackPACK's convolutions -----------------------------------------------------


@pytest.mark.parametrize("sharing", SHARING)
def test_with_biases_theirs_is_ours_without_products(case: Any, sharing: str) -> None:
    ours, theirs = fit_ours(case, sharing), fit_theirs(case, sharing)
    matrix = without_products(case, dense(ours)) + PRIOR * torch.eye(len(theirs.mean))
    close(matrix, theirs.posterior_precision.to_matrix())
    # the evidence differs by the log-determinants, and by nothing else
    products = torch.logdet(linalg.to_dense(ours.posterior.precision)) - torch.logdet(matrix)
    close(ours.log_evidence() + 0.5 * products, theirs.log_marginal_likelihood())
    assert float(products) < 0  # Fischer: cutting a block into smaller ones raises the determinant


@pytest.mark.parametrize("layer", [0, 2])
def test_backpack_convolutions_mix_expand_and_reduce(layer: int, cnn_without_bias: Any) -> None:
    """Their B is that of reduce, their A that of expand, divided by N rather than NT."""
    case = cnn_without_bias
    expand, reduce = fit_ours(case, "expand"), fit_ours(case, "reduce")
    b, a = fit_theirs(case, backend=BackPackGGN).H_facs.kfacs[[0, 2, 5].index(layer)]
    columns = expand.state.layout.slices()[f"{layer}.weight"]
    blocks = [dense(la)[columns, columns].reshape(len(b), len(a), len(b), len(a)) for la in (expand, reduce)]
    # with outputs, or inputs, traced out, our blocks are A of expand and B of reduce up to a scale
    inputs, outputs = torch.einsum("oiol->il", blocks[0]), torch.einsum("oimi->om", blocks[1])
    close(inputs / inputs.trace(), a / a.trace())
    close(outputs / outputs.trace(), b / b.trace())
    positions = {0: 16, 2: 4}[layer]
    close(expand.state.sums[f"{layer}/A"].diagonal(dim1=-2, dim2=-1).sum() / len(case.inputs), a.trace())
    assert float(expand.state.sums[f"{layer}/count"]) == positions * len(case.inputs)
    close(reduce.state.sums[f"{layer}/B"].diagonal(dim1=-2, dim2=-1).sum(), b.trace())


def test_their_empirical_fisher_for_regression_is_doubled(case_without_bias: Any) -> None:
    """At unit noise; the factor of ½ belongs to the loss, and is applied once where its square is due."""
    from laplace.curvature import CurvlinopsEF

    case = case_without_bias
    ours = dense(fit_ours(case, noise=1.0, factor="empirical"))
    theirs = fit_theirs(case, backend=CurvlinopsEF, noise=1.0).H_facs.to_matrix()
    close(ours * (2 if case.likelihood == "gaussian" else 1), theirs)
