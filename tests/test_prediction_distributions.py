"""The full predictive distribution of y: moments, distribution functions, quantiles and densities, against closed
forms, integrals on a fine grid by SciPy's distributions, and many draws of f."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.distributions import MultivariateNormal
from torch.testing import assert_close

import lapwing as lw
from helpers import close
from lapwing.likelihoods import Poisson, special
from lapwing.outputs import nodes
from lapwing.predictive import quantiles

SEEDS = (0, 1)


def gaussian_outputs(seed: int, n: int = 4, c: int = 2, scale: float = 0.6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    root = scale * torch.randn(n, c, c, generator=generator, dtype=torch.float64) / math.sqrt(c)
    return torch.randn(n, c, generator=generator, dtype=torch.float64), root @ root.mT + 0.01 * torch.eye(c)


@dataclass(frozen=True)
class Silent(Poisson):
    """Without its distribution function."""

    def cdf(self, f: Tensor, y: Tensor) -> Tensor | None:
        return None


@dataclass(frozen=True)
class Logistic(Poisson):
    """y = f + logistic noise: real, not Gaussian."""

    counts: ClassVar[bool] = False

    def validate(self, f: Tensor, y: Tensor) -> None:
        pass

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return (nn.functional.logsigmoid(y - f) + nn.functional.logsigmoid(f - y)).sum(-1)

    def mean(self, f: Tensor) -> Tensor:
        return f

    def variance(self, f: Tensor) -> Tensor:
        return torch.full_like(f, math.pi**2 / 3)

    def cdf(self, f: Tensor, y: Tensor) -> Tensor | None:
        return torch.sigmoid(y - f)


def on_a_grid(mean: float, var: float, of_f: Callable[[Tensor], Any]) -> Any:
    """E of_f(f), f ~ N(mean, var), by a fine grid of its own."""
    z = torch.linspace(-9, 9, 4_001, dtype=torch.float64)
    weight = torch.exp(-0.5 * z.square())
    return (torch.as_tensor(of_f(mean + math.sqrt(var) * z)) * weight / weight.sum()).sum(-1)


# -- nodes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("std", [0.01, 1.0, 10.0])
def test_the_line_has_the_moments_of_the_normal(std: float) -> None:
    mean = torch.tensor([[0.3], [-2.0]], dtype=torch.float64)
    found = nodes.line(mean, torch.full_like(mean, std**2))
    for k, moment in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0), (6, 15.0)):
        close(found.average(((found.f - mean) / std) ** k), torch.full_like(mean, moment), 1e-10)
    close(found.average(torch.ones_like(found.f)), torch.ones_like(mean), 1e-12)


def test_moments_of_counts_are_those_of_the_log_normal_rate() -> None:
    for seed in SEEDS:
        mean, cov = gaussian_outputs(seed)
        var = cov.diagonal(dim1=-2, dim2=-1)
        prediction = lw.Prediction(Poisson(), lw.outputs.Normal(mean, cov))
        rate = torch.exp(mean + 0.5 * var)
        close(prediction.mean, rate)
        close(prediction.aleatoric, rate)
        close(prediction.epistemic, torch.expm1(var) * rate.square())


# -- quantiles -------------------------------------------------------------------------------------------------------


def poisson_below(y: float, mean: Tensor, var: Tensor) -> float:
    return float(on_a_grid(float(mean), float(var), lambda f: stats.poisson.cdf(y, f.exp().numpy())))


@pytest.mark.parametrize("q", [0.001, 0.025, 0.5, 0.9, 0.999])
def test_the_quantile_of_counts_is_the_least_integer_with_enough_below(q: float) -> None:
    for seed in SEEDS:
        mean, cov = gaussian_outputs(seed, scale=1.0)
        found = lw.Prediction(Poisson(), lw.outputs.Normal(mean + 1.0, cov)).quantile(q)
        assert torch.equal(found, found.round())
        for i, j in [(i, j) for i in range(4) for j in range(2)]:
            y, f = float(found[i, j]), (mean[i, j] + 1.0, cov[i, j, j])
            assert poisson_below(y, *f) >= q - 1e-9
            assert y == 0 or poisson_below(y - 1, *f) < q + 1e-9


@pytest.mark.parametrize("nu", [0.3, 1.0, 1.7, 4.0, 12.5, 60.0, 100.0, 101.0, 400.0])
def test_student_noise_has_scipys_distribution_function(nu: float) -> None:
    """In both tails to a relative 1e-11, down to 1e-300; ν past 100 goes another way."""
    z = torch.cat([torch.linspace(-9, 9, 181), torch.tensor([-1e6, -300.0, 40.0, 1e12])]).double()
    likelihood = lw.likelihoods.StudentT(torch.tensor([0.7, 2.0]), torch.tensor([nu, 3.0], dtype=torch.float64))
    f = torch.randn(2, dtype=torch.float64)
    found = likelihood.cdf(f, f + z[:, None] * likelihood.scale)
    close(found, torch.as_tensor(np.stack([stats.t.cdf(z, nu), stats.t.cdf(z, 3.0)], -1)), 1e-11)
    low = special.student_tail(z, torch.tensor(nu, dtype=torch.float64))
    assert_close(low, torch.as_tensor(stats.t.sf(z.abs(), nu)), rtol=1e-11, atol=1e-300)


@pytest.mark.parametrize("likelihood", [Poisson(), lw.likelihoods.NegativeBinomial(torch.tensor([0.8, 3.0]))])
def test_probabilities_of_counts_add_up_to_the_distribution_function(likelihood: Any) -> None:
    mean, cov = gaussian_outputs(1)
    prediction, below = lw.Prediction(likelihood, lw.outputs.Normal(mean, cov)), torch.zeros_like(mean)
    for k in range(12):
        y = torch.full_like(mean, k)
        below = below + prediction.pmf(y)
        close(below, prediction.cdf(y), 1e-10)
        close(lw.likelihoods.Likelihood.pmf(likelihood, mean, y), likelihood.pmf(mean, y), 1e-10)
    with pytest.raises(lw.errors.Unsupported, match="for counts"):
        lw.Prediction(lw.likelihoods.StudentT(), lw.outputs.Normal(mean, cov)).pmf(mean)
    with pytest.raises(lw.errors.Unsupported, match="a method cdf"):
        lw.likelihoods.Likelihood.pmf(lw.likelihoods.Categorical(), mean, mean)


def test_a_quantile_takes_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """And inputs are the same in pieces as in one."""
    counted, cdf = [], lw.likelihoods.StudentT.cdf
    monkeypatch.setattr(lw.likelihoods.StudentT, "cdf", lambda *args: counted.append(1) or cdf(*args))
    mean, cov = gaussian_outputs(0, n=6)
    prediction = lw.Prediction(lw.likelihoods.StudentT(0.3, 2.5), lw.outputs.Normal(mean, cov))
    for q in (0.001, 0.3, 0.975):
        monkeypatch.setattr(quantiles, "PIECE", 10**9)
        counted.clear()
        found = prediction.quantile(q)
        assert len(counted) < 30
        close(prediction.cdf(found), torch.full_like(found, q), 1e-12)
        monkeypatch.setattr(quantiles, "PIECE", 1)
        assert_close(prediction.quantile(q), found, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("q", [0.01, 0.5, 0.975])
def test_the_quantile_of_a_mixture_inverts_its_distribution_function(q: float) -> None:
    for seed in SEEDS:
        mean, cov = gaussian_outputs(seed, scale=2.0)
        prediction = lw.Prediction(Logistic(), lw.outputs.Normal(mean, cov))
        found = prediction.quantile(q)
        close(prediction.cdf(found), torch.full_like(found, q), 1e-10)
        for i, j in [(i, j) for i in range(4) for j in range(2)]:
            y = float(found[i, j])
            there = on_a_grid(float(mean[i, j]), float(cov[i, j, j]), lambda f, y=y: torch.sigmoid(y - f))
            assert abs(float(there) - q) < 1e-8


def test_the_gaussian_by_nodes_is_the_gaussian_in_closed_form() -> None:
    """Through the mixture, as if it were not known to be Gaussian."""
    mean, cov = gaussian_outputs(0)
    likelihood = lw.likelihoods.Gaussian(0.3)
    exact = lw.Prediction(likelihood, lw.outputs.Normal(mean, cov))
    line = nodes.line(mean, cov.diagonal(dim1=-2, dim2=-1))
    for q in (0.01, 0.4, 0.99):
        close(quantiles.quantile(likelihood, line, q), exact.quantile(q))
        close(exact.cdf(exact.quantile(q)), torch.full_like(mean, q))


def test_quantiles_of_gaussian_draws_are_those_of_their_mixture() -> None:
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(3, 5, 2, generator=generator, dtype=torch.float64)
    prediction = lw.Prediction(lw.likelihoods.Gaussian(0.2), lw.outputs.Draws(f, f.mean(0)))
    found = prediction.quantile(0.3)
    close(torch.special.ndtr((found - f) / 0.2).mean(0), torch.full_like(found, 0.3), 1e-10)


def test_without_a_distribution_function_quantiles_are_those_of_draws() -> None:
    mean, cov = gaussian_outputs(0)
    known, silent = (lw.Prediction(likelihood, lw.outputs.Normal(mean, cov)) for likelihood in (Poisson(), Silent()))
    for q in (0.1, 0.5, 0.9):
        assert (known.quantile(q) - silent.quantile(q)).abs().max() <= 1
    with pytest.raises(lw.errors.Unsupported, match="cdf"):
        silent.cdf(mean)


@pytest.mark.parametrize("likelihood", [Poisson(), Logistic(), lw.likelihoods.Gaussian(0.5)], ids=lambda l: l.name)
def test_the_interval_covers_what_it_says(likelihood: Any) -> None:
    mean, cov = gaussian_outputs(3, scale=1.5)
    prediction = lw.Prediction(likelihood, lw.outputs.Normal(mean, cov))
    low, high = prediction.interval(0.8)
    close(low, prediction.quantile(0.1), 1e-12)
    close(high, prediction.quantile(0.9), 1e-12)
    if likelihood.name != "logistic":  # it has no sampler here
        y = prediction.sample(40_000, torch.Generator().manual_seed(1))
        covered, error = ((low <= y) & (y <= high)).double().mean(0), 5 * math.sqrt(0.8 * 0.2 / 40_000)
        assert (covered > 0.8 - error).all()  # more for counts, which cannot split an integer
        assert likelihood.counts or (covered < 0.8 + error).all()


def test_nonsense_is_refused() -> None:
    mean, cov = gaussian_outputs(0)
    prediction = lw.Prediction(Poisson(), lw.outputs.Normal(mean, cov))
    for level in (0.0, 1.0, math.nan):
        with pytest.raises(lw.errors.InvalidValue, match="level"):
            prediction.interval(level)
    with pytest.raises(lw.errors.InvalidValue, match="one y for each target"):
        prediction.cdf(mean[0])
    with pytest.raises(lw.errors.Unsupported, match="classes"):
        lw.Prediction(lw.likelihoods.Categorical(), lw.outputs.Normal(mean, cov)).cdf(mean)
    with pytest.raises(lw.errors.Unsupported, match="it has 'auto' and 'monte_carlo'"):
        lw.Prediction(Poisson(), lw.outputs.Normal(mean, cov), "probit")


def test_a_narrow_likelihood_under_a_wide_posterior_is_resolved() -> None:
    """Logistic noise a hundredth as wide as f is uncertain: a coarse grid of f would be a staircase."""
    mean, cov = torch.zeros(1, 1, dtype=torch.float64), torch.full((1, 1, 1), 200.0**2, dtype=torch.float64)
    prediction = lw.Prediction(Logistic(), lw.outputs.Normal(mean, cov))
    for y in (-300.0, 3.3, 150.0):
        at = torch.full((1, 1), y, dtype=torch.float64)
        z = torch.linspace(-9, 9, 400_001, dtype=torch.float64)
        weight = torch.exp(-0.5 * z.square()) / torch.exp(-0.5 * z.square()).sum()
        close(prediction.cdf(at).squeeze(), (weight * torch.sigmoid(y - 200 * z)).sum(), 1e-6)
        density = torch.sigmoid(y - 200 * z) * torch.sigmoid(200 * z - y)
        close(prediction.log_prob(at).squeeze(), (weight * density).sum().log(), 1e-6)


# -- densities -------------------------------------------------------------------------------------------------------


def test_log_prob_of_one_count_is_its_integral() -> None:
    mean, cov = gaussian_outputs(1, c=1)
    y = torch.tensor([[0.0], [1.0], [7.0], [2.0]], dtype=torch.float64)
    found = lw.Prediction(Poisson(), lw.outputs.Normal(mean, cov)).log_prob(y)
    for i in range(4):
        y_i = float(y[i])
        truth = on_a_grid(float(mean[i]), float(cov[i]), lambda f, y_i=y_i: stats.poisson.pmf(y_i, f.exp().numpy()))
        assert abs(float(found[i]) - math.log(float(truth))) < 1e-8


def test_binary_probabilities_of_one_output_are_their_integrals() -> None:
    mean, cov = gaussian_outputs(1, c=1, scale=3.0)
    prediction = lw.Prediction(lw.likelihoods.Bernoulli(), lw.outputs.Normal(mean, cov), "monte_carlo")
    for i in range(4):
        truth = on_a_grid(float(mean[i]), float(cov[i]), torch.sigmoid)
        assert abs(float(prediction.mean[i]) - float(truth)) < 1e-8
        assert abs(float(prediction.log_prob(torch.ones(4, 1))[i]) - math.log(float(truth))) < 1e-8


# -- likelihoods of the package ----------------------------------------------------------------------------------------


def by_scipy(likelihood: Any, f: Tensor) -> Any:
    f = f.numpy()
    if likelihood.name == "studentt":
        return stats.t(float(likelihood.df), loc=f, scale=float(likelihood.scale))
    if likelihood.name == "poisson":
        return stats.poisson(np.exp(f))
    r = float(likelihood.dispersion)
    return stats.nbinom(r, r / (r + np.exp(f)))


NAMED = [
    lw.likelihoods.Poisson(),
    lw.likelihoods.NegativeBinomial(2.5),
    lw.likelihoods.StudentT(0.3, 5.0),
    lw.likelihoods.StudentT(0.3, 1.0),
]


@pytest.mark.parametrize("likelihood", NAMED, ids=lambda l: f"{l.name} {float(getattr(l, 'df', 0)):g}")
def test_counts_and_heavy_tails_against_scipy(likelihood: Any) -> None:
    mean, cov = gaussian_outputs(2, n=2, scale=0.8)
    prediction = lw.Prediction(likelihood, lw.outputs.Normal(mean, cov))
    quantiles = {q: prediction.quantile(q) for q in (0.05, 0.5, 0.99)}
    for i, j in [(i, j) for i in range(2) for j in range(2)]:
        f = float(mean[i, j]), float(cov[i, j, j])

        def average(of_y: Callable[[Any], Any], f: tuple[float, float] = f) -> float:
            return float(on_a_grid(*f, lambda at: of_y(by_scipy(likelihood, at))))

        for q, found in quantiles.items():
            y = float(found[i, j])
            if likelihood.counts:
                assert average(lambda p, y=y: p.cdf(y)) >= q - 1e-9
                assert y == 0 or average(lambda p, y=y: p.cdf(y - 1)) < q + 1e-9
            else:
                assert abs(average(lambda p, y=y: p.cdf(y)) - q) < 1e-8
        if float(getattr(likelihood, "df", 3.0)) > 2:
            assert abs(float(prediction.aleatoric[i, j]) / average(lambda p: p.var()) - 1) < 1e-8
            assert abs(float(prediction.mean[i, j]) - average(lambda p: p.mean())) < 1e-8
    if float(getattr(likelihood, "df", 3.0)) <= 1:
        with pytest.raises(lw.errors.Unsupported, match="mean"):
            prediction.mean  # noqa: B018


def test_student_noise_is_not_taken_for_gaussian() -> None:
    mean, cov = gaussian_outputs(2, n=2, c=1)
    likelihood = lw.likelihoods.StudentT(0.3, 5.0)
    y = mean + 4.0  # far out
    found = lw.Prediction(likelihood, lw.outputs.Normal(mean, cov)).log_prob(y)
    for i in range(2):
        truth = on_a_grid(
            float(mean[i]), float(cov[i]), lambda f, i=i: stats.t.pdf(float(y[i]), 5.0, loc=f.numpy(), scale=0.3)
        )
        assert abs(float(found[i]) - math.log(float(truth))) < 1e-8


def test_ordered_classes_are_integrals_of_their_probabilities() -> None:
    mean, cov = gaussian_outputs(4, c=1, scale=2.0)
    likelihood = lw.likelihoods.Ordinal((-1.0, 0.2, 1.5))
    prediction = lw.Prediction(likelihood, lw.outputs.Normal(mean, cov))
    cuts = torch.tensor([-1.0, 0.2, 1.5], dtype=torch.float64)
    for i in range(4):
        below = [float(on_a_grid(float(mean[i]), float(cov[i]), lambda f, b=b: torch.sigmoid(b - f))) for b in cuts]
        p = torch.tensor([*below, 1.0], dtype=torch.float64).diff(prepend=torch.zeros(1, dtype=torch.float64))
        close(prediction.probs[i], p)
        close(prediction.total[i], p * (1 - p))
        close(prediction.entropy[i], -(p * p.log()).sum())
    every = torch.stack([prediction.log_prob(torch.full((4,), k)) for k in range(4)], -1)
    close(every.exp(), prediction.probs)
    low, high = prediction.interval(0.5)
    assert low.shape == (4, 4)
    assert (low <= high).all()


def test_preferences_have_the_links_of_classes() -> None:
    mean, cov = gaussian_outputs(5)
    for link in ("auto", "mean_field", "bridge", "monte_carlo"):
        close(
            lw.Prediction(lw.likelihoods.BradleyTerry(), lw.outputs.Normal(mean, cov), link).probs,
            lw.Prediction(lw.likelihoods.Categorical(), lw.outputs.Normal(mean, cov), link).probs,
        )


def test_a_log_density_alone_is_enough_for_densities() -> None:
    @dataclass(frozen=True)
    class Sech(lw.likelihoods.Custom):
        """A density of y about f, and nothing else."""

        def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
            return (-torch.log(torch.cosh(y - f)) - math.log(math.pi)).sum(-1)

    mean, cov = gaussian_outputs(2, n=2, c=1)
    prediction = lw.Prediction(Sech(), lw.outputs.Normal(mean, cov))
    y = mean + 0.4
    for i in range(2):
        here = float(y[i])
        truth = on_a_grid(float(mean[i]), float(cov[i]), lambda f, here=here: 1 / torch.cosh(here - f) / math.pi)
        assert abs(float(prediction.log_prob(y)[i]) - math.log(float(truth))) < 1e-8
    assert "sech" in repr(prediction)
    for what in ("mean", "std"):
        with pytest.raises(lw.errors.Unsupported, match="does not say its mean"):
            getattr(prediction, what)


# -- the delta method ------------------------------------------------------------------------------------------------


def natural_outputs(seed: int, n: int = 3, t: int = 2, scale: float = 0.05) -> tuple[Tensor, Tensor]:
    """η (n, 2t) with η₂ well below zero, and a covariance."""
    generator = torch.Generator().manual_seed(seed)
    eta1 = torch.randn(n, t, generator=generator, dtype=torch.float64)
    eta2 = -0.5 - torch.rand(n, t, generator=generator, dtype=torch.float64)
    root = scale * torch.randn(n, 2 * t, 2 * t, generator=generator, dtype=torch.float64)
    return torch.cat([eta1, eta2], -1), root @ root.mT


def delta_by_hand(eta: Tensor, cov: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, D V Dᵀ and noise of one input, with ∂μ/∂η₁ = −1/(2η₂) and ∂μ/∂η₂ = η₁/(2η₂²)."""
    t = len(eta) // 2
    eta1, eta2 = eta[:t], eta[t:]
    D = torch.cat([torch.diag(-0.5 / eta2), torch.diag(eta1 / (2 * eta2.square()))], 1)
    return -eta1 / (2 * eta2), D @ cov @ D.mT, torch.diag(-0.5 / eta2)


