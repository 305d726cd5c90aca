"""The neural g-prior A = diag(λ_g h_d), h = diag of the curvature at unit noise: its invariance (identity 5), and what
happens to columns without curvature. Oracles are dense linear algebra on a Jacobian by plain autograd."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import lapwing as lw
from helpers import backward_rows
from lapwing.errors import InvalidValue, LapwingWarning, Unsupported
from lapwing.operators import Blocks, Dense, Diagonal, HeldRows, KroneckerPlusDiagonal, RootPlusDiagonal, linalg

TIGHT: dict[str, Any] = {"rtol": 1e-8, "atol": 1e-8}
STRUCTURES = ["primal", "dual", "kron", "block", "diag"]


def structure(name: str) -> Any:
    return lw.curvature.Full(form=name) if name in ("primal", "dual") else name


def relu_net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 7), nn.ReLU(), nn.Linear(7, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        net[0].bias.fill_(0.4), net[2].bias.fill_(1.0)  # no unit is dead
    return net


def data(seed: int, n: int = 40, outputs: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """X, y and new inputs."""
    g = torch.Generator().manual_seed(seed)
    x, y = torch.randn(n, 3, generator=g).double(), torch.randn(n, outputs, generator=g).double()
    return x, y, 2 * torch.randn(6, 3, generator=g).double()


def fit(model: nn.Module, x: Tensor, y: Tensor, prior: Any, kind: str = "primal", noise: Any = 0.4) -> lw.Laplace:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LapwingWarning)  # of dead units; they have tests of their own
        return lw.laplace(model, (x, y), lw.likelihoods.Gaussian(noise), structure=structure(kind), prior=prior)


# -- against dense linear algebra ----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["primal", "dual"])
@pytest.mark.parametrize("seed", range(3))
def test_equals_isotropic_prior_on_normalized_columns(form: str, seed: int, jacobian: Callable[..., Tensor]) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    for p in net.parameters():
        nn.init.normal_(p, generator=torch.Generator().manual_seed(seed))
    x, y, new = data(seed, n=9 if form == "dual" else 30)
    lam, noise = 0.7, 0.4
    la = fit(net, x, y, lw.priors.GPrior(lam), form, noise)
    J, Jnew = jacobian(net, lambda m: m(x)).flatten(0, 1), jacobian(net, lambda m: m(new)).flatten(0, 1)
    root = J.square().sum(0).sqrt()
    Jn, Jnewn, theta = J / root, Jnew / root, torch.cat([p.detach().reshape(-1) for p in net.parameters()]) * root
    M = Jn.mT @ Jn / noise**2 + lam * torch.eye(len(root), dtype=torch.float64)
    expected = (Jnewn @ torch.linalg.inv(M) @ Jnewn.mT).diagonal().reshape(-1, 2)
    assert_close(la.predict(new).f_var, expected, **TIGHT)
    residual = (y - net(x).detach()).reshape(-1)
    fit_term = -0.5 * residual.square().sum() / noise**2 - len(residual) * math.log(noise * math.sqrt(2 * math.pi))
    occam = 0.5 * (torch.logdet(M) - len(root) * math.log(lam))
    assert_close(la.log_evidence("map"), fit_term - 0.5 * lam * theta.square().sum() - occam, **TIGHT)
    gamma = len(root) - lam * torch.linalg.inv(M).trace()
    assert_close(la.effective_dimension(), gamma.reshape(1), **TIGHT)


@pytest.mark.parametrize("kind", STRUCTURES)
@pytest.mark.parametrize("per", ["all", "layer", "globs"])
def test_every_structure_conditions_on_its_own_diagonal(kind: str, per: str) -> None:
    """Posterior, predictions, evidence and draws against the dense form of the structure's own curvature."""
    net, (x, y, new) = relu_net(0), data(1)
    globs = {"0.*": 0.3, "2.weight": 2.0, "2.bias": 0.1, "4.*": 5.0}
    prior = lw.priors.GPrior(globs) if per == "globs" else lw.priors.GPrior(0.8, per=per)
    la = fit(net, x, y, prior, kind)
    G = linalg.to_dense(lw.posterior.curvature(la.state, lw.likelihoods.Gaussian(1.0)))
    lam = la.prior.groups().dense()
    named = la.prior.named()
    if per == "globs":
        expected = [named[next(g for g in globs if n.startswith(g.rstrip("*")))] for n, _ in net.named_parameters()]
        sizes = [p.numel() for p in net.parameters()]
        assert_close(lam, torch.repeat_interleave(torch.tensor(expected).double(), torch.tensor(sizes)))
    assert int((G.diagonal() == 0).sum()) == int(la.prior.dropped.sum())
    live = G.diagonal() > 0
    A = (lam * G.diagonal())[live]
    M = G[live][:, live] / 0.4**2 + torch.diag(A)
    ratio = torch.logdet(M) - A.log().sum()
    evidence = la.decompose("map")
    assert_close(2 * evidence.occam, ratio, **TIGHT)
    theta = la.tangent.theta.double()[live]
    assert_close(2 * evidence.quadratic, (A * theta.square()).sum(), **TIGHT)
    rows = backward_rows(net(new).reshape(-1), net.parameters())
    cov = rows[:, live] @ torch.linalg.inv(M) @ rows[:, live].mT
    assert_close(la.predict(new, joint=True).covariance.reshape(len(cov), -1), cov, **TIGHT)
    assert_close(la.predict(new).f_var.reshape(-1), cov.diagonal(), **TIGHT)
    draws = la.posterior.draw(20_000) - la.posterior.mean
    variance = torch.linalg.inv(M).diagonal()
    assert ((draws[:, live].var(0) / variance - 1).abs() < 5 * math.sqrt(2 / 20_000)).all()
    assert float(draws[:, ~live].abs().max() if (~live).any() else 0) < 1e-9


