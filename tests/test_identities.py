"""The identities that an exact Laplace approximation must satisfy, on the public API, in float64 at 1e-8.

The oracle is written out in dense linear algebra from Jacobians by plain autograd, one output at a time:

    G = Σ_n J_nᵀ Λ_n J_n,   Σ = (G + A)⁻¹,   log Z = log p(D|θ*) − ½‖θ* − m‖²_A − ½(log|G + A| − log|A|)
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, MultivariateNormal, Normal

import lapwing as lw
from helpers import backward_rows, close, draw
from lapwing.evidence import log_det_ratio

SEEDS = (0, 1)
FORMS = ("primal", "dual")
LIKELIHOODS = ("gaussian", "gaussian per output", "categorical", "bernoulli")
PRIORS = ("scalar", "layerwise", "glob", "unit", "weight", "mean", "means")


def seeded(*choices: Iterable) -> list[tuple]:
    """Every combination, each with a seed of its own."""
    return [(seed, *case) for seed, case in enumerate(itertools.product(*choices))]


# -- models, data, priors, likelihoods ---------------------------------------------------------------------------


class Features(nn.Module):
    """Linear in its parameters: f = a(x) + b(sin(2x) restricted), x (n, 3), f (n, 2); p = 8 + 4."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 2)
        self.b = nn.Linear(2, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(torch.sin(2 * x[:, :2]))


class Sequence(nn.Module):
    """Positions that see each other: x (n, 3, 2) -> (n, 3, 4); p = 15 + 16."""

    def __init__(self, outputs: int = 4) -> None:
        super().__init__()
        self.inside = nn.Linear(2, 5)
        self.head = nn.Linear(5, outputs, bias=False)
        self.gain = nn.Parameter(torch.ones(3, 1))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inside(x))
        return self.gain * self.head(h + h.mean(1, keepdim=True))


def mlp(outputs: int = 2) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


def likelihood_and_targets(kind: str, shape: tuple[int, ...]) -> tuple[lw.likelihoods.Likelihood, Tensor]:
    if kind == "gaussian":
        return lw.likelihoods.Gaussian(0.3), draw(*shape)
    if kind == "gaussian per output":
        noise = torch.linspace(0.3, 0.8, shape[-1], dtype=torch.float64)
        return lw.likelihoods.Gaussian(noise), draw(*shape)
    if kind == "categorical":
        return lw.likelihoods.Categorical(), torch.randint(shape[-1], shape[:-1])
    return lw.likelihoods.Bernoulli(), torch.randint(2, shape)


