"""Variational inference against closed forms: the linear Gaussian model, whose posterior and evidence are known."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.errors import InvalidValue, NotConverged, Unsupported
from lapwing.samplers.target import targeted
from lapwing.variational.climb import Objective
from lapwing.variational.factors import Approximation, Family, FullLayers, LowRankLayers, MeanField
from lapwing.variational.noise import noisy_layers

NOISE, PRECISION = 0.5, 2.0


def linear() -> tuple[nn.Linear, Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    x = (
        torch.randn(30, 3, generator=g, dtype=torch.float64)
        @ torch.tensor([[1.0, 0.6, 0], [0, 1, 0.5], [0, 0, 1]]).double()
    )
    model = nn.Linear(3, 2).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g, dtype=torch.float64) * 0.1)
    return model, x, x[:, :2] - 0.3 + NOISE * torch.randn(30, 2, generator=g, dtype=torch.float64)


def truth(model: nn.Linear, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Precision, mean and log evidence by dense algebra, weights (o, i) row-major, then the bias."""
    eye, n = torch.eye(2, dtype=torch.float64), len(x)
    J = torch.cat([torch.einsum("ni,oc->ncoi", x, eye).reshape(2 * n, 6), eye.repeat(n, 1)], 1)
    P = J.T @ J / NOISE**2 + PRECISION * torch.eye(8, dtype=torch.float64)
    K = NOISE**2 * torch.eye(2 * n, dtype=torch.float64) + J @ J.T / PRECISION
    evidence = torch.distributions.MultivariateNormal(torch.zeros(2 * n).double(), K).log_prob(y.reshape(-1))
    return P, torch.linalg.solve(P, J.T @ y.reshape(-1) / NOISE**2), evidence


def known() -> lw.likelihoods.Gaussian:
    return lw.likelihoods.Gaussian(noise=NOISE)


def test_mean_field_of_a_linear_model_has_the_diagonal_of_its_precision() -> None:
    model, x, y = linear()
    P, mean, evidence = truth(model, x, y)
    before, state = [p.clone() for p in model.parameters()], torch.get_rng_state()
    post = lw.variational.mean_field(model, (x, y), known(), prior=PRECISION, steps=800, lr=0.02)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    q = post.posterior
    torch.testing.assert_close(q.deviation, P.diagonal().rsqrt(), rtol=0.04, atol=0)
    assert float(((q.mean - mean) * P.diagonal().sqrt()).abs().max()) < 0.1
    elbo, error, _ = post.diagnostics
    gap = 0.5 * (P.diagonal().log().sum() - torch.logdet(P))  # KL(q* ‖ posterior)
    assert abs(float(elbo - (evidence - gap))) < 4.5 * float(error) + 0.05


@pytest.mark.parametrize("rank", [None, 8])
def test_a_covariance_of_one_linear_layer_is_the_posteriors(rank: int | None) -> None:
    model, x, y = linear()
    P, mean, evidence = truth(model, x, y)
    post = lw.variational.layerwise(model, (x, y), known(), rank=rank, prior=PRECISION, steps=900, lr=0.03, draws=20)
    q = post.posterior
    torch.testing.assert_close(q.deviation, torch.linalg.inv(P).diagonal().sqrt(), rtol=0.02, atol=0)
    torch.testing.assert_close(q.mean, mean, rtol=0, atol=0.002)
    assert float(post.diagnostics.error) < 0.01  # log p(D, θ) − log q(θ) is the evidence at every θ
    torch.testing.assert_close(post.diagnostics.elbo, evidence, rtol=0, atol=0.02)


def test_a_wider_family_has_the_higher_bound() -> None:
    model, x, y = linear()
    P, _, evidence = truth(model, x, y)
    least = evidence - 0.5 * (P.diagonal().log().sum() - torch.logdet(P))  # of independent weights
    post = lw.variational.layerwise(model, (x, y), known(), rank=2, prior=PRECISION, steps=600, lr=0.03, draws=400)
    elbo, error, _ = post.diagnostics
    assert float(least) + 4 * float(error) < float(elbo) < float(evidence)