@pytest.mark.parametrize("kind", ["exact", "monte_carlo", "empirical"])
def test_second_moments_come_from_the_factor_of_the_state(kind: str) -> None:
    net, (x, y, _) = relu_net(2), data(2)
    labels = (y[:, 0] > 0).long()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LapwingWarning)
        la = lw.laplace(net, (x, labels), "categorical", structure="full", factor=kind, prior="gprior")
    G = linalg.diagonal(lw.posterior.curvature(la.state, la.likelihood))
    live = ~la.prior.dropped
    assert_close(la.prior.operator().dense()[live], G[live], **TIGHT)
    assert torch.isfinite(la.log_evidence("map"))


# -- identity 5: invariance ----------------------------------------------------------------------------------------


class Rescaled(nn.Module):
    """A network in other coordinates, θ = c·φ: J becomes J·diag(c)."""

    def __init__(self, net: nn.Module, seed: int) -> None:
        super().__init__()
        self.net = copy.deepcopy(net).requires_grad_(False)
        g = torch.Generator().manual_seed(seed)
        self.names = [n for n, _ in net.named_parameters()]
        self.scales = [torch.exp(2 * torch.randn(p.shape, generator=g)).double() for p in net.parameters()]
        self.phi = nn.ParameterList([p.detach() / c for p, c in zip(net.parameters(), self.scales, strict=True)])

    def forward(self, x: Tensor) -> Tensor:
        params = {n: c * p for n, c, p in zip(self.names, self.scales, self.phi, strict=True)}
        return torch.func.functional_call(self.net, params, (x,))