def test_heteroscedastic_moments_and_density_are_those_of_the_delta_method() -> None:
    for seed in SEEDS:
        eta, cov = natural_outputs(seed)
        prediction = lw.Prediction(lw.likelihoods.HeteroscedasticGaussian(), lw.outputs.Normal(eta, cov))
        y = torch.randn(3, 2, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
        for i in range(3):
            mean, spread, noise = delta_by_hand(eta[i], cov[i])
            close(prediction.mean[i], mean)
            close(prediction.epistemic[i], spread.diagonal())
            close(prediction.aleatoric[i], noise.diagonal())
            close(prediction.log_prob(y)[i], MultivariateNormal(mean, spread + noise).log_prob(y[i]))
        close(prediction.cdf(prediction.quantile(0.2)), torch.full_like(y, 0.2))


def test_heteroscedastic_joint_density_is_that_of_all_targets_together() -> None:
    eta, _ = natural_outputs(0)
    generator = torch.Generator().manual_seed(4)
    root = 0.05 * torch.randn(12, 12, generator=generator, dtype=torch.float64)
    cov = (root @ root.mT).reshape(3, 4, 3, 4)
    prediction = lw.Prediction(lw.likelihoods.HeteroscedasticGaussian(), lw.outputs.Normal(eta, cov, joint=True))
    D = torch.block_diag(
        *(torch.cat([torch.diag(-0.5 / e[2:]), torch.diag(e[:2] / (2 * e[2:].square()))], 1) for e in eta)
    )
    total = D @ cov.reshape(12, 12) @ D.mT + torch.diag((-0.5 / eta[:, 2:]).reshape(-1))
    mean, y = (-eta[:, :2] / (2 * eta[:, 2:])).reshape(-1), torch.randn(3, 2, generator=generator, dtype=torch.float64)
    close(prediction.log_prob(y), MultivariateNormal(mean, total).log_prob(y.reshape(-1)))
    each = prediction.marginal
    for i in range(3):
        close(each[i], cov[i, :, i, :])


def test_heteroscedastic_draws_agree_with_the_delta_method_where_the_posterior_is_narrow() -> None:
    eta, cov = natural_outputs(0, scale=0.01)
    delta, drawn = (
        lw.Prediction(lw.likelihoods.HeteroscedasticGaussian(), lw.outputs.Normal(eta, cov), link)
        for link in ("auto", "monte_carlo")
    )
    assert_close(drawn.mean, delta.mean, rtol=1e-2, atol=1e-3)
    assert_close(drawn.epistemic, delta.epistemic, rtol=0.03, atol=0)
    assert_close(drawn.aleatoric, delta.aleatoric, rtol=1e-2, atol=0)
    y = delta.mean + 0.3
    assert_close(drawn.log_prob(y), delta.log_prob(y), rtol=0, atol=1e-2)
    assert_close(drawn.quantile(0.9), delta.quantile(0.9), rtol=0, atol=1e-2)


@pytest.mark.parametrize("link", ["auto", "monte_carlo"])
def test_heteroscedastic_samples_have_the_moments_of_their_link(link: str) -> None:
    eta, cov = natural_outputs(0, scale=0.03)
    prediction, s = lw.Prediction(lw.likelihoods.HeteroscedasticGaussian(), lw.outputs.Normal(eta, cov), link), 40_000
    y = prediction.sample(s, torch.Generator().manual_seed(2))
    assert y.shape == (s, 3, 2)
    assert ((y.mean(0) - prediction.mean).abs() < 5 * (prediction.total / s).sqrt() + 2e-3).all()
    assert ((y.var(0) / prediction.total - 1).abs() < 5 * math.sqrt(2 / s) + 5e-3).all()


def test_draws_outside_of_a_likelihood_are_left_out_and_said() -> None:
    eta = torch.tensor([[0.5, -0.1]], dtype=torch.float64)
    cov = torch.tensor([[[0.01, 0.0], [0.0, 0.0025]]], dtype=torch.float64)  # η₂ = −0.1 ± 0.05: 2.3 % are positive
    prediction = lw.Prediction(lw.likelihoods.HeteroscedasticGaussian(), lw.outputs.Normal(eta, cov), "monte_carlo")
    with pytest.warns(lw.errors.LapwingWarning, match=r"up to 2\.\d % of the draws"):
        assert (prediction.aleatoric > 0).all()
    assert torch.isfinite(prediction.sample(2_000)).all()
    y = torch.ones(1, 1, dtype=torch.float64)
    few = torch.tensor([[[0.01, 0.0], [0.0, 0.01]]], dtype=torch.float64)
    sixth = replace(prediction, outputs=lw.outputs.Normal(prediction.f_mean, few))  # of which a sixth are positive
    a, b = torch.linspace(-0.2, 1.2, 301).double(), torch.linspace(-0.9, -1e-9, 3_001).double()
    grid = torch.stack(torch.meshgrid(a, b, indexing="ij"), -1).reshape(-1, 2)
    weight = (-50 * (grid - eta).square().sum(-1)).softmax(0)  # over what is left
    truth = (weight * prediction.likelihood.log_prob(grid, y.expand(len(grid), 1)).exp()).sum().log()
    with pytest.warns(lw.errors.LapwingWarning, match="up to 16 % of the draws"):
        assert abs(float(sixth.log_prob(y)) - float(truth)) < 0.03
    certain = lw.outputs.Normal(torch.tensor([[0.5, 0.1]], dtype=torch.float64), 1e-12 * cov)
    wide = replace(prediction, outputs=certain)
    with pytest.raises(lw.errors.InvalidValue, match="no draw"):
        wide.mean  # noqa: B018
    with pytest.raises(lw.errors.InvalidValue, match="gave none"):
        wide.sample(2)


@pytest.mark.parametrize("joint", [False, True])
def test_the_density_of_targets_with_their_noise_is_gaussian(joint: bool) -> None:
    g = torch.Generator().manual_seed(3)
    mean, y = (torch.randn(3, 2, generator=g, dtype=torch.float64) for _ in range(2))
    noise = 0.1 + torch.rand(3, 2, generator=g, dtype=torch.float64)
    root = torch.randn(6, 6, generator=g, dtype=torch.float64)
    whole = root @ root.mT
    cov = whole.reshape(3, 2, 3, 2)
    each = torch.stack([cov[i, :, i] for i in range(3)])
    likelihood = lw.likelihoods.KnownNoise()
    found = lw.Prediction(likelihood, lw.outputs.Normal(mean, cov if joint else each, joint=joint)).log_prob(
        likelihood.pack(y, noise)
    )
    if joint:
        total = whole + noise.reshape(-1).square().diag()
        close(found, MultivariateNormal(mean.reshape(-1), total).log_prob(y.reshape(-1)))
    else:
        close(found, MultivariateNormal(mean, each + torch.diag_embed(noise.square())).log_prob(y))


# -- slices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("joint", [False, True])
def test_a_slice_of_a_prediction_is_the_prediction_at_those_inputs(joint: bool) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), torch.randn(9, 3).double()
    la = lw.laplace(model, (x, torch.randn(9, 2).double()), "gaussian")
    part = la.predict(x, joint=joint)[2:5]
    expected = la.predict(x[2:5], joint=joint)
    close(part.covariance, expected.covariance)
    close(part.mean, expected.mean)
    drawn = la.predict(x, via="network", joint=joint)
    assert drawn[2:5].outputs.values.shape == (64, 3, 2)
    close(drawn[2:5].f_var, drawn.f_var[2:5])
    with pytest.raises(lw.errors.InvalidValue, match="slice"):
        part[0]


