"""Gaussian priors with correlated weights: every use of one is that of its dense covariance."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from helpers import close, normal
from lapwing.errors import InvalidValue, Unsupported
from lapwing.operators import Dense, linalg, plus

NOISE = 0.4


def spd(n: int, seed: int) -> Tensor:
    a = torch.randn(n, n + 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return a @ a.mT / n + 0.2 * torch.eye(n, dtype=torch.float64)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()  # 16 + 10 weights


def images() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2)).double()


def problem(n: int = 20) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return network(), (normal(n, 3, seed=1), normal(n, 2, seed=2))


PRODUCTS = {"0.*": (spd(4, 1), spd(4, 2)), "2.*": (spd(2, 3), spd(5, 4))}
LAYERS = {"0.*": spd(16, 5), "2.weight": spd(8, 6)}
PARTLY = {"2.*": (spd(2, 3), spd(5, 4))}
JOINT = spd(26, 7)


def dense_covariance(covariance: Any, lam: float) -> Tensor:
    """Written out by hand for `network`, whose vector is W1 (4, 3), b1 (4), W2 (2, 4), b2 (2)."""
    C = torch.eye(26, dtype=torch.float64)
    if isinstance(covariance, Tensor):
        return covariance / lam
    at = {
        "0.*": [i for o in range(4) for i in (*range(3 * o, 3 * o + 3), 12 + o)],
        "2.*": [i for o in range(2) for i in (*range(16 + 4 * o, 20 + 4 * o), 24 + o)],
    }
    for name, c in covariance.items():
        if isinstance(c, Tensor):
            index = list(range(16)) if name == "0.*" else list(range(16, 24))
            block = c
        else:
            index, block = at[name], torch.kron(*c)
        C[torch.tensor(index).unsqueeze(1), torch.tensor(index)] = block
    return C / lam


def jacobian(net: nn.Module, x: Tensor) -> Tensor:
    f = net(x).reshape(-1)
    rows = [torch.autograd.grad(one, tuple(net.parameters()), retain_graph=True) for one in f]
    return torch.stack([torch.cat([g.reshape(-1) for g in row]) for row in rows])


# -- the density -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("covariance", [PRODUCTS, LAYERS, JOINT], ids=["products", "layers", "joint"])
def test_it_keeps_the_laws_of_priors(covariance: Any) -> None:
    net, data = problem()
    lw.testing.check_prior(lw.priors.Correlated(1.7, covariance=covariance, mean=0.3), net, data)


@pytest.mark.parametrize("covariance", [PRODUCTS, LAYERS, PARTLY, JOINT], ids=["products", "layers", "partly", "joint"])
def test_its_density_and_draws_are_those_of_the_dense_normal(covariance: Any) -> None:
    net, _ = problem()
    prior, C = lw.priors.Correlated(1.7, covariance=covariance, mean=0.3), dense_covariance(covariance, 1.7)
    theirs = torch.distributions.MultivariateNormal(torch.full((26,), 0.3).double(), C)
    theta = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    torch.testing.assert_close(-prior.penalty(net).detach(), theirs.log_prob(theta))
    bound = prior.bind(lw.linearize(net).layout)
    torch.testing.assert_close(linalg.to_dense(bound.operator()), torch.linalg.inv(C), rtol=1e-9, atol=1e-9)
    draws = bound.sample(40_000, torch.Generator().manual_seed(1))
    error = (draws.T.cov() - C).abs() / (C.diagonal().outer(C.diagonal()) + C.square()).sqrt()
    assert float(error.max()) < 5 / 200


# -- the posterior ---------------------------------------------------------------------------------------------------


HELD = {
    "primal, products": (lw.curvature.Full("primal"), PRODUCTS),
    "primal, joint": (lw.curvature.Full("primal"), JOINT),
    "dual, joint": (lw.curvature.Full("dual"), JOINT),
    "dual, layers": (lw.curvature.Full("dual"), LAYERS),
    "dual by ranges, partly": (lw.curvature.Full("dual", memory_budget=5_000), PARTLY),
    "lowrank, joint": (lw.curvature.LowRank(26), JOINT),
    "block, layers": ("block", LAYERS),
    "block, products": ("block", PRODUCTS),
    "kron, products": ("kron", PRODUCTS),
    "kron, partly": ("kron", PARTLY),
    "kron, bias apart": (lw.curvature.Kronecker(bias="apart"), PRODUCTS),
}


@pytest.mark.parametrize(("structure", "covariance"), HELD.values(), ids=HELD)
def test_the_posterior_is_that_of_dense_algebra(structure: Any, covariance: Any) -> None:
    net, (x, y) = problem()
    prior = lw.priors.Correlated(1.7, covariance=covariance, mean=0.1)
    likelihood = lw.likelihoods.Gaussian(NOISE)
    la = lw.laplace(net, (x, y), likelihood, structure=structure, prior=prior)
    # G as the structure has it, from the same structure under independent weights: no code of whitening
    G = linalg.to_dense(lw.laplace(net, (x, y), likelihood, structure=structure, prior=1.0).posterior.precision)
    G = G - torch.eye(26, dtype=torch.float64)
    C = dense_covariance(covariance, 1.7)
    M, theta = G + torch.linalg.inv(C), torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    new = normal(4, 3, seed=3)
    J = jacobian(net, new).reshape(4, 2, 26)
    expected = J @ torch.linalg.solve(M, J.mT)
    torch.testing.assert_close(la.predict(new).covariance, expected, rtol=1e-8, atol=1e-8)
    whole = J.reshape(8, 26)
    together = (whole @ torch.linalg.solve(M, whole.mT)).reshape(4, 2, 4, 2)
    torch.testing.assert_close(la.predict(new, joint=True).covariance, together, rtol=1e-8, atol=1e-8)
    fit = torch.distributions.Normal(net(x).detach(), NOISE).log_prob(y).sum()
    away = theta - 0.1
    price = 0.5 * away @ torch.linalg.solve(C, away)
    evidence = fit - price - 0.5 * (torch.logdet(M) + torch.logdet(C))
    torch.testing.assert_close(la.log_evidence(center="map"), evidence, rtol=1e-8, atol=1e-8)
    gamma = torch.trace(G @ torch.linalg.inv(M))
    torch.testing.assert_close(la.effective_dimension().sum(), gamma, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("covariance", [PRODUCTS, LAYERS, JOINT], ids=["products", "layers", "joint"])
def test_the_verbs_of_whitened_operators_are_dense_algebras(covariance: Any) -> None:
    net, _ = problem()
    prior = lw.priors.Correlated(1.7, covariance=covariance).bind(lw.linearize(net).layout)
    H, v, rows = spd(26, 11), normal(3, 26, seed=4), normal(5, 2, 26, seed=6)
    A = torch.linalg.inv(dense_covariance(covariance, 1.7))
    for op, M in [
        (prior.operator(), A),
        (plus(Dense(H), prior.operator()), H + A),
        (linalg.scale(plus(Dense(H), prior.operator()), torch.tensor(0.6, dtype=torch.float64)), 0.6 * (H + A)),
    ]:
        close(linalg.to_dense(op), M)
        close(linalg.diagonal(op), M.diagonal())
        close(linalg.mv(op, v), v @ M)
        close(linalg.solve(op, v), torch.linalg.solve(M, v.mT).mT)
        close(linalg.logdet(op), torch.logdet(M))
        close(linalg.covariance(op, rows), rows @ torch.linalg.solve(M, rows.mT))
        draws = linalg.draw(op, 20_000, torch.Generator().manual_seed(0))
        S = torch.linalg.inv(M)
        error = (draws.T.cov() - S).abs() / (S.diagonal().outer(S.diagonal()) + S.square()).sqrt()
        assert float(error.max()) < 5 / 20_000**0.5


def test_draws_have_the_posterior_covariance() -> None:
    net, data = problem()
    prior = lw.priors.Correlated(1.7, covariance=PRODUCTS)
    la = lw.laplace(net, data, lw.likelihoods.Gaussian(NOISE), structure="kron", prior=prior)
    draws = la.posterior.draw(40_000, torch.Generator().manual_seed(0))
    C = torch.linalg.inv(linalg.to_dense(la.posterior.precision))
    error = (draws.T.cov() - C).abs() / (C.diagonal().outer(C.diagonal()) + C.square()).sqrt()
    assert float(error.max()) < 5 / 200


def test_a_convolution_has_a_covariance_of_its_filters() -> None:
    """kron orders a filter's entries anew: it must be the same posterior as block, on a Kronecker curvature (n = 1, one
    position would be; here the dense form of kron's own curvature)."""
    net, x, y = images(), normal(6, 2, 3, 3, seed=1), normal(6, 2, seed=2)
    covariance = {"0.*": (spd(3, 1), spd(9, 2))}
    likelihood = lw.likelihoods.Gaussian(NOISE)
    la = lw.laplace(net, (x, y), likelihood, structure="kron", prior=lw.priors.Correlated(1.7, covariance=covariance))
    plain = lw.laplace(net, (x, y), likelihood, structure="kron", prior=1.0)
    p = la.tangent.layout.size
    C = torch.eye(p, dtype=torch.float64)
    index = torch.tensor([i for o in range(3) for i in (*range(8 * o, 8 * o + 8), 24 + o)])
    C[index.unsqueeze(1), index] = torch.kron(*covariance["0.*"])
    M = linalg.to_dense(plain.posterior.precision) - torch.eye(p).double() + 1.7 * torch.linalg.inv(C)
    torch.testing.assert_close(linalg.to_dense(la.posterior.precision), M, rtol=1e-8, atol=1e-8)
    J = jacobian(net, x[:2]).reshape(2, 2, p)
    expected = J @ torch.linalg.solve(M, J.mT)
    torch.testing.assert_close(la.predict(x[:2]).covariance, expected, rtol=1e-8, atol=1e-8)


