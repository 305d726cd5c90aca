"""Tuning: what `la.tuned(center="map")` returns is a maximum of the evidence, within bounds, and leaves `la` as it was.

∂ log Z/∂ log λ_g = ½(γ_g − λ_g‖θ_g − m_g‖²),   ∂ log Z/∂ log σ = SSE/σ² − NC + γ
MacKay: λ = γ/‖v‖²      EM: λ = P/(‖v‖² + tr Σ)      the same fixed point
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from helpers import HalfDead, close, draw

METHODS = ("evidence", "mackay")
PRIORS = {
    "scalar": 1.0,
    "layerwise": "layerwise",
    "glob": {"0.*": 1.0, "2.weight": 0.5, "2.bias": 2.0},
    "unit": lw.priors.Gaussian(per="unit"),
    "weight": lw.priors.Gaussian(per="weight"),
    "mean": lw.priors.Gaussian(mean=0.1, per="layer"),
}


def mlp() -> nn.Module:
    """3 -> 4 -> 2, p = 26, with weights of some size."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(draw(*p.shape))
    return net


def problem(
    kind: str, seed: int = 0, n: int = 25
) -> tuple[nn.Module, tuple[Tensor, Tensor], lw.likelihoods.Likelihood]:
    """Data that the network fits well, so that the evidence has a maximum inside its bounds."""
    torch.manual_seed(seed)
    model, x = mlp(), draw(n, 3)
    f = model(x).detach()
    if kind == "categorical":
        return model, (x, torch.distributions.Categorical(logits=f).sample()), lw.likelihoods.Categorical()
    if kind == "bernoulli":
        return model, (x, torch.bernoulli(torch.sigmoid(f))), lw.likelihoods.Bernoulli()
    noise = torch.tensor([0.2, 0.6], dtype=torch.float64) if kind == "per output" else torch.tensor(0.3)
    return model, (x, f + noise * draw(n, 2)), lw.likelihoods.Gaussian(torch.ones_like(noise))


def train(model: nn.Module, x: Tensor, y: Tensor) -> None:
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=300, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        penalty = sum(p.square().sum() for p in model.parameters())
        loss = (model(x) - y).square().sum() + 0.1 * penalty
        loss.backward()
        return loss

    optimizer.step(closure)


def structure_of(name: str):
    return lw.curvature.Full(name) if name in ("primal", "dual") else name


def logs_of(la: lw.Laplace) -> dict[str, Tensor]:
    return {k: v.log() for k, v in {**la.prior.hyperparameters, **la.likelihood.hyperparameters}.items()}


def evidence_at(la: lw.Laplace, logs: dict[str, Tensor]) -> Tensor:
    likelihood = la.likelihood.replace(noise=logs["noise"].exp()) if "noise" in logs else None
    return la.log_evidence(prior=la.prior.replace(precision=logs["precision"].exp()), likelihood=likelihood)


def slopes(la: lw.Laplace) -> dict[str, Tensor]:
    """∂ log Z/∂ log hyperparameters."""
    logs = {k: v.clone().requires_grad_() for k, v in logs_of(la).items()}
    return dict(zip(logs, torch.autograd.grad(evidence_at(la, logs), list(logs.values())), strict=True))


# -- stationarity ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["gaussian", "per output", "categorical", "bernoulli"])
@pytest.mark.parametrize("prior", PRIORS)
def test_a_tuned_evidence_is_stationary_and_higher_than_all_around(method: str, kind: str, prior: str) -> None:
    model, data, likelihood = problem(kind)
    la = lw.laplace(model, data, likelihood, structure="full", prior=PRIORS[prior])
    tuned = la.tuned(method, center="map")
    assert tuned.tuning.converged
    assert tuned.tuning.at_bound == ()
    gamma = tuned.effective_dimension()
    # MacKay stops where |γ − λ‖θ‖²| and σ are within 1e-3, relative: so are the slopes
    allowed = {"precision": 1e-3 * gamma.clamp(min=1), "noise": torch.tensor(2e-3 * 50)}
    for key, slope in slopes(tuned).items():
        most = torch.tensor(1e-5) if method == "evidence" else allowed[key]
        assert (slope.abs() <= most).all(), (key, slope)
    best, logs = tuned.log_evidence(), logs_of(tuned)
    assert best > la.log_evidence()
    for key, step in itertools.product(logs, (-0.2, 0.2)):
        assert evidence_at(tuned, {**logs, key: logs[key] + step}) < best


