"""LaplaceModel in BoTorch: its posterior is the fit's, its conditioning is Bayesian linear regression on all data, its
gradients are differences, and BoTorch's acquisition functions and optimizer find what a grid finds.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from helpers import backward_rows, close, normal
from lapwing.errors import InvalidValue, NotPositiveDefinite, Unsupported

botorch = pytest.importorskip("botorch", reason="needs BoTorch: pip install 'lapwing[botorch]'")

from botorch.acquisition import analytic, qKnowledgeGradient, qUpperConfidenceBound  # noqa: E402
from botorch.acquisition.logei import qLogExpectedImprovement, qLogNoisyExpectedImprovement  # noqa: E402
from botorch.acquisition.objective import ScalarizedPosteriorTransform  # noqa: E402
from botorch.models.transforms import Normalize, Standardize  # noqa: E402
from botorch.optim import optimize_acqf  # noqa: E402
from botorch.sampling import SobolQMCNormalSampler  # noqa: E402

from lapwing.integrations.botorch import LaplaceModel  # noqa: E402

BOUNDS = torch.tensor([[-1.5, -1.0], [1.0, 1.5]], dtype=torch.float64)


def network(d: int, outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(d, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


def fitted(outputs: int = 2, d: int = 3, structure: Any = "full", likelihood: Any = None, n: int = 9) -> lw.Laplace:
    likelihood = likelihood or lw.likelihoods.Gaussian(0.3)
    return lw.laplace(network(d, outputs), (normal(n, d), normal(n, outputs, seed=1)), likelihood, structure=structure)


def together(la: lw.Laplace, X: Tensor, mean: str = "network") -> tuple[Tensor, Tensor]:
    """Means (b, q, c) and covariances (b, q·c, q·c) by la.predict, batch after batch."""
    made = [la.predict(x, joint=True, mean=mean) for x in X]
    size = made[0].f_mean.numel()
    return torch.stack([p.f_mean for p in made]), torch.stack([p.covariance.reshape(size, size) for p in made])


@pytest.mark.parametrize("structure", ["full", "kron", "diag", lw.curvature.MatrixFree(samples=8)], ids=str)
@pytest.mark.parametrize("outputs", [1, 2])
def test_posterior_is_the_joint_prediction(structure: Any, outputs: int) -> None:
    la, X = fitted(outputs, structure=structure), normal(5, 4, 3, seed=2)
    found = LaplaceModel(la).posterior(X)
    mean, cov = together(la, X)
    close(found.mean, mean)
    close(found.distribution.covariance_matrix, cov)
    close(found.variance, torch.stack([la.predict(x).f_var for x in X]))
    batched = LaplaceModel(la).posterior(X.reshape(5, 1, 4, 3).expand(5, 2, 4, 3))
    assert batched.mean.shape == (5, 2, 4, outputs)
    close(batched.mean[:, 1], mean)


@pytest.mark.parametrize("mean", ["tangent", "process"])
def test_posterior_is_about_the_mean_that_was_asked_for(mean: str) -> None:
    la, X = fitted(), normal(2, 4, 3, seed=2)
    la = la.recentered() if mean == "tangent" else la
    close(LaplaceModel(la, mean).posterior(X).mean, together(la, X, mean)[0], 1e-7)


def test_pieces_within_the_memory_budget_give_the_same() -> None:
    la, X = fitted(), normal(7, 4, 3, seed=2)
    small = lw.laplace(la.tangent.model, la.data, la.likelihood, structure="full", memory_budget=2**16)
    close(LaplaceModel(small).posterior(X).variance, LaplaceModel(la).posterior(X).variance)


def test_a_single_precision_network_keeps_covariances_positive() -> None:
    x, y = normal(9, 3).float(), normal(9, 1, seed=1).float()
    found = LaplaceModel(lw.laplace(network(3, 1).float(), (x, y), "gaussian")).posterior(normal(30, 3, seed=2))
    assert found.mean.dtype == torch.float64
    assert float(torch.linalg.eigvalsh(found.distribution.covariance_matrix).min()) > -1e-12


def test_observation_noise_adds_that_of_the_fit_or_what_is_given() -> None:
    R = torch.tensor([[0.5, 0.2], [0.2, 0.4]], dtype=torch.float64)
    la, X = fitted(likelihood=lw.likelihoods.CorrelatedGaussian(R)), normal(2, 4, 3, seed=2)
    model = LaplaceModel(la)
    latent = model.posterior(X).distribution.covariance_matrix
    noisy = model.posterior(X, observation_noise=True).distribution.covariance_matrix
    close(noisy - latent, torch.kron(torch.eye(4), R).double().expand(2, 8, 8))
    given = normal(2, 4, 2, seed=3).square()
    noisy = model.posterior(X, observation_noise=given).distribution.covariance_matrix
    close(noisy - latent, torch.diag_embed(given.flatten(1)))


def test_known_noise_has_to_be_given() -> None:
    y = lw.likelihoods.KnownNoise.pack(normal(9, 2), torch.ones(9, 2).double())
    model = LaplaceModel(lw.laplace(network(3, 2), (normal(9, 3), y), lw.likelihoods.KnownNoise()))
    assert model.num_outputs == 2
    assert model.posterior(normal(4, 3), observation_noise=torch.ones(4, 2)).mean.shape == (4, 2)
    with pytest.raises(Unsupported, match="noise at new inputs is not known"):
        model.posterior(normal(4, 3), observation_noise=True)


def test_subsets_of_outputs_are_slices() -> None:
    la, X = fitted(3, likelihood=lw.likelihoods.Gaussian([0.1, 0.2, 0.3])), normal(2, 4, 3, seed=2)
    model = LaplaceModel(la, outcome_transform=trained(Standardize(3), normal(9, 3)))
    whole = model.posterior(X, observation_noise=True)
    some = model.subset_output([2, 0])
    assert (model.num_outputs, some.num_outputs) == (3, 2)
    for found in (some.posterior(X, observation_noise=True), model.posterior(X, [2, 0], True)):
        close(found.mean, whole.mean[..., [2, 0]])
        cov = whole.distribution.covariance_matrix.reshape(2, 4, 3, 4, 3)[:, :, [2, 0]][..., [2, 0]]
        close(found.distribution.covariance_matrix, cov.reshape(2, 8, 8))
    close(model.posterior(X, observation_noise=True).mean, whole.mean)  # is as it was


# -- conditioning ----------------------------------------------------------------------------------------------------


def test_conditioning_is_the_regression_on_all_data() -> None:
    """At the mode of the tangent model: the posterior of a linear model on the features J, by dense algebra."""
    la = fitted(likelihood=lw.likelihoods.Gaussian([0.2, 0.4])).recentered()
    X, x, Y = normal(5, 3, seed=4), normal(4, 3, seed=5), normal(5, 2, seed=6)
    model, net = la.tangent.model, list(la.tangent.model.parameters())
    (inputs, targets), sigma = (normal(9, 3), normal(9, 2, seed=1)), torch.tensor([0.2, 0.4]).double()
    seen, y = torch.cat([inputs, X]), torch.cat([targets, Y])
    J, new = backward_rows(model(seen), net), backward_rows(model(x), net)  # (n, 2, p)
    theta = torch.cat([p.detach().flatten() for p in net])
    offset = y - (model(seen).detach() - J @ theta)  # what J v must explain
    weight = (1 / sigma**2).expand(len(seen), 2).reshape(-1, 1)
    rows = J.flatten(0, 1)
    M = rows.mT @ (weight * rows) + torch.eye(len(theta)).double()
    v = torch.linalg.solve(M, rows.mT @ (weight * offset.reshape(-1, 1))).squeeze()
    found = LaplaceModel(la, "tangent").condition_on_observations(X, Y).posterior(x)
    close(found.mean, (model(x) + new @ (v - theta)).detach(), 1e-7)
    flat = new.flatten(0, 1)
    close(found.distribution.covariance_matrix, flat @ torch.linalg.solve(M, flat.mT), 1e-7)


def test_conditioning_has_the_variance_of_a_fit_to_all_data() -> None:
    la, X, Y = fitted(1), normal(5, 3, seed=4), normal(5, 1, seed=6)
    found = LaplaceModel(la).condition_on_observations(X, Y).posterior(normal(4, 3, seed=5))
    close(found.variance, la.updated((X, Y)).predict(normal(4, 3, seed=5)).f_var)


def test_conditioning_twice_is_conditioning_on_both() -> None:
    model, X, Y, x = LaplaceModel(fitted()), normal(5, 3, seed=4), normal(5, 2, seed=6), normal(4, 3, seed=5)
    twice = model.condition_on_observations(X[:2], Y[:2]).condition_on_observations(X[2:], Y[2:])
    noise = torch.full_like(Y, 0.3**2)
    for other in (twice, model.condition_on_observations(X, Y, noise=noise)):
        found, expected = other.posterior(x), model.condition_on_observations(X, Y).posterior(x)
        close(found.mean, expected.mean)
        close(found.distribution.covariance_matrix, expected.distribution.covariance_matrix)


def test_fantasies_are_models_of_each_draw() -> None:
    model, X, x = LaplaceModel(fitted()), normal(3, 2, 3, seed=4), normal(3, 4, 3, seed=5)
    sampler = SobolQMCNormalSampler(torch.Size([6]), seed=0)
    fantasies = model.fantasize(X, sampler)
    assert fantasies.batch_shape == (6, 3)
    found, Y = fantasies.posterior(x), sampler(model.posterior(X, observation_noise=True))
    assert found.mean.shape == (6, 3, 4, 2)
    one = model.condition_on_observations(X[1], Y[5, 1]).posterior(x[1])
    close(found.mean[5, 1], one.mean)
    close(found.variance[5, 1], one.variance)


def test_conditioning_has_gradients_in_what_was_seen() -> None:
    model, x = LaplaceModel(fitted(1)), normal(4, 3, seed=5)
    X, Y = normal(5, 3, seed=4).requires_grad_(), normal(5, 1, seed=6).requires_grad_()

    def value(X: Tensor, Y: Tensor) -> Tensor:
        found = model.condition_on_observations(X, Y).posterior(x)
        return found.mean.sum() + found.variance.sum()

    assert torch.autograd.gradcheck(value, (X, Y))


# -- gradients and transforms ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["full", "kron"])
def test_gradients_in_points_are_differences(structure: str) -> None:
    model, X = LaplaceModel(fitted(structure=structure)), normal(2, 2, 3, seed=2).requires_grad_()

    def value(X: Tensor) -> Tensor:
        found = model.posterior(X)
        return found.mean.sum() + found.distribution.covariance_matrix.square().sum()

    assert torch.autograd.gradcheck(value, (X,))


def trained(transform: Any, value: Tensor) -> Any:
    transform.train()
    transform(value)
    return transform.eval()


def test_transforms_are_those_of_hand_made_data() -> None:
    raw, Y = 5 + 3 * normal(9, 3), 7 + 2 * normal(9, 2, seed=1)
    inputs, outcomes = trained(Normalize(3), raw), trained(Standardize(2), Y)
    la = lw.laplace(network(3, 2), (inputs(raw), outcomes(Y)[0]), lw.likelihoods.Gaussian(0.3))
    model, plain = LaplaceModel(la, input_transform=inputs, outcome_transform=outcomes), LaplaceModel(la)
    X, mean, std = 5 + 3 * normal(4, 3, seed=2), Y.mean(0), Y.std(0)
    scaled = (X - raw.amin(0)) / (raw.amax(0) - raw.amin(0))
    close(model.posterior(X).mean, mean + std * plain.posterior(scaled).mean)
    close(model.posterior(X, observation_noise=True).variance, std**2 * (plain.posterior(scaled).variance + 0.09))
    new, there = model.condition_on_observations(X, 7 + normal(4, 2)), (7 + normal(4, 2) - mean) / std
    expected = plain.condition_on_observations(scaled, there).posterior(scaled).mean
    close(new.posterior(X).mean, mean + std * expected)
    assert model.train().eval().posterior(X).mean.shape == (4, 2)


# -- acquisition -----------------------------------------------------------------------------------------------------


def surface() -> LaplaceModel:
    torch.manual_seed(0)
    x = normal(12, 2) / 2
    y = torch.sin(3 * x).sum(-1, keepdim=True)
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = torch.optim.Adam(net.parameters(), 0.05)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
    return LaplaceModel(lw.laplace(net, (x, y), lw.likelihoods.Gaussian(0.1)))


ACQUISITIONS: dict[str, Any] = {
    "LogExpectedImprovement": (lambda m: analytic.LogExpectedImprovement(m, 0.5), 1),
    "UpperConfidenceBound": (lambda m: analytic.UpperConfidenceBound(m, 2.0), 1),
    "qLogExpectedImprovement": (lambda m: qLogExpectedImprovement(m, 0.5), 2),
    "qLogNoisyExpectedImprovement": (lambda m: qLogNoisyExpectedImprovement(m, normal(12, 2) / 2), 2),
    "qUpperConfidenceBound": (lambda m: qUpperConfidenceBound(m, 2.0), 2),
    "qKnowledgeGradient": (lambda m: qKnowledgeGradient(m, 3), 1),
}


@pytest.mark.parametrize("name", [*ACQUISITIONS])
def test_the_optimizer_finds_what_a_search_finds(name: str) -> None:
    make, q = ACQUISITIONS[name]
    acquisition = make(surface())
    few = q if name != "qKnowledgeGradient" else 4
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # BoTorch tells of steps of its optimizer
        found, value = optimize_acqf(acquisition, BOUNDS, q, num_restarts=4, raw_samples=32)
    assert found.shape == (q, 2)
    span = BOUNDS[1] - BOUNDS[0]
    others = BOUNDS[0] + span * torch.rand(100, few, 2, dtype=torch.float64)
    with torch.no_grad():
        assert float(value) >= float(acquisition(others).max()) - 1e-6


def test_expected_improvement_is_the_integral() -> None:
    model, X = surface(), normal(5, 1, 2, seed=3) / 2
    pred = model.la.predict(X.squeeze(1))
    z = (pred.f_mean - 0.5) / pred.f_var.sqrt()
    each = pred.f_var.sqrt() * (torch.exp(-(z**2) / 2) / (2 * torch.pi) ** 0.5 + z * torch.special.ndtr(z))
    close(analytic.LogExpectedImprovement(model, 0.5)(X).exp(), each.squeeze(-1), 1e-6)


def test_several_outputs_are_optimized_by_weights() -> None:
    la, X = fitted(2), normal(5, 1, 3, seed=2)
    weights = torch.tensor([0.3, -1.0], dtype=torch.float64)
    bound = analytic.UpperConfidenceBound(LaplaceModel(la), 4.0, ScalarizedPosteriorTransform(weights))(X)
    pred = la.predict(X.squeeze(1))
    close(bound, pred.f_mean @ weights + 2 * torch.einsum("a,nab,b->n", weights, pred.covariance, weights).sqrt())


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_what_has_no_normal_posterior_is_refused() -> None:
    x, y = normal(9, 3), torch.randint(2, (9,))
    with pytest.raises(Unsupported, match="normal outcomes, and these are categorical"):
        LaplaceModel(lw.laplace(network(3, 2), (x, y), "categorical"))
    with pytest.raises(Unsupported, match=r"takes what lw\.laplace gives, got Sequential"):
        LaplaceModel(network(3, 2))  # type: ignore[arg-type]
    with pytest.raises(InvalidValue, match=r"mean must be one of .* 'tangent'"):
        LaplaceModel(fitted(), "tangant")
    places = nn.Sequential(nn.Linear(3, 4), nn.Unflatten(1, (2, 2))).double()
    la = lw.laplace(places, (normal(9, 3), normal(9, 2, 2)), "gaussian")
    with pytest.raises(Unsupported, match="BoTorch knows outputs"):
        LaplaceModel(la).posterior(normal(4, 3))


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lapwing.integrations.botorch.FantasizeMixin", object)
    with pytest.raises(Unsupported, match=r"needs BoTorch.*'lapwing\[botorch\]'"):
        LaplaceModel(fitted())


def test_conditioning_refuses_what_it_would_drop() -> None:
    model = LaplaceModel(fitted())
    with pytest.raises(Unsupported, match=r"got \['targets'\]"):
        model.condition_on_observations(normal(2, 3), normal(2, 2), targets=1)
    seen = model.condition_on_observations(normal(2, 3), normal(2, 2))
    with pytest.raises(Unsupported, match="take subset_output before"):
        seen.subset_output([0])
    twice = normal(1, 3).expand(3, 3)
    with pytest.raises(NotPositiveDefinite, match="give a larger noise="):
        model.condition_on_observations(twice, normal(3, 2), noise=torch.zeros(3, 2)).posterior(normal(2, 3))


def test_the_network_is_left_as_it_was() -> None:
    la = fitted()
    before = copy.deepcopy(la.tangent.model.state_dict())
    model = LaplaceModel(la).condition_on_observations(normal(2, 3), normal(2, 2))
    model.posterior(normal(2, 3).requires_grad_()).variance.sum().backward()
    assert all(torch.equal(value, before[name]) for name, value in la.tangent.model.state_dict().items())
    assert all(p.grad is None for p in la.tangent.model.parameters())
    assert [*model.parameters()] == []