# -- the tangent center and tuning -----------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", ["full", "kron", "block"])
def test_the_tangent_center_is_bayesian_linear_regression(structure: str) -> None:
    net, (x, y) = problem(40)
    la = lw.laplace(
        net,
        (x, y),
        lw.likelihoods.Gaussian(NOISE),
        structure=structure,
        prior=lw.priors.Correlated(1.7, covariance=PRODUCTS, mean=0.1),
    )
    C = dense_covariance(PRODUCTS, 1.7)
    J, f = jacobian(net, x), net(x).detach().reshape(-1)
    theta = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    target = y.reshape(-1) - f + J @ theta
    M, m = J.mT @ J / NOISE**2 + torch.linalg.inv(C), torch.full((26,), 0.1).double()
    v = torch.linalg.solve(M, J.mT @ target / NOISE**2 + torch.linalg.solve(C, m))
    found = la.recentered()
    torch.testing.assert_close(found.at.vector, v, rtol=1e-7, atol=1e-7)
    if structure == "full":
        marginal = torch.distributions.MultivariateNormal(J @ m, NOISE**2 * torch.eye(80).double() + J @ C @ J.mT)
        torch.testing.assert_close(found.log_evidence(), marginal.log_prob(target), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("method", ["mackay", "evidence"])
def test_tuning_ends_where_the_evidence_is_flat(method: str) -> None:
    net, (x, y) = problem(40)
    prior = lw.priors.Correlated(1.0, covariance=JOINT)
    la = lw.laplace(net, (x, y), lw.likelihoods.Gaussian(NOISE), prior=prior).tuned(method=method, fixed="noise")
    lam = float(la.prior.precision)
    J, f = jacobian(net, x), net(x).detach().reshape(-1)
    target = y.reshape(-1) - f + J @ torch.cat([p.detach().reshape(-1) for p in net.parameters()])

    def evidence(log_lam: float) -> float:
        cov = NOISE**2 * torch.eye(80).double() + J @ JOINT @ J.mT / math.exp(log_lam)
        return float(torch.distributions.MultivariateNormal(torch.zeros(80).double(), cov).log_prob(target))

    best, near = evidence(math.log(lam)), [evidence(math.log(lam) + d) for d in (-0.05, 0.05)]
    assert best > max(near)


# -- the other uses --------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_hmc_and_variational_inference_find_the_posterior_of_a_linear_model() -> None:
    torch.manual_seed(0)
    net, x = nn.Linear(3, 1).double(), normal(15, 3, seed=1)
    y = x[:, :1] + 0.4 * normal(15, 1, seed=2)
    C = spd(4, 9)
    prior, features = lw.priors.Correlated(2.0, covariance=C), torch.cat([x, torch.ones(15, 1).double()], 1)
    M = features.mT @ features / NOISE**2 + 2.0 * torch.linalg.inv(C)
    mean = torch.linalg.solve(M, features.mT @ y[:, 0] / NOISE**2)
    likelihood, S = lw.likelihoods.Gaussian(NOISE), torch.linalg.inv(M)
    chains = lw.samplers.hmc(net, (x, y), likelihood, prior=prior, draws=300, warmup=150, leapfrog=8)
    draws = chains.posterior.weights
    assert float(((draws.mean(0) - mean) / S.diagonal().sqrt()).abs().max()) < 0.2
    torch.testing.assert_close(draws.T.cov(), S, rtol=0.3, atol=float(0.2 * S.diagonal().max()))
    field = lw.variational.mean_field(net, (x, y), likelihood, prior=prior, steps=800, lr=0.02, batch=15)
    torch.testing.assert_close(field.posterior.deviation.square(), 1 / M.diagonal(), rtol=0.05, atol=0)
    torch.testing.assert_close(field.posterior.mean, mean, rtol=0, atol=0.03)


def test_it_is_saved_and_compared(tmp_path: Path) -> None:
    net, data = problem()
    la = lw.laplace(net, data, "gaussian", prior=lw.priors.Correlated(1.7, covariance=PRODUCTS)).tuned()
    la.save(tmp_path / "fit")
    again = lw.load(tmp_path / "fit", net)
    torch.testing.assert_close(again.log_evidence(), la.log_evidence(), rtol=1e-12, atol=0)
    assert again.prior.facts().keys() == la.prior.facts().keys()
    other = lw.laplace(net, data, "gaussian", prior=1.0).tuned()
    assert set(lw.compare({"correlated": la, "independent": other}).to_dict()) == {"correlated", "independent"}


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("structure", "covariance", "match"),
    [
        ("diag", LAYERS, "structure='diag'.*use structure='full' or 'block'"),
        ("ekfac", PRODUCTS, "structure='ekfac'.*use structure='full' or 'block'"),
        (lw.curvature.MatrixFree(samples=4), LAYERS, "structure='matrix_free'.*use structure='full' or 'block'"),
        ("kron", LAYERS, "unless it is a product .B, A. of the whole layer.*use structure='full' or 'block'"),
        ("kron", {"2.weight": (spd(2, 3), spd(4, 4))}, "bias included"),
        ("kron", JOINT, "treats apart; use structure='full' or 'lowrank', or a covariance for each layer"),
        ("block", JOINT, "treats apart; use structure='full' or 'lowrank', or a covariance for each layer"),
    ],
)
def test_structures_that_cannot_hold_it_refuse_by_name(structure: Any, covariance: Any, match: str) -> None:
    net, data = problem()
    prior = lw.priors.Correlated(1.0, covariance=covariance)
    with pytest.raises(Unsupported, match=match):
        lw.laplace(net, data, "gaussian", structure=structure, prior=prior).log_evidence(center="map")