@pytest.mark.parametrize("structure", ["primal", "dual", "diag", "block", "kron"])
@pytest.mark.parametrize("kind", ["gaussian", "per output", "categorical"])
@pytest.mark.parametrize("prior", ["scalar", "layerwise"])
def test_gradient_and_mackay_reach_the_same_optimum(structure: str, kind: str, prior: str) -> None:
    for seed in (1, 2) if structure in ("primal", "diag") else (1,):
        model, data, likelihood = problem(kind, seed)
        la = lw.laplace(model, data, likelihood, structure=structure_of(structure), prior=PRIORS[prior])
        gradient, mackay = la.tuned(center="map"), la.tuned("mackay", center="map")
        close(gradient.log_evidence(), mackay.log_evidence(), 1e-4)
        for key, value in logs_of(gradient).items():
            close(value, logs_of(mackay)[key], 1e-2)
        # and, given the time, to the last digit
        settled, noise, _ = lw.tune.mackay(la.state, la.prior, la.likelihood, tolerance=1e-10)
        close(gradient.prior.precision, settled.precision, 1e-4)
        assert all(float(s.abs().max()) < 1e-6 for s in slopes(la.replace(settled, noise)).values())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("factor", ["empirical", "monte_carlo", "hessian"])
def test_every_factor_is_tuned_to_a_stationary_point(method: str, factor: str) -> None:
    model, data, likelihood = problem("gaussian", seed=3)
    train(model, *data)  # the Hessian is positive definite at a minimum only
    la = lw.laplace(model, data, likelihood, structure="full", factor=factor)
    tuned = la.tuned(method, center="map")
    assert tuned.tuning.converged
    assert all(float(s.abs().max()) < (1e-5 if method == "evidence" else 0.1) for s in slopes(tuned).values())


@pytest.mark.parametrize("prior", ["scalar", "layerwise", "mean"])
@pytest.mark.parametrize("kind", ["gaussian", "categorical"])
def test_mackay_and_em_have_the_same_fixed_point(prior: str, kind: str) -> None:
    """EM's λ_g ← P_g/(‖θ_g − m_g‖² + tr_g Σ), iterated with dense matrices from far away."""
    for seed in (0, 1, 2):
        model, data, likelihood = problem(kind, seed)
        la = lw.laplace(model, data, likelihood, structure=lw.curvature.Full("primal"), prior=PRIORS[prior])
        fixed = ("noise",) if kind == "gaussian" else ()
        settled, _, _ = lw.tune.mackay(la.state, la.prior, la.likelihood, fixed, tolerance=1e-12)
        groups = torch.zeros(26).long() if prior == "scalar" else torch.tensor([0] * 16 + [1] * 10)
        count = torch.bincount(groups).double()
        G = lw.operators.linalg.to_dense(la.posterior.precision) - la.prior.operator().dense().diag()
        theta = torch.cat([p.detach().reshape(-1) for p in model.parameters()]) - (0.1 if prior == "mean" else 0.0)
        square = torch.zeros_like(count).index_add(0, groups, theta.square())
        lam = torch.full_like(count, 50.0)
        for _ in range(3000):
            variance = torch.linalg.inv(G + lam[groups].diag()).diagonal()
            lam, last = count / (square + torch.zeros_like(count).index_add(0, groups, variance)), lam
            if float((lam / last - 1).abs().max()) < 1e-13:
                break
        close(settled.precision.reshape(-1), lam)


@pytest.mark.parametrize("method", METHODS)
def test_a_tuned_scalar_precision_beats_a_fine_grid(method: str) -> None:
    for seed in (0, 1, 2):
        model, data, likelihood = problem("categorical", seed)
        la = lw.laplace(model, data, likelihood, structure="full")
        grid = [float(la.log_evidence(prior=float(p))) for p in torch.logspace(-4, 4, 400, dtype=torch.float64)]
        best = float(la.tuned(method, center="map").log_evidence())
        assert best > max(grid) - 1e-6
        assert best < max(grid) + 1e-2


@pytest.mark.parametrize("method", METHODS)
def test_the_optimum_does_not_depend_on_where_the_user_was(method: str) -> None:
    model, data, _ = problem("gaussian")
    fits = [
        lw.laplace(model, data, lw.likelihoods.Gaussian(noise), prior=prior).tuned(method, center="map")
        for prior, noise in [(1.0, 1.0), (1e4, 1e-5), (1e-4, 1e4)]
    ]
    for other in fits[1:]:
        close(other.log_evidence(), fits[0].log_evidence(), 1e-5)
        close(other.prior.precision, fits[0].prior.precision, 1e-2)
        close(other.likelihood.noise, fits[0].likelihood.noise, 1e-3)


@pytest.mark.parametrize("method", METHODS)
def test_noise_per_output_finds_each_outputs_noise(method: str) -> None:
    model, data, likelihood = problem("per output", n=400)
    tuned = lw.laplace(model, data, likelihood).tuned(method, center="map")
    truth = torch.tensor([0.2, 0.6], dtype=torch.float64)
    assert tuned.likelihood.noise.shape == (2,)
    torch.testing.assert_close(tuned.likelihood.noise, truth, rtol=5 / math.sqrt(800), atol=0.0)  # 5 standard errors


