"""tuned(method="validation"): a bounded search on held-out log-likelihood, against optima that are known."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import lapwing as lw
from lapwing.errors import InvalidValue, LapwingWarning
from lapwing.tune.validation import TOLERANCE, search


def mlp(seed: int, outputs: int = 2) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, outputs)).double()


def regression(seed: int, n: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, 3, generator=g).double(), 0.5 * torch.randn(n, 2, generator=g).double()


def classes(seed: int) -> lw.Laplace:
    x = regression(seed, 40)[0]
    return lw.laplace(mlp(seed), (x, (x[:, 0] > 0).long()), "categorical", prior=1.0)


def sampled(la: lw.Laplace, seed: int, n: int) -> tuple[Tensor, Tensor]:
    """Held-out data that a Laplace object predicts rightly: its own hyperparameters are about the best."""
    x = 2 * regression(seed, n)[0]
    return x, la.predict(x).sample(1, torch.Generator().manual_seed(seed))[0]


def nll(la: lw.Laplace, data: tuple[Tensor, Tensor]) -> float:
    return float(-la.predict(data[0]).log_prob(data[1]).mean())


# -- the search ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [-3.3, 0.0, 0.7, 8.9])
def test_search_finds_the_least_of_a_parabola_and_stays_inside(at: float) -> None:
    seen: list[float] = []

    def parabola(x: float) -> float:
        seen.append(x)
        return (x - at) ** 2

    best, value = search(parabola, -5.0, 9.0, 1.0)
    assert abs(best - at) < TOLERANCE
    assert value == (best - at) ** 2 == min((x - at) ** 2 for x in seen)
    assert min(seen) == -5.0
    assert max(seen) == 9.0
    assert 1.0 in seen


def test_search_ends_at_the_bound_of_a_slope() -> None:
    for slope, end in ((1.0, -5.0), (-1.0, 9.0)):
        assert search(lambda x, slope=slope: slope * x, -5.0, 9.0, 0.0)[0] == end  # type: ignore[misc]


# -- known optima ----------------------------------------------------------------------------------------------------


def test_noise_of_a_determined_model_is_the_held_out_residual() -> None:
    """Parameters far better known than the noise: held-out NLL is that of N(f, σ²), least at σ² = mean residual²."""
    net, (x, y), held = mlp(0), regression(1, 60), regression(2, 500)
    la = lw.laplace(net, (x, y), "gaussian", prior=1e12).tuned("validation", data=held, fixed="precision")
    residual = (held[1] - net(held[0]).detach()).square().mean().sqrt()
    assert_close(la.likelihood.noise, residual, rtol=TOLERANCE, atol=0)
    assert float(la.prior.precision) == pytest.approx(1e12)
    assert la.temperature == 1.0


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_joint_optimum_equals_a_dense_grid(seed: int, structure: str) -> None:
    """Against every point of a fine grid over prior and noise, each by a posterior of its own."""
    net, data = mlp(seed), regression(seed, 25)
    la = lw.laplace(net, data, "gaussian", structure=structure, prior="layerwise")
    held = sampled(la.replace(prior=0.3, likelihood=lw.likelihoods.Gaussian(0.2)), seed + 10, 300)
    tuned = la.tuned("validation", data=held)
    assert_close(float(tuned.likelihood.noise), 0.2, rtol=0.2, atol=0)
    best = math.inf
    for factor in torch.logspace(-2, 1.5, 15).tolist():
        for noise in torch.logspace(-1, -0.4, 7).tolist():
            prior = la.prior.replace(precision=la.prior.precision * factor)
            best = min(best, nll(la.replace(prior=prior, likelihood=lw.likelihoods.Gaussian(noise)), held))
    assert nll(tuned, held) <= best + 1e-3
    assert nll(tuned, held) <= nll(la, held)
    assert tuned.tuning is not None
    assert_close(tuned.tuning.trace[-1], -nll(tuned, held), rtol=1e-9, atol=1e-9)
    assert list(tuned.tuning.trace) == sorted(tuned.tuning.trace)
    ratio = tuned.prior.precision / la.prior.precision
    assert_close(ratio, ratio[:1].expand_as(ratio))  # one factor: the groups keep their proportions


@pytest.mark.parametrize("prior", [1.0, "gprior"])
def test_temperature_of_classes_is_that_of_the_covariance(prior: Any) -> None:
    net, (x, y), (xv, yv) = mlp(3, 3), regression(3, 40), regression(4, 60)
    labels, held = (y[:, 0] * 3).long().clamp(0, 2), (xv, (yv[:, 0] * 3).long().clamp(0, 2))
    la = lw.laplace(net, (x, labels), "categorical", prior=prior)
    with pytest.warns(LapwingWarning, match="bound"):  # labels that are noise: any error bar, the wider the better
        tuned = la.tuned("validation", data=held)
    assert tuned.likelihood is la.likelihood
    plain = la.replace(prior=tuned.prior)
    assert_close(tuned.predict(xv).covariance, tuned.temperature * plain.predict(xv).covariance, rtol=1e-8, atol=1e-10)
    assert_close(tuned.log_evidence("map"), plain.log_evidence("map"))  # of the prior and likelihood
    assert nll(tuned, held) <= min(nll(la, held), nll(plain, held))
    draws = torch.cat([v.flatten(1) for v in tuned.draw(4000).values()], 1)
    cool = torch.cat([v.flatten(1) for v in plain.draw(4000).values()], 1)
    assert_close(draws.var(0), tuned.temperature * cool.var(0), rtol=1e-6, atol=1e-10)
    assert f"temperature {tuned.temperature:.3g}" in repr(tuned)
    back = tuned.tuned(center="map") if prior == 1.0 else None
    assert back is None or back.temperature == 1.0


def test_fixed_temperature_moves_the_prior_alone() -> None:
    la = classes(5)
    held = sampled(la.replace(prior=0.05), 6, 500)
    tuned = la.tuned("validation", data=held, fixed=("temperature",))
    assert tuned.temperature == 1.0
    assert 0.005 < float(tuned.prior.precision) < 0.5
    grid = [nll(la.replace(prior=float(lam)), held) for lam in torch.logspace(-3, 1, 41)]
    assert nll(tuned, held) <= min(grid) + 1e-4


def test_empirical_factor_goes_with_the_fourth_power_of_the_noise() -> None:
    la = lw.laplace(mlp(7), regression(7, 25), lw.likelihoods.Gaussian(0.3), factor="empirical")
    held = sampled(la.replace(prior=2.0, likelihood=lw.likelihoods.Gaussian(0.2)), 8, 200)
    for fixed in ((), ("precision",), ("noise",)):
        tuned = la.tuned("validation", data=held, fixed=fixed)
        assert tuned.tuning is not None
        assert_close(tuned.tuning.trace[-1], -nll(tuned, held), rtol=1e-9, atol=1e-9)
        assert ("precision" in fixed) == (float(tuned.prior.precision) == pytest.approx(1.0, rel=1e-9))
        assert ("noise" in fixed) == (float(tuned.likelihood.noise) == 0.3)


# -- bounds, files, errors ---------------------------------------------------------------------------------------------


def test_stays_within_bounds_and_says_so() -> None:
    """Held-out targets that are the network's own outputs ask for no error bar and no noise at all."""
    net, data, (xv, _) = mlp(1), regression(1, 30), regression(2, 20)
    la = lw.laplace(net, data, "gaussian")
    with pytest.warns(LapwingWarning, match="stopped at a bound for precision, noise"):
        tuned = la.tuned("validation", data=(xv, net(xv).detach()))
    assert tuned.tuning is not None
    assert tuned.tuning.at_bound == ("precision", "noise")
    scale = float(la.likelihood.target_scale(la.state.statistics))
    assert float(tuned.likelihood.noise) >= 1e-6 * scale * (1 - 1e-9)
    assert math.isfinite(tuned.tuning.trace[-1])