def prior_of(kind: str, model: nn.Module):
    """What a user passes as prior=, and its precision and mean written out per weight, (p,) each."""
    shapes = {n: p.shape for n, p in model.named_parameters()}
    sizes = {n: s.numel() for n, s in shapes.items()}
    p = sum(sizes.values())
    zero = torch.zeros(p, dtype=torch.float64)
    if kind == "scalar":
        return 0.7, zero + 0.7, zero
    if kind == "layerwise":
        layers = list(dict.fromkeys(n.rpartition(".")[0] for n in shapes))
        values = torch.rand(len(layers), dtype=torch.float64) + 0.5
        each = [values[layers.index(n.rpartition(".")[0])].expand(k) for n, k in sizes.items()]
        return lw.priors.Gaussian(values, per="layer"), torch.cat(each), zero
    if kind == "glob":
        each = [torch.full((k,), 2.0 if n.endswith("weight") else 0.4, dtype=torch.float64) for n, k in sizes.items()]
        patterns = {"*weight": 2.0}
        if any(not n.endswith("weight") for n in sizes):
            patterns["*[!t]"] = 0.4
        return patterns, torch.cat(each), zero
    if kind == "unit":
        values, each, start = [], [], {}
        for name, shape in shapes.items():
            key = name.rpartition(".")[0], shape[0]
            if key not in start:
                start[key] = len(values)
                values += (torch.rand(shape[0]).double() + 0.5).tolist()
            mine = torch.tensor(values[start[key] : start[key] + shape[0]], dtype=torch.float64)
            each.append(mine.repeat_interleave(shape.numel() // shape[0]))
        return lw.priors.Gaussian(torch.tensor(values, dtype=torch.float64), per="unit"), torch.cat(each), zero
    if kind == "weight":
        values = torch.rand(p, dtype=torch.float64) + 0.5
        return lw.priors.Gaussian(values, per="weight"), values, zero
    if kind == "mean":
        return lw.priors.Gaussian(0.7, mean=0.25), zero + 0.7, zero + 0.25
    mean = {n: draw(*s) for n, s in shapes.items()}
    return lw.priors.Gaussian(0.7, mean=mean), zero + 0.7, torch.cat([m.reshape(-1) for m in mean.values()])


# -- the oracle --------------------------------------------------------------------------------------------------


def theta_of(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def jacobian(model: nn.Module, x: Tensor) -> Tensor:
    """(n, q·c, p): every output of an example, positions first, by one reverse pass each."""
    return backward_rows(model(x).flatten(1), model.parameters())


def distribution(likelihood: lw.likelihoods.Likelihood, f: Tensor):
    """torch's own distribution of y given f."""
    if isinstance(likelihood, lw.likelihoods.Gaussian):
        return Normal(f, likelihood.noise.expand(f.shape[-1]))
    return Categorical(logits=f) if likelihood.name == "categorical" else Bernoulli(logits=f)


def log_likelihood(likelihood: lw.likelihoods.Likelihood, f: Tensor, y: Tensor) -> Tensor:
    y = y if likelihood.name == "categorical" else y.to(f)
    return distribution(likelihood, f).log_prob(y).sum()


def output_hessian(likelihood: lw.likelihoods.Likelihood, f: Tensor, y: Tensor) -> Tensor:
    """Λ of one example, (q·c, q·c), by differentiating torch's log-density twice."""
    loss = lambda flat: -log_likelihood(likelihood, flat.reshape(f.shape), y)  # noqa: E731
    return torch.autograd.functional.hessian(loss, f.detach().reshape(-1))


def ggn(model: nn.Module, x: Tensor, y: Tensor, likelihood: lw.likelihoods.Likelihood) -> Tensor:
    f, J = model(x).detach(), jacobian(model, x)
    blocks = [J[i].mT @ output_hessian(likelihood, f[i], y[i]) @ J[i] for i in range(len(x))]
    return torch.stack(blocks).sum(0)


def empirical_fisher(model: nn.Module, x: Tensor, y: Tensor, likelihood: lw.likelihoods.Likelihood) -> Tensor:
    params, total = list(model.parameters()), 0.0
    for i in range(len(x)):
        grads = torch.autograd.grad(log_likelihood(likelihood, model(x[i : i + 1]), y[i : i + 1]), params)
        g = torch.cat([g.reshape(-1) for g in grads])
        total = total + torch.outer(g, g)
    return total


def dense_evidence(fit: Tensor, away: Tensor, a: Tensor, G: Tensor) -> Tensor:
    ratio = torch.linalg.slogdet(G + a.diag())[1] - a.log().sum()
    return fit - 0.5 * (a * away.square()).sum() - 0.5 * ratio


def curvature_of(la: lw.Laplace) -> Tensor:
    """G as Lapwing has it, (p, p)."""
    return lw.operators.linalg.to_dense(la.posterior.precision) - la.prior.operator().dense().diag()


def covariance_of(la: lw.Laplace) -> Tensor:
    """Σ as Lapwing has it, (p, p)."""
    p = la.state.layout.size
    return la.posterior.covariance(torch.eye(p, dtype=torch.float64).unsqueeze(0))[0]


# -- 1: Bayesian linear regression -------------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "form", "noise", "kind"), seeded(FORMS, [0.3, (0.3, 0.7)], PRIORS))
def test_a_linear_model_with_gaussian_noise_is_bayesian_linear_regression(
    seed: int, form: str, noise: float | tuple[float, float], kind: str
) -> None:
    torch.manual_seed(seed)
    model = Features().double()
    x, y, new = draw(5, 3), draw(5, 2), draw(4, 3)
    prior, a, m = prior_of(kind, model)
    sigma = torch.tensor(noise, dtype=torch.float64)
    each = sigma.expand(2).repeat(5)  # (nc,)
    J = jacobian(model, x).flatten(0, 1)
    precision = J.mT @ (J / each.square()[:, None]) + a.diag()
    posterior_mean = torch.linalg.solve(precision, J.mT @ (y.reshape(-1) / each.square()) + a * m)
    with torch.no_grad():
        nn.utils.vector_to_parameters(posterior_mean, model.parameters())  # the trained weights: the MAP

    likelihood = lw.likelihoods.Gaussian(noise)  # floats, as a user writes them: 0.3 is float64's 0.3
    la = lw.laplace(model, (x, y), likelihood, structure=lw.curvature.Full(form), prior=prior)
    prediction, together = la.predict(new), la.predict(new, joint=True)

    close(la.posterior.mean, posterior_mean)
    close(covariance_of(la), torch.linalg.inv(precision))
    marginal = MultivariateNormal(J @ m, each.square().diag() + J / a @ J.mT)
    close(la.log_evidence(), marginal.log_prob(y.reshape(-1)))
    J_new = jacobian(model, new)
    close(prediction.f_mean, (J_new @ posterior_mean))
    close(prediction.covariance, J_new @ torch.linalg.inv(precision) @ J_new.mT)
    close(prediction.total, prediction.f_var + sigma.square())
    stacked = J_new.flatten(0, 1)
    close(together.covariance.reshape(8, 8), stacked @ torch.linalg.inv(precision) @ stacked.mT)


# -- 2: primal and dual ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "kind", "prior"), seeded(LIKELIHOODS, PRIORS))
def test_primal_and_dual_agree_with_the_dense_oracle(seed: int, kind: str, prior: str) -> None:
    torch.manual_seed(seed)
    n = (5, 20)[seed % 2]  # NC = 10 < P = 26 < NC = 40
    model, x, new = mlp(), draw(n, 3), draw(3, 3)
    likelihood, y = likelihood_and_targets(kind, (n, 2))
    given, a, m = prior_of(prior, model)
    fits = {
        form: lw.laplace(model, (x, y), likelihood, structure=lw.curvature.Full(form), prior=given) for form in FORMS
    }

    G, theta = ggn(model, x, y, likelihood), theta_of(model)
    evidence = dense_evidence(log_likelihood(likelihood, model(x), y).detach(), theta - m, a, G)
    sigma, J = torch.linalg.inv(G + a.diag()), jacobian(model, new)
    stacked = J.flatten(0, 1)
    for la in fits.values():
        close(curvature_of(la), G)
        close(la.log_evidence(), evidence)
        close(la.predict(new).covariance, J @ sigma @ J.mT)
        close(la.predict(new, joint=True).covariance.reshape(6, 6), stacked @ sigma @ stacked.mT)
    close(fits["primal"].effective_dimension(), fits["dual"].effective_dimension())
    close(log_det_ratio(fits["primal"].state, fits["primal"].prior, likelihood), evidence_ratio(G, a))
    close(log_det_ratio(fits["dual"].state, fits["dual"].prior, likelihood), evidence_ratio(G, a))


def evidence_ratio(G: Tensor, a: Tensor) -> Tensor:
    return torch.linalg.slogdet(G + a.diag())[1] - a.log().sum()


def test_full_takes_the_smaller_of_primal_and_dual() -> None:
    model = mlp()
    few, many = (lw.laplace(model, (draw(n, 3), draw(n, 2)), "gaussian", structure="full") for n in (5, 20))
    assert "dual" in repr(few)
    assert "primal" in repr(many)
    assert few.state.holds_data
    assert not many.state.holds_data


@pytest.mark.filterwarnings("ignore:tuning stopped at a bound")
@pytest.mark.parametrize("prior", ["scalar", "layerwise", "weight"])
@pytest.mark.parametrize("kind", ["gaussian per output", "categorical"])
@pytest.mark.parametrize("method", ["evidence", "mackay"])
def test_primal_and_dual_tune_to_the_same_hyperparameters(prior: str, kind: str, method: str) -> None:
    torch.manual_seed(3)
    model, x = mlp(), draw(9, 3)
    likelihood, y = likelihood_and_targets(kind, (9, 2))
    given = prior_of(prior, model)[0]
    primal, dual = (
        lw.laplace(model, (x, y), likelihood, structure=lw.curvature.Full(form), prior=given).tuned(
            method, center="map"
        )
        for form in FORMS
    )
    close(primal.log_evidence(), dual.log_evidence(), 1e-7)
    close(primal.prior.precision.log(), dual.prior.precision.log(), 1e-5)
    for name, value in primal.likelihood.hyperparameters.items():
        close(value, dual.likelihood.hyperparameters[name], 1e-6)
    assert primal.tuning.at_bound == dual.tuning.at_bound


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["gaussian per output", "categorical"])
def test_draws_have_the_posterior_covariance(form: str, kind: str) -> None:
    torch.manual_seed(4)
    model, x = mlp(), draw(6, 3)
    likelihood, y = likelihood_and_targets(kind, (6, 2))
    prior, a, _ = prior_of("weight", model)
    la = lw.laplace(model, (x, y), likelihood, structure=lw.curvature.Full(form), prior=prior)
    sigma = torch.linalg.inv(ggn(model, x, y, likelihood) + a.diag())
    n = 40_000
    draws = la.posterior.draw(n, torch.Generator().manual_seed(1)) - theta_of(model)
    variance = sigma.diagonal()
    error = (2 * sigma.square() + variance.outer(variance)).sqrt() / math.sqrt(n)
    assert ((draws.mT @ draws / n - sigma).abs() < 5 * error).all()
    assert (draws.mean(0).abs() < 5 * (variance / n).sqrt()).all()


@pytest.mark.parametrize(
    ("kind", "prior"), [("gaussian", "scalar"), ("gaussian per output", "layerwise"), ("categorical", "weight")]
)
def test_a_dual_that_streams_its_rows_equals_one_that_holds_them(kind: str, prior: str) -> None:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 5)).double()  # p = 245
    x, new = draw(12, 6), draw(3, 6)  # 60 rows of 245 float64: 118 kB
    likelihood, y = likelihood_and_targets(kind, (12, 5))
    given = prior_of(prior, model)[0]
    dual = lw.curvature.Full("dual")
    tiny = lw.curvature.Full("dual", memory_budget=2**16)
    held = lw.laplace(model, (x, y), likelihood, structure=dual, prior=given)
    streamed = lw.laplace(model, (x, y), likelihood, structure=tiny, prior=given, memory_budget=2**16)
    assert held.posterior.precision.rows.held
    assert not streamed.posterior.precision.rows.held

    close(streamed.log_evidence(), held.log_evidence())
    close(streamed.predict(new).covariance, held.predict(new).covariance)
    close(streamed.predict(new, joint=True).covariance, held.predict(new, joint=True).covariance)
    close(streamed.posterior.draw(3), held.posterior.draw(3))
    close(covariance_of(streamed), covariance_of(held))
    if prior == "weight":  # a Gram matrix a weight cannot be kept: the error says what to do
        with pytest.raises(lw.errors.Unsupported, match="memory_budget"):
            streamed.tuned(center="map")
        return
    close(streamed.effective_dimension(), held.effective_dimension())
    close(streamed.tuned(center="map").prior.precision, held.tuned(center="map").prior.precision, 1e-6)