# -- what may move -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_fixed_holds_a_hyperparameter_and_tunes_the_other(method: str) -> None:
    model, data, _ = problem("gaussian")
    la = lw.laplace(model, data, lw.likelihoods.Gaussian(0.37), prior=3.3)
    held_noise, held_prior = (
        la.tuned(method, fixed=("noise",), center="map"),
        la.tuned(method, fixed="precision", center="map"),
    )
    assert float(held_noise.likelihood.noise) == 0.37
    assert float(held_prior.prior.precision) == 3.3
    assert held_noise.tuning.fixed == ("noise",)
    assert held_prior.tuning.fixed == ("precision",)
    assert float(slopes(held_noise)["precision"].abs()) < 0.03
    assert float(slopes(held_prior)["noise"].abs()) < 0.03
    assert float(slopes(held_noise)["noise"].abs()) > 0.5
    assert float(slopes(held_prior)["precision"].abs()) > 0.5


@pytest.mark.filterwarnings("ignore:tuning stopped at a bound")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("prior", PRIORS)
def test_granularity_never_changes(method: str, prior: str) -> None:
    model, data, likelihood = problem("per output")
    la = lw.laplace(model, data, likelihood, prior=PRIORS[prior])
    tuned = la.tuned(method, center="map")
    assert tuned.prior.precision.shape == la.prior.precision.shape
    assert tuned.prior.names == la.prior.names
    assert tuned.prior.per == la.prior.per
    assert tuned.prior.named().keys() == la.prior.named().keys()
    close(tuned.prior.mean_vector(), la.prior.mean_vector(), 0.0)
    assert tuned.likelihood.noise.shape == la.likelihood.noise.shape
    groups = {"scalar": 1, "layerwise": 2, "glob": 3, "unit": 6, "weight": 26, "mean": 2}[prior]
    assert len(set(tuned.prior.precision.reshape(-1).tolist())) == groups


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("structure", ["primal", "dual", "diag"])
def test_tuning_changes_nothing_of_the_object_it_starts_from(method: str, structure: str) -> None:
    model, data, likelihood = problem("gaussian")
    la = lw.laplace(model, data, likelihood, structure=structure_of(structure))
    new = draw(3, 3)
    before = la.log_evidence(), la.predict(new).total, la.prior, la.likelihood, repr(la)
    sums = {k: v.clone() for k, v in la.state.sums.items()}
    weights = {k: v.clone() for k, v in model.state_dict().items()}
    tuned = la.tuned(method, center="map")
    assert la.tuning is None
    assert (la.prior, la.likelihood) == before[2:4]
    assert float(la.prior.precision) == 1.0
    assert float(la.likelihood.noise) == 1.0
    assert repr(la) == before[4]
    close(la.log_evidence(), before[0])
    close(la.predict(new).total, before[1])
    for key, value in la.state.sums.items():
        close(value, sums[key], 0.0)
    for key, value in model.state_dict().items():
        close(value, weights[key], 0.0)
    assert not tuned.prior.precision.requires_grad
    assert not tuned.likelihood.noise.requires_grad
    assert not torch.equal(tuned.predict(new).total, before[1])


@pytest.mark.parametrize("method", METHODS)
def test_tuning_says_how_it_went(method: str) -> None:
    model, data, likelihood = problem("gaussian")
    la = lw.laplace(model, data, likelihood)
    tuned = la.tuned(method, center="map")
    how = tuned.tuning
    assert how.method == method
    assert how.center == tuned.center == "map"
    assert how.converged
    assert how.at_bound == ()
    assert how.fixed == ()
    assert 1 <= how.iterations <= len(how.trace)
    assert all(math.isfinite(value) for value in how.trace)
    assert how.trace[-1] == pytest.approx(float(tuned.log_evidence()), abs=1e-2)
    assert max(how.trace) <= float(tuned.log_evidence()) + 1e-2
    assert f"tuned by {method} at the map" in repr(tuned)
    assert "not tuned" in repr(la)
    assert tuned.replace(prior=2.0).tuning is None


