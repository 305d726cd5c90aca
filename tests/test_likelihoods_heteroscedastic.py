"""Heteroscedastic regression: identity 16, the domain η₂ < 0, and training by evidence."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import lapwing as lw
from helpers import close
from lapwing.errors import InvalidValue, Unsupported
from lapwing.likelihoods import HeteroscedasticGaussian, MeanLogVariance, NaturalHead


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_curvature_is_the_covariance_of_y_and_its_square(seed: int) -> None:
    """Identity 16: Λ = Cov[(y, y²)] = [[σ², 2μσ²], [2μσ², 4μ²σ² + 2σ⁴]], positive definite everywhere."""
    torch.manual_seed(seed)
    mean, variance = 3 * torch.randn(50, 2, dtype=torch.float64), torch.exp(2 * torch.randn(50, 2, dtype=torch.float64))
    f = torch.cat([mean / variance, -0.5 / variance], -1)
    S = HeteroscedasticGaussian().hessian_root(f)
    found = S @ S.mT
    for t in range(2):
        m, v = mean[:, t], variance[:, t]
        expected = torch.stack([v, 2 * m * v, 2 * m * v, 4 * m**2 * v + 2 * v**2], -1).reshape(-1, 2, 2)
        close(found[:, [t, t + 2]][:, :, [t, t + 2]], expected)
        assert bool((torch.linalg.eigvalsh(expected) > 0).all())
    close(found[:, [0, 2]][:, :, [1, 3]], torch.zeros(50, 2, 2, dtype=torch.float64))  # targets do not mix


def test_the_layout_is_halves() -> None:
    """Outputs are [η₁ of every target | η₂ of every target]."""
    mean, std = torch.tensor([[1.0, -2.0, 5.0]]).double(), torch.tensor([[0.1, 1.0, 7.0]]).double()
    f = torch.cat([mean / std**2, -0.5 / std**2], -1)
    likelihood = HeteroscedasticGaussian()
    close(likelihood.mean(f), mean)
    close(likelihood.variance(f), std**2)
    head = NaturalHead()(torch.tensor([[1.0, 2.0, 0.0, -3.0]]))
    assert_close(head, torch.tensor([[1.0, 2.0, -0.5 * math.log(2), -0.5 * math.log1p(math.exp(-3))]]))
    with pytest.raises(InvalidValue, match="two inputs"):
        NaturalHead()(torch.zeros(2, 3))


def test_outputs_without_the_head_are_an_error_that_names_it() -> None:
    net, x, y = nn.Linear(3, 2), torch.randn(20, 3), torch.randn(20, 1)
    with pytest.raises(InvalidValue, match="NaturalHead"):
        lw.laplace(net, (x, y), "heteroscedastic")
    with pytest.raises(InvalidValue, match="NaturalHead"):
        HeteroscedasticGaussian().loss(torch.zeros(20, 2), y)
    likelihood = HeteroscedasticGaussian()
    f = torch.tensor([[0.0, -1.0]])
    for bad, text in [
        (torch.zeros(1), "unsqueeze"),
        (torch.zeros(1, 2), "two outputs for each target"),
        (torch.zeros(1, 1).long(), "floating point"),
        (torch.full((1, 1), math.nan), "NaN"),
    ]:
        with pytest.raises(InvalidValue, match=text):
            likelihood.validate(f, bad)
    with pytest.raises(InvalidValue, match="NaturalHead"):
        likelihood.validate(torch.tensor([[0.0, math.nan]]), torch.zeros(1, 1))


def test_the_density_is_zero_outside_of_its_domain() -> None:
    f = torch.tensor([[0.3, -1.0], [0.3, 0.0], [0.3, 2.0]], dtype=torch.float64)
    found = HeteroscedasticGaussian().log_prob(f, torch.ones(3, 1).double())
    assert bool(torch.isfinite(found[0]))
    assert found[1:].tolist() == [-math.inf, -math.inf]
    assert HeteroscedasticGaussian().inside(f).tolist() == [True, False, False]


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_the_search_for_the_tangent_map_stays_inside(structure: str) -> None:
    """Targets far wider than the network believes: full first steps would leave η₂ < 0. At the end h(x, v*) is inside,
    and the objective is stationary."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 2), NaturalHead()).double()
    x = torch.randn(25, 2, dtype=torch.float64)
    y = 8 * torch.randn(25, 1, dtype=torch.float64)
    la = lw.laplace(net, (x, y), "heteroscedastic", structure=structure, prior=1e-3).recentered()
    center = la.tangent_map
    h = la.predict(x, mean="tangent").f_mean
    assert bool((h[:, 1] < 0).all())
    jac = torch.func.jacrev(lambda p: torch.func.functional_call(net, p, (x,)))(
        {k: v.detach() for k, v in net.named_parameters()}
    )
    J = torch.cat([jac[k].reshape(25, 2, -1) for k, _ in net.named_parameters()], -1)
    v = center.vector.clone().requires_grad_()
    h = net(x).detach() + J @ (v - nn.utils.parameters_to_vector(net.parameters()).detach())
    normal = torch.distributions.Normal(-h[:, 0] / (2 * h[:, 1]), (-0.5 / h[:, 1]).sqrt())
    (slope,) = torch.autograd.grad(normal.log_prob(y[:, 0]).sum() - 0.5e-3 * v @ v, v)
    assert float(slope.abs().max()) < 1e-6 * 64 * 25  # of scores y² that are as large