# -- 2 and 7: the effective dimension ----------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "n", "kind"), seeded([4, 20], LIKELIHOODS))
def test_effective_dimension_is_the_same_by_three_routes(seed: int, n: int, kind: str) -> None:
    torch.manual_seed(seed)
    model, x = mlp(), draw(n, 3)
    likelihood, y = likelihood_and_targets(kind, (n, 2))
    prior, a, _ = prior_of("layerwise", model)
    G, f, J = ggn(model, x, y, likelihood), model(x).detach(), jacobian(model, x)
    sigma = torch.linalg.inv(G + a.diag())
    roots = [psd_root(output_hessian(likelihood, f[i], y[i])).mT @ J[i] for i in range(n)]
    R = torch.cat(roots)  # SᵀJ
    K = R / a @ R.mT
    first = (G @ sigma).diagonal()
    second = 1 - a * sigma.diagonal()
    third = torch.linalg.solve(torch.eye(len(K), dtype=K.dtype) + K, K).trace()
    close(first, second)
    close(first.sum(), third)
    by_layer = torch.stack([first[:16].sum(), first[16:].sum()])
    for form in FORMS:
        la = lw.laplace(model, (x, y), likelihood, structure=lw.curvature.Full(form), prior=prior)
        close(la.effective_dimension(), by_layer)
    diag = lw.laplace(model, (x, y), likelihood, structure="diag", prior=prior)
    h = G.diagonal()
    close(diag.effective_dimension(), torch.stack([(h / (h + a))[:16].sum(), (h / (h + a))[16:].sum()]))


