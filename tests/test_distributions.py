"""Predictions as GPyTorch's distributions: their moments and densities are the prediction's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lapwing as lw
from helpers import close, integers, normal
from lapwing.errors import InvalidValue, Unsupported
from lapwing.integrations.distributions import distribution

gpytorch = pytest.importorskip("gpytorch", reason="needs GPyTorch: pip install 'lapwing[gpytorch]'")


def fitted(outputs: int = 2, noise: object = 0.3) -> lw.Laplace:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double()
    likelihood = noise if isinstance(noise, lw.likelihoods.Likelihood) else lw.likelihoods.Gaussian(noise)
    return lw.laplace(model, (normal(9, 3), normal(9, outputs, seed=1)), likelihood, structure="full")


@pytest.mark.parametrize("outputs", [1, 2])
def test_a_joint_prediction_is_one_distribution(outputs: int) -> None:
    pred = fitted(outputs).predict(normal(5, 3, seed=2), joint=True)
    found = distribution(pred)
    assert isinstance(found, gpytorch.distributions.MultitaskMultivariateNormal) is (outputs > 1)
    close(found.mean.reshape(5, outputs), pred.f_mean)
    close(found.covariance_matrix, pred.covariance.reshape(5 * outputs, 5 * outputs))
    close(found.variance.reshape(5, outputs), pred.f_var)


@pytest.mark.parametrize("outputs", [1, 2])
def test_noise_gives_the_density_of_targets(outputs: int) -> None:
    pred, y = fitted(outputs).predict(normal(5, 3, seed=2), joint=True), normal(5, outputs, seed=3)
    close(distribution(pred, noise=True).log_prob(y if outputs > 1 else y.squeeze(-1)), pred.log_prob(y))


def test_inputs_by_themselves_are_a_batch() -> None:
    R = torch.tensor([[0.5, 0.2], [0.2, 0.4]], dtype=torch.float64)
    pred, y = fitted(2, lw.likelihoods.CorrelatedGaussian(R)).predict(normal(5, 3, seed=2)), normal(5, 2, seed=3)
    found = distribution(pred, noise=True)
    assert (found.batch_shape, found.event_shape) == ((5,), (1, 2))
    close(found.covariance_matrix, pred.covariance + R)
    close(found.log_prob(y.unsqueeze(1)), pred.log_prob(y))


def test_logits_of_classes_are_normal_and_their_labels_are_not() -> None:
    model = nn.Linear(3, 4).double()
    pred = lw.laplace(model, (normal(9, 3), integers(4, 9)), "categorical").predict(normal(5, 3, seed=2), joint=True)
    close(distribution(pred).mean, pred.f_mean)
    with pytest.raises(Unsupported, match="y of categorical is not f and Gaussian noise"):
        distribution(pred, noise=True)


def test_draws_follow_it() -> None:
    pred = fitted().predict(normal(5, 3, seed=2), joint=True)
    draws = distribution(pred).rsample(torch.Size([20_000]))
    z = (draws.mean(0) - pred.f_mean) / (pred.f_var / 20_000).sqrt()
    assert float(z.abs().max()) < 4.5
    gap = draws - draws.mean(0)
    cross = torch.einsum("sa,sb->ab", gap.flatten(1), gap.flatten(1)) / 20_000
    scale = pred.f_var.flatten().sqrt()
    assert float(((cross - distribution(pred).covariance_matrix) / (scale * scale[:, None])).abs().max()) < 0.05


def test_what_is_no_normal_distribution_is_refused() -> None:
    with pytest.raises(InvalidValue, match=r"takes what la\.predict\(x\) gives, got Tensor"):
        distribution(normal(3, 3))  # type: ignore[arg-type]
    la = fitted()
    mixture = lw.mixture([la, fitted(2, 0.5)]).predict(normal(3, 3))
    with pytest.raises(Unsupported, match=r"use pred\.f_sample"):
        distribution(mixture)
    places = nn.Sequential(nn.Linear(3, 4), nn.Unflatten(1, (2, 2))).double()
    pred = lw.laplace(places, (normal(9, 3), normal(9, 2, 2)), "gaussian").predict(normal(4, 3))
    with pytest.raises(Unsupported, match="outputs at several positions"):
        distribution(pred)
