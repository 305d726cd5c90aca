"""Samplers on networks: the posterior of a linear model in closed form, noise and scales that are sampled too, and
binary weights by enumeration."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributions, nn

import lapwing as lw
from helpers import close, normal, seeded
from lapwing.errors import Unsupported
from lapwing.priors import Bernoulli, Gamma, HalfCauchy, Hierarchical, Horseshoe, Laplace
from lapwing.samplers import hmc, langevin, mala, metropolis, sghmc, sgld

Z = 4.5
NOISE = 0.5


def linear(seed: int = 0, n: int = 20, inputs: int = 2, outputs: int = 1) -> tuple[nn.Module, Tensor, Tensor]:
    model = nn.Linear(inputs, outputs, bias=False).double()
    x = normal(n, inputs, seed=seed)
    y = x @ normal(inputs, outputs, seed=seed + 1) + NOISE * normal(n, outputs, seed=seed + 2)
    with torch.no_grad():
        model.weight.copy_(torch.linalg.lstsq(x, y).solution.mT)
    return model, x, y


def closed_form(x: Tensor, y: Tensor, precision: float = 2.0) -> tuple[Tensor, Tensor]:
    """Mean and covariance of the weights of one output."""
    covariance = torch.linalg.inv(x.mT @ x / NOISE**2 + precision * torch.eye(x.shape[1]).double())
    return covariance @ x.mT @ y.squeeze(1) / NOISE**2, covariance


def check_moments(q: Tensor, mean: Tensor, covariance: Tensor) -> None:
    """Of independent rows."""
    n, deviation = len(q), covariance.diagonal().sqrt()
    assert float(((q.mean(0) - mean).abs() / deviation).max()) < Z / n**0.5
    away = (q - mean) / deviation
    error = (away.unsqueeze(1) * away.unsqueeze(2)).std(0) / n**0.5
    correlation = covariance / deviation / deviation.unsqueeze(1)
    assert float((((away.mT @ away) / n - correlation).abs() / error).max()) < Z


def mlp(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()


def by_chain(post: lw.Fitted, values: Tensor) -> Tensor:
    return post.posterior.by_chain(values)  # type: ignore[attr-defined]


def check_mean(values: Tensor, truth: float) -> None:
    """Of values (k, l) of independent chains."""
    means = values.mean(1)
    assert abs(float(means.mean()) - truth) < Z * float(means.std()) / len(means) ** 0.5


# -- closed forms -----------------------------------------------------------------------------------------------------


EXACT: list[tuple[Callable[..., lw.Fitted], dict[str, Any]]] = [
    (hmc, {"leapfrog": 4, "step": 0.06}),
    (mala, {"step": 0.015}),
    (metropolis, {"step": 0.1}),
]


@pytest.mark.parametrize(("sampler", "options"), EXACT, ids=["hmc", "mala", "metropolis"])
@pytest.mark.parametrize(
    ("temperature", "seed"),
    [(1.0, 0), (0.25, 0), *(pytest.param(1.0, 10 * seed, marks=pytest.mark.full) for seed in range(1, 5))],
)
def test_chains_started_at_exact_draws_of_a_linear_model_stay_exact(
    sampler: Callable[..., lw.Fitted], options: dict[str, Any], temperature: float, seed: int
) -> None:
    model, x, y = linear(seed)
    mean, covariance = closed_form(x, y)
    covariance = temperature * covariance
    start = mean + normal(600, 2, seed=seed + 9) @ torch.linalg.cholesky(covariance).mT
    told: dict[str, Any] = {"prior": 2.0, "chains": 600, "draws": 4, "warmup": 0, "temperature": temperature}
    step = options["step"] * (temperature if sampler is mala else temperature**0.5)
    post = sampler(model, (x, y), lw.likelihoods.Gaussian(NOISE), start=start, **told, **{**options, "step": step})
    last = by_chain(post, post.posterior.weights)[:, -1]  # type: ignore[attr-defined]
    check_moments(last, mean, covariance)
    assert 0.2 < float(post.diagnostics.acceptance.mean()) < 0.99
    cold = "" if temperature == 1 else " at temperature 0.25"
    assert f"600 chains of 4 draws by {sampler.__name__}{cold};" in repr(post)


def test_hmc_finds_the_posterior_of_a_linear_model_and_its_predictions() -> None:
    """From starts apart, with its own step and masses; particles through a linear network have the Gaussian's moments
    (identity 26)."""
    model, x, y = linear()
    lik = lw.likelihoods.Gaussian(NOISE)
    post = hmc(model, (x, y), lik, prior=2.0, chains=24, draws=60, warmup=150, leapfrog=5, start="prior")
    mean, covariance = closed_form(x, y)
    draws = by_chain(post, post.posterior.weights)  # type: ignore[attr-defined]
    for i in range(2):
        check_mean(draws[..., i], float(mean[i]))
        check_mean((draws[..., i] - mean[i]).square(), float(covariance[i, i]))
    la, new = lw.laplace(model, (x, y), lik, prior=2.0, structure="full"), normal(5, 2, seed=7)
    f = by_chain(post, post.posterior.outputs(new).values)[..., 0]
    truth = new @ mean
    for j in range(5):
        check_mean(f[..., j], float(truth[j]))
        check_mean((f[..., j] - truth[j]).square(), float(la.predict(new).f_var[j]))


@pytest.mark.full
def test_minibatch_samplers_come_near_the_posterior() -> None:
    """With small steps and large batches: means within a deviation's tenth, variances within a third."""
    model, x, y = linear()
    mean, covariance = closed_form(x, y)
    step = 0.05 * float(covariance.diagonal().min())
    told: dict[str, Any] = {"prior": 2.0, "chains": 40, "draws": 40, "warmup": 60, "thin": 3, "step": step, "batch": 20}
    for sampler, options in ((sgld, {}), (sghmc, {"friction": 0.3}), (sghmc, {"cycles": 2, "step": 2 * step})):
        post = sampler(model, (x, y), lw.likelihoods.Gaussian(NOISE), **{**told, **options})
        w = post.posterior.weights  # type: ignore[attr-defined]
        assert float(((w.mean(0) - mean).abs() / covariance.diagonal().sqrt()).max()) < 0.25
        assert bool(((w.var(0) / covariance.diagonal()).log().abs() < 0.7).all())