def psd_root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors * values.clamp(min=0).sqrt()


@pytest.mark.parametrize("kind", LIKELIHOODS)
@pytest.mark.parametrize("structure", ["primal", "dual", "diag"])
def test_effective_dimension_is_bounded_and_falls_with_the_prior_precision(kind: str, structure: str) -> None:
    for seed, n in enumerate((3, 20)):
        torch.manual_seed(seed)
        model, x = mlp(), draw(n, 3)
        likelihood, y = likelihood_and_targets(kind, (n, 2))
        la = lw.laplace(model, (x, y), likelihood, structure=structure_of(structure))
        gammas = [float(la.replace(prior=10.0**e).effective_dimension()) for e in range(-4, 5)]
        most = 26 if structure == "diag" else min(26, 2 * n)
        assert all(0 <= g <= most + 1e-8 for g in gammas)
        assert all(later < earlier for earlier, later in itertools.pairwise(gammas))


def structure_of(name: str):
    return lw.curvature.Full(name) if name in FORMS else name


# -- 8: bounds on log-determinants -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_log_determinants_grow_from_full_to_block_to_diagonal(kind: str) -> None:
    for seed in SEEDS:
        torch.manual_seed(seed)
        model, x = mlp(), draw(8, 3)
        likelihood, y = likelihood_and_targets(kind, (8, 2))
        prior, a, _ = prior_of("weight", model)
        full, block, diag = (
            lw.laplace(model, (x, y), likelihood, structure=s, prior=prior) for s in ("full", "block", "diag")
        )
        G = ggn(model, x, y, likelihood)
        layers = torch.block_diag(G[:16, :16], G[16:, 16:])  # a layer's weight and bias together
        ratios = [log_det_ratio(la.state, la.prior, likelihood) for la in (full, block, diag)]
        for ratio, matrix in zip(ratios, (G, layers, G.diagonal().diag()), strict=True):
            close(ratio, evidence_ratio(matrix, a))
        assert ratios[0] < ratios[1] - 1e-3
        assert ratios[1] < ratios[2] - 1e-3
        for la, ratio in ((block, ratios[1]), (diag, ratios[2])):  # so block and diagonal evidences are lower bounds
            close(full.log_evidence() - la.log_evidence(), 0.5 * (ratio - ratios[0]))