# -- bounds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("structure", ["primal", "dual", "diag"])
def test_a_group_that_the_data_do_not_see_stops_at_its_bound(method: str, structure: str) -> None:
    torch.manual_seed(0)
    model, x = HalfDead().double(), draw(20, 3)
    la = lw.laplace(
        model,
        (x, model(x).detach() + 0.2 * draw(20, 2)),
        lw.likelihoods.Gaussian(0.2),
        structure=structure_of(structure),
        prior="layerwise",
    )
    with pytest.warns(lw.errors.LapwingWarning, match=r"precision\[dead\]") as caught:
        tuned = la.tuned(method, fixed=("noise",), center="map")
    assert len(caught) == 1
    assert tuned.tuning.at_bound == ("precision[dead]",)
    live, dead = tuned.prior.precision.tolist()
    G = lw.operators.linalg.diagonal(la.posterior.precision) - 1
    typical = float(G[:8].mean())
    assert dead == pytest.approx(1e-6 * typical, rel=0.01)  # the evidence falls in it: −½λ‖θ‖²
    assert 1e-3 < live < 1e3
    assert float(slopes(tuned)["precision"][0].abs()) < 0.01
    assert torch.isfinite(tuned.log_evidence())
    assert torch.isfinite(tuned.predict(x).total).all()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("per_output", [False, True])
def test_noise_stops_at_its_bound_where_the_fit_is_perfect(method: str, per_output: bool) -> None:
    torch.manual_seed(1)
    model, x = mlp(), draw(40, 3)
    y = model(x).detach()
    if per_output:
        y[:, 1] += 0.5 * draw(40)
    noise = torch.ones(2 if per_output else ()).double()
    la = lw.laplace(model, (x, y), lw.likelihoods.Gaussian(noise), structure="full")
    with pytest.warns(lw.errors.LapwingWarning, match="noise") as caught:
        tuned = la.tuned(method, center="map")
    assert len(caught) == 1
    assert any("noise" in name for name in tuned.tuning.at_bound)
    spread = y.std(0, correction=0) if per_output else y.var(0, correction=0).mean().sqrt()
    found = tuned.likelihood.noise
    assert float(found.reshape(-1)[0]) == pytest.approx(1e-6 * float(spread.reshape(-1)[0]), rel=0.01)
    if per_output:
        assert float(found[1]) == pytest.approx(0.5, rel=0.5)
    assert torch.isfinite(tuned.log_evidence())


@pytest.mark.parametrize("method", METHODS)
def test_one_example_can_be_tuned(method: str) -> None:
    torch.manual_seed(2)
    model, x = mlp(), draw(1, 3)
    tuned = lw.laplace(model, (x, model(x).detach() + 0.3), "gaussian").tuned(method, fixed=("noise",), center="map")
    assert float(slopes(tuned)["precision"].abs()) < 1e-3


@pytest.mark.parametrize("method", METHODS)
def test_a_group_at_its_prior_mean_stops_at_the_upper_bound(method: str) -> None:
    model, data, likelihood = problem("categorical", seed=4)
    mean = {n: p.detach().clone() if n.startswith("0.") else torch.zeros_like(p) for n, p in model.named_parameters()}
    la = lw.laplace(model, data, likelihood, prior=lw.priors.Gaussian(per="layer", mean=mean), structure="diag")
    with pytest.warns(lw.errors.LapwingWarning, match=r"precision\[0\]"):
        tuned = la.tuned(method, center="map")
    assert tuned.tuning.at_bound == ("precision[0]",)
    typical = float((lw.operators.linalg.diagonal(la.posterior.precision) - 1)[:16].mean())
    assert float(tuned.prior.precision[0]) == pytest.approx(1e6 * typical, rel=0.01)
    assert float(slopes(tuned)["precision"][1].abs()) < 0.01


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("structure", ["primal", "diag"])
def test_outputs_with_positions_are_tuned_by_all_of_them(method: str, structure: str) -> None:
    torch.manual_seed(6)
    model, x = nn.Sequential(nn.Linear(3, 2), nn.Tanh()).double(), draw(10, 4, 3)
    la = lw.laplace(model, (x, model(x).detach() + 0.3 * draw(10, 4, 2)), "gaussian", structure=structure_of(structure))
    tuned = la.tuned(method, center="map")
    assert all(float(s.abs()) < (1e-5 if method == "evidence" else 0.2) for s in slopes(tuned).values())
    assert float(tuned.likelihood.noise) == pytest.approx(0.3, rel=5 / math.sqrt(160))


@pytest.mark.parametrize("batch", [7, 300])
def test_standardized_targets_are_known_again(batch: int) -> None:
    """Their sum is rounding alone, and no reason to call the data of the fit others; other targets are one."""
    generator = torch.Generator().manual_seed(batch)
    x, y = torch.randn(300, 3, generator=generator).double(), torch.randn(300, 2, generator=generator).double()
    y = (y - y.mean(0)) / y.std(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    la = lw.laplace(net, list(zip(x.split(batch), y.split(batch), strict=True)), "gaussian")
    assert la.tuned(data=(x, y)).center == "tangent"
    with pytest.raises(lw.errors.InvalidValue, match="not the data of the fit"):
        la.tuned(data=(x, y + 0.01))
