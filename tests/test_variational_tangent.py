"""Variational inference in the tangent model, against closed forms, quadrature and dense algebra."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from helpers import backward_rows, close
from lapwing.errors import InvalidValue, NotConverged, Unsupported
from lapwing.variational.linearized import Dual, Primal, TangentBound


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def network(outputs: int, hidden: int = 4, seed: int = 1) -> nn.Module:
    net = nn.Sequential(nn.Linear(3, hidden), nn.Tanh(), nn.Linear(hidden, outputs)).double()
    with torch.no_grad():
        for i, p in enumerate(net.parameters()):
            p.copy_(random(*p.shape, seed=seed + i))
    return net


@pytest.mark.parametrize("n", [5, 40])  # rows of J fewer and more than weights
def test_it_is_the_posterior_and_its_bound_the_evidence_where_noise_is_gaussian(n: int) -> None:
    net, x, y = network(2), random(n, 3, seed=7), random(n, 2, seed=8)
    noise = lw.likelihoods.Gaussian(noise=0.4)
    post = lw.variational.tangent(net, (x, y), noise, prior=1.7)
    la = lw.laplace(net, (x, y), noise, prior=1.7, structure="full").recentered()
    new = random(6, 3, seed=9)
    mine, theirs = post.predict(new), la.predict(new, mean="tangent")
    close(mine.f_mean, theirs.f_mean)
    close(mine.covariance, theirs.covariance)
    close(post.diagnostics.elbo, la.log_evidence())


@pytest.mark.parametrize("form", [Primal, Dual])
def test_both_forms_of_a_precision_are_that_of_dense_algebra(form: type[Primal | Dual]) -> None:
    rows, b, a = random(4, 3, 7, seed=1), random(4, 2, 3, seed=2), random(7, seed=3).exp()
    f, theta = torch.zeros(4, 3).double(), torch.zeros(7).double()
    problem = TangentBound(lw.likelihoods.Categorical(), f, torch.zeros(4).long(), rows, theta, a, theta)
    found, r = form(problem, b), torch.einsum("mqc,mcp->mqp", b, rows).flatten(0, 1)
    dense = a.diag() + r.mT @ r
    g = random(7, seed=4)
    close(found.solve(g), torch.linalg.solve(dense, g))
    close(found.log_ratio, torch.logdet(dense) - a.log().sum())
    close(found.variances, rows @ torch.linalg.inv(dense) @ rows.mT)


def hermite(k: int = 60) -> tuple[Tensor, Tensor]:
    z, w = np.polynomial.hermite_e.hermegauss(k)
    return torch.tensor(z), torch.tensor(w / math.sqrt(2 * math.pi))


def logistic() -> tuple[nn.Module, Tensor, Tensor]:
    """One weight, so that everything is an integral over a line."""
    net = nn.Linear(1, 1, bias=False).double()
    with torch.no_grad():
        net.weight.fill_(0.7)
    x = random(12, 1, seed=3)
    return net, x, (random(12, seed=4) + 2 * x[:, 0] > 0).double()[:, None]


def expected(mean: Tensor, deviation: Tensor, x: Tensor, y: Tensor, precision: float) -> Tensor:
    """The bound of N(mean, deviation²) for logistic regression, by Gauss and Hermite."""
    z, w = hermite()
    theta = mean + deviation * z
    log_p = -nn.functional.softplus((1 - 2 * y) * x * theta).sum(0)
    kl = 0.5 * (precision * (deviation**2 + mean**2) - 1 - (precision * deviation**2).log())
    return (w * log_p).sum() - kl


def test_its_bound_is_under_the_evidence_and_over_laplaces() -> None:
    net, x, y = logistic()
    precision = 0.3
    grid = torch.linspace(-40, 40, 200_001, dtype=torch.float64)
    log_p = -nn.functional.softplus((1 - 2 * y) * x * grid).sum(0) - 0.5 * precision * grid**2
    evidence = torch.logsumexp(log_p, 0) + math.log(80 / 200_000) + 0.5 * math.log(precision / (2 * math.pi))
    post = lw.variational.tangent(net, (x, y), "bernoulli", prior=precision)
    deviation = post.posterior.gaussian.covariance(torch.ones(1, 1, 1).double()).sqrt().reshape(())
    mean = post.posterior.mean.reshape(())
    close(post.diagnostics.elbo, expected(mean, deviation, x, y, precision))
    for other in (0.9, 1.1):
        assert expected(mean, other * deviation, x, y, precision) < post.diagnostics.elbo
        assert expected(other * mean, deviation, x, y, precision) < post.diagnostics.elbo
    assert post.diagnostics.elbo < evidence
    mode = grid[log_p.argmax()]
    p = torch.sigmoid(mode * x)
    laplace = (precision + (p * (1 - p) * x**2).sum()).rsqrt()
    assert expected(mode, laplace, x, y, precision) < post.diagnostics.elbo


@pytest.mark.parametrize("likelihood", ["bernoulli", "poisson", "categorical"])
def test_mean_and_precision_are_stationary(likelihood: str) -> None:
    """A (m − m₀) = Σ Jᵀ E[∂ log p], S⁻¹ = A + Σ Jᵀ E[−∂² log p] J, by many draws of f and autograd's derivatives."""
    outputs = {"bernoulli": 1, "poisson": 2, "categorical": 3}[likelihood]
    net, x = network(outputs), random(9, 3, seed=5)
    y = {
        "bernoulli": (random(9, 1, seed=6) > 0).double(),
        "poisson": random(9, 2, seed=6).square().floor(),
        "categorical": torch.arange(9) % 3,
    }[likelihood]
    known = lw.likelihoods.Poisson() if likelihood == "poisson" else likelihood
    post = lw.variational.tangent(net, (x, y), known, prior=0.8)
    q, J = post.posterior, backward_rows(net(x), net.parameters())
    S = torch.linalg.inv(q.root.T @ q.root + torch.diag(q.prior_precision))
    theta = torch.nn.utils.parameters_to_vector(net.parameters()).detach()
    h = net(x).detach() + J @ (q.mean - theta)
    z = torch.quasirandom.SobolEngine(outputs, scramble=True, seed=5).draw(2**13, dtype=torch.float64)
    z = math.sqrt(2) * torch.erfinv((2 * z - 1).clamp(-1 + 1e-12, 1 - 1e-12))
    gradient, curvature = -q.prior_precision * q.mean, torch.diag(q.prior_precision)
    for n in range(9):
        f = h[n] + z @ torch.linalg.cholesky(J[n] @ S @ J[n].T).T
        log_p = {
            "bernoulli": lambda f, n=n: -nn.functional.softplus((1 - 2 * y[n]) * f).sum(),
            "poisson": lambda f, n=n: (y[n] * f - f.exp()).sum(),
            "categorical": lambda f, n=n: f.log_softmax(-1)[y[n]],
        }[likelihood]
        slope = torch.func.vmap(torch.func.grad(log_p))(f).mean(0)
        bend = -torch.func.vmap(torch.func.hessian(log_p))(f).mean(0)
        gradient, curvature = gradient + slope @ J[n], curvature + J[n].T @ bend @ J[n]
    assert float((gradient @ S @ gradient).sqrt()) < 0.01
    eigen = torch.linalg.eigvals(S @ curvature).real
    assert float((eigen - 1).abs().max()) < 0.02


