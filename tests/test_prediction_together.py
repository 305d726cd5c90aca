"""The density of several targets together: exact for Gaussian noise whatever the draws, one in all over all labels, and
near an integral by quadrature where one output serves all inputs."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal

import lapwing as lw
from lapwing.predictive.together import log_density

SEEDS = (0, 1, 2)


def gaussian(seed: int, n: int, c: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    mean = torch.randn(n, c, generator=g, dtype=torch.float64)
    root = scale * torch.randn(n * c, n * c, generator=g, dtype=torch.float64) / math.sqrt(n * c)
    return mean, root @ root.mT


@pytest.mark.parametrize("n", [1, 5, 40])
def test_it_is_exact_for_gaussian_noise(n: int) -> None:
    for seed in SEEDS:
        mean, cov = gaussian(seed, n, 2)
        likelihood = lw.likelihoods.Gaussian(0.3)
        y = mean + torch.randn(n, 2, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
        truth = MultivariateNormal(mean.reshape(-1), cov + 0.09 * torch.eye(2 * n, dtype=torch.float64)).log_prob(
            y.reshape(-1)
        )
        torch.testing.assert_close(log_density(likelihood.log_prob, mean, cov, y), truth, rtol=1e-9, atol=1e-8)


@pytest.mark.parametrize(("kind", "n", "c"), [("categorical", 3, 3), ("bernoulli", 2, 2)])
def test_over_all_labels_it_adds_up_to_one(kind: str, n: int, c: int) -> None:
    for seed in SEEDS[:2]:
        mean, cov = gaussian(seed, n, c, scale=2.0)
        if kind == "categorical":
            likelihood: Any = lw.likelihoods.Categorical()
            labels = [torch.tensor(bits) for bits in itertools.product(range(c), repeat=n)]
        else:
            likelihood = lw.likelihoods.Bernoulli()
            labels = [torch.tensor(bits).reshape(n, c) for bits in itertools.product((0, 1), repeat=n * c)]
        prediction = lw.Prediction(likelihood, lw.outputs.Normal(mean, cov.reshape(n, c, n, c), joint=True))
        total = sum(float(prediction.log_prob(y).exp()) for y in labels)
        assert abs(total - 1) < 0.02


@pytest.mark.parametrize("n", [10, 100])
@pytest.mark.parametrize("kind", ["poisson", "bernoulli", "studentt"])
def test_many_targets_of_one_output_are_an_integral_over_a_line(kind: str, n: int) -> None:
    """All inputs share one f: where draws of f itself would nearly all be far from what 100 targets say."""
    likelihood: Any = {
        "poisson": lw.likelihoods.Poisson(),
        "bernoulli": lw.likelihoods.Bernoulli(),
        "studentt": lw.likelihoods.StudentT(0.5, 4.0),
    }[kind]
    std, g = 3.0, torch.Generator().manual_seed(1)
    y = likelihood.sample(torch.full((n, 1), 1.7, dtype=torch.float64), g)
    mean, cov = torch.zeros(n, 1, dtype=torch.float64), torch.full((n, 1, n, 1), std**2, dtype=torch.float64)
    found = lw.Prediction(likelihood, lw.outputs.Normal(mean, cov, joint=True)).log_prob(y)
    f = torch.linspace(-8 * std, 8 * std, 40_001, dtype=torch.float64)
    each = sum(likelihood.log_prob(f.unsqueeze(-1), one.expand(len(f), 1)) for one in y)
    truth = torch.logsumexp(each - 0.5 * (f / std).square(), 0) + math.log(float(f[1] - f[0]))
    truth = truth - math.log(std) - 0.5 * math.log(2 * math.pi)
    assert found.shape == ()
    assert abs(float(found - truth)) < 0.02


def test_a_heteroscedastic_density_counts_only_what_can_be() -> None:
    """η₂ is uncertain enough that some of its mass is outside: a grid over both parameters, renormalized."""
    eta = torch.tensor([[0.4, -0.3]], dtype=torch.float64)
    cov = torch.tensor([[[[0.2, 0.02]], [[0.02, 0.03]]]], dtype=torch.float64).reshape(1, 2, 1, 2)
    likelihood = lw.likelihoods.HeteroscedasticGaussian()
    y = torch.tensor([[1.3]], dtype=torch.float64)
    found = lw.Prediction(likelihood, lw.outputs.Normal(eta, cov, joint=True), "monte_carlo").log_prob(y)
    a, b = torch.linspace(-4, 5, 1_501).double(), torch.linspace(-1.7, -1e-6, 1_501).double()
    grid = torch.stack(torch.meshgrid(a, b, indexing="ij"), -1).reshape(-1, 2)
    weight = MultivariateNormal(eta[0], cov.reshape(2, 2)).log_prob(grid).softmax(0)
    truth = (weight * likelihood.log_prob(grid, y.expand(len(grid), 1)).exp()).sum().log()
    assert abs(float(found - truth)) < 0.02


def test_draws_that_say_little_are_named() -> None:
    """A likelihood without curvature, of which one draw in a hundred has any."""

    def log_prob(f: Tensor, y: Tensor) -> Tensor:
        return torch.where(f.abs() < 0.03, 0.0, -math.inf).sum(-1)

    mean, cov = torch.zeros(1, 1, dtype=torch.float64), torch.full((1, 1), 9.0, dtype=torch.float64)
    with pytest.warns(lw.errors.LapwingWarning, match="rests on"):
        found = log_density(log_prob, mean, cov, torch.zeros(1))
    assert abs(float(found) - math.log(0.02 / math.sqrt(2 * math.pi))) < 1.0