@pytest.mark.parametrize("form", ["primal", "dual", "diag"])
@pytest.mark.parametrize("linear", [True, False], ids=["linear", "network"])
@pytest.mark.parametrize("seed", range(2))
def test_nothing_changes_as_columns_are_rescaled(form: str, linear: bool, seed: int) -> None:
    net = nn.Linear(3, 2).double() if linear else relu_net(seed)
    x, y, new = data(seed, n=12 if form == "dual" else 40)
    results = []
    for model in (net, Rescaled(net, seed)):
        la, flat = (fit(model, x, y, prior, form) for prior in (lw.priors.GPrior(0.3), 1.0))
        tuned = la.tuned(center="map")
        at_v = la.recentered()
        found = [la.predict(new).f_var, la.log_evidence("map"), la.effective_dimension(), la.decompose("map").occam]
        found += [at_v.log_evidence(), at_v.predict(new, mean="tangent").mean]
        results.append((found, flat.predict(new).f_var, tuned.prior.precision, tuned.predict(new).f_var))
    (a, flat_a, lam_a, tuned_a), (b, flat_b, lam_b, tuned_b) = results
    for mine, other in zip(a, b, strict=True):
        assert_close(mine, other, **TIGHT)
    assert float((flat_a / flat_b - 1).abs().max()) > 0.1  # the isotropic prior does depend on the coordinates
    assert_close(lam_a, lam_b, rtol=1e-3, atol=0)
    assert_close(tuned_a, tuned_b, rtol=1e-3, atol=0)


@pytest.mark.parametrize("kind", STRUCTURES)
@pytest.mark.parametrize("a", [0.01, 7.0])
def test_relu_rescaling_changes_the_isotropic_predictive_only(kind: str, a: float) -> None:
    net, (x, y, new) = relu_net(3), data(3)
    twin = copy.deepcopy(net)
    with torch.no_grad():
        twin[0].weight.mul_(a), twin[0].bias.mul_(a), twin[2].weight.div_(a)
    assert_close(net(new), twin(new))
    mine, other = (fit(m, x, y, lw.priors.GPrior(0.5, per="layer"), kind) for m in (net, twin))
    assert_close(mine.predict(new).f_var, other.predict(new).f_var, **TIGHT)
    assert_close(mine.log_evidence("map"), other.log_evidence("map"), **TIGHT)
    mine, other = (fit(m, x, y, 1.0, kind) for m in (net, twin))
    assert float((mine.predict(new).f_var / other.predict(new).f_var - 1).abs().max()) > 0.05


# -- hyperparameters -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", STRUCTURES)
@pytest.mark.parametrize("per", ["all", "layer"])
def test_evidence_gradients_are_finite_differences(kind: str, per: str) -> None:
    net, (x, y, _) = relu_net(1), data(1)
    la = fit(net, x, y, lw.priors.GPrior(0.8, per=per), kind)

    def value(log: Tensor) -> Tensor:
        prior, noise = la.prior.replace(precision=log[1:].exp().reshape(la.prior.precision.shape)), log[0].exp()
        return la.log_evidence("map", prior=prior, likelihood=lw.likelihoods.Gaussian(noise))

    at = torch.zeros(1 + la.prior.precision.numel(), dtype=torch.float64).requires_grad_()
    (grad,) = torch.autograd.grad(value(at), at)
    step = 1e-5
    for i in range(len(at)):
        e = torch.zeros_like(at)
        e[i] = step
        with torch.no_grad():
            assert_close(grad[i], (value(at + e) - value(at - e)) / (2 * step), rtol=1e-6, atol=1e-6)


def test_prior_does_not_move_with_the_noise() -> None:
    """Zellner's form at noise σ is this one with λ = 1/(g σ²), so both have the same optimum."""
    net, (x, y, _) = relu_net(4), data(4)
    one, other = (fit(net, x, y, lw.priors.GPrior(2.0), noise=noise) for noise in (0.3, 3.0))
    assert_close(one.prior.operator().dense(), other.prior.operator().dense())
    moved = one.replace(likelihood=lw.likelihoods.Gaussian(3.0))
    assert_close(moved.log_evidence("map"), other.log_evidence("map"), **TIGHT)
    per_output = fit(net, x, y, lw.priors.GPrior(2.0), noise=torch.tensor([0.3, 3.0]))
    assert_close(per_output.prior.operator().dense(), one.prior.operator().dense())


