"""The tangent kernel as a Gaussian process with a constant prior mean, and leaving examples out of it.

h = c + J v:   mean c + K_*X (K + Σ)⁻¹ (ỹ − c),   log Z = log N(ỹ; c, K + Σ),   K = J A⁻¹ Jᵀ
left out       the same with a row of the data dropped, by brute force
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from helpers import close
from lapwing.center import about_constant, tangent_map
from lapwing.errors import InvalidValue, Unsupported

CLASSES = 3


def network(seed: int, outputs: int = CLASSES) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, outputs)).double()


def problem(kind: str, seed: int = 0, n: int = 9) -> tuple[nn.Module, Tensor, Tensor, lw.likelihoods.Likelihood]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=g, dtype=torch.float64)
    if kind == "gaussian":
        net = network(seed, 2)
        J = rows(net, x)
        y = J @ torch.randn(J.shape[-1], generator=g, dtype=torch.float64)
        y = y + 0.3 * torch.randn(n, 2, generator=g, dtype=torch.float64)
        return net, x, y, lw.likelihoods.Gaussian(0.4)
    return network(seed), x, torch.randint(CLASSES, (n,), generator=g), lw.likelihoods.Dirichlet(0.05)


def observed(kind: str, y: Tensor) -> tuple[Tensor, Tensor]:
    """ỹ and σ² (n, c), written out."""
    if kind == "gaussian":
        return y, torch.full_like(y, 0.16)
    alpha = 0.05 + nn.functional.one_hot(y, CLASSES).double()
    variance = torch.log(1 + 1 / alpha)
    return alpha.log() - variance / 2, variance


def rows(net: nn.Module, x: Tensor) -> Tensor:
    """J (n, c, p), by autograd."""
    f = net(x)
    flat = [
        torch.autograd.grad(f[i, j], tuple(net.parameters()), retain_graph=True)
        for i in range(len(f))
        for j in range(f.shape[1])
    ]
    return torch.stack([torch.cat([g.reshape(-1) for g in one]) for one in flat]).reshape(*f.shape, -1).detach()


def process(
    kind: str, net: nn.Module, x: Tensor, y: Tensor, new: Tensor, precision: float, c: Tensor
) -> tuple[Tensor, ...]:
    """Mean (n, c), covariance (n, c, c) at new inputs and the log evidence, by dense algebra."""
    target, variance = observed(kind, y)
    J, Jn = rows(net, x).flatten(0, 1), rows(net, new)
    M = J @ J.mT / precision + torch.diag(variance.reshape(-1))
    r = (target - c).reshape(-1)
    cross = Jn @ J.mT / precision
    mean = c + (cross @ torch.linalg.solve(M, r)).reshape(len(new), -1)
    cov = Jn @ Jn.mT / precision - cross @ torch.linalg.solve(M, cross.mT)
    log_z = -0.5 * (r @ torch.linalg.solve(M, r) + torch.linalg.slogdet(M).logabsdet + len(r) * math.log(2 * math.pi))
    return mean, cov, log_z


def constant(kind: str, y: Tensor) -> Tensor:
    target, variance = observed(kind, y)
    return (target / variance).sum(0) / (1 / variance).sum(0)


@pytest.mark.parametrize("form", ["primal", "dual"])
@pytest.mark.parametrize("kind", ["gaussian", "dirichlet"])
@pytest.mark.parametrize("seed", range(3))
def test_the_process_is_regression_about_a_constant(kind: str, seed: int, form: str) -> None:
    net, x, y, likelihood = problem(kind, seed)
    la = lw.laplace(net, (x, y), likelihood, structure=lw.curvature.Full(form), prior=0.7)
    new = torch.randn(4, 4, dtype=torch.float64)
    mean, cov, log_z = process(kind, net, x, y, new, 0.7, constant(kind, y))
    own = la.predict(new, mean="process")
    close(own.f_mean, mean)
    close(own.covariance, cov)
    close(la.log_evidence(center="process"), log_z)
    both = la.predict(new, mean="mixture")
    close(both.f_mean, 0.5 * (mean + net(new).detach()))
    assert len(both.outputs.parts) == 2
    three = la.predict(new, mean={"process": 3, "network": 1})
    close(three.f_mean, 0.75 * mean + 0.25 * net(new).detach())
    alone = [la.predict(new, mean=one).log_prob(y[:4]) for one in ("process", "network")]
    shares = torch.tensor([[0.75], [0.25]], dtype=torch.float64)
    close(three.log_prob(y[:4]), torch.logsumexp(torch.stack(alone) + shares.log(), 0))
    close(la.predict(new, mean={"process": 2}).f_mean, mean)


@pytest.mark.parametrize("kind", ["gaussian", "dirichlet"])
@pytest.mark.parametrize("seed", range(3))
def test_left_out_is_the_process_without_the_example(kind: str, seed: int) -> None:
    net, x, y, likelihood = problem(kind, seed)
    la = lw.laplace(net, (x, y), likelihood, structure="full", prior=0.7)
    found, c = la.leave_one_out(), constant(kind, y)
    for i in range(len(x)):
        keep = torch.arange(len(x)) != i
        mean, cov, _ = process(kind, net, x[keep], y[keep], x[i : i + 1], 0.7, c)
        close(found.mean[i], mean[0])
        close(found.covariance[i], cov[0])
        alone = lw.Prediction(likelihood.predictive, lw.outputs.Normal(mean, cov)).log_prob(y[i : i + 1])
        close(found.score[i], alone[0])


def test_left_out_about_the_tangent_mode_is_a_fit_without_the_example() -> None:
    net, x, y, likelihood = problem("gaussian")
    la = lw.laplace(net, (x, y), likelihood, structure="full", prior=0.7).recentered()
    found = la.leave_one_out("tangent")
    for i in range(3):
        keep = torch.arange(len(x)) != i
        other = lw.laplace(net, (x[keep], y[keep]), likelihood, structure="full", prior=0.7).recentered()
        pred = other.predict(x[i : i + 1], mean="tangent")
        close(found.mean[i], pred.f_mean[0], 1e-7)
        close(found.covariance[i], pred.covariance[0])


@pytest.mark.parametrize("kind", ["gaussian", "dirichlet"])
def test_tuning_the_process_ends_at_the_top_of_its_evidence(kind: str) -> None:
    net, x, y, likelihood = problem(kind, n=25)
    la = lw.laplace(net, (x, y), likelihood, structure="full").tuned(center="process", mean="process")
    assert la.center == "process"
    assert la.tuning is not None
    assert la.tuning.center == "process"
    best = float(la.log_evidence())
    for factor in (0.8, 1.25):
        assert float(la.log_evidence(prior=float(la.prior.precision) * factor)) < best
    if kind == "gaussian":
        for factor in (0.9, 1.1):
            assert (
                float(la.log_evidence(likelihood=lw.likelihoods.Gaussian(float(la.likelihood.noise) * factor))) < best
            )


def test_a_process_comes_back_from_a_file(tmp_path: Path) -> None:
    net, x, y, likelihood = problem("dirichlet")
    la = lw.laplace(net, (x, y), likelihood, structure="full").tuned(center="process")
    la.save(tmp_path / "la")
    back = lw.load(tmp_path / "la", net)
    assert back.center == "process"
    for mean in ("process", "mixture"):
        assert torch.equal(back.predict(x, mean=mean).probs, la.predict(x, mean=mean).probs)
    close(back.log_evidence(), la.log_evidence())


def test_kron_and_matrix_free_solve_for_the_same_mean() -> None:
    net, x, y, likelihood = problem("dirichlet", n=14)
    full = lw.laplace(net, (x, y), likelihood, structure="full", prior=0.7).predict(x, mean="process").f_mean
    for structure in ("kron", "diag"):
        la = lw.laplace(net, (x, y), likelihood, structure=structure, prior=0.7)
        close(la.predict(x, mean="process").f_mean, full, 1e-6)


@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_directions_of_one_search_serve_every_prior_precision(structure: str) -> None:
    """(G + λ)⁻¹b at 20 λ by one space of directions: known images, and a pass that checks each."""
    net, x, y, likelihood = problem("dirichlet", n=10)
    la = lw.laplace(net, (x, y), likelihood, structure=structure)
    jacobian = about_constant(replace(la.jacobian(la.data), rows=None), likelihood)
    target, variance = observed("dirichlet", y)
    J, c = rows(net, x).flatten(0, 1), constant("dirichlet", y)
    weighed, r = J / variance.reshape(-1, 1), (target - c).reshape(-1)
    center, passes = None, []
    for precision in torch.logspace(-2, 2, 20).tolist() * 2:
        before = jacobian.passes
        prior = la.prior.replace(precision=torch.tensor(precision, dtype=torch.float64))
        center = tangent_map(la.state, prior, likelihood, jacobian, center, tolerance=1e-9)
        passes.append(jacobian.passes - before)
        exact = torch.linalg.solve(J.mT @ weighed + precision * torch.eye(J.shape[1]).double(), weighed.mT @ r)
        close(center.vector, exact, 1e-7)
    assert sum(passes[20:]) <= 2 * 20 < sum(passes[:20])


def test_what_a_process_cannot_be_is_told() -> None:
    net, x, y, likelihood = problem("dirichlet")
    la = lw.laplace(net, (x, y), likelihood, structure="full")
    with pytest.raises(InvalidValue, match="mean must be one of"):
        la.predict(x, mean="own")
    for wrong in ({}, {"own": 1}, {"mixture": 1}):
        with pytest.raises(InvalidValue, match="a mixture of means is"):
            la.predict(x, mean=wrong)
    for weights in ({"process": -1.0, "network": 2.0}, {"process": 0.0}, {"process": "much"}):
        with pytest.raises(InvalidValue, match="weights"):
            la.predict(x, mean=weights)
    with pytest.raises(InvalidValue, match="one by one"):
        la.leave_one_out("mixture")
    with pytest.raises(InvalidValue, match="drop mean='process'"):
        la.predict(x, mean="process", via="network")
    kron = lw.laplace(net, (x[:2], y[:2]), likelihood, structure="diag", prior=1e-8)
    with pytest.warns(match="covariances of 'diag'"), pytest.raises(InvalidValue, match="structure='full'"):
        kron.leave_one_out()
    counts = lw.laplace(net, (x, torch.ones(9, 3).double()), "poisson")
    with pytest.raises(Unsupported, match="no constant outputs"):
        counts.predict(x, mean="process")