@pytest.mark.parametrize("kind", ["mean field", "full", "low rank"])
def test_closed_forms_equal_torch_distributions_and_draws(kind: str) -> None:
    model, x, y = linear()
    target = targeted(model, (x, y), known(), PRECISION, 1.0, "all", None)
    g = torch.Generator().manual_seed(5)
    mean = torch.randn(8, generator=g, dtype=torch.float64)
    deviation = torch.rand(8, generator=g, dtype=torch.float64) + 0.3
    layers = {"a": torch.tensor([0, 2, 5]), "b": torch.tensor([1, 3, 4, 6, 7])}
    q: Approximation
    if kind == "mean field":
        q, cov = MeanField(mean, deviation, Family.of("normal")), deviation.square().diag()
    elif kind == "full":
        q = FullLayers(mean, deviation, layers)
        for low in q.lower:
            low.data.normal_(generator=g)
        root = torch.zeros(8, 8).double()
        for i, low in zip(layers.values(), q.lower, strict=True):
            root[i[:, None], i] = deviation[i, None] * (low.detach().tril(-1) + torch.eye(len(i)).double())
        cov = root @ root.T
    else:
        q = LowRankLayers(mean, deviation, layers, 2, g)
        cov = deviation.square().diag()
        for i, R in zip(layers.values(), q.R, strict=True):
            cov[i[:, None], i] += deviation[i, None] * (R @ R.T).detach() * deviation[i]
    with torch.no_grad():
        oracle = torch.distributions.MultivariateNormal(mean, cov)
        theta = q.draw(40_000, g)
        torch.testing.assert_close(q.log_q(theta), oracle.log_prob(theta))
        torch.testing.assert_close(q.variance(), cov.diagonal())
        torch.testing.assert_close(theta.T.cov(), cov, atol=0.06, rtol=0.05)
        prior = torch.distributions.MultivariateNormal(torch.zeros(8).double(), torch.eye(8).double() / PRECISION)
        kl = Objective(target, q, 1, {}, True).kl(mean) - 4 * (1 + math.log(2 * math.pi))
        torch.testing.assert_close(kl, torch.distributions.kl_divergence(oracle, prior))
        drawn = Objective(target, q, 1, {}, False)
        sampled = torch.stack([drawn.kl(w) for w in theta[:300]])
        torch.testing.assert_close(sampled, (q.log_q(theta) - prior.log_prob(theta))[:300])
        assert abs(float(sampled.mean() - kl)) < 4.5 * float(sampled.std()) / 300**0.5


@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize("kind", ["full", "low rank"])
def test_a_sampled_kl_has_the_slopes_of_the_closed_one(kind: str, temperature: float) -> None:
    model, x, y = linear()
    target = targeted(model, (x, y), known(), PRECISION, temperature, "all", None)
    g = torch.Generator().manual_seed(6)
    mean, layers = torch.randn(8, generator=g, dtype=torch.float64), {"a": torch.arange(3), "b": torch.arange(3, 8)}
    wide = torch.full_like(mean, 0.6)
    q: Approximation = FullLayers(mean, wide, layers) if kind == "full" else LowRankLayers(mean, wide, layers, 2, g)
    closed = torch.autograd.grad(Objective(target, q, 1, {}, True).kl(mean), q.parameters)
    rows = []
    for _ in range(200):
        slopes = torch.autograd.grad(Objective(target, q, 1, {}, False).kl(q.draw(1, g)[0]), q.parameters)
        rows.append(torch.cat([t.flatten() for t in slopes]))
    each, exact = torch.stack(rows), torch.cat([t.flatten() for t in closed])
    moving = each.std(0) > 0
    z = (each.mean(0) - exact)[moving] / each.std(0)[moving] * 200**0.5
    assert float(z.abs().max()) < 4.5
    torch.testing.assert_close(each[0][~moving], exact[~moving])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(self.a(torch.tanh(self.a(x)))))) + self.b.weight.sum()


