"""MacKay's original on a linear model, where training has a closed form: its fixed point is a stationary point of the
exact evidence log N(y; 0, σ²I + X A⁻¹ Xᵀ), written here without the package."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.errors import InvalidValue, LapwingWarning, Unsupported


class Two(nn.Module):
    """A linear model in two groups of inputs, (4 + 3) -> c."""

    def __init__(self, outputs: int = 1) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, outputs, bias=False), nn.Linear(3, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x[:, :4]) + self.b(x[:, 4:])


def problem(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(40, 7, generator=generator, dtype=torch.float64)
    w = torch.cat([2 * torch.randn(4, 1, generator=generator), 0.3 * torch.randn(3, 1, generator=generator)]).double()
    return x, x @ w + 0.5 * torch.randn(40, 1, generator=generator, dtype=torch.float64)


def ridge(x: Tensor, y: Tensor):
    """Training to the end: θ = (XᵀX/σ² + A)⁻¹ Xᵀy/σ², with A read off the penalty alone."""

    def train(model: nn.Module, penalty: lw.training.TrainingLoss) -> None:
        sigma = float(penalty.likelihood.noise)
        slopes = torch.autograd.grad(penalty(model), list(model.parameters()))
        lam = torch.cat(
            [(len(x) * g / p.detach()).reshape(-1) for g, p in zip(slopes, model.parameters(), strict=True)]
        )
        theta = torch.linalg.solve(x.mT @ x / sigma**2 + lam.diag(), x.mT @ y / sigma**2)
        with torch.no_grad():
            model.a.weight.copy_(theta[:4].mT)
            model.b.weight.copy_(theta[4:].mT)

    return train


def exact_evidence(x: Tensor, y: Tensor, log_lam: Tensor, log_sigma: Tensor) -> Tensor:
    lam = log_lam.exp().repeat_interleave(torch.tensor([4, 3]))
    cov = (x / lam) @ x.mT + (2 * log_sigma).exp() * torch.eye(len(x), dtype=torch.float64)
    return torch.distributions.MultivariateNormal(torch.zeros(len(x)).double(), cov).log_prob(y[:, 0])


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("structure", ["full", "auto"])
def test_the_fixed_point_is_a_stationary_point_of_the_exact_evidence(seed: int, structure: str) -> None:
    x, y = problem(seed)
    la, history = lw.training.mackay(
        Two().double(),
        (x, y),
        "gaussian",
        ridge(x, y),
        prior="layerwise",
        structure=structure,
        tolerance=1e-11,
        rounds=2000,
    )
    assert history.converged
    lam, sigma = la.prior.precision.log().requires_grad_(), la.likelihood.noise.log().requires_grad_()
    value = exact_evidence(x, y, lam, sigma)
    torch.testing.assert_close(la.log_evidence(center="map"), value.detach(), rtol=1e-10, atol=1e-10)
    for slope in torch.autograd.grad(value, [lam, sigma]):
        assert slope.abs().max() < 1e-8
    assert history[-1].log_evidence == max(r.log_evidence for r in history) or math.isclose(
        history[-1].log_evidence, max(r.log_evidence for r in history), rel_tol=1e-9
    )


def test_the_records_are_the_rounds() -> None:
    x, y = problem(4)
    la, history = lw.training.mackay(Two().double(), (x, y), "gaussian", ridge(x, y), prior=3.0)
    assert history.converged
    assert [r.epoch for r in history] == list(range(1, len(history) + 1))
    assert history[0].hyperparameters == {"precision": 3.0, "noise": 1.0}
    assert history[-1].hyperparameters["noise"] == float(la.likelihood.noise)
    gamma, square = la.effective_dimension().sum(), la.tangent.theta.square().sum()
    assert abs(gamma - la.prior.precision.sum() * square) <= 1e-3 * gamma
    log_joint = torch.distributions.Normal(x @ la.tangent.theta[:, None], la.likelihood.noise).log_prob(y).sum()
    expected = (0.5 * la.prior.precision.sum() * square - log_joint) / 40
    assert math.isclose(history[-1].train_loss, float(expected), rel_tol=1e-9)


def test_penalty_loss_trains_a_network_by_gradient() -> None:
    torch.manual_seed(0)
    x = torch.linspace(-3, 3, 60)[:, None].double()
    y = torch.sin(x) + 0.2 * torch.randn_like(x)
    net = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1)).double()

    def train(model: nn.Module, penalty: lw.training.TrainingLoss) -> None:
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=300, line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = penalty.loss(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)

    la, history = lw.training.mackay(net, (x, y), "gaussian", train, tolerance=1e-2)
    assert history.converged
    assert history[-1].log_evidence > history[0].log_evidence
    assert abs(float(la.likelihood.noise) / 0.2 - 1) < 0.5  # 5 standard errors


def test_fixed_noise_stays() -> None:
    x, y = problem(0)
    la, _ = lw.training.mackay(Two().double(), (x, y), lw.likelihoods.Gaussian(0.7), ridge(x, y), fixed=("noise",))
    assert float(la.likelihood.noise) == 0.7


def test_rounds_that_run_out_are_said() -> None:
    x, y = problem(0)
    with pytest.warns(LapwingWarning, match="did not settle"):
        la, history = lw.training.mackay(Two().double(), (x, y), "gaussian", ridge(x, y), tolerance=1e-14, rounds=2)
    assert history.converged is False
    assert len(history) == 2
    assert float(la.prior.precision) == history[-1].hyperparameters["precision"]  # those that it was trained under


def test_targets_without_noise_stay_bounded() -> None:
    """σ → 0: it stops at its bound, finite."""
    x, _ = problem(0)
    y = x.sum(1, keepdim=True)
    la, history = lw.training.mackay(Two().double(), (x, y), "gaussian", ridge(x, y), rounds=100)
    assert all(math.isfinite(r.log_evidence) for r in history)
    assert history[-1].at_bound == 1
    assert float(la.likelihood.noise) > 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"rounds": 0}, "rounds must be"), ({"tolerance": 0.0}, "tolerance must be"), ({"fixed": ("x",)}, "names no")],
)
def test_wrong_arguments_are_named(wrong: dict, message: str) -> None:
    x, y = problem(0)
    with pytest.raises(InvalidValue, match=message):
        lw.training.mackay(Two().double(), (x, y), "gaussian", ridge(x, y), **wrong)
    with pytest.raises(InvalidValue, match="train must be a function"):
        lw.training.mackay(Two().double(), (x, y), "gaussian", None)
    with pytest.raises(Unsupported, match="no penalty"):
        lw.training.mackay(Two().double(), (x, y), "gaussian", ridge(x, y), prior="gprior")
