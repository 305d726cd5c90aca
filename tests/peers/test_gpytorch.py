"""Kernels of networks inside GPyTorch 1.15: its marginal likelihood, its gradient and its predictions are ours."""

from __future__ import annotations

import gpytorch
import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.gp import infinite
from lapwing.gp.infinite.tuning import value_and_slope
from lapwing.integrations.gpytorch import infinite_kernel, tangent_kernel

pytestmark = pytest.mark.usefixtures("exactly")


@pytest.fixture
def exactly():
    with gpytorch.settings.fast_computations(False, False, False), gpytorch.settings.cholesky_jitter(1e-12, 1e-12):
        yield


class Exact(gpytorch.models.ExactGP):
    def __init__(self, x: Tensor, y: Tensor, likelihood, kernel) -> None:
        super().__init__(x, y, likelihood)
        self.mean, self.kernel = gpytorch.means.ZeroMean(), kernel

    def forward(self, x: Tensor):
        return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))


def data(n: int = 9, d: int = 3) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(n, d)
    return x, torch.sin(x[:, 0]) + 0.1 * torch.randn(n)


def fitted(kernel, x: Tensor, y: Tensor, noise: float) -> Exact:
    likelihood = gpytorch.likelihoods.GaussianLikelihood().double()
    likelihood.noise = noise**2
    return Exact(x, y, likelihood, kernel)


@pytest.mark.parametrize("what", ["nngp", "ntk"])
@pytest.mark.parametrize("activation", ["relu", torch.tanh])
def test_infinite_width_has_our_evidence_gradient_and_predictions(what: str, activation: object) -> None:
    (x, y), new = data(), torch.randn(4, 3)
    k = getattr(infinite, what)(2, activation, 1.6, 0.2)
    ours, theirs = k.regression((x, y[:, None]), noise=0.3), fitted(infinite_kernel(k), x, y, 0.3)
    torch.testing.assert_close(theirs.kernel(x, new).to_dense(), k(x, new))
    torch.testing.assert_close(theirs.kernel(x, diag=True), k.diagonal(x))
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(theirs.likelihood, theirs)
    value = mll(theirs(x), y) * len(x)
    torch.testing.assert_close(value, ours.log_evidence(), rtol=1e-6, atol=1e-6)
    value.backward()
    _, slope = value_and_slope(ours, ("weight_variance", "bias_variance"))
    for name in slope:
        raw, constraint = getattr(theirs.kernel, f"raw_{name}"), getattr(theirs.kernel, f"raw_{name}_constraint")
        step = torch.autograd.functional.jacobian(constraint.transform, raw.detach())
        expected = slope[name] / getattr(k, name) * step
        torch.testing.assert_close(raw.grad, expected, rtol=1e-4, atol=1e-4)
    theirs.eval(), theirs.likelihood.eval()
    found, pred = theirs(new), ours.predict(new, joint=True)
    torch.testing.assert_close(found.mean, pred.f_mean[:, 0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.covariance_matrix, pred.covariance[:, 0, :, 0], rtol=1e-5, atol=1e-6)


def test_its_optimizer_learns_the_variances() -> None:
    x, y = data(20)
    theirs = fitted(infinite_kernel(infinite.nngp(2, "relu", 2.0, 0.1)), x, y, 0.5)
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(theirs.likelihood, theirs)
    optimizer, values = torch.optim.Adam(theirs.parameters(), lr=0.1), []
    for _ in range(30):
        optimizer.zero_grad()
        loss = -mll(theirs(x), y)
        loss.backward()
        optimizer.step()
        values.append(float(loss.detach()))
    assert values[-1] < values[0] - 0.05
    best = infinite.nngp(2, "relu", 2.0, 0.1).regression((x, y[:, None]), noise=0.5).tuned().log_evidence()
    assert -values[-1] * 20 <= float(best) + 1e-3


def test_images_are_given_their_shape() -> None:
    net = nn.Sequential(nn.Conv2d(2, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(18, 1))
    k, x = infinite.of(net, "ntk", 1.6, 0.2), torch.randn(4, 2, 3, 4)
    theirs = infinite_kernel(k, (2, 3, 4))
    torch.testing.assert_close(theirs(x.flatten(1)).to_dense(), k(x))
    both = torch.stack([x.flatten(1), 2 * x.flatten(1)])
    torch.testing.assert_close(theirs(both).to_dense()[1], k(2 * x))


def test_the_tangent_kernel_of_one_output_and_of_all() -> None:
    net, (x, y), new = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)), data(), torch.randn(4, 3)
    tangent = lw.linearize(net)
    K = lw.gp.kernel(tangent, torch.cat([x, new]))
    one, every = tangent_kernel(tangent, 1), tangent_kernel(tangent)
    torch.testing.assert_close(one(x, new).to_dense(), K[:9, 1, 9:, 1])
    torch.testing.assert_close(every(x, new).to_dense(), K[:9, :, 9:].reshape(18, 8))
    theirs = fitted(gpytorch.kernels.ScaleKernel(one), x, y, 0.3)
    theirs.kernel.outputscale = 0.5
    theirs.eval(), theirs.likelihood.eval()
    C = 0.5 * K[:9, 1, :9, 1] + 0.09 * torch.eye(9)
    cross = 0.5 * K[9:, 1, :9, 1]
    torch.testing.assert_close(theirs(new).mean, cross @ torch.linalg.solve(C, y), rtol=1e-6, atol=1e-6)
    cov = 0.5 * K[9:, 1, 9:, 1] - cross @ torch.linalg.solve(C, cross.mT)
    torch.testing.assert_close(theirs(new).covariance_matrix, cov, rtol=1e-5, atol=1e-6)


def test_the_tangent_kernel_of_all_outputs_is_a_multitask_process() -> None:
    net, (x, _), new = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)), data(), torch.randn(4, 3)
    y, tangent = torch.randn(9, 2), lw.linearize(net)

    class Tasks(gpytorch.models.ExactGP):
        def __init__(self, likelihood) -> None:
            super().__init__(x, y, likelihood)
            self.mean = gpytorch.means.MultitaskMean(gpytorch.means.ZeroMean(), 2)
            self.kernel = tangent_kernel(tangent)

        def forward(self, x: Tensor):
            return gpytorch.distributions.MultitaskMultivariateNormal(self.mean(x), self.kernel(x))

    likelihood = gpytorch.likelihoods.MultitaskGaussianLikelihood(2, rank=0, has_task_noise=False).double()
    likelihood.noise = 0.09
    theirs = Tasks(likelihood).eval()
    likelihood.eval()
    K = lw.gp.kernel(tangent, torch.cat([x, new]))
    C = K[:9, :, :9].reshape(18, 18) + 0.09 * torch.eye(18)
    expected = K[9:, :, :9].reshape(8, 18) @ torch.linalg.solve(C, y.reshape(-1))
    torch.testing.assert_close(theirs(new).mean.reshape(-1), expected, rtol=1e-6, atol=1e-6)


def test_what_it_cannot_do_is_named() -> None:
    k, x = infinite_kernel(infinite.nngp(1)), torch.randn(3, 2)
    with pytest.raises(lw.errors.Unsupported, match="no derivative in their inputs"):
        k(x.requires_grad_(), x).to_dense()
    with pytest.raises(lw.errors.InvalidValue, match=r"lw\.gp\.infinite"):
        infinite_kernel(torch.nn.Linear(1, 1))