@pytest.mark.parametrize("kind", STRUCTURES)
@pytest.mark.parametrize("center", ["map", "tangent"])
def test_tuning_ends_at_a_stationary_point(kind: str, center: str) -> None:
    net, (x, y, _) = relu_net(5), data(5)
    la = fit(net, x, net(x).detach() + 0.1 * y, lw.priors.GPrior(0.8), kind).tuned(center=center)
    assert la.tuning is not None
    assert la.tuning.converged
    gamma, quadratic = la.effective_dimension(), 2 * la.decompose().quadratic
    assert_close(gamma.sum(), quadratic, rtol=2e-3, atol=2e-3)


# -- dead and nearly dead weights ------------------------------------------------------------------------------------


def with_dead_unit(seed: int) -> nn.Sequential:
    net = relu_net(seed)
    with torch.no_grad():
        net[0].bias[2], net[0].weight[2] = -3.0, torch.tensor([40.0, 0.0, 0.0])  # reached from x₀ > .075 only
    return net


@pytest.mark.parametrize("kind", STRUCTURES)
@pytest.mark.parametrize("center", ["map", "tangent"])
def test_dead_units_are_dropped_as_if_frozen(kind: str, center: str) -> None:
    """A unit that no example reaches, and some new inputs do: equal to the network without its weights."""
    net, (x, y, new) = with_dead_unit(0), data(6)
    x[:, 0], new[:, 0] = -x[:, 0].abs(), new[:, 0].abs() + 1
    with pytest.warns(LapwingWarning, match=r"g-prior drops 8 of 70 weights.*0\.weight, 0\.bias, 2\.weight"):
        la = lw.laplace(
            net, (x, y), lw.likelihoods.Gaussian(0.4), structure=structure(kind), prior=lw.priors.GPrior(0.5)
        )
    assert "3 of 21 weights dropped by the g-prior" in la.coverage["0.weight"]
    assert "1 of 7" in la.coverage["0.bias"]
    assert "4 of 28" in la.coverage["2.weight"]
    assert "dropped" not in la.coverage["4.weight"]
    masks = {n: torch.ones(p.shape, dtype=torch.bool) for n, p in net.named_parameters()}
    masks["0.weight"][2], masks["0.bias"][2], masks["2.weight"][:, 2] = False, False, False
    kept = torch.cat([m.reshape(-1) for m in masks.values()])
    assert torch.equal(la.prior.dropped, ~kept)
    la = la if center == "map" else la.recentered()
    assert_close(la.posterior.mean[~kept], la.tangent.theta[~kept])
    assert float(la.posterior.draw(50)[:, ~kept].std(0).max()) < 1e-9
    assert torch.isfinite(la.predict(new).f_var).all()
    if kind in ("kron", "block"):
        return  # masked parameters get blocks of their own there: another curvature
    small = lw.laplace(
        net,
        (x, y),
        lw.likelihoods.Gaussian(0.4),
        subset=masks,
        structure=structure(kind),
        prior=lw.priors.GPrior(0.5),
    )
    small = small if center == "map" else small.recentered()
    assert_close(la.log_evidence(), small.log_evidence(), **TIGHT)
    assert_close(la.effective_dimension(), small.effective_dimension(), **TIGHT)
    assert_close(la.predict(new).f_var, small.predict(new).f_var, **TIGHT)
    assert_close(la.predict(new, mean="tangent").f_mean, small.predict(new, mean="tangent").f_mean, **TIGHT)
    assert_close(la.prior.log_prob(la.tangent.params), small.prior.log_prob(small.tangent.params), **TIGHT)