def test_means_that_the_likelihood_cannot_take_are_left_to_draws() -> None:
    """A tangent model can have η₂ ≥ 0 where the network has not."""
    likelihood = lw.likelihoods.HeteroscedasticGaussian()
    mean = torch.tensor([[0.2, -0.6], [0.3, 0.1]], dtype=torch.float64)
    cov = torch.diag_embed(torch.tensor([[0.01, 0.01], [0.04, 0.09]], dtype=torch.float64))
    y = torch.tensor([[0.4], [-0.5]], dtype=torch.float64)
    with pytest.raises(lw.errors.InvalidValue, match=r"1 of 2 mean outputs are outside .* use mean='network'"):
        lw.Prediction(likelihood, lw.outputs.Normal(mean, cov))
    with pytest.warns(lw.errors.LapwingWarning, match="are left out"):
        found = lw.Prediction(likelihood, lw.outputs.Normal(mean, cov), "monte_carlo").log_prob(y)
    draws = MultivariateNormal(mean, cov).sample((200_000,))
    inside = draws[:, 1, 1] < 0
    p = likelihood.log_prob(draws[inside], y.expand(int(inside.sum()), 2, 1))[:, 1].exp()
    assert_close(found[1].exp(), p.mean(), rtol=0.02, atol=0.0)