def test_weights_that_run_twice_or_elsewhere_are_drawn_as_weights() -> None:
    assert list(noisy_layers(lw.linearize(Tied().double()), torch.randn(5, 3).double())) == ["c"]


@pytest.mark.parametrize("conv", [False, True])
def test_noise_in_layers_is_unbiased_and_lowers_gradient_variance(conv: bool) -> None:
    torch.manual_seed(0)
    if conv:
        net, x = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(9, 2)), torch.randn(12, 2, 4)
    else:
        net, x = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)), torch.randn(12, 3)
    net, x, y = net.double(), x.double(), torch.randn(12, 2).double()
    target = targeted(net, (x, y), known(), PRECISION, 1.0, "all", None)
    theta = target.joint.tangent.theta.double()
    found = {}
    for local in (True, False):
        q, g = MeanField(theta, torch.full_like(theta, 0.3), Family.of("normal")), torch.Generator().manual_seed(1)
        objective = Objective.of(target, q, 12, local, True)
        assert bool(objective.layers) == local
        rows = []
        for _ in range(300):
            value = objective.value(g)
            rows.append(torch.cat([value.detach().reshape(1), *torch.autograd.grad(value, q.parameters)]))
        found[local] = torch.stack(rows)
    a, b = found[True], found[False]
    error = ((a.var(0) + b.var(0)) / 300).sqrt()
    assert float(((a.mean(0) - b.mean(0)).abs() / error).max()) < 4.5
    assert float(a[:, 1:].var(0).sum()) < 0.7 * float(b[:, 1:].var(0).sum())


@pytest.mark.parametrize("conv", [False, True])
def test_networks_in_single_precision_run(conv: bool) -> None:
    net: nn.Module = nn.Linear(4, 2)
    x = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    if conv:
        net, x = nn.Sequential(nn.Conv1d(1, 2, 2), nn.Flatten(), nn.Linear(6, 2)), x.unsqueeze(1)
    for method in (lw.variational.mean_field, lw.variational.layerwise):
        assert method(net, (x, x.reshape(9, 4)[:, :2]), known(), steps=3).predict(x).mean.dtype == torch.float32


def test_minibatches_are_scaled_to_all_data() -> None:
    model, x, y = linear()
    target = targeted(model, (x, y), known(), PRECISION, 1.0, "all", None)
    theta, g = target.joint.tangent.theta, torch.Generator().manual_seed(0)
    objective = Objective(target, MeanField(theta, torch.full_like(theta, 1e-9), Family.of("normal")), 7, {}, True)
    with torch.no_grad():
        fits = torch.stack([objective.fit(theta, g) for _ in range(400)])
        exact = target.joint(theta) - target.joint.prior.log_density(theta)
    assert abs(float(fits.mean() - exact)) < 4.5 * float(fits.std()) / 400**0.5


def test_any_family_by_its_inverse_cdf_finds_the_scale_that_quadrature_finds() -> None:
    x, y = torch.zeros(1, 1).double(), torch.ones(1, 1).double()
    model = nn.Linear(1, 1, bias=True).double()  # the input is 0: the weight's posterior is its prior
    logistic = (torch.logit, lambda e: -e - 2 * torch.nn.functional.softplus(-e))
    q = lw.variational.mean_field(
        model, (x, y), known(), prior=PRECISION, family=logistic, steps=800, lr=0.03
    ).posterior
    best = (3 / (math.pi**2 * PRECISION)) ** 0.5  # E θ² = s² π²/3:  argmax log s − ½ λ s² π²/3
    torch.testing.assert_close(q.deviation[0], torch.tensor(best).double(), rtol=0.08, atol=0)