@pytest.mark.parametrize("kind", LIKELIHOODS)
@pytest.mark.parametrize("structure", ["primal", "dual", "diag"])
def test_merging_data_blocks_lowers_the_sum_of_their_log_determinants(kind: str, structure: str) -> None:
    for seed in SEEDS:
        torch.manual_seed(seed)
        model, x = mlp(), draw(9, 3)
        likelihood, y = likelihood_and_targets(kind, (9, 2))
        whole, a, b = (
            log_det_ratio(la.state, la.prior, likelihood)
            for la in (
                lw.laplace(model, (x[i], y[i]), likelihood, structure=structure_of(structure))
                for i in (slice(None), slice(4), slice(4, None))
            )
        )
        assert whole < a + b - 1e-3
        assert whole > max(a, b)


# -- 11: factors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_the_exact_factor_is_the_fisher_of_the_model(kind: str) -> None:
    """G = Σ_n E_{y ~ p(·|f_n)}[∇log p ∇log pᵀ]; the expectation enumerated, or by Gauss-Hermite nodes."""
    for seed in SEEDS:
        torch.manual_seed(seed)
        model, x = mlp(), draw(5, 3)
        likelihood, y = likelihood_and_targets(kind, (5, 2))
        la = lw.laplace(model, (x, y), likelihood, structure=lw.curvature.Full("primal"), factor="exact")
        fisher = torch.zeros(26, 26, dtype=torch.float64)
        for outcome, probability in outcomes(likelihood, model(x).detach()):
            fisher += empirical_fisher_weighted(model, x, outcome, likelihood, probability)
        close(curvature_of(la), fisher)


