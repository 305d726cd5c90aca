"""Gaussian noise with a full covariance: closed forms, and the covariance that the evidence picks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from helpers import close
from lapwing.errors import InvalidValue, Unsupported
from lapwing.likelihoods import CorrelatedGaussian, Gaussian

R = torch.tensor([[0.5, 0.3, -0.1], [0.3, 0.8, 0.2], [-0.1, 0.2, 0.4]], dtype=torch.float64)


def linear_data(n: int, seed: int = 0) -> tuple[nn.Module, Tensor, Tensor, Tensor]:
    """A linear network at zero, X, Y with correlated noise, and the rows of J (3n, p)."""
    torch.manual_seed(seed)
    net = nn.Linear(4, 3, bias=False).double()
    nn.init.zeros_(net.weight)
    x = torch.randn(n, 4, dtype=torch.float64)
    y = (
        x @ torch.randn(4, 3, dtype=torch.float64)
        + torch.randn(n, 3, dtype=torch.float64) @ torch.linalg.cholesky(R).mT
    )
    J = torch.einsum("ni,co->ncoi", x, torch.eye(3, dtype=torch.float64)).reshape(3 * n, 12)
    return net, x, y, J


def test_it_is_bayesian_linear_regression() -> None:
    """Identity 1: evidence = log N(y; 0, I ⊗ R + J A⁻¹ Jᵀ); the predictive has R in its total covariance."""
    net, x, y, J = linear_data(15)
    la = lw.laplace(net, (x, y), CorrelatedGaussian(R), structure="full", prior=0.6).recentered()
    cov = torch.block_diag(*[R] * 15) + J @ J.mT / 0.6
    normal = torch.distributions.MultivariateNormal(torch.zeros(45, dtype=torch.float64), cov)
    close(la.log_evidence(), normal.log_prob(y.reshape(-1)))
    precision = torch.block_diag(*[torch.linalg.inv(R)] * 15)
    posterior = torch.linalg.inv(J.mT @ precision @ J + 0.6 * torch.eye(12, dtype=torch.float64))
    rows = J.reshape(15, 3, 12)
    pred = la.predict(x, mean="tangent")
    close(pred.covariance, rows @ posterior @ rows.mT)
    mean = rows @ (posterior @ (J.mT @ precision @ y.reshape(-1)))
    total = torch.distributions.MultivariateNormal(mean, rows @ posterior @ rows.mT + R)
    close(pred.log_prob(y), total.log_prob(y))


def test_a_diagonal_covariance_is_noise_per_output() -> None:
    net, x, y, _ = linear_data(15)
    sigma = torch.tensor([0.5, 1.2, 0.8], dtype=torch.float64)
    a = lw.laplace(net, (x, y), CorrelatedGaussian(torch.diag(sigma**2)), structure="kron")
    b = lw.laplace(net, (x, y), Gaussian(sigma), structure="kron")
    close(a.log_evidence(), b.log_evidence())
    close(a.recentered().log_evidence(), b.recentered().log_evidence())


@pytest.mark.parametrize("center", ["tangent", "map"])
def test_the_evidence_picks_a_stationary_covariance(center: str) -> None:
    """Both methods end where the evidence has no slope in λ nor in R; the fixed point is N R = Σ rrᵀ + Σ J Σ Jᵀ."""
    net, x, y, J = linear_data(60)
    nn.init.normal_(net.weight, std=0.5)
    start = lw.laplace(net, (x, y), CorrelatedGaussian(torch.eye(3)), structure="full")
    found = [start.tuned(method=method, center=center) for method in ("mackay", "evidence")]
    close(found[0].log_evidence(), found[1].log_evidence(), 1e-5)
    close(found[0].likelihood.covariance, found[1].likelihood.covariance, 2e-2)
    la = found[1]
    noise = la.likelihood.covariance
    precision = torch.block_diag(*[torch.linalg.inv(noise)] * 60)
    posterior = torch.linalg.inv(J.mT @ precision @ J + la.prior.precision * torch.eye(12, dtype=torch.float64))
    mean = posterior @ (J.mT @ precision @ y.reshape(-1))
    weights = mean if center == "tangent" else net.weight.detach().reshape(-1)
    r = y - (J @ weights).reshape(60, 3)
    rows = J.reshape(60, 3, 12)
    close(noise, (r.mT @ r + (rows @ posterior @ rows.mT).sum(0)) / 60, 1e-3)


def test_the_covariance_is_found() -> None:
    """Of 600 examples: within 5 standard errors √((R_ab² + R_aa R_bb)/N) of the truth, every entry."""
    net, x, y, _ = linear_data(600, seed=1)
    la = lw.laplace(net, (x, y), CorrelatedGaussian(torch.eye(3)), structure="kron").tuned()
    error = ((R.square() + torch.outer(R.diagonal(), R.diagonal())) / 600).sqrt()
    assert float(((la.likelihood.covariance - R) / error).abs().max()) < 5
    alone = lw.laplace(net, (x, y), Gaussian(torch.ones(3)), structure="kron").tuned()
    assert float(la.log_evidence()) > float(alone.log_evidence()) + 20  # correlations are worth their nats
    assert "covariance" in repr(la)


def test_training_by_evidence_moves_it() -> None:
    net, x, y, _ = linear_data(40)
    online = lw.OnlineEvidence(net, (x, y), CorrelatedGaussian(torch.eye(3)), structure="kron", every=10, burn_in=10)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    for _ in range(30):
        optimizer.zero_grad()
        online.loss(net(x), y).backward()
        optimizer.step()
        online.step()
    values = [record.log_evidence for record in online.history.records]
    assert values[-1] > values[0] + 10
    assert float(online.likelihood.covariance[0, 1]) > 0.05


def test_what_it_cannot_do_is_said() -> None:
    net, x, y, _ = linear_data(8)
    likelihood = CorrelatedGaussian(R)
    with pytest.raises(Unsupported, match="mixes the outputs"):
        lw.laplace(net, (x, y), likelihood, factor="monte_carlo")
    for bad in (torch.zeros(3, 3), torch.ones(3), torch.ones(2, 2), torch.tensor([[1.0, 0.5], [0.0, 1.0]])):
        with pytest.raises(InvalidValue, match="covariance"):
            CorrelatedGaussian(bad)
    with pytest.raises(InvalidValue, match="3 outputs, and there are 2"):
        likelihood.validate(torch.zeros(4, 2), torch.zeros(4, 2))
    with pytest.raises(InvalidValue, match="covariance"):
        CorrelatedGaussian(torch.full((2, 2), math.nan))