@pytest.mark.parametrize(
    "prior", [lw.priors.StudentT(), lw.priors.Horseshoe(), lw.priors.Hierarchical(), lw.priors.Laplace()]
)
def test_any_proper_prior_has_a_sampled_kl(prior: Any) -> None:
    model, x, y = linear()
    for kl in ("auto", "sampled"):
        post = lw.variational.mean_field(model, (x, y), known(), prior=prior, steps=20, kl=kl)
        assert bool(torch.isfinite(post.diagnostics.elbo))
    with pytest.raises(Unsupported, match="use kl='sampled'"):
        lw.variational.mean_field(model, (x, y), known(), prior=prior, steps=20, kl="closed")


def test_a_laplace_is_a_start_and_a_temperature_narrows() -> None:
    model, x, y = linear()
    la, P = lw.laplace(model, (x, y), known(), prior=PRECISION), truth(model, x, y)[0]

    def run(**told: Any) -> Any:
        return lw.variational.mean_field(model, (x, y), known(), prior=PRECISION, **told)

    for t in (1.0, 0.25):  # a Laplace has the diagonal that the best q of a linear model has
        warm = run(steps=1, lr=1e-9, temperature=t, start=la).posterior
        torch.testing.assert_close(warm.deviation, t**0.5 * P.diagonal().rsqrt())
    cold = run(steps=500, lr=0.01, temperature=0.25, start=la)
    torch.testing.assert_close(cold.posterior.deviation, 0.5 * P.diagonal().rsqrt(), rtol=0.06, atol=0)
    assert "at temperature 0.25" in repr(cold)
    again = run(steps=1, lr=1e-9, start=cold).posterior
    torch.testing.assert_close(again.mean, cold.posterior.mean)
    torch.testing.assert_close(again.deviation, cold.posterior.deviation)


def test_it_keeps_the_laws_of_posteriors_files_and_comparisons(tmp_path) -> None:  # type: ignore[no-untyped-def]
    model, x, y = linear()
    post = lw.variational.layerwise(model, (x, y), known(), rank=2, steps=50)
    lw.testing.check_posterior(post.posterior, x)
    post.save(tmp_path / "q.safetensors")
    again = lw.load(tmp_path / "q.safetensors", model)
    assert torch.equal(again.predict(x).mean, post.predict(x).mean)
    assert torch.equal(again.diagnostics.elbo, post.diagnostics.elbo)
    assert repr(post).startswith("Fitted(gaussian; 64 draws by layerwise rank-2 variational inference")
    table = lw.compare({"vi": post, "laplace": lw.laplace(model, (x, y), known())}, data=(x, y))
    assert table["vi"].nll is not None
    same = lw.variational.layerwise(model, (x, y), known(), rank=2, steps=50)
    assert torch.equal(same.posterior.weights, post.posterior.weights)


def test_bad_input_is_named() -> None:
    model, x, y = linear()

    def run(likelihood: Any = None, **told: Any) -> Any:
        return lw.variational.mean_field(model, (x, y), likelihood or known(), **{"steps": 3, **told})

    with pytest.raises(Unsupported, match="Jeffreys is improper"):
        run(prior=lw.priors.Jeffreys())
    with pytest.raises(Unsupported, match="have no gradient"):
        run(prior=lw.priors.Bernoulli())
    with pytest.raises(Unsupported, match="noise fixed"):
        run(likelihood=lw.likelihoods.Gaussian(noise=lw.priors.Gamma(0.5, 1.0)))
    with pytest.raises(InvalidValue, match="family is"):
        run(family="cauchy")
    with pytest.raises(InvalidValue, match="not that of its inverse CDF"):
        run(family=(torch.logit, lambda e: -e))
    with pytest.raises(InvalidValue, match="start is"):
        run(start="prior")
    with pytest.raises(InvalidValue, match="start is"):
        run(start=lw.ensembles.deep([model], known()))
    with pytest.raises(InvalidValue, match="fit of other parameters"):
        run(start=lw.laplace(model, (x, y), known(), subset=["weight"]))
    with pytest.raises(InvalidValue, match="kl is"):
        run(kl="exact")
    with pytest.raises(InvalidValue, match="temperature"):
        run(temperature=0.0)
    with pytest.raises(NotConverged, match="diverged at step"):
        run(lr=1e4, steps=50)