# -- what is sampled with the weights ---------------------------------------------------------------------------------


def test_a_noise_with_a_density_is_sampled_with_the_weights(tmp_path: Path) -> None:
    """p(σ | D) ∝ N(y; 0, σ²I + xxᵀ/λ) p(σ), by quadrature."""
    model, x, y = linear(n=12)
    noisy = lw.likelihoods.Gaussian(noise=Gamma(0.5, 1.0))
    post = hmc(model, (x, y), noisy, prior=2.0, chains=24, draws=60, warmup=150, leapfrog=6)
    log_sigma = torch.linspace(-4, 3, 1001, dtype=torch.float64)
    covariance = log_sigma.exp().square()[:, None, None] * torch.eye(12).double() + x @ x.mT / 2
    evidence = distributions.MultivariateNormal(torch.zeros(12).double(), covariance).log_prob(y.squeeze(1))
    weight = (evidence + Gamma(0.5, 1.0).log_prob(log_sigma.exp()) + log_sigma).softmax(0)
    assert isinstance(post.likelihood, lw.likelihoods.Several)
    noise = by_chain(post, post.likelihood.drawn["noise"])
    check_mean(noise.log(), float(weight @ log_sigma))
    check_mean(noise.log().square(), float(weight @ log_sigma.square()))
    pred = post.predict(x)
    close(pred.aleatoric.mean(), post.likelihood.drawn["noise"].square().mean(), 1e-8)
    post.save(tmp_path / "post.safetensors")
    again = lw.load(tmp_path / "post.safetensors", model)
    assert torch.equal(again.predict(x).std, pred.std)
    assert torch.equal(again.diagnostics.acceptance, post.diagnostics.acceptance)
    assert repr(again) == repr(post)


@pytest.mark.parametrize(
    "prior", [Hierarchical(HalfCauchy(0.5), per="all"), Horseshoe(0.5, slab=2.0)], ids=lambda prior: prior.kind
)
def test_without_data_the_posterior_is_the_prior(prior: Any) -> None:
    """Neal's funnel, in the coordinates in which samplers walk: quantiles of the draws are the prior's."""
    model, x, y = linear()
    post = hmc(model, (x, y), lw.likelihoods.Gaussian(1e6), prior=prior, chains=48, draws=60, warmup=150, leapfrog=6)
    truth = prior.bind(post.tangent.layout).sample(20_000, seeded(1)).abs()
    for share in (0.25, 0.5, 0.75):
        level = float(truth.quantile(share))
        values = (by_chain(post, post.posterior.weights[:, 0]).abs() < level).double()  # type: ignore[attr-defined]
        means = values.mean(1)
        error = float(means.std()) / 48**0.5 + (0.25 / 40_000) ** 0.5
        assert abs(float(means.mean()) - share) < Z * error


def test_the_posterior_of_a_laplace_prior_has_no_zeros() -> None:
    model, x, y = linear(inputs=4)
    post = hmc(
        model, (x, y), lw.likelihoods.Gaussian(NOISE), prior=Laplace(0.05), chains=4, draws=40, warmup=60, leapfrog=5
    )
    assert bool((post.posterior.weights != 0).all())  # type: ignore[attr-defined]