def test_a_sure_network_keeps_its_doubt() -> None:
    """Where Laplace's curvature vanishes, so that it has the prior's width, the average curvature does not."""
    net, x, y = logistic()
    y = (x > 0).double()
    with torch.no_grad():
        net.weight.fill_(60.0)
    la = lw.laplace(net, (x, y), "bernoulli", prior=0.1, structure="full")
    post = lw.variational.tangent(net, (x, y), "bernoulli", prior=0.1)
    one = torch.ones(1, 1).double()
    assert float(post.predict(one).f_var) < 0.6 * float(la.predict(one).f_var)


def test_it_is_saved_and_drawn_from(tmp_path: Path) -> None:
    net, x, y = network(3), random(9, 3, seed=5), torch.arange(9) % 3
    post = lw.variational.tangent(net, (x, y), "categorical")
    post.save(tmp_path / "post.safetensors")
    again = lw.load(tmp_path / "post.safetensors", net)
    assert torch.equal(again.predict(x).probs, post.predict(x).probs)
    lw.testing.check_posterior(post.posterior, x)
    drawn = torch.cat([w.flatten(1) for w in post.draw(4000).values()], 1)
    S = torch.linalg.inv(post.posterior.root.T @ post.posterior.root + torch.diag(post.posterior.prior_precision))
    scale = S.diagonal().sqrt()
    assert float(((drawn.mean(0) - post.posterior.mean) / scale).abs().max()) < 5 / math.sqrt(4000)


def test_what_it_cannot_do_is_named() -> None:
    net, x, y = network(2), random(9, 3, seed=5), random(9, 2, seed=6)
    with pytest.raises(Unsupported, match="needs a Gaussian prior, and StudentT is none"):
        lw.variational.tangent(net, (x, y), "gaussian", prior=lw.priors.StudentT(4.0))
    with pytest.raises(Unsupported, match="not concave in the network"):
        lw.variational.tangent(net, (x, y), lw.likelihoods.StudentT(scale=1.0))
    with pytest.raises(InvalidValue, match="past memory_budget"):
        lw.variational.tangent(net, (x, y), "gaussian", memory_budget=1000)
    with pytest.raises(NotConverged, match=r"in the last of 1 steps"):
        lw.variational.tangent(network(1), (x, (y[:, :1] > 0).double()), "bernoulli", prior=0.01, steps=1)