def test_labels_that_the_network_foretells_ask_for_the_plain_network() -> None:
    """Held-out labels that are the network's own: any error bar makes them less likely."""
    net, (x, y), (xv, _) = mlp(3, 3), regression(3, 40), regression(4, 60)
    la = lw.laplace(net, (x, (y[:, 0] * 3).long().clamp(0, 2)), "categorical")
    with pytest.warns(LapwingWarning, match="held-out data prefer the plain network"):
        la.tuned("validation", data=(xv, net(xv).argmax(1)))


@pytest.mark.full
def test_deterministic_and_leaves_the_original_alone() -> None:
    la = lw.laplace(mlp(2), regression(2, 10), "gaussian", subset="last_layer")
    held = sampled(la.replace(prior=0.2, likelihood=lw.likelihoods.Gaussian(0.2)), 3, 100)
    before = (float(la.prior.precision), float(la.likelihood.noise))
    state = torch.get_rng_state()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*held), batch_size=6)
    a, b = la.tuned("validation", data=held), la.tuned("validation", data=loader)
    assert torch.equal(torch.get_rng_state(), state)
    assert before == (float(la.prior.precision), float(la.likelihood.noise))
    assert_close(a.prior.precision, b.prior.precision)
    assert_close(a.likelihood.noise, b.likelihood.noise)
    assert a.tuning is not None
    assert "tuned by validation" in repr(a)


def test_saved_with_its_temperature(tmp_path: Path) -> None:
    la = classes(5)
    held = sampled(replace(la, temperature=5.0), 6, 500)
    tuned = la.tuned("validation", data=held, fixed="precision")
    assert 1.5 < tuned.temperature < 15
    tuned.save(tmp_path / "a.safetensors")
    back = lw.load(tmp_path / "a.safetensors", la.tangent.model)
    assert back.temperature == tuned.temperature != 1.0
    assert back.tuning == tuned.tuning
    assert torch.equal(back.predict(held[0]).mean, tuned.predict(held[0]).mean)


def test_bad_input_is_refused() -> None:
    net, data, held = mlp(0), regression(0, 20), regression(1, 10)
    la = lw.laplace(net, data, "gaussian")
    with pytest.raises(InvalidValue, match="needs held-out data"):
        la.tuned("validation")
    with pytest.raises(InvalidValue, match=r"\['temperature'\] names nothing.*'precision', 'noise'"):
        la.tuned("validation", data=held, fixed="temperature")
    with pytest.raises(InvalidValue, match="nothing to tune"):
        la.tuned("validation", data=held, fixed=("precision", "noise"))
    with pytest.raises(InvalidValue, match="do not match outputs"):
        la.tuned("validation", data=(held[0], held[1][:, :1]))
    with pytest.raises(InvalidValue, match="'validation'"):
        la.tuned("cross-validation")