def outcomes(likelihood: lw.likelihoods.Likelihood, f: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Targets y for all examples at once, with the probability of each example's, (n,)."""
    n, c = f.shape
    if likelihood.name == "categorical":
        return [(torch.full((n,), k), Categorical(logits=f).probs[:, k]) for k in range(c)]
    if likelihood.name == "bernoulli":
        every = [torch.tensor(bits, dtype=f.dtype).expand(n, c) for bits in itertools.product((0, 1), repeat=c)]
        return [(y, Bernoulli(logits=f).log_prob(y).sum(-1).exp()) for y in every]
    # the score's outer product is a polynomial of degree 2 in y: three nodes an output integrate it exactly
    nodes, weights = [-math.sqrt(3), 0.0, math.sqrt(3)], [1 / 6, 2 / 3, 1 / 6]
    sigma = likelihood.noise.expand(c)
    out = []
    for index in itertools.product(range(3), repeat=c):
        z = torch.tensor([nodes[i] for i in index], dtype=f.dtype)
        out.append((f + sigma * z, torch.full((n,), math.prod(weights[i] for i in index), dtype=f.dtype)))
    return out


def empirical_fisher_weighted(
    model: nn.Module, x: Tensor, y: Tensor, likelihood: lw.likelihoods.Likelihood, weight: Tensor
) -> Tensor:
    each = [empirical_fisher(model, x[i : i + 1], y[i : i + 1], likelihood) for i in range(len(x))]
    return torch.einsum("n,nab->ab", weight, torch.stack(each))


@pytest.mark.parametrize("kind", ["gaussian", "categorical", "bernoulli"])
@pytest.mark.parametrize("structure", ["primal", "dual", "diag"])
@pytest.mark.parametrize("factor", ["exact", "empirical"])
def test_a_factor_equals_dense_autograd(kind: str, structure: str, factor: str) -> None:
    for seed in SEEDS:
        torch.manual_seed(seed)
        model, x = mlp(), draw(7, 3)
        likelihood, y = likelihood_and_targets(kind, (7, 2))
        la = lw.laplace(model, (x, y), likelihood, structure=structure_of(structure), factor=factor)
        oracle = {"exact": ggn, "empirical": empirical_fisher}[factor](model, x, y, likelihood)
        close(curvature_of(la), oracle.diagonal().diag() if structure == "diag" else oracle)


@pytest.mark.parametrize(
    ("kind", "structure"),
    [("gaussian", "primal"), ("gaussian", "diag"), ("categorical", "dual"), ("bernoulli", "diag")],
)
def test_the_monte_carlo_factor_is_unbiased_and_converges_as_one_over_root_samples(kind: str, structure: str) -> None:
    torch.manual_seed(6)
    model, x = mlp(), draw(7, 3)
    likelihood, y = likelihood_and_targets(kind, (7, 2))
    exact = ggn(model, x, y, likelihood)
    exact = exact.diagonal().diag() if structure == "diag" else exact

    def errors(samples: int) -> Tensor:
        factor = lw.curvature.Factor("monte_carlo", samples)
        return torch.stack(
            [
                curvature_of(
                    lw.laplace(
                        model,
                        (x, y),
                        likelihood,
                        structure=structure_of(structure),
                        factor=factor,
                        generator=torch.Generator().manual_seed(seed),
                    )
                )
                - exact
                for seed in range(16)
            ]
        )

    few, many = errors(1), errors(16)
    z = few.mean(0) / (few.std(0) / math.sqrt(len(few))).clamp(min=1e-12)
    assert (z.abs() < 6).all()  # unbiased
    ratio = float(few.square().sum().sqrt() / many.square().sum().sqrt())
    assert 4 / 1.5 < ratio < 4 * 1.5  # √(16/1)


def test_the_empirical_factor_under_another_noise_equals_a_new_fit() -> None:
    torch.manual_seed(0)
    model, data = mlp(), (draw(7, 3), draw(7, 2))
    for factor, structure in itertools.product(("exact", "empirical", "hessian"), ("full", "diag")):
        if factor == "hessian" and structure == "diag":
            continue
        fits = [
            lw.laplace(model, data, lw.likelihoods.Gaussian(s), structure=structure, factor=factor, prior=400.0)
            for s in (0.3, 1.1)
        ]
        close(fits[0].replace(likelihood=lw.likelihoods.Gaussian(1.1)).log_evidence(), fits[1].log_evidence())


def test_curvature_kept_per_output_serves_one_noise_for_all() -> None:
    torch.manual_seed(0)
    model, data, new = mlp(), (draw(7, 3), draw(7, 2)), draw(3, 3)
    fine = lw.likelihoods.Gaussian(torch.tensor([0.3, 0.8]))
    for structure in ("primal", "dual", "diag"):
        la = lw.laplace(model, data, fine, structure=structure_of(structure))
        coarse = lw.laplace(model, data, lw.likelihoods.Gaussian(0.5), structure=structure_of(structure))
        one = la.replace(likelihood=lw.likelihoods.Gaussian(0.5))
        close(one.log_evidence(), coarse.log_evidence())
        close(one.predict(new).total, coarse.predict(new).total)


# -- outputs with positions --------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["primal", "dual", "diag"])
@pytest.mark.parametrize(
    ("kind", "factor"),  # an empirical factor mixes outputs, so it refuses noise per output
    [c for c in itertools.product(LIKELIHOODS, ["exact", "empirical"]) if c != ("gaussian per output", "empirical")],
)
def test_outputs_with_positions_equal_the_dense_oracle(kind: str, structure: str, factor: str) -> None:
    torch.manual_seed(7)
    model, x, new = Sequence().double(), draw(5, 3, 2), draw(2, 3, 2)
    with torch.no_grad():
        model.gain.copy_(draw(3, 1))
    likelihood, y = likelihood_and_targets(kind, (5, 3, 4))
    la = lw.laplace(model, (x, y), likelihood, structure=structure_of(structure), factor=factor)

    G = {"exact": ggn, "empirical": empirical_fisher}[factor](model, x, y, likelihood)
    G = G.diagonal().diag() if structure == "diag" else G
    a = torch.ones(len(G), dtype=torch.float64)
    close(curvature_of(la), G)
    fit = log_likelihood(likelihood, model(x), y).detach()
    close(la.log_evidence(), dense_evidence(fit, theta_of(model), a, G))
    J = jacobian(model, new).reshape(2, 3, 4, -1)
    prediction = la.predict(new)
    close(prediction.covariance, J @ torch.linalg.inv(G + a.diag()) @ J.mT)
    assert prediction.mean.shape == prediction.total.shape == (2, 3, 4)
    close(prediction.total, prediction.epistemic + prediction.aleatoric)


# -- the true Hessian --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LIKELIHOODS)
@pytest.mark.parametrize("shape", [(6, 3), (4, 3, 2)])
def test_the_hessian_factor_is_the_hessian_of_the_negative_log_likelihood(kind: str, shape: tuple[int, ...]) -> None:
    for seed in SEEDS:
        torch.manual_seed(seed)
        model = mlp() if len(shape) == 2 else Sequence(2).double()
        x = draw(*shape)
        likelihood, y = likelihood_and_targets(kind, (*shape[:-1], 2))
        hessian = true_hessian(model, x, y, likelihood)
        prior = 10.0 + float(torch.linalg.eigvalsh(hessian)[0].abs())
        la = lw.laplace(model, (x, y), likelihood, structure="full", factor="hessian", prior=prior)
        close(curvature_of(la), hessian)
        a = torch.full((len(hessian),), prior, dtype=torch.float64)
        fit = log_likelihood(likelihood, model(x), y).detach()
        close(la.log_evidence(), dense_evidence(fit, theta_of(model), a, hessian))
        J = jacobian(model, x[:2])
        sigma = J @ torch.linalg.inv(hessian + a.diag()) @ J.mT
        covariance = la.predict(x[:2]).covariance
        blocks = [sigma[:, 2 * q : 2 * q + 2, 2 * q : 2 * q + 2] for q in range(J.shape[1] // 2)]
        close(covariance, torch.stack(blocks, 1).reshape(covariance.shape))


def true_hessian(model: nn.Module, x: Tensor, y: Tensor, likelihood: lw.likelihoods.Likelihood) -> Tensor:
    shapes = {n: p.shape for n, p in model.named_parameters()}

    def loss(theta: Tensor) -> Tensor:
        parts = theta.split([s.numel() for s in shapes.values()])
        params = {n: part.reshape(s) for (n, s), part in zip(shapes.items(), parts, strict=True)}
        return -unchecked_log_likelihood(likelihood, torch.func.functional_call(model, params, (x,)), y)

    return torch.func.hessian(loss)(theta_of(model))


def unchecked_log_likelihood(likelihood: lw.likelihoods.Likelihood, f: Tensor, y: Tensor) -> Tensor:
    """As log_likelihood, without the value checks that torch.func cannot trace."""
    if likelihood.name == "categorical":
        return -nn.functional.cross_entropy(f.flatten(0, -2), y.flatten(), reduction="sum")
    if likelihood.name == "bernoulli":
        return -nn.functional.binary_cross_entropy_with_logits(f, y.to(f), reduction="sum")
    noise = likelihood.noise.expand(f.shape[-1])
    return -(0.5 * ((y - f) / noise).square() + noise.log()).sum()


@pytest.mark.parametrize("seed", SEEDS)
def test_an_indefinite_hessian_is_an_error_that_names_the_least_eigenvalue(seed: int) -> None:
    torch.manual_seed(seed)
    model, x, y = mlp(), draw(6, 3), 5 * draw(6, 2)
    likelihood = lw.likelihoods.Gaussian(0.3)
    hessian = true_hessian(model, x, y, likelihood)
    least = float(torch.linalg.eigvalsh(hessian)[0]) + 0.01
    assert least < -1
    la = lw.laplace(model, (x, y), likelihood, factor="hessian", prior=0.01)
    for use in (la.log_evidence, lambda: la.predict(x), la.draw):
        with pytest.raises(lw.errors.NotPositiveDefinite) as caught:
            use()
        named = re.search(r"least eigenvalue is (\S+)\. ", str(caught.value))
        assert named is not None
        assert float(named[1]) == pytest.approx(least, rel=1e-5)
        assert "factor='exact'" in str(caught.value)
        assert "prior precision" in str(caught.value)
    assert torch.isfinite(la.replace(prior=1 - least).log_evidence())


# -- 15: subsets -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["primal", "dual", "diag"])
@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_a_full_mask_is_the_whole_network(structure: str, kind: str) -> None:
    torch.manual_seed(8)
    model, x, new = mlp(), draw(7, 3), draw(3, 3)
    likelihood, y = likelihood_and_targets(kind, (7, 2))
    mask = {n: torch.ones_like(p, dtype=torch.bool) for n, p in model.named_parameters()}
    whole, masked, globbed = (
        lw.laplace(model, (x, y), likelihood, structure=structure_of(structure), subset=subset, prior="layerwise")
        for subset in ("all", mask, ["*"])
    )
    for la in (masked, globbed):
        close(la.log_evidence(), whole.log_evidence(), 1e-12)
        close(la.predict(new).covariance, whole.predict(new).covariance, 1e-12)
        close(la.posterior.draw(2), whole.posterior.draw(2), 1e-12)


@pytest.mark.parametrize("structure", ["primal", "dual", "diag"])
def test_a_mask_takes_its_rows_and_columns_of_the_whole(structure: str) -> None:
    torch.manual_seed(9)
    model, x, y, new = mlp(), draw(7, 3), draw(7, 2), draw(3, 3)
    mask = {n: torch.rand(p.shape) < 0.5 for n, p in model.named_parameters() if n.endswith("weight")}
    mask["2.bias"] = torch.tensor([False, True])
    keep = torch.cat([mask.get(n, torch.zeros_like(p).bool()).reshape(-1) for n, p in model.named_parameters()])
    la = lw.laplace(model, (x, y), "gaussian", structure=structure_of(structure), subset=mask)
    G = ggn(model, x, y, lw.likelihoods.Gaussian())[keep][:, keep]
    G = G.diagonal().diag() if structure == "diag" else G
    close(curvature_of(la), G)
    J = jacobian(model, new)[..., keep]
    close(la.predict(new).covariance, J @ torch.linalg.inv(G + torch.eye(len(G))) @ J.mT)
    draws = la.draw(2)
    for name, p in model.named_parameters():
        if name in mask:  # outside the mask a draw is the trained weight
            close(draws[name][:, ~mask[name]], p.detach()[~mask[name]].expand(2, -1), 0.0)
        else:
            assert name not in draws
    assert la.coverage["0.bias"] == "frozen"


def test_the_last_layer_is_the_last_layer() -> None:
    torch.manual_seed(10)
    model, x, y = mlp(), draw(7, 3), draw(7, 2)
    traced, named = (lw.laplace(model, (x, y), "gaussian", subset=s) for s in ("last_layer", ["2.*"]))
    close(traced.log_evidence(), named.log_evidence(), 1e-12)
    assert traced.state.layout.names == ("2.weight", "2.bias")


# -- 19: adjoints, joint likelihoods, gradients ------------------------------------------------------------------


def test_jvp_and_vjp_are_adjoint() -> None:
    for seed in SEEDS:
        torch.manual_seed(seed)
        model, x = Sequence().double(), draw(5, 3, 2)
        tangent = lw.linearize(model)
        v = {n: draw(*p.shape) for n, p in model.named_parameters()}
        u = draw(5, 3, 4)
        pulled = tangent.vjp(x, u)
        close((u * tangent.jvp(x, v)).sum(), sum((pulled[n] * v[n]).sum() for n in v))
        close(tangent.jvp(x, v).reshape(5, -1), jacobian(model, x) @ torch.cat([t.reshape(-1) for t in v.values()]))


@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_without_epistemic_variance_the_joint_log_probability_is_a_sum(kind: str) -> None:
    torch.manual_seed(11)
    f = draw(5, 2)
    likelihood, y = likelihood_and_targets(kind, (5, 2))
    joint = lw.Prediction(likelihood, lw.outputs.Normal(f, torch.zeros(5, 2, 5, 2, dtype=torch.float64), joint=True))
    each = lw.Prediction(likelihood, lw.outputs.Normal(f, torch.zeros(5, 2, 2, dtype=torch.float64)))
    close(joint.log_prob(y), log_likelihood(likelihood, f, y))
    close(each.log_prob(y).sum(), log_likelihood(likelihood, f, y))


@pytest.mark.parametrize("structure", ["primal", "dual", "diag"])
@pytest.mark.parametrize("kind", ["gaussian", "gaussian per output", "categorical"])
@pytest.mark.parametrize("prior", ["scalar", "layerwise", "unit", "weight"])
def test_evidence_gradients_are_finite_differences(structure: str, kind: str, prior: str) -> None:
    torch.manual_seed(12)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    x = draw(8, 2)
    likelihood, y = likelihood_and_targets(kind, (8, 2))
    la = lw.laplace(model, (x, y), likelihood, structure=structure_of(structure), prior=prior_of(prior, model)[0])

    values = {"precision": la.prior.precision, **la.likelihood.hyperparameters}

    def evidence(logs: dict[str, Tensor]) -> Tensor:
        at = {k: v.exp() for k, v in logs.items()}
        prior = la.prior.replace(precision=at["precision"])
        return la.log_evidence(prior=prior, likelihood=likelihood.replace(**{k: at[k] for k in at if k == "noise"}))

    logs = {k: v.log().clone().requires_grad_() for k, v in values.items()}
    gradients = torch.autograd.grad(evidence(logs), list(logs.values()))
    for (name, log), gradient in zip(logs.items(), gradients, strict=True):
        flat, h = log.detach().reshape(-1), 1e-3
        for i in range(len(flat)):

            def at(step: float, name: str = name, flat: Tensor = flat, i: int = i, like: Tensor = log) -> Tensor:
                moved = flat.clone()
                moved[i] += step
                return evidence({**{k: v.detach() for k, v in logs.items()}, name: moved.reshape(like.shape)})

            slope = (8 * (at(h) - at(-h)) - (at(2 * h) - at(-2 * h))) / (12 * h)  # to h⁴
            close(gradient.reshape(-1)[i], slope)


def test_the_evidence_carries_a_gradient_only_where_a_hyperparameter_asks_for_one() -> None:
    model, data = mlp(), (draw(7, 3), draw(7, 2))
    la = lw.laplace(model, data, "gaussian")
    assert not la.log_evidence().requires_grad
    assert la.log_evidence().shape == ()
    assert la.log_evidence().dtype == torch.float64
    precision = torch.tensor(2.0, requires_grad=True)
    assert la.log_evidence(prior=precision).requires_grad
    assert la.log_evidence(likelihood=lw.likelihoods.Gaussian(precision)).requires_grad


# -- 20: softmax does not see a common shift ---------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["primal", "dual"])
@pytest.mark.parametrize("factor", ["exact", "empirical", "monte_carlo"])
def test_a_common_shift_of_the_logits_is_a_null_direction(structure: str, factor: str) -> None:
    for seed in SEEDS:
        torch.manual_seed(seed)
        model, x, y = mlp(4), draw(9, 3), torch.randint(4, (9,))
        la = lw.laplace(model, (x, y), "categorical", structure=structure_of(structure), factor=factor)
        shift = torch.zeros(la.state.layout.size, dtype=torch.float64)
        shift[-4:] = 1
        precision = la.posterior.precision
        close(lw.operators.linalg.mv(precision, shift), la.prior.operator().dense() * shift)
        close(la.posterior.covariance(shift.reshape(1, 1, -1)).squeeze(), torch.tensor(4.0, dtype=torch.float64))