def test_binary_weights_by_enumeration() -> None:
    model, x, y = linear(n=6, inputs=4)
    prior = Bernoulli(0.3, values=(-1.0, 1.0))
    y = 0.3 * y
    lik = lw.likelihoods.Gaussian(2.0)
    states = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=4))).double()
    joint = lw.log_joint(model, (x, y), lik, prior)
    truth = torch.stack([joint(one) for one in states]).softmax(0).detach()
    post = metropolis(model, (x, y), lik, prior=prior, chains=100, draws=80, warmup=40)
    draws = by_chain(post, post.posterior.weights)  # type: ignore[attr-defined]
    assert set(draws.unique().tolist()) == {-1.0, 1.0}
    for state, share in zip(states, truth, strict=True):
        means = (draws == state).all(-1).double().mean(1)
        assert abs(float(means.mean() - share)) < Z * float(means.std()) / 10 + 1e-3
    for sampler in (hmc, mala, lambda *a, **k: sgld(*a, step=0.1, **k)):
        with pytest.raises(Unsupported, match=r"weights of Bernoulli have none; use lw\.samplers\.metropolis"):
            sampler(model, (x, y), lik, prior=prior)


# -- posteriors -------------------------------------------------------------------------------------------------------


def test_a_sampled_posterior_keeps_the_laws_and_is_compared(tmp_path: Path) -> None:
    model, x, y = mlp(), normal(15, 2), normal(15, 2, seed=1)
    post = hmc(model, (x, y), "gaussian", chains=2, draws=20, warmup=20, leapfrog=3)
    lw.testing.check_posterior(post.posterior, x)
    table = lw.compare({"hmc": post, "laplace": lw.laplace(model, (x, y), "gaussian")}, data=(x, y))
    assert table["hmc"].nll > 0
    assert post.draw(3)["0.weight"].shape == (3, 3, 2)
    assert "acceptance" in repr(post.diagnostics)
    assert post.diagnostics.energy.shape == (2, 20)
    assert post.diagnostics.bfmi.shape == (2,)


@pytest.mark.parametrize("scale", [None, 4.0])
def test_permuted_or_rescaled_units_in_every_particle_predict_the_same(scale: float | None) -> None:
    """Each particle its own permutation; of ReLU units their own factor, out of the next layer again."""
    model = nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    tangent, x = lw.linearize(model), normal(7, 2)
    weights = normal(12, tangent.layout.size, seed=3)
    named = {k: v.clone() for k, v in tangent.layout.unflatten(weights).items()}
    for s in range(12):
        order = torch.randperm(5, generator=seeded(s))
        factor = torch.ones(5).double() if scale is None else scale ** normal(5, seed=s)
        named["0.weight"][s] = (named["0.weight"][s] * factor[:, None])[order]
        named["0.bias"][s] = (named["0.bias"][s] * factor)[order]
        named["2.weight"][s] = (named["2.weight"][s] / factor)[:, order]
    moved = tangent.layout.flatten(named, batch_dims=1)
    one, other = (lw.posterior.Particles(tangent, w).outputs(x) for w in (weights, moved))
    close(one.values, other.values, 1e-12)
    close(one.variance, other.variance, 1e-12)


def test_the_model_and_the_random_state_are_left_as_they_were() -> None:
    model, x, y = mlp().train(), normal(9, 2), normal(9, 2, seed=1)
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.random.get_rng_state()
    for sampler, options in ((hmc, {"leapfrog": 2}), (sgld, {"step": 1e-3})):
        first, again = (sampler(model, (x, y), "gaussian", chains=2, draws=3, warmup=3, **options) for _ in range(2))
        assert torch.equal(first.posterior.weights, again.posterior.weights)  # type: ignore[attr-defined]
    other = hmc(model, (x, y), "gaussian", chains=2, draws=3, warmup=3, leapfrog=2, generator=seeded(5))
    assert not torch.equal(other.posterior.weights[0], first.posterior.weights[0])  # type: ignore[attr-defined]
    assert model.training
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_chain_does_not_depend_on_its_company() -> None:
    model, x, y = mlp(), normal(9, 2), normal(9, 2, seed=1)
    one, three = (
        langevin(model, (x, y), "gaussian", step=1e-2, chains=k, draws=5, warmup=2).posterior.weights
        for k in (1, 3)  # type: ignore[attr-defined]
    )
    close(one, three[:5], 1e-12)


@pytest.mark.full
def test_a_float32_network_with_labels() -> None:
    model, x = mlp().float(), normal(30, 2).float()
    post = hmc(model, (x, (x[:, 0] > 0).long()), "categorical", chains=2, draws=10, warmup=20, leapfrog=3)
    probs = post.predict(x).probs
    assert probs.shape == (30, 2)
    assert bool(torch.isfinite(probs).all())
    assert post.draw(2)["0.weight"].dtype == torch.float32