def test_dead_weights_are_said_once() -> None:
    net, (x, y, _) = with_dead_unit(0), data(6)
    x[:, 0] = -x[:, 0].abs()
    with pytest.warns(LapwingWarning, match="drops"):
        la = lw.laplace(net, (x, y), "gaussian", prior="gprior")
    for lam in (0.1, 1.0, 10.0):  # warnings are errors here
        la.replace(prior=lw.priors.GPrior(lam)).log_evidence("map")


@pytest.mark.parametrize("kind", STRUCTURES)
def test_all_dead_network_has_no_variance(kind: str) -> None:
    net, (x, y, new) = relu_net(0), data(0)
    with torch.no_grad():
        net[2].bias.fill_(-1e3)
    la = fit(net, x, y, "gprior", kind)
    dead = la.prior.counts_dropped()
    assert dead == {"0.weight": 21, "0.bias": 7, "2.weight": 28, "2.bias": 4, "4.weight": 8}
    for value in (la.log_evidence("map"), la.predict(new).f_var, la.draw(3)["0.weight"]):
        assert torch.isfinite(value).all()
    assert_close(la.effective_dimension(), 2 / (1 + 0.16 / 1) * torch.ones(1, dtype=torch.float64), **TIGHT)
    tuned = fit(net, x, y, "gprior", kind).tuned(center="map")
    assert torch.isfinite(tuned.log_evidence())