def test_what_needs_independent_weights_refuses_by_name() -> None:
    net, data = problem()
    prior = lw.priors.Correlated(1.0, covariance=JOINT)
    for fit in (
        lambda: lw.gp.ella(net, data, "gaussian", prior=prior),
        lambda: lw.OnlineEvidence(net, [data], "gaussian", prior=prior),
    ):
        with pytest.raises(
            Unsupported, match=r"weights are independent, and those of Correlated are not; use lw.priors"
        ):
            fit()
    with pytest.raises(Unsupported, match="use kl='sampled'"):
        lw.variational.layerwise(net, data, "gaussian", prior=prior, kl="closed", steps=1)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({}, "covariance is .glob: C."),
        ({"covariance": {}}, "empty mapping"),
        ({"covariance": {"0.*": torch.ones(2, 3)}}, "square matrix"),
        ({"covariance": {"0.*": torch.tensor([[1.0, 0.5], [0.0, 1.0]])}}, "symmetric"),
        ({"covariance": {"0.*": torch.tensor([[1.0, 2.0], [2.0, 1.0]])}}, "least eigenvalue is -1"),
        ({"covariance": {"0.*": spd(15, 0)}}, "is of 1 x 15 weights, and .* have 16"),
        ({"covariance": {"9.*": spd(2, 0)}}, "matches no selected parameter"),
        ({"covariance": {"0.*": spd(16, 0), "*bias": spd(6, 1)}}, "0.bias matches two covariances"),
        ({"covariance": {"*": (spd(4, 0), spd(4, 1))}}, "one weight matrix"),
        ({"covariance": {"0.*": spd(16, 0)}, "per": "unit"}, "lie in several groups"),
    ],
)
def test_bad_covariances_are_named(options: dict[str, Any], match: str) -> None:
    net, data = problem()
    with pytest.raises(InvalidValue, match=match):
        lw.laplace(net, data, "gaussian", prior=lw.priors.Correlated(1.0, **options))