def wave(n: int = 120) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.linspace(-2, 2, n, dtype=torch.float64).unsqueeze(-1)
    noise = torch.randn(n, 1, generator=generator, dtype=torch.float64)
    return x, torch.sin(2 * x) + (0.05 + 0.5 * torch.sigmoid(3 * x)) * noise


def test_training_by_evidence_learns_the_prior_and_the_noise_of_each_input() -> None:
    torch.manual_seed(0)
    x, y = wave()
    net = nn.Sequential(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 2), NaturalHead()).double()
    online = lw.OnlineEvidence(net, (x, y), "heteroscedastic", structure="kron", prior=1.0, every=100, burn_in=200)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for _ in range(800):
        optimizer.zero_grad()
        online.loss(net(x), y).backward()
        optimizer.step()
        online.step()
    values = [record.log_evidence for record in online.history.records]
    assert values[-1] > values[0]
    la = online.laplace()
    variance = la.likelihood.variance(net(x).detach())
    assert float(variance[:20].mean()) < float(variance[-20:].mean()) / 4
    tuned = la.tuned()
    assert tuned.tuning is not None
    assert tuned.tuning.converged
    assert float(tuned.log_evidence()) > float(la.log_evidence())


def test_positions_are_rows() -> None:
    """Outputs (n, q, 2t) are q independent rows an example."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(3, 4), NaturalHead()).double()
    x, y = torch.randn(6, 5, 3, dtype=torch.float64), torch.randn(6, 5, 2, dtype=torch.float64)
    whole = lw.laplace(net, (x, y), "heteroscedastic", structure="full", factor="exact")
    flat = lw.laplace(net, (x.reshape(-1, 3), y.reshape(-1, 2)), "heteroscedastic", structure="full", factor="exact")
    close(whole.log_evidence(), flat.log_evidence())
    close(whole.recentered().log_evidence(), flat.recentered().log_evidence())
    stream = lw.laplace(net, (x, y), "heteroscedastic", structure="matrix_free")
    v = torch.ones(2, whole.state.layout.size, dtype=torch.float64)
    close(lw.operators.linalg.mv(stream.posterior.precision, v), lw.operators.linalg.mv(whole.posterior.precision, v))


def test_a_mean_and_a_log_variance_have_a_fisher_factor_only() -> None:
    """Their Hessian is indefinite where a residual is large; what is offered is E[−∂² log p]."""
    f, y = torch.zeros(1, 2, dtype=torch.float64), torch.full((1, 1), 3.0, dtype=torch.float64)
    H = -torch.func.hessian(lambda f: MeanLogVariance().log_prob(f[None], y)[0])(f[0])
    assert float(torch.linalg.eigvalsh(H)[0]) < 0
    net, x = nn.Linear(3, 2).double(), torch.randn(20, 3, dtype=torch.float64)
    data = (x, torch.randn(20, 1, dtype=torch.float64))
    with pytest.raises(Unsupported, match="HeteroscedasticGaussian"):
        lw.laplace(net, data, MeanLogVariance(), factor="hessian")
    la = lw.laplace(net, data, MeanLogVariance())
    with pytest.raises(Unsupported, match="center='map'"):
        la.tuned()
    assert la.tuned(center="map").tuning is not None