def test_columns_of_rounding_count_as_dead() -> None:
    """A bias before an instance norm has no effect: its Jacobian is rounding, not a column to be normalized."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(2, 3, 3), nn.InstanceNorm1d(3), nn.Tanh(), nn.Flatten(), nn.Linear(18, 2)).double()
    x, y = torch.randn(20, 2, 8).double(), torch.randn(20, 2).double()
    with pytest.warns(LapwingWarning, match=r"drops 3 .*0\.bias"):
        la = lw.laplace(net, (x, y), "gaussian", structure="full", prior="gprior")
    assert la.prior.counts_dropped() == {"0.bias": 3}


@pytest.mark.parametrize("kind", STRUCTURES)
def test_floor_narrows_nearly_dead_columns_and_gives_up_the_invariance(kind: str) -> None:
    net, (x, y, new) = with_dead_unit(0), data(6)
    x[:, 0], new[:, 0] = -x[:, 0].abs(), new[:, 0].abs() + 1
    x[0, 0] = 0.0751  # the unit's only example, barely
    none, some = (fit(net, x, y, lw.priors.GPrior(1.0, floor=floor), kind) for floor in (0.0, 0.1))
    assert not none.prior.dropped.any()
    assert bool((some.predict(new).f_var <= none.predict(new).f_var + 1e-12).all())
    assert float((none.predict(new).f_var / some.predict(new).f_var).max()) > 3
    h, lifted = none.prior.unit, some.prior.unit
    assert bool((lifted >= h * (1 - 1e-12)).all())
    if kind in ("primal", "dual"):
        for s in (slice(0, 28), slice(28, 60), slice(60, 70)):  # layers
            assert_close(lifted[s], h[s].clamp(min=0.1 * float(h[s].mean())), **TIGHT)
    if kind != "kron":
        a, b = (fit(m, x, y, lw.priors.GPrior(0.3, floor=0.1), kind) for m in (net, Rescaled(net, 0)))
        assert float((a.predict(new).f_var / b.predict(new).f_var - 1).abs().max()) > 1e-3


def test_floor_keeps_dead_units() -> None:
    net, (x, y, new) = with_dead_unit(0), data(6)
    x[:, 0], new[:, 0] = -x[:, 0].abs(), new[:, 0].abs() + 1
    la = lw.laplace(net, (x, y), "gaussian", structure="full", prior=lw.priors.GPrior(1.0, floor=0.1))  # no warning
    assert not la.prior.dropped.any()
    assert float(la.draw(50)["0.weight"][:, 2].std(0).min()) > 1e-3


# -- the life of an object -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", STRUCTURES)
def test_saved_and_loaded_bit_by_bit(kind: str, tmp_path: Path) -> None:
    net, (x, y, new) = relu_net(1), data(1)
    la = fit(net, x, y, lw.priors.GPrior({"0.*": 0.2, "[24].*": 3.0}, floor=0.05), kind)
    la.save(tmp_path / "a.safetensors")
    back = lw.load(tmp_path / "a.safetensors", net)
    assert isinstance(back.prior, lw.priors.GPrior)
    assert back.prior.floor == 0.05
    assert back.prior.named() == la.prior.named()
    assert torch.equal(back.prior.operator().dense(), la.prior.operator().dense())
    assert torch.equal(back.predict(new).f_var, la.predict(new).f_var)


def test_more_data_move_the_second_moments() -> None:
    net, (x, y, _) = relu_net(1), data(1)
    whole, part = fit(net, x, y, "gprior"), fit(net, x[:25], y[:25], "gprior")
    both = part.updated((x[25:], y[25:]))
    assert_close(both.prior.operator().dense(), whole.prior.operator().dense(), **TIGHT)
    merged = lw.from_state(both.state, net, lw.priors.GPrior(1.0), lw.likelihoods.Gaussian(0.4))
    assert_close(merged.log_evidence("map"), whole.log_evidence("map"), **TIGHT)


def test_last_layer_is_bayesian_linear_regression_on_normalized_features() -> None:
    net, (x, y, new) = relu_net(3), data(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LapwingWarning)
        la = lw.laplace(net, (x, y), lw.likelihoods.Gaussian(0.4), subset="last_layer", prior="gprior")
    phi = torch.cat([net[:-1](x), torch.ones(len(x), 1).double()], 1).detach()
    star = torch.cat([net[:-1](new), torch.ones(len(new), 1).double()], 1).detach()
    live = phi.square().sum(0) > 0
    root = phi[:, live].square().sum(0).sqrt()
    M = (phi[:, live] / root).mT @ (phi[:, live] / root) / 0.16 + torch.eye(int(live.sum())).double()
    var = torch.einsum("ni,ij,nj->n", star[:, live] / root, torch.linalg.inv(M), star[:, live] / root)
    assert_close(la.predict(new).f_var, var[:, None].expand(-1, 2), **TIGHT)


def test_bad_input_is_refused() -> None:
    net, (x, y, _) = relu_net(0), data(0)
    for floor in (-0.1, 1.5, float("nan"), True, "0.1"):
        with pytest.raises(InvalidValue, match="floor is a fraction"):
            lw.priors.GPrior(floor=floor)
    with pytest.raises(InvalidValue, match="positive and finite"):
        lw.priors.GPrior(-1.0)
    with pytest.raises(InvalidValue, match="'gprior'"):
        lw.laplace(net, (x, y), "gaussian", prior="g-prior")
    with pytest.raises(InvalidValue, match="has not seen a curvature"):
        lw.priors.GPrior().bind(lw.linearize(net).layout).operator()
    indefinite = Dense(torch.diag(torch.linspace(-1, 1, 70, dtype=torch.float64)), psd=False)
    with pytest.raises(InvalidValue, match="diagonal are negative"):
        lw.priors.GPrior().bind(lw.linearize(net).layout).at(indefinite, torch.zeros(70))


# -- operators shifted by a Diagonal with a unit ----------------------------------------------------------------------


def rank_one(g: torch.Generator) -> Tensor:
    u, e = torch.rand(2, generator=g).double() + 0.1, 3 * torch.rand(3, generator=g).double() + 0.1
    return (u[:, None] * e).reshape(-1)


@pytest.mark.parametrize("kind", ["dense", "root", "kron", "kron diagonal inputs", "diagonal", "blocks"])
@pytest.mark.parametrize("values", ["single", "grouped"])
def test_shift_in_a_unit_equals_dense_linear_algebra(kind: str, values: str) -> None:
    g = torch.Generator().manual_seed(11)
    rows, scale = torch.randn(4, 6, generator=g).double(), torch.tensor(0.6, dtype=torch.float64)
    a, b = (torch.randn(2, n, n, generator=g).double()[0] for n in (3, 2))
    a, b = a @ a.mT, b @ b.mT
    h, unit, index = rows.mT @ rows, rank_one(g), torch.arange(6) // 3
    ops: dict[str, tuple[Any, Tensor]] = {
        "dense": (Dense(h, scale), scale * h),
        "root": (RootPlusDiagonal(HeldRows(rows), Diagonal(scale.reshape(1), 4)), scale * h),
        "kron": (KroneckerPlusDiagonal(a[None], b[None], scale), scale * torch.kron(b, a)),
        "kron diagonal inputs": (
            KroneckerPlusDiagonal(a.diagonal()[None], b[None], scale),
            scale * torch.kron(b, a.diagonal().diag()),
        ),
        "diagonal": (Diagonal(scale * h.diagonal(), 6), scale * h.diagonal().diag()),
    }
    if kind == "blocks":
        order = torch.tensor([3, 0, 5, 1, 4, 2])
        inverse = order.argsort()
        op, dense = Blocks((ops["kron"][0],), (order,)), ops["kron"][1][inverse][:, inverse]
        unit, index = unit[inverse], index[inverse]
    else:
        op, dense = ops[kind]
    levels = torch.tensor([0.7] if values == "single" else [0.7, 2.5], dtype=torch.float64).requires_grad_()
    d = Diagonal(levels, 6, None if values == "single" else index, unit)
    spread = (levels.expand(6) if values == "single" else levels[index]) * unit
    exact, shifted = dense + torch.diag(spread), linalg.shift(op, d)
    for _ in range(2):  # the second time from what is kept
        assert_close(linalg.logdet(shifted), torch.logdet(exact), **TIGHT)
    mine, other = (
        torch.autograd.grad(torch_value, levels)[0] for torch_value in (linalg.logdet(shifted), torch.logdet(exact))
    )
    assert_close(mine, other, **TIGHT)
    with torch.no_grad():
        x = torch.randn(2, 3, 6, generator=g).double()
        inv = torch.linalg.inv(exact)
        assert_close(linalg.logdet(linalg.shift(op, d)), torch.logdet(exact), **TIGHT)
        assert_close(linalg.solve(shifted, x), x @ inv, **TIGHT)
        assert_close(linalg.covariance(shifted, x), x @ inv @ x.mT, **TIGHT)
        assert_close(linalg.to_dense(shifted), exact, **TIGHT)
        assert_close(linalg.mv(shifted, x), x @ exact, **TIGHT)
        assert_close(linalg.diagonal(shifted), exact.diagonal(), **TIGHT)
        traces = torch.zeros(2).double().index_add(0, index, dense.diagonal() / unit)
        assert_close(linalg.traces(op, d), traces.sum().reshape(1) if values == "single" else traces, **TIGHT)
        draws = linalg.draw(shifted, 40_000, torch.Generator().manual_seed(0))
        assert ((draws.var(0) / inv.diagonal() - 1).abs() < 5 * math.sqrt(2 / 40_000)).all()
        plain = Diagonal(torch.ones(1).double(), 6)  # and what is kept for one unit serves no other
        assert_close(linalg.logdet(linalg.shift(op, plain)), torch.logdet(dense + torch.eye(6).double()), **TIGHT)


def test_kronecker_refuses_a_unit_that_is_no_product() -> None:
    one, eye = torch.ones(()).double(), torch.eye(2).double()[None]
    unit = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    op = linalg.shift(KroneckerPlusDiagonal(eye, eye, one), Diagonal(torch.ones(1).double(), 4, unit=unit))
    with pytest.raises(Unsupported, match="no product of a value a row"):
        linalg.logdet(op)
