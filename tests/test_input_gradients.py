"""Gradients of predictions in their inputs, against central differences in float64: for Bayesian optimization.

The values are those of the route without a graph, for every structure, kind of posterior and mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import lapwing as lw
from helpers import close, integers, normal, seeded
from lapwing.errors import InvalidValue, LapwingWarning, Unsupported

STRUCTURES: dict[str, Any] = {
    "primal": lw.curvature.Full("primal"),
    "dual": lw.curvature.Full("dual"),
    "kron": "kron",
    "ekfac": "ekfac",
    "block": "block",
    "diag": "diag",
    "lowrank": lw.curvature.LowRank(rank=6),
    "matrix_free": lw.curvature.MatrixFree(samples=8, tolerance=1e-10),
}
STEP = 1e-5


def network(outputs: int, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


def fitted(structure: Any, likelihood: str = "gaussian", outputs: int = 2, **options: Any) -> lw.Laplace:
    y = {
        "gaussian": lambda: normal(9, outputs, seed=1),
        "categorical": lambda: integers(outputs, 9),
        "bernoulli": lambda: integers(2, 9, outputs),
        "poisson": lambda: integers(4, 9, outputs),
    }[likelihood]()
    return lw.laplace(network(outputs), (normal(9, 3), y), likelihood, structure=structure, prior=0.7, **options)


def differences(function: Callable[[Tensor], Tensor], x: Tensor, direction: Tensor) -> Tensor:
    """∂⟨direction, function⟩/∂x by central differences."""
    out = torch.zeros_like(x)
    for place in range(x.numel()):
        away = torch.zeros(x.numel(), dtype=x.dtype)
        away[place] = STEP
        away = away.reshape(x.shape)
        out.view(-1)[place] = ((function(x + away) - function(x - away)) * direction).sum() / (2 * STEP)
    return out


def check(function: Callable[[Tensor], Tensor], x: Tensor, tolerance: float = 1e-6) -> None:
    """The same values with a graph, and the gradient that differences have."""
    moving = x.clone().requires_grad_()
    plain, value = function(x), function(moving)
    assert not plain.requires_grad
    assert value.requires_grad
    close(value.detach(), plain, 1e-9)
    direction = normal(*plain.shape, seed=7)
    (found,) = torch.autograd.grad((value * direction).sum(), moving)
    expected = differences(function, x, direction)
    assert float(expected.abs().max()) > 1e-6
    assert_close(found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


FIELDS = {
    "gaussian": ("mean", "std", "epistemic", "covariance"),
    "categorical": ("probs", "epistemic", "aleatoric", "entropy", "mutual_information"),
    "bernoulli": ("probs", "total", "mutual_information"),
    "poisson": ("mean", "std", "epistemic"),
}


@pytest.mark.parametrize("likelihood", FIELDS)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_fields_of_a_prediction(structure: str, likelihood: str) -> None:
    la, x = fitted(STRUCTURES[structure], likelihood, 3 if likelihood == "categorical" else 2), normal(2, 3, seed=5)
    for name in FIELDS[likelihood]:
        check(lambda t, name=name: getattr(la.predict(t), name), x)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_functions_of_the_posterior(structure: str) -> None:
    functions = fitted(STRUCTURES[structure]).function_samples(3, seeded(2))
    check(functions, normal(2, 3, seed=5))


def test_joint_covariances_log_probabilities_and_draws() -> None:
    la, x, y = fitted("kron"), normal(2, 3, seed=5), normal(2, 2, seed=6)
    check(lambda t: la.predict(t, joint=True).covariance, x)
    check(lambda t: la.predict(t, joint=True).f_sample(4, seeded(1)), x)
    check(lambda t: la.predict(t).log_prob(y), x)
    check(lambda t: la.predict(t).sample(4, seeded(1)), x)
    classes = fitted("full", "categorical", 3)
    check(lambda t: classes.predict(t).log_prob(torch.tensor([2, 0])), x)
    for link in ("probit", "probit_centered", "mean_field", "bridge"):
        check(lambda t, link=link: classes.predict(t, link=link).probs, x)


@pytest.mark.parametrize("mean", ["tangent", "process", "mixture"])
def test_other_means(mean: str) -> None:
    la, x = fitted("full").recentered(), normal(2, 3, seed=5)
    for name in ("mean", "f_var"):
        check(lambda t, name=name: getattr(la.predict(t, mean=mean), name), x)
    if mean == "tangent":
        check(la.function_samples(2, seeded(2), mean="tangent"), x)


@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.filterwarnings("ignore::lapwing.errors.LapwingWarning")
def test_the_defaults_of_a_task(task: str) -> None:
    y = integers(3, 40) if task == "classification" else normal(40, 3, seed=1)
    la, x = lw.laplace(network(3), (normal(40, 3), y), task).tuned(), normal(2, 3, seed=5)
    for name in ("mean", "std", "f_var"):
        check(lambda t, name=name: getattr(la.predict(t), name), x)
    close(la.predict(x.numpy()).std, la.predict(x).std)
    close(la.predict(torch.utils.data.DataLoader(x, batch_size=1)).std, la.predict(x).std)


def test_other_posteriors() -> None:
    la, x, noise = fitted("full"), normal(2, 3, seed=5), lw.likelihoods.Gaussian(0.4)
    data, model = (normal(9, 3), normal(9, 2, seed=1)), network(2)
    target = lw.log_joint(model, data, noise, 1.0)
    particles = target.fitted(lw.posterior.Particles(target.tangent, la.posterior.draw(5, seeded(0))), "hand")
    ella = lw.gp.ella(model, data, noise, rank=4)
    for fit in (particles, ella, lw.mixture([la, particles])):
        for name in ("mean", "std"):
            check(lambda t, fit=fit, name=name: getattr(fit.predict(t), name), x)
    check(ella.function_samples(2, seeded(2)), x)
    check(lambda t: la.predict(t, via="network", samples=4).std, x)
    check(lambda t: lw.predict(la.posterior, la.likelihood, t).std, x)
    check(lambda t: lw.predict(la.posterior, la.likelihood, t, center=la.posterior.mean + 0.1).mean, x)


def test_quantiles() -> None:
    """Those that are searched for too, by F(y) = q; whole numbers have none, and those of draws say so."""
    x, la = normal(2, 3, seed=5), fitted("full").recentered()
    student = lw.laplace(network(2), (normal(9, 3), normal(9, 2, seed=1)), lw.likelihoods.StudentT(0.5, df=4.0))
    check(lambda t: la.predict(t).quantile(0.9), x)
    check(lambda t: la.predict(t, mean="mixture").quantile(0.9), x)
    check(lambda t: student.predict(t).interval(0.8)[0], x)
    check(lambda t: student.predict(t).cdf(normal(2, 2, seed=3)), x)
    check(lambda t: fitted("full", "categorical", 3).predict(t).quantile(0.7), x)
    moving = x[:1].clone().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda t: la.predict(t, mean="mixture").quantile(0.9), moving, atol=1e-4)
    assert not fitted("full", "poisson").predict(moving).quantile(0.9).requires_grad

    class Raw(lw.likelihoods.StudentT):
        def cdf(self, f: Tensor, y: Tensor) -> None:
            return None

    drawn = lw.laplace(network(2), (normal(9, 3), normal(9, 2, seed=1)), Raw(0.5, df=4.0)).predict(moving)
    with pytest.raises(Unsupported, match=r"read them under torch\.no_grad"):
        drawn.quantile(0.5)
    with torch.no_grad():
        assert torch.isfinite(drawn.quantile(0.5)).all()


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 2, 2), nn.GroupNorm(1, 2), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).tanh().flatten(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(2, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(2, 1, batch_first=True), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0])  # an output at each position


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * (1 + x.mean()).tanh()  # every output depends on every input


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "convolution": (Convolved, (1, 3, 3), (2,)),
    "recurrent": (Recurrent, (3, 2), (2,)),
    "attention": (Attentive, (2, 2), (2, 2)),
    "batches that mix": (Mixing, (2,), (2,)),
}


@pytest.mark.parametrize("structure", ["full", "kron"])
@pytest.mark.parametrize("kind", NETWORKS)
@pytest.mark.filterwarnings("ignore:this network cannot be:lapwing.errors.LapwingWarning")
def test_networks_of_other_kinds(kind: str, structure: str) -> None:
    make, inputs, outputs = NETWORKS[kind]
    torch.manual_seed(0)
    model = make().double().eval()
    la = lw.laplace(model, (normal(6, *inputs), normal(6, *outputs, seed=1)), "gaussian", structure=structure)
    check(lambda t: la.predict(t).std, normal(2, *inputs, seed=5))


def test_some_of_several_inputs_in_float32_and_of_a_subset() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.fc = nn.Embedding(5, 2), nn.Linear(4, 1)

        def forward(self, ids: Tensor, x: Tensor) -> Tensor:
            return self.fc(torch.cat([self.table(ids), x], -1)).sin()

    torch.manual_seed(0)
    ids, x, y = integers(5, 8), normal(8, 2), normal(8, seed=1)
    la = lw.laplace(Two().double(), ((ids, x), y), "gaussian", subset=["fc.*"])
    check(lambda t: la.predict((ids[:2], t)).std, x[:2])
    check(lambda t: la.predict({"ids": ids[:2], "x": t}).std, x[:2])
    single = lw.laplace(Two(), ((ids, x), y), "gaussian", subset=["fc.*"])
    moving = x[:2].clone().requires_grad_()  # float64 inputs of a float32 network
    assert moving.grad is None
    single.predict((ids[:2], moving)).std.sum().backward()

    assert moving.grad is not None
    assert moving.grad.dtype == torch.float64


def test_second_derivatives_are_right_too() -> None:
    la, x = fitted("kron"), normal(1, 3, seed=5).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda t: la.predict(t).f_var, x)


def test_a_maximum_of_an_acquisition_function_is_found() -> None:
    """What Bayesian optimization does: climb a bound, then see that nothing near it is higher."""
    la = fitted("full")
    x = normal(1, 3, seed=5).requires_grad_()
    optimizer = torch.optim.LBFGS([x], max_iter=60, line_search_fn="strong_wolfe")

    def bound(t: Tensor) -> Tensor:
        pred = la.predict(t)
        return (pred.mean[:, 0] + 2 * pred.epistemic[:, 0].sqrt() - 0.3 * t.square().sum(-1)).sum()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = -bound(x)
        loss.backward()
        return loss

    optimizer.step(closure)
    top = float(bound(x.detach()))
    near = x.detach() + 0.05 * normal(50, 3, seed=9)
    assert all(float(bound(one[None])) <= top + 1e-9 for one in near)


def test_nothing_is_kept_unless_it_is_asked_for() -> None:
    la, x = fitted("kron"), normal(2, 3, seed=5)
    moving = x.clone().requires_grad_()
    assert not la.predict(x).std.requires_grad
    functions = la.function_samples(2)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            assert not la.predict(moving).std.requires_grad
            assert not lw.predict(la.posterior, la.likelihood, moving).mean.requires_grad
            assert not functions(moving).requires_grad
    assert all(p.grad is None for p in la.tangent.model.parameters())
    data = moving.repeat(4, 1).detach().requires_grad_(), normal(8, 2)
    fit = lw.laplace(network(2), data, "gaussian", structure="kron")  # training data are not differentiated by
    assert not fit.tuned().log_evidence().requires_grad
    assert data[0].grad is None


def test_where_gradients_cannot_be_had_an_error_says_so() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(checkpoint(lambda t: self.a(t).tanh(), x, use_reentrant=False))

    torch.manual_seed(0)
    x, y = normal(6, 3), normal(6, 2)
    moving = x.clone().requires_grad_()
    la = lw.laplace(Checkpointed().double(), (x, y), "gaussian", structure="diag")
    assert torch.isfinite(la.predict(x).std).all()
    for use in (la.predict, la.function_samples(2), lambda t: la.predict(t, via="network")):
        with pytest.raises(Unsupported, match="switch gradient checkpointing off"):
            use(moving)
    wide = lw.laplace(nn.Linear(3, 600).double(), (x, normal(6, 600)), "gaussian", structure="diag")
    with pytest.raises(Unsupported, match="predicted by draws, which keep no graph"):
        wide.predict(moving)
    small = lw.laplace(network(2), (x, y), "gaussian", structure="diag", memory_budget=2**16)
    with pytest.raises(InvalidValue, match=r"rows of the Jacobian.*past memory_budget"):
        small.predict(moving.repeat(100, 1))


def test_loaders_and_arrays_have_no_graph_and_need_none() -> None:
    la, x = fitted("kron"), normal(9, 3, seed=5)
    with pytest.warns(LapwingWarning, match="shuffle=False"):
        pred = la.predict(torch.utils.data.DataLoader(x.requires_grad_(), batch_size=4, shuffle=True))
    assert not pred.mean.requires_grad
