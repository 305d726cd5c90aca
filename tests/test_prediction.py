"""Predictions: the law of total variance, links against Monte-Carlo truth, densities against torch.distributions.

Truth is brute force: many independent draws of f ~ N(μ, V) pushed through softmax or sigmoid; its standard error is
at most ½/√100,000 = 0.0016, so comparisons with it use six of those, 0.01, besides what a link may be off by.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal, Normal

import lapwing as lw
from helpers import close, draw

SEEDS = (0, 1, 2)
LIKELIHOODS = ("gaussian", "per output", "categorical", "bernoulli")
CLASS_LIKELIHOODS = {"categorical": lw.likelihoods.Categorical(), "bernoulli": lw.likelihoods.Bernoulli()}
DRAWS = 100_000
ERROR = 6 * 0.5 / math.sqrt(DRAWS)


def fitted(kind: str, seed: int = 0, n: int = 9, structure: object = "full", prior: float = 1.0) -> lw.Laplace:
    """A 3 -> 4 -> 3 network with a posterior."""
    torch.manual_seed(seed)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double(), draw(n, 3)
    if kind == "categorical":
        return lw.laplace(model, (x, torch.randint(3, (n,))), "categorical", structure=structure, prior=prior)
    if kind == "bernoulli":
        return lw.laplace(model, (x, torch.randint(2, (n, 3))), "bernoulli", structure=structure, prior=prior)
    noise = torch.tensor([0.3, 0.5, 0.9]) if kind == "per output" else torch.tensor(0.4)
    likelihood = lw.likelihoods.Gaussian(noise.double())
    return lw.laplace(model, (x, draw(n, 3)), likelihood, structure=structure, prior=prior)


def targets_for(kind: str, n: int) -> Tensor:
    if kind == "categorical":
        return torch.randint(3, (n,))
    return torch.randint(2, (n, 3)) if kind == "bernoulli" else draw(n, 3)


def gaussian_outputs(seed: int, n: int = 4, c: int = 3, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """μ (n, c) and V (n, c, c) of some size, the outputs of an input correlated."""
    torch.manual_seed(seed)
    root = scale * draw(n, c, c) / math.sqrt(c)
    return 1.5 * draw(n, c), root @ root.mT


def brute_force(mean: Tensor, cov: Tensor, draws: int = DRAWS) -> Tensor:
    """Independent draws of f, (s, n, c)."""
    generator = torch.Generator().manual_seed(1234)
    noise = torch.randn(draws, *mean.shape, generator=generator, dtype=torch.float64)
    return mean + torch.einsum("nab,snb->sna", torch.linalg.cholesky(cov), noise)


def probabilities(kind: str, f: Tensor) -> Tensor:
    return f.softmax(-1) if kind == "categorical" else f.sigmoid()


# -- moments -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LIKELIHOODS)
@pytest.mark.parametrize("via", ["tangent", "network"])
@pytest.mark.parametrize("joint", [False, True])
def test_the_law_of_total_variance(kind: str, via: str, joint: bool) -> None:
    for seed in SEEDS:
        la, new = fitted(kind, seed), draw(4, 3)
        prediction = la.predict(new, via=via, joint=joint)
        close(prediction.total, prediction.epistemic + prediction.aleatoric, 1e-12)
        close(prediction.std, prediction.total.sqrt(), 1e-12)
        assert (prediction.epistemic > 0).all()
        if kind in CLASS_LIKELIHOODS:  # a binary variable: its variance is that of its mean
            close(prediction.total, prediction.mean * (1 - prediction.mean), 1e-12)
        else:
            close(prediction.aleatoric, la.likelihood.noise.square().expand(4, 3), 1e-12)
            close(prediction.mean, prediction.f_mean, 1e-12)
        if kind not in CLASS_LIKELIHOODS and via == "tangent":
            close(prediction.epistemic, prediction.f_var, 1e-12)


@pytest.mark.parametrize("kind", CLASS_LIKELIHOODS)
@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
def test_variances_and_entropies_are_those_of_the_draws_of_f(kind: str, scale: float) -> None:
    mean, cov = gaussian_outputs(3, scale=scale)
    prediction = lw.Prediction(CLASS_LIKELIHOODS[kind], lw.outputs.Normal(mean, cov))
    p = probabilities(kind, brute_force(mean, cov))
    torch.testing.assert_close(prediction.epistemic, p.var(0), rtol=0.0, atol=ERROR)
    torch.testing.assert_close(prediction.aleatoric, (p * (1 - p)).mean(0), rtol=0.0, atol=ERROR)

    def entropy(q: Tensor) -> Tensor:
        every = q if kind == "categorical" else torch.stack([q, 1 - q], -1)
        return -torch.xlogy(every, every).sum(-1)

    torch.testing.assert_close(prediction.entropy, entropy(p.mean(0)), rtol=0.0, atol=3 * ERROR)
    torch.testing.assert_close(prediction.expected_entropy, entropy(p).mean(0), rtol=0.0, atol=3 * ERROR)
    close(prediction.mutual_information, prediction.entropy - prediction.expected_entropy, 1e-12)


@pytest.mark.parametrize("kind", CLASS_LIKELIHOODS)
def test_mutual_information_is_never_negative_and_vanishes_without_epistemic_variance(kind: str) -> None:
    for seed, scale in itertools.product(SEEDS, (1e-3, 0.3, 1.0, 10.0)):
        mean, cov = gaussian_outputs(seed, n=20, scale=scale)
        prediction = lw.Prediction(CLASS_LIKELIHOODS[kind], lw.outputs.Normal(mean, cov))
        information = prediction.mutual_information
        assert (information >= -1e-14).all()
        assert (information <= prediction.entropy).all()
        assert (prediction.entropy <= math.log(3 if kind == "categorical" else 2) + 1e-12).all()
        assert float(information.max()) > (1e-8 if scale < 0.1 else 1e-3)
        certain = lw.Prediction(CLASS_LIKELIHOODS[kind], lw.outputs.Normal(mean, torch.zeros_like(cov)))
        close(certain.mutual_information, torch.zeros_like(information), 1e-12)
        close(certain.epistemic, torch.zeros_like(mean), 1e-12)


# -- links -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.1, 0.5, 1.0, 3.0])
def test_monte_carlo_is_the_mean_of_softmax(scale: float) -> None:
    for seed in SEEDS:
        mean, cov = gaussian_outputs(seed, c=3 + seed, scale=scale)
        truth = brute_force(mean, cov).softmax(-1).mean(0)
        found = lw.Prediction(CLASS_LIKELIHOODS["categorical"], lw.outputs.Normal(mean, cov), "monte_carlo").mean
        torch.testing.assert_close(found, truth, rtol=0.0, atol=ERROR)
        close(found.sum(-1), torch.ones(4, dtype=torch.float64), 1e-12)


@pytest.mark.parametrize("link", ["probit", "probit_centered"])
@pytest.mark.parametrize(("scale", "most"), [(0.3, 0.05), (1.0, 0.24), (3.0, 0.45)])
def test_probit_links_of_correlated_logits_stay_within_their_known_error(link: str, scale: float, most: float) -> None:
    """The largest errors over a hundred other seeds were 0.033, 0.19 and 0.36; of softmax(μ) 0.037, 0.23, 0.48."""
    for seed in SEEDS:
        mean, cov = gaussian_outputs(seed, n=8, scale=scale)
        truth = brute_force(mean, cov, 20_000).softmax(-1).mean(0)
        found = lw.Prediction(CLASS_LIKELIHOODS["categorical"], lw.outputs.Normal(mean, cov), link).mean
        torch.testing.assert_close(found, truth, rtol=0.0, atol=most)


@pytest.mark.parametrize(("variance", "most"), [(0.01, 0.02), (0.5, 0.04), (2.0, 0.065), (10.0, 0.1)])
def test_probit_of_isotropic_logits_is_close_to_the_truth(variance: float, most: float) -> None:
    """Where its assumption holds (equal, independent variances); the largest errors over a hundred other seeds were
    0.001, 0.022, 0.049 and 0.075, those of softmax(μ) 0.002, 0.052, 0.14 and 0.32."""
    for seed in SEEDS:
        mean = gaussian_outputs(seed, n=8)[0]
        cov = variance * torch.eye(3, dtype=torch.float64).expand(8, 3, 3)
        truth = brute_force(mean, cov, 20_000).softmax(-1).mean(0)
        found = lw.Prediction(CLASS_LIKELIHOODS["categorical"], lw.outputs.Normal(mean, cov), "probit").mean
        torch.testing.assert_close(found, truth, rtol=0.0, atol=most)
        if variance >= 0.5:
            assert (found - truth).abs().mean() < 0.5 * (mean.softmax(-1) - truth).abs().mean()


def test_binary_probit_is_within_two_hundredths_of_the_logistic_normal_mean() -> None:
    mean = torch.linspace(-8, 8, 41, dtype=torch.float64).unsqueeze(-1)
    z = torch.linspace(-12, 12, 40_001, dtype=torch.float64)
    weight = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi) * (z[1] - z[0])
    for variance in (0.1, 1.0, 4.0, 25.0, 100.0):
        truth = (torch.sigmoid(mean + math.sqrt(variance) * z) * weight).sum(-1, keepdim=True)
        cov = torch.full((41, 1, 1), variance, dtype=torch.float64)
        probit, monte_carlo = (
            lw.Prediction(CLASS_LIKELIHOODS["bernoulli"], lw.outputs.Normal(mean, cov), link).mean
            for link in ("probit", "monte_carlo")
        )
        torch.testing.assert_close(probit, truth, rtol=0.0, atol=0.02)
        torch.testing.assert_close(monte_carlo, truth, rtol=0.0, atol=0.002)
        close(probit + probit.flip(0), torch.ones_like(probit), 1e-12)  # p(f) + p(−f) = 1


@pytest.mark.parametrize(
    ("kind", "link"),
    [
        *itertools.product(CLASS_LIKELIHOODS, ["auto", "probit", "monte_carlo"]),
        ("categorical", "probit_centered"),
        ("categorical", "mean_field"),
    ],
)
def test_without_variance_a_link_is_softmax_or_sigmoid(kind: str, link: str) -> None:
    mean, cov = gaussian_outputs(0)
    close(
        lw.Prediction(CLASS_LIKELIHOODS[kind], lw.outputs.Normal(mean, 0 * cov), link).mean,
        probabilities(kind, mean),
        1e-12,
    )


def test_the_mean_field_link_of_two_classes_is_the_probit_of_their_difference() -> None:
    """Two logits are one, f₁ − f₀, of variance V₀₀ + V₁₁ − 2 V₀₁."""
    for seed in SEEDS:
        mean, cov = gaussian_outputs(seed, c=2, scale=2.0)
        found = lw.Prediction(CLASS_LIKELIHOODS["categorical"], lw.outputs.Normal(mean, cov), "mean_field").mean
        gap, var = mean[:, 1:] - mean[:, :1], cov[:, :1, :1] + cov[:, 1:, 1:] - 2 * cov[:, :1, 1:]
        close(found[:, 1:], lw.Prediction(CLASS_LIKELIHOODS["bernoulli"], lw.outputs.Normal(gap, var), "probit").mean)


@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
def test_the_mean_field_link_is_nearer_to_the_truth_than_the_probit(scale: float) -> None:
    """On average; it knows the covariance of the logits."""
    errors = {"probit": 0.0, "mean_field": 0.0}
    for seed in SEEDS:
        mean, cov = gaussian_outputs(seed, n=20, c=4, scale=scale)
        truth = brute_force(mean, cov, 20_000).softmax(-1).mean(0)
        for link in errors:
            found = lw.Prediction(CLASS_LIKELIHOODS["categorical"], lw.outputs.Normal(mean, cov), link).mean
            errors[link] += float((found - truth).abs().mean())
    assert errors["mean_field"] < errors["probit"]


def dirichlet_image(alpha: Tensor) -> tuple[Tensor, Tensor]:
    """The Gaussian over logits that the Laplace bridge gives Dirichlet(α)."""
    c, inverse = alpha.shape[-1], 1 / alpha
    mean = alpha.log() - alpha.log().mean(-1, keepdim=True)
    cov = torch.diag_embed(inverse) - (inverse.unsqueeze(-1) + inverse.unsqueeze(-2)) / c
    return mean, cov + inverse.sum(-1)[..., None, None] / c**2


def test_the_bridge_inverts_the_gaussian_that_it_gives_a_dirichlet() -> None:
    """Exact for such covariances, also under a common shift, certain or not; near the truth where α is large."""
    for seed, shift in itertools.product(SEEDS, (0.0, 1e-17, 1e-3, 2.0)):
        torch.manual_seed(seed)
        alpha = 0.5 + 20 * torch.rand(5, 3 + seed, dtype=torch.float64)
        mean, cov = dirichlet_image(alpha)
        found = lw.Prediction(
            CLASS_LIKELIHOODS["categorical"], lw.outputs.Normal(mean + 0.7, cov + shift), "bridge"
        ).mean
        close(found, alpha / alpha.sum(-1, keepdim=True))
    alpha = 5 + 45 * torch.rand(5, 3, dtype=torch.float64)
    mean, cov = dirichlet_image(alpha)
    truth = brute_force(mean, cov + 0.01).softmax(-1).mean(0)  # softmax is blind to the 0.01
    found = lw.Prediction(CLASS_LIKELIHOODS["categorical"], lw.outputs.Normal(mean, cov), "bridge").mean
    torch.testing.assert_close(found, truth, rtol=0.0, atol=0.01 + ERROR)


def test_the_bridge_is_finite_without_variance() -> None:
    mean, cov = gaussian_outputs(0, c=2)
    found = lw.Prediction(CLASS_LIKELIHOODS["categorical"], lw.outputs.Normal(mean, 0 * cov), "bridge").mean
    close(found, mean.softmax(-1))  # of two classes


def test_only_probit_counts_the_variance_of_a_common_shift() -> None:
    mean, cov = gaussian_outputs(1)

    def change(link: str, more: float) -> float:
        plain, shifted = (
            lw.Prediction(CLASS_LIKELIHOODS["categorical"], lw.outputs.Normal(mean, v), link).mean
            for v in (cov, cov + more)
        )
        return float((plain - shifted).abs().max())

    assert change("probit_centered", 5.0) < 1e-12
    assert change("mean_field", 5.0) < 1e-12
    assert change("monte_carlo", 5.0) < 2 * ERROR
    assert change("probit", 5.0) > 0.05


def test_auto_is_the_mean_over_nodes_for_classes_and_exact_for_regression() -> None:
    new = draw(4, 3)
    for kind in CLASS_LIKELIHOODS:
        la = fitted(kind)
        close(la(new).mean, la.predict(new, link="monte_carlo").mean, 0.0)
        close(la(new).probs, la(new).mean, 0.0)
    la = fitted("gaussian")
    close(la(new).mean, la.predict(new, link="exact").mean, 0.0)
    close(la.predict(new, mean="tangent").mean, la(new).mean, 0.0)  # the center is the trained weights


# -- covariances -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LIKELIHOODS)
@pytest.mark.parametrize("structure", ["primal", "dual", "diag"])
def test_the_joint_covariance_has_the_marginals_on_its_diagonal(kind: str, structure: str) -> None:
    la = fitted(kind, structure=lw.curvature.Full(structure) if structure != "diag" else structure)
    new = draw(5, 3)
    joint, marginal = la.predict(new, joint=True), la.predict(new)
    assert joint.covariance.shape == (5, 3, 5, 3)
    for i in range(5):
        close(joint.covariance[i, :, i, :], marginal.covariance[i])
    close(joint.f_var, marginal.f_var)
    close(joint.f_var, marginal.covariance.diagonal(dim1=-2, dim2=-1))
    close(joint.mean, marginal.mean)
    close(joint.total, marginal.total, 1e-8)
    flat = joint.covariance.reshape(15, 15)
    close(flat, flat.mT)
    assert float(torch.linalg.eigvalsh(flat).min()) > -1e-12
    assert float(joint.covariance[0, :, 1, :].abs().max()) > 1e-4  # inputs are correlated


def test_joint_covariances_of_positions_have_the_marginals_on_their_diagonal() -> None:
    model, new = nn.Linear(2, 3).double(), draw(2, 5, 2)
    la = lw.laplace(model, (draw(4, 5, 2), draw(4, 5, 3)), "gaussian")
    joint = la.predict(new, joint=True)
    assert joint.covariance.shape == (2, 5, 3, 2, 5, 3)
    close(joint.marginal, la.predict(new).covariance)
    close(joint.std, la.predict(new).std)


# -- densities ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gaussian", "per output"])
def test_gaussian_log_prob_is_the_multivariate_normal(kind: str) -> None:
    for seed in SEEDS:
        la, new, y = fitted(kind, seed), draw(4, 3), draw(4, 3)
        noise = la.likelihood.noise.square().expand(3)
        each = la.predict(new)
        close(each.log_prob(y), MultivariateNormal(each.f_mean, each.covariance + noise.diag()).log_prob(y))
        joint = la.predict(new, joint=True)
        cov = joint.covariance.reshape(12, 12) + noise.repeat(4).diag()
        close(joint.log_prob(y), MultivariateNormal(joint.f_mean.reshape(-1), cov).log_prob(y.reshape(-1)))
        assert joint.log_prob(y).shape == ()


@pytest.mark.parametrize("link", ["probit", "probit_centered", "bridge", "monte_carlo"])
def test_categorical_log_prob_is_the_log_of_the_predicted_probability(link: str) -> None:
    la, new, y = fitted("categorical"), draw(4, 3), torch.randint(3, (4,))
    prediction = la.predict(new, link=link)
    close(prediction.log_prob(y), prediction.probs[torch.arange(4), y].log())
    every = torch.stack([prediction.log_prob(torch.full((4,), k)) for k in range(3)])
    close(every.exp().sum(0), torch.ones(4, dtype=torch.float64))


def test_bernoulli_log_prob_is_that_of_the_dependent_outputs_or_of_their_means() -> None:
    mean, cov = gaussian_outputs(5)
    cov = cov + 4.0  # strongly dependent
    likelihood = CLASS_LIKELIHOODS["bernoulli"]
    p = brute_force(mean, cov).sigmoid()
    probit = lw.Prediction(likelihood, lw.outputs.Normal(mean, cov), "probit")
    drawn = lw.Prediction(likelihood, lw.outputs.Normal(mean, cov))
    every = [torch.tensor(bits).expand(4, 3) for bits in itertools.product((0, 1), repeat=3)]
    close(torch.stack([probit.log_prob(y) for y in every]).exp().sum(0), torch.ones(4, dtype=torch.float64))
    close(torch.stack([drawn.log_prob(y) for y in every]).exp().sum(0), torch.ones(4, dtype=torch.float64))
    for y in every:
        close(probit.log_prob(y), torch.distributions.Bernoulli(probit.mean).log_prob(y.double()).sum(-1))
        truth = torch.where(y.bool(), p, 1 - p).prod(-1).mean(0)
        torch.testing.assert_close(drawn.log_prob(y).exp(), truth, rtol=0.0, atol=ERROR)


@pytest.mark.parametrize("kind", CLASS_LIKELIHOODS)
def test_joint_log_prob_of_classes_is_the_log_mean_of_the_product(kind: str) -> None:
    for seed in SEEDS:
        la, new, y = fitted(kind, seed, prior=0.3), draw(3, 3), targets_for(kind, 3)
        joint = la.predict(new, joint=True)
        cov = joint.covariance.reshape(1, 9, 9) + 1e-12 * torch.eye(9)
        f = brute_force(joint.f_mean.reshape(1, 9), cov).reshape(DRAWS, 3, 3)
        each = la.likelihood.log_prob(f, y.expand(DRAWS, *y.shape)).sum(1)
        truth, deviation = each.exp().mean(), each.exp().std() / math.sqrt(DRAWS)
        assert float((joint.log_prob(y).exp() - truth).abs()) < 6 * float(deviation) + 0.003 * float(truth)
        assert joint.log_prob(y).shape == ()
        one, alone = (
            la.predict(new[:1], "monte_carlo", joint=joint).log_prob(y[:1]).squeeze() for joint in (True, False)
        )
        truth = torch.logsumexp(la.likelihood.log_prob(f[:, :1], y[:1].expand(DRAWS, *y[:1].shape)).squeeze(1), 0)
        close(one, truth - math.log(DRAWS), 0.01)
        close(alone, truth - math.log(DRAWS), 0.03)  # 512 draws of f that do not know y


def test_log_prob_stays_finite_where_a_float32_probability_saturates() -> None:
    cov = torch.full((1, 1, 1), 1e-3)
    for f, y in itertools.product((-90.0, 90.0), (0, 1)):
        prediction = lw.Prediction(CLASS_LIKELIHOODS["bernoulli"], lw.outputs.Normal(torch.full((1, 1), f), cov))
        assert torch.isfinite(prediction.log_prob(torch.full((1, 1), y))).all()


@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_log_prob_refuses_targets_of_another_shape(kind: str) -> None:
    la, new = fitted(kind), draw(4, 3)
    wrong = targets_for(kind, 4).T if kind != "categorical" else targets_for(kind, 4).reshape(2, 2)
    with pytest.raises(lw.errors.InvalidValue, match="shape"):
        la.predict(new).log_prob(wrong)


@pytest.mark.parametrize("kind", ["gaussian", "per output"])
def test_gaussian_quantiles_are_those_of_the_normal(kind: str) -> None:
    la, new = fitted(kind), draw(4, 3)
    prediction = la.predict(new)
    for q in (0.025, 0.5, 0.9):
        close(prediction.quantile(q), Normal(prediction.mean, prediction.std).icdf(torch.tensor(q).double()), 1e-6)


@pytest.mark.parametrize("kind", CLASS_LIKELIHOODS)
def test_class_quantiles_are_those_of_the_probabilities(kind: str) -> None:
    mean, cov = gaussian_outputs(7)
    p = probabilities(kind, brute_force(mean, cov, 20_000))
    prediction = lw.Prediction(CLASS_LIKELIHOODS[kind], lw.outputs.Normal(mean, cov))
    quantiles = [prediction.quantile(q) for q in (0.1, 0.5, 0.9)]
    for q, found in zip((0.1, 0.5, 0.9), quantiles, strict=True):
        torch.testing.assert_close(found, p.quantile(q, 0), rtol=0.0, atol=0.05)
    assert (quantiles[0] < quantiles[1]).all()
    assert (quantiles[1] < quantiles[2]).all()


@pytest.mark.parametrize("q", [0.0, 1.0, -0.1, 1.1, math.nan])
def test_a_quantile_outside_zero_and_one_is_refused(q: float) -> None:
    with pytest.raises(lw.errors.InvalidValue, match="quantile"):
        fitted("gaussian").predict(draw(2, 3)).quantile(q)


# -- samples -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gaussian", "per output"])
@pytest.mark.parametrize("joint", [False, True])
def test_gaussian_samples_have_the_predictive_moments(kind: str, joint: bool) -> None:
    la, new, s = fitted(kind), draw(2, 3), 40_000
    prediction = la.predict(new, joint=joint)
    samples = prediction.sample(s, torch.Generator().manual_seed(3))
    assert samples.shape == (s, 2, 3)
    away = (samples - prediction.mean).reshape(s, 6)
    noise = la.likelihood.noise.square().expand(3).repeat(2).diag()
    cov = noise + (prediction.covariance.reshape(6, 6) if joint else torch.block_diag(*prediction.covariance.unbind(0)))
    variance = cov.diagonal()
    assert (away.mean(0).abs() < 5 * (variance / s).sqrt()).all()
    error = (cov.square() + variance.outer(variance)).sqrt() / math.sqrt(s)
    assert ((away.mT @ away / s - cov).abs() < 5 * error).all()


@pytest.mark.parametrize("kind", CLASS_LIKELIHOODS)
def test_class_samples_have_the_predictive_frequencies(kind: str) -> None:
    la, new, s = fitted(kind, prior=0.1), draw(4, 3), 40_000
    samples = la.predict(new).sample(s)
    assert samples.shape == ((s, 4) if kind == "categorical" else (s, 4, 3))
    every = torch.nn.functional.one_hot(samples, 3) if kind == "categorical" else samples
    truth = la.predict(new).mean
    torch.testing.assert_close(every.double().mean(0), truth, rtol=0.0, atol=5 * 0.5 / math.sqrt(s) + 0.005)


@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_samples_follow_their_generator_and_no_other(kind: str) -> None:
    la, new = fitted(kind), draw(4, 3)
    state = torch.get_rng_state()
    prediction = la.predict(new)
    a, b, c = (prediction.sample(5, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert torch.equal(prediction.sample(5), prediction.sample(5))
    _ = prediction.total, prediction.std, prediction.quantile(0.3), la.draw(2), la.predict(new, via="network").total
    assert torch.equal(torch.get_rng_state(), state)


def test_f_samples_have_the_latent_covariance() -> None:
    la, new, s = fitted("categorical"), draw(2, 3), 40_000
    prediction = la.predict(new, joint=True)
    away = (prediction.f_sample(s) - prediction.f_mean).reshape(s, 6)
    cov = prediction.covariance.reshape(6, 6)
    error = (cov.square() + cov.diagonal().outer(cov.diagonal())).sqrt() / math.sqrt(s)
    assert ((away.mT @ away / s - cov).abs() < 5 * error).all()


# -- through the network itself ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LIKELIHOODS)
@pytest.mark.parametrize("joint", [False, True])
def test_via_network_is_the_average_over_drawn_weights(kind: str, joint: bool) -> None:
    la, new, s = fitted(kind), draw(4, 3), 50
    prediction = la.predict(new, via="network", samples=s, joint=joint, generator=torch.Generator().manual_seed(5))
    draws = la.draw(s, torch.Generator().manual_seed(5))
    model = la.tangent.model
    with torch.no_grad():
        f = torch.stack(
            [torch.func.functional_call(model, {n: w[i] for n, w in draws.items()}, (new,)) for i in range(s)]
        )
    close(prediction.f_mean, f.mean(0))
    away = (f - f.mean(0)).reshape(s, 12)
    whole = (away.mT @ away / (s - 1)).reshape(4, 3, 4, 3)
    close(prediction.covariance if joint else torch.stack([*prediction.covariance]), whole if joint else blocks(whole))
    y = targets_for(kind, 4)
    each = la.likelihood.log_prob(f, y.expand(s, *y.shape))
    expected = torch.logsumexp(each.sum(1) if joint else each, 0) - math.log(s)
    close(prediction.log_prob(y), expected)
    if kind in CLASS_LIKELIHOODS:
        p = probabilities(kind, f)
        close(prediction.probs, p.mean(0))
        close(prediction.epistemic, p.var(0, correction=0))
        close(prediction.quantile(0.3), p.quantile(0.3, 0))
        assert (prediction.mutual_information >= -1e-14).all()
    else:
        close(prediction.mean, f.mean(0))
    assert prediction.sample(7).shape == (7, *y.shape)


def blocks(whole: Tensor) -> Tensor:
    return torch.stack([whole[i, :, i, :] for i in range(len(whole))])


def test_via_network_agrees_with_the_tangent_for_a_model_linear_in_its_weights() -> None:
    torch.manual_seed(0)
    model, s = nn.Linear(3, 2).double(), 4_000
    la = lw.laplace(model, (draw(9, 3), draw(9, 2)), lw.likelihoods.Gaussian(0.4))
    new = draw(3, 3)
    tangent, network = la.predict(new), la.predict(new, via="network", samples=s)
    assert ((network.mean - tangent.mean).abs() < 5 * (tangent.f_var / s).sqrt()).all()
    variance = tangent.f_var
    error = (tangent.covariance.square() + variance.unsqueeze(-1) * variance.unsqueeze(-2)).sqrt() / math.sqrt(s)
    assert ((network.covariance - tangent.covariance).abs() < 5 * error).all()
    assert ((network.total - tangent.total).abs() < 5 * math.sqrt(2 / s) * tangent.total).all()


# -- small things ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["probs", "entropy", "expected_entropy", "mutual_information"])
def test_regression_has_no_class_probabilities(what: str) -> None:
    prediction = fitted("gaussian").predict(draw(2, 3))
    with pytest.raises(lw.errors.LapwingError, match="gaussian"):
        getattr(prediction, what)


@pytest.mark.parametrize("kind", LIKELIHOODS)
@pytest.mark.parametrize("joint", [False, True])
def test_a_prediction_prints_its_means_and_deviations(kind: str, joint: bool) -> None:
    la = fitted(kind)
    prediction = la.predict(draw(7, 3), joint=joint)
    text = repr(prediction)
    assert f"{la.likelihood.name}, 7 inputs, 3 outputs" in text
    assert ("joint" in text) == joint
    assert f"{float(prediction.mean[0, 0]):.4g}" in text
    assert f"{float(prediction.std[4, 2]):.4g}" in text
    assert text.endswith("...")


@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_predictions_do_not_depend_on_their_company_nor_on_memory(kind: str) -> None:
    la, new = fitted(kind), draw(6, 3)
    whole = la.predict(new)
    for i in range(6):
        close(la.predict(new[i : i + 1]).covariance[0], whole.covariance[i])
        close(la.predict(new[i : i + 1]).total[0], whole.total[i])
    data = draw(30, 3), targets_for(kind, 30)
    many = draw(400, 3)
    small, large = (
        lw.laplace(la.tangent.model, data, la.likelihood, structure="full", memory_budget=budget)
        for budget in (2**16, None)
    )
    close(small.predict(many).covariance, large.predict(many).covariance)


# -- a likelihood of the user's own ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counts(lw.likelihoods.Likelihood):
    """y ~ Poisson(exp f), with nothing but what a likelihood must say: no link in closed form."""

    def validate(self, f: Tensor, y: Tensor) -> None:
        pass

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return (y * f - f.exp() - torch.lgamma(y + 1)).sum(-1)

    def sample(self, f: Tensor, generator: torch.Generator) -> Tensor:
        return torch.poisson(f.exp(), generator=generator)

    def mean(self, f: Tensor) -> Tensor:
        return f.exp()

    def variance(self, f: Tensor) -> Tensor:
        return f.exp()


def test_log_prob_of_a_users_likelihood_averages_over_the_posterior() -> None:
    torch.manual_seed(0)
    root = 0.4 * torch.randn(3, 2, 2).double()
    prediction = lw.Prediction(Counts(), lw.outputs.Normal(0.5 * torch.randn(3, 2).double(), root @ root.mT))
    y = torch.tensor([[0.0, 2.0], [1.0, 0.0], [3.0, 1.0]]).double()
    draws = prediction.f_sample(200_000, torch.Generator().manual_seed(1))
    truth = torch.logsumexp(Counts().log_prob(draws, y), 0) - math.log(200_000)
    torch.testing.assert_close(prediction.log_prob(y), truth, atol=0.01, rtol=0)
    torch.testing.assert_close(prediction.mean, draws.exp().mean(0), atol=0.02, rtol=0.02)
    with pytest.raises(lw.errors.Unsupported):
        prediction.probs  # noqa: B018 - no classes, no class probabilities
