"""How sure a classifier may be: ridge regression against n dense refits, features against their kernel, the rule
against searches over grids, and the object against its own definition written out."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from helpers import close, integers, normal, seeded
from lapwing import files, io
from lapwing.calibration import classes, features, reading, record, ridge
from lapwing.calibration.classes import CalibrationRows
from lapwing.data import TensorBatches

COUNT = 24  # features, in place of 1,024


@pytest.fixture(autouse=True)
def few_features(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "COUNT", COUNT)
    monkeypatch.setattr(record, "COUNT", COUNT)


# -- ridge regression --------------------------------------------------------------------------------------------


def sums_of(phi: Tensor, t: Tensor) -> ridge.Sums:
    return ridge.Sums(phi.mT @ phi, phi.mT @ t, phi.sum(0), t.mT @ t, t.sum(0), len(phi))


def problem(n: int, d: int, seed: int, c: int = 3) -> tuple[Tensor, Tensor]:
    """Features (n, d) with a constant, and targets (n, c) that they foretell in part."""
    phi = torch.cat([normal(n, d - 1, seed=seed) / math.sqrt(d), torch.full((n, 1), 0.7).double()], 1)
    return phi, phi @ normal(d, c, seed=seed + 100) + 0.3 * normal(n, c, seed=seed + 200) + 2.0


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("n", "d"), [(30, 5), (12, 20)])
@pytest.mark.parametrize("noise", [0.003, 0.5])
def test_left_out_is_what_dense_refits_without_the_example_say(n: int, d: int, seed: int, noise: float) -> None:
    """By a process of the others: mean k_*ᵀ (K₋ + j)⁻¹ r₋, variance k_** + j − k_*ᵀ (K₋ + j)⁻¹ k_*."""
    phi, t = problem(n, d, seed)
    found = sums_of(phi, t).fitted(phi, t, noise)
    P, r = phi.numpy(), (t - t.mean(0)).numpy()
    K = P @ P.T
    for i in range(n):
        keep = np.arange(n) != i
        gain = np.linalg.solve(K[np.ix_(keep, keep)] + noise * np.eye(n - 1), K[keep, i])
        np.testing.assert_allclose(found.mean[i], gain @ r[keep] + t.mean(0).numpy(), rtol=1e-7, atol=1e-8)
        np.testing.assert_allclose(found.spread[i] ** 2, K[i, i] + noise - gain @ K[keep, i], rtol=1e-7)
        np.testing.assert_allclose(found.doubt[i] ** 2, K[i, i] - gain @ K[keep, i], rtol=1e-5, atol=1e-9)
    np.testing.assert_allclose(found.between, r.T @ np.linalg.solve(K + noise * np.eye(n), r) / n, rtol=1e-7, atol=1e-9)
    new = normal(4, d, seed=seed + 300)
    noise_free = (new @ new.mT).numpy() - new.numpy() @ P.T @ np.linalg.solve(K + noise * np.eye(n), P @ new.numpy().T)
    close((new @ found.root) @ (new @ found.root).mT, torch.from_numpy(noise_free), 1e-7)
    dense = new.numpy() @ P.T @ np.linalg.solve(K + noise * np.eye(n), r) + t.mean(0).numpy()
    close(found(new), torch.from_numpy(dense), 1e-7)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("n", "d"), [(30, 5), (12, 20), (20, 20)])
def test_the_noise_of_labels_is_the_likeliest_of_the_grid(n: int, d: int, seed: int) -> None:
    """argmax_j of Σ_c log N(r_c; 0, s(K + jI)) at its best s, by a dense density."""
    phi, t = problem(n, d, seed)
    r, K = t - t.mean(0), phi @ phi.mT

    def evidence(j: float) -> float:
        S = K + j * torch.eye(n).double()
        s = float((r * torch.linalg.solve(S, r)).sum()) / r.numel()
        density = torch.distributions.MultivariateNormal(torch.zeros(n).double(), s * S)
        return float(density.log_prob(r.mT).sum())

    likeliest = max(ridge.NOISES.tolist(), key=evidence)
    found, told = sums_of(phi, t).fitted(phi, t), sums_of(phi, t).fitted(phi, t, likeliest)
    close(found.mean, told.mean)
    close(found.spread, told.spread)


def test_sums_over_batches_in_any_order_are_those_over_all() -> None:
    phi, t = problem(23, 6, 0)
    other = normal(23, 2, seed=5)
    whole: list[Tensor] = []
    reading._add(whole, phi, t, other)
    for order in (torch.arange(23), torch.randperm(23, generator=seeded(1))):
        parts: list[Tensor] = []
        for some in order.split(5):
            reading._add(parts, phi[some], t[some], other[some])
        for mine, all_ in zip(parts, whole, strict=True):
            close(mine, all_, 1e-12)
    for mine, expected in zip(whole[2:5], (phi.mT @ t, t.mT @ t, t.sum(0)), strict=True):
        close(mine, expected)


# -- features ----------------------------------------------------------------------------------------------------


def features_of(x: Tensor, batch: int = 7) -> features.InputFeatures:
    found = features.input_features(TensorBatches(x, torch.zeros(len(x)), batch), torch.device("cpu"))
    assert found is not None
    return found


def test_features_multiply_to_the_rbf_kernel_as_their_number_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    x = normal(9, 3) * torch.tensor([1.0, 5.0, 0.1]).double() + torch.tensor([0.0, 3.0, -40.0]).double()
    z = (x - x.mean(0)) / x.std(0, unbiased=False) / math.sqrt(3)
    kernel = 0.5 * (-0.5 * torch.cdist(z, z).square()).exp() + 0.5
    for count in (400, 25600):
        monkeypatch.setattr(features, "COUNT", count)
        phi = features_of(x)(x)
        assert phi.shape == (9, count + 1)
        # a product of cosines lies within ±1, so a mean of `count` has a standard error of at most 1/√count
        assert float((phi @ phi.mT - kernel).abs().max()) < 4 / math.sqrt(count)


def test_units_constants_and_the_order_of_inputs_do_not_matter() -> None:
    x = normal(11, 4)
    phi = features_of(x)(x)
    units = torch.tensor([1e-9, 1e9, -3.0, 1.0]).double()  # a number in nanometers beside one in dollars
    moved = x * units + torch.tensor([0.0, 1e10, 7.0, 1e3]).double()
    signs = features_of(x * units.sign())(x * units.sign())
    close(features_of(moved)(moved), signs, 1e-5)
    order = torch.randperm(11, generator=seeded(0))
    close(features_of(x[order])(x), phi, 1e-12)
    still = features_of(torch.cat([x, torch.full((11, 1), 0.1).double()], 1))
    assert still.scale[-1] == 0
    close(still.scale[:-1], features_of(x).scale)
    constant = features_of(torch.full((5, 2), 1 / 3).double())
    assert not constant.scale.any()
    near = features_of(
        (torch.tensor([[1.0], [1.0]]).repeat(3, 1) + torch.tensor([0.0, 6e-8]).repeat(3)[:, None]).float()
    )
    assert near.scale == 0  # it changes by the rounding of float32 alone


@pytest.mark.parametrize("inputs", [integers(5, 6, 3), {"a": normal(6, 3)}, normal(6), normal(6, 2**14 + 1)])
def test_inputs_that_no_features_can_be_made_of(inputs: Any) -> None:
    assert features.input_features([(inputs, torch.zeros(6))], torch.device("cpu")) is None


# -- the rule ----------------------------------------------------------------------------------------------------


def rows(seed: int = 0, m: int = 40, c: int = 3, gain: float = 1.0, smooth: float = 0.0) -> CalibrationRows:
    """Labels that are drawn from softmax of what the features know; logits that are `gain` times too sure."""
    truth = 2 * normal(m, c, seed=seed)
    y = torch.multinomial(truth.softmax(-1), 1, generator=seeded(seed)).squeeze(-1)
    e = normal(8, m, c, seed=seed + 1)
    known = truth + 0.5 * normal(4, m, c, seed=seed + 2)
    return CalibrationRows(
        lw.likelihoods.SoftLabels() if smooth else lw.likelihoods.Categorical(),
        gain * truth,
        e,
        y,
        m,
        gain * known,
        0.9,
        normal(m, c, seed=seed + 3),
        0.3 * normal(8, m, c, seed=seed + 4),
    )


def direct(one: CalibrationRows, s: float, f: Tensor, b: float = 0.0) -> Tensor:
    """−log of the mean probability of each label, in a loop."""
    nodes = zip(one.e, one.doubt, strict=True)
    p = torch.stack([(f + math.sqrt(s) * e + b * d).softmax(-1) for e, d in nodes]).mean(0)
    return -p[torch.arange(len(one.y)), one.y].log()


@pytest.mark.parametrize("s", [0.0, 0.3, 1.0])
def test_the_loss_is_the_log_of_an_average_probability(s: float) -> None:
    one = rows()
    close(one.loss(s, one.f), direct(one, s, one.f))
    expected = torch.stack([direct(one, s, 0.5 * k + 0.7 * one.labels, 0.7) for k in one.logits]).mean(0)
    close(one.left_out(s, 0.5, 0.7), expected)
    assert one.premium(s, 0.8) == pytest.approx(float((direct(one, s, 0.8 * one.f) - direct(one, 0, one.f)).mean()))


@pytest.mark.parametrize("budget", [-1.0, 0.0, 0.3, 4.0])
def test_the_largest_is_within_the_budget_and_no_larger_one_is(budget: float) -> None:
    cost: Callable[[float], float] = lambda t: t**2 - 1.0  # noqa: E731
    found = classes._largest(cost, budget, 0.5, 2.0)
    expected = min(max(math.sqrt(max(budget + 1, 0.0)), 0.5), 2.0)
    assert found == pytest.approx(expected, abs=1e-5)
    assert found == 0.5 or cost(found) <= budget


@pytest.mark.parametrize("least", [0.001, 0.05, 0.4, 3.0])
def test_the_lowest_of_a_convex_function_of_the_logarithm(least: float) -> None:
    found = classes._lowest(lambda t: (math.log(t) - math.log(least)) ** 2, 1 / 50, 1.0)
    assert found == pytest.approx(min(max(least, 1 / 50), 1.0), rel=1e-4)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("gain", [0.5, 4.0])
def test_the_boxed_search_finds_what_a_grid_finds(seed: int, gain: float) -> None:
    one = rows(seed, gain=gain)
    low, high = torch.tensor([0.2, 0.0]).double(), torch.tensor([1.0, 2.0]).double()
    loss: Callable[[Tensor], Tensor] = lambda w: one.left_out(0.5, w[0], w[1]).mean()  # noqa: E731
    found = classes.boxed(loss, torch.tensor([1.0, 0.0]).double(), low, high)
    assert bool(((low <= found) & (found <= high)).all())
    grid = [float(loss(torch.tensor([a, b]))) for a in np.linspace(0.2, 1, 17) for b in np.linspace(0, 2, 21)]
    assert float(loss(found)) <= min(grid) + 1e-6


def test_a_network_that_is_too_sure_is_held_back_and_one_that_is_not_is_left() -> None:
    sure, fair = classes.choose(rows(m=400, gain=5.0)), classes.choose(rows(m=400))
    assert sure.temperature == pytest.approx(5 * fair.temperature, rel=0.2)
    assert sure.a < 0.5
    assert sure.left_out < sure.network - 0.1
    assert fair.left_out <= fair.network + 1e-9
    assert fair.temperature < 1.5


def test_a_network_that_was_trained_to_be_modest_has_paid_already() -> None:
    truth = normal(50, 4)
    y, e = truth.argmax(-1), normal(8, 50, 4, seed=1)
    soft = torch.full((50, 4), 0.1).double().scatter(1, y[:, None], 0.7).log()  # smoothed: entropy 0.94, loss 0.36
    likelihood = lw.likelihoods.Categorical()
    assert CalibrationRows(likelihood, soft, e, y, 50).budget == 0.0
    assert CalibrationRows(likelihood, 10 * soft, e, y, 50).budget == classes.PREMIUM
    chosen = classes.choose(CalibrationRows(likelihood, soft, e, y, 50))
    assert chosen.scale == classes.LEAST_SCALE
    assert chosen.a == pytest.approx(1.0, abs=1e-5)


# -- the object --------------------------------------------------------------------------------------------------


def data_of(n: int = 60, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    x = normal(n, 3, seed=seed).to(dtype)
    return x, (x[:, 0] * x[:, 1] > 0).long() + (x[:, 2] > 1).long()


TRAINED: dict[tuple[Any, ...], nn.Module] = {}  # many tests ask for the same network


def trained(x: Tensor, y: Tensor, outputs: int = 3, smoothing: float = 0.0, steps: int = 250) -> nn.Module:
    key = x.numpy().tobytes(), y.numpy().tobytes(), outputs, smoothing, steps
    if key not in TRAINED:
        TRAINED[key] = trained_anew(x, y, outputs, smoothing, steps)
    return copy.deepcopy(TRAINED[key])


def trained_anew(x: Tensor, y: Tensor, outputs: int, smoothing: float, steps: int) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Linear(12, outputs)).to(x.dtype)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.03)
    for _ in range(steps):
        optimizer.zero_grad()
        if outputs == 1:
            loss = nn.functional.binary_cross_entropy_with_logits(net(x), y.to(x.dtype))
        else:
            loss = nn.functional.cross_entropy(net(x), y, label_smoothing=smoothing)
        loss.backward()
        optimizer.step()
    return net


def calibrated(x: Tensor, y: Tensor, **options: Any) -> lw.Laplace:
    outputs = options.pop("outputs", 3)
    return lw.laplace(trained(x, y, outputs), (x, y), "classification", **options).tuned()


@pytest.fixture(scope="module")
def pooled() -> lw.Laplace:
    """With all three of s, a and b."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features, "COUNT", COUNT)
        la = calibrated(*data_of())
    assert la.calibration is not None
    assert la.calibration.choice.b > 0
    assert la.calibration.choice.a < 1
    return la


def new(n: int = 4) -> Tensor:
    return normal(n, 3, seed=9)


def test_predictions_are_about_a_f_plus_b_m_with_s_times_the_covariance(pooled: lw.Laplace) -> None:
    one, x = pooled.calibration, new()
    assert one is not None
    about, plain = pooled.predict(x), pooled.predict(x, mean="network")
    waves = torch.Generator().manual_seed(features.SEED)
    W = torch.randn(3, COUNT, generator=waves, dtype=torch.float64)
    b = 2 * math.pi * torch.rand(COUNT, generator=waves, dtype=torch.float64)
    train = pooled.data.inputs
    z = (x - train.mean(0)) / train.std(0, unbiased=False) / math.sqrt(3)
    phi = torch.cat([(z @ W + b).cos() / math.sqrt(COUNT), torch.full((len(x), 1), math.sqrt(0.5)).double()], 1)
    m, s = one.labels, one.choice.scale
    mean = one.choice.a * pooled.tangent(x) + one.choice.b * (phi @ m.weights + m.offset)
    close(about.f_mean, mean, 1e-7)
    seen = one.features(train)
    left = torch.linalg.solve(seen.mT @ seen + m.noise * torch.eye(COUNT + 1).double(), m.noise * phi.mT)
    cold = dataclasses.replace(pooled, temperature=1.0, calibration=None).predict(x)
    close(plain.covariance, s * cold.covariance)
    doubt = (phi.mT * left).sum(0)[:, None, None] * m.between
    cov = plain.covariance + one.choice.b**2 * doubt
    close(about.covariance, cov, 1e-7)
    together = pooled.predict(x, joint=True).covariance
    expected = torch.einsum("nm,ab->namb", phi @ left, one.choice.b**2 * m.between)
    close(together - pooled.predict(x, joint=True, mean="network").covariance, expected, 1e-7)
    draws = torch.distributions.MultivariateNormal(mean, cov)
    torch.manual_seed(1)
    probs = draws.sample((20000,)).softmax(-1)
    assert bool(((probs.mean(0) - about.probs).abs() < 5 * probs.std(0) / math.sqrt(20000) + 5e-3).all())


def test_the_weights_of_m_are_those_of_a_dense_ridge_regression_on_observed_labels(pooled: lw.Laplace) -> None:
    one, (x, y) = pooled.calibration, data_of()
    assert one is not None
    phi = one.features(x)
    alpha = 0.1 + torch.nn.functional.one_hot(y, 3).double()
    t = alpha.log() - 0.5 * torch.log1p(1 / alpha)
    r, gram = t - t.mean(0), phi.mT @ phi
    fits = [torch.linalg.solve(gram + j * torch.eye(COUNT + 1).double(), phi.mT @ r) for j in ridge.NOISES.tolist()]
    gaps = [float((w - one.labels.weights).abs().max()) for w in fits]
    assert min(gaps) < 1e-7
    close(one.labels.offset, t.mean(0))


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_dtypes_and_joint_predictions(joint: bool, dtype: torch.dtype, pooled: lw.Laplace) -> None:
    x, y = data_of(dtype=dtype)
    la = pooled if dtype == torch.float64 else calibrated(x, y)
    pred = la.predict(new().to(dtype), joint=joint)
    close(pred.probs.sum(-1), torch.ones(4, dtype=pred.probs.dtype), 1e-6)
    close(pred.f_mean, la.predict(new().to(dtype)).f_mean, 1e-6)
    assert la.calibration is not None
    assert pooled.calibration is not None
    assert la.calibration.choice.a == pytest.approx(pooled.calibration.choice.a, rel=1e-2)


def test_one_output_is_binary() -> None:
    x, y = data_of()
    la = calibrated(x, (y > 0).double()[:, None], outputs=1)
    assert la.likelihood.name == "dirichlet_bernoulli" or "bernoulli" in la.likelihood.kind
    assert la.calibration is not None
    probs = la.predict(new()).probs
    assert bool(((probs > 0) & (probs < 1)).all())


@pytest.mark.parametrize("seed", [0, 1])
def test_held_out_labels_are_better_predicted_than_by_an_overconfident_network(seed: int) -> None:
    x, y = data_of(60, seed)
    noisy = torch.where(torch.rand(60, generator=seeded(seed)) < 0.15, integers(3, 60, seed=seed), y)
    la, (at, label) = calibrated(x, noisy), data_of(400, seed + 50)
    mine = -la.predict(at).log_prob(label).mean()
    network = nn.functional.cross_entropy(la.tangent(at), label)
    assert float(mine) < float(network) - 0.1


def test_labels_that_inputs_say_nothing_of() -> None:
    x, _ = data_of()
    la = calibrated(x, integers(3, 60, seed=4))
    assert la.calibration is not None
    assert la.calibration.choice.temperature > 5  # what the left-out loss asks for, and R² does not let it have
    assert "foretell little" in la.calibration.findings[0]
    at, label = normal(300, 3, seed=8), integers(3, 300, seed=8)
    assert float(-la.predict(at).log_prob(label).mean()) < float(nn.functional.cross_entropy(la.tangent(at), label))


class Dictionary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


@pytest.mark.parametrize("kind", ["integers", "dicts", "many numbers"])
def test_inputs_without_features_are_calibrated_by_the_premium_alone_and_said(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = data_of(30)
    inputs: Any = x
    net: nn.Module = nn.Sequential(nn.Linear(3, 3)).double()
    if kind == "integers":
        inputs = integers(5, 30, 2)
        net = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 3)).double()
    elif kind == "dicts":
        inputs, net = {"x": x}, Dictionary()
    else:
        monkeypatch.setattr(features, "MOST_NUMBERS", 2)
    la = lw.laplace(net, (inputs, y), "classification").tuned()
    assert la.calibration is not None
    assert la.calibration.features is None
    assert math.isnan(la.calibration.choice.r2)
    assert "no features" in la.calibration.findings[0]
    assert la.calibration.choice.premium <= classes.PREMIUM + 1e-9
    assert la.calibration.choice.a == 1  # nothing left out says that the network is too sure
    assert bool(torch.isfinite(la.predict(inputs).probs).all())


def test_the_model_and_the_random_state_are_left_as_they_were() -> None:
    x, y = data_of()
    net = trained(x, y)
    net.train()
    before, state = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    lw.laplace(net, (x, y), "classification").tuned().predict(new())
    assert net.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, net.state_dict()[k]) for k, v in before.items())


def test_the_order_of_shuffled_batches_is_the_same_in_each_pass(pooled: lw.Laplace) -> None:
    x, y = data_of()
    net, loaders = trained(x, y), []
    for generator in (None, torch.Generator().manual_seed(3)):
        sets = torch.utils.data.TensorDataset(x, y)
        loaders.append(torch.utils.data.DataLoader(sets, batch_size=7, shuffle=True, generator=generator))
    assert pooled.calibration is not None
    whole = pooled.calibration.choice
    for loader in loaders:
        found = lw.laplace(net, loader, "classification").tuned().calibration.choice
        for mine, other in zip(dataclasses.astuple(found), dataclasses.astuple(whole), strict=True):
            assert mine == pytest.approx(other, rel=1e-4)


# -- what becomes of it ------------------------------------------------------------------------------------------


def test_another_prior_data_or_way_of_tuning_drops_it(pooled: lw.Laplace) -> None:
    x, y = data_of()
    held = data_of(30, 5)
    exact = calibrated(x, y, structure="full")
    others = {
        "prior": pooled.replace(prior=3.0),
        "updated": pooled.updated(held),
        "without": exact.without((x[:5], y[:5])),
        "center": pooled.tuned(center="tangent"),
    }
    for name, one in others.items():
        assert one.calibration is None, name
        assert one.temperature == 1.0, name
    assert pooled.predict(new(), mean="auto").f_mean.equal(pooled.predict(new()).f_mean)


def test_what_is_not_taken_is_refused(pooled: lw.Laplace) -> None:
    for refused in (
        lambda: pooled.tuned(mean="tangent"),
        lambda: pooled.tuned(method="mackay"),
        lambda: pooled.tuned(center="tangent", mean="auto"),
        lambda: pooled.leave_one_out(mean="auto"),
        lambda: pooled.function_samples(2, mean="auto"),
        lambda: pooled.function_samples(2, mean="process"),
        lambda: pooled.predict(new(), mean="auto", via="network"),
    ):
        with pytest.raises(lw.errors.InvalidValue, match=r"mean|method|via"):
            refused()
    short = dataclasses.replace(pooled.calibration, features=features_of(normal(5, 2)))
    with pytest.raises(lw.errors.InvalidValue, match="2 numbers each"):
        dataclasses.replace(pooled, calibration=short).predict(new())


def test_it_is_said(pooled: lw.Laplace) -> None:
    one = pooled.calibration.choice
    words = f"covariance × {one.scale:.3g}, logits × {one.a:.3g}, labels of near inputs × {one.b:.3g}"
    assert words in repr(pooled)
    assert "temperature" not in repr(pooled)


# -- files -------------------------------------------------------------------------------------------------------


def test_a_file_holds_it_bit_by_bit(pooled: lw.Laplace, tmp_path: Path) -> None:
    plain = calibrated(integers(5, 30, 3).double(), integers(3, 30))
    for i, la in enumerate((pooled, plain, lw.laplace(trained(*data_of()), data_of(), "classification"))):
        la.save(tmp_path / str(i))
        again = lw.load(tmp_path / str(i), la.tangent.model)
        assert again.mean == "auto"
        assert repr(again) == repr(la)
        assert repr(again.calibration and again.calibration.choice) == repr(la.calibration and la.calibration.choice)
        x = new() if i != 1 else integers(5, 4, 3).double()
        assert again.predict(x).probs.equal(la.predict(x).probs)
        assert again.predict(x).covariance.equal(la.predict(x).covariance)


def broken(header: dict[str, Any], tensors: dict[str, Tensor]) -> list[tuple[dict[str, Any], dict[str, Tensor]]]:
    """A file with one thing wrong in it, in each way."""
    out = []
    spec = header["calibration"]
    choice = spec["choice"]
    for key, value in [
        ("scale", 0.0),
        ("scale", 2.0),
        ("scale", None),
        ("scale", 0.5 * choice["scale"]),
        ("a", -1.0),
        ("a", 1.5),
        ("b", -1.0),
        ("b", math.inf),
        ("b", None),
        ("b", 0.0),
        ("a", "1"),
        ("premium", True),
    ]:
        out.append((header | {"calibration": {**spec, "choice": {**choice, key: value}}}, tensors))
    for some in ({**choice, "more": 1.0}, {k: v for k, v in choice.items() if k != "r2"}, None, []):
        out.append((header | {"calibration": {**spec, "choice": some}}, tensors))
    for some in (
        {**spec, "n": 0},
        {**spec, "process": 0.25},
        {**spec, "process": 2.0},
        {**spec, "n": 1.5},
        {**spec, "more": 1},
        {"n": 3},
        [],
        3,
        None,
    ):
        out.append((header | {"calibration": some}, tensors))
    out += [(header | {"mean": mean}, tensors) for mean in ("network", "process", "", 1)]
    out += [
        (header | {"temperature": 1e-3}, tensors),
        ({k: v for k, v in header.items() if k != "calibration"}, tensors),
    ]
    for name in ("center", "scale", "weights", "offset", "between", "root"):
        one = tensors[f"calibration.{name}"]
        for wrong in (one[:-1], one.float(), one[None], one / 0.0, None):
            rest = {k: v for k, v in tensors.items() if k != f"calibration.{name}"}
            out.append((header, rest if wrong is None else rest | {f"calibration.{name}": wrong}))
    return out


def test_a_file_that_is_wrong_about_it_is_refused(pooled: lw.Laplace, tmp_path: Path) -> None:
    tensors, header = pooled.packed(tmp_path / "la")
    io.checked(tensors, header, "la")
    for i, (changed, held) in enumerate(broken(header, tensors)):
        try:
            io.checked(held, changed, "la")
        except lw.errors.BrokenFile:
            continue
        pytest.fail(f"change {i} was not seen: {changed.get('calibration')}")
    files.write(tmp_path / "la", tensors, header | {"mean": "process"})
    with pytest.raises(lw.errors.BrokenFile, match="about 'process'"):
        lw.load(tmp_path / "la", pooled.tangent.model)


# -- la.check() --------------------------------------------------------------------------------------------------


def test_a_check_tells_what_a_calibration_was_chosen_by(pooled: lw.Laplace) -> None:
    found, one = pooled.check(), pooled.calibration.choice
    assert found.calibration is pooled.calibration
    x, y = data_of()
    assert found.training == pytest.approx(-float(pooled.predict(x).log_prob(y).mean()), rel=1e-6)
    assert found.network == pytest.approx(float(nn.functional.cross_entropy(pooled.tangent(x), y)), rel=1e-6)
    for words in (
        f"{one.premium:.3g} nats",
        f"{one.left_out:.4g}",
        f"{one.network:.4g}",
        f"R² {one.r2:.2f}",
        str(pooled.calibration),
    ):
        assert words in repr(found)
    assert found.ok == (not found.findings)
    assert not any("too wide" in text for text in found.findings)  # that it is wider was chosen


def test_findings_of_a_calibration_are_those_of_the_check() -> None:
    net = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 3)).double()
    la = lw.laplace(net, (integers(5, 30, 2), integers(3, 30)), "classification").tuned()
    found = la.check()
    assert not found.ok
    assert la.calibration.findings[0] in found.findings
    assert "no features" in repr(found)
    assert "R²" not in repr(found)


# -- bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", ["one class", "a class without examples", "1 example", "2 examples", "3 examples", "constant inputs"]
)
def test_little_to_learn_from_gives_finite_predictions(case: str) -> None:
    x, y = data_of()
    net = trained(x, y, 5 if case == "a class without examples" else 3)
    if case == "one class":
        y = torch.zeros_like(y)
    elif case == "constant inputs":
        x = torch.ones_like(x)
    elif case[0].isdigit():
        x, y = x[: int(case[0])], y[: int(case[0])]
    la = lw.laplace(net, (x, y), "classification").tuned()
    assert la.calibration is not None
    choice = la.calibration.choice
    assert all(math.isfinite(v) for v in dataclasses.astuple(choice))
    probs = la.predict(torch.cat([new(), x[:2]])).probs
    assert bool(torch.isfinite(probs).all())
    close(probs.sum(-1), torch.ones(len(probs)).double())
    la.check()


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (torch.rand(60, 3, generator=seeded(0)).double(), "adds up to 1"),
        (integers(3, 60) + 2, "outside 0..2"),
        (integers(3, 60) - 1, "outside 0..2"),
        (integers(3, 60).double(), "integer"),
    ],
)
def test_targets_that_are_no_labels_are_named(targets: Tensor, words: str) -> None:
    x, y = data_of()
    with pytest.raises(lw.errors.InvalidValue, match=words):
        lw.laplace(trained(x, y, steps=1), (x, targets), "classification")


def test_soft_labels_are_taken() -> None:
    x, y = data_of()
    soft = 0.9 * nn.functional.one_hot(y, 3).double() + 0.1 / 3
    la = lw.laplace(trained(x, y), (x, soft), "classification").tuned()
    assert bool(torch.isfinite(la.predict(new()).probs).all())


def test_rows_that_are_looked_at_come_from_all_of_the_data() -> None:
    """Data that are sorted by class have every class among them, and there are at most ROWS."""
    torch.manual_seed(0)
    x, y = torch.randn(1300, 3), torch.arange(1300) * 4 // 1300
    net = torch.nn.Linear(3, 4)
    la = lw.laplace(net, (x, y), "classification")
    seen = reading.read(la.spread, la.likelihood, la.data, la.n)
    cut = reading.read(la.spread, la.likelihood, TensorBatches(x, y, 7), la.n)
    close(cut.f, seen.f, 1e-5)  # whatever the batches are
    assert reading.ROWS / 2 <= len(seen.y) <= reading.ROWS
    assert seen.y.bincount().min() > len(seen.y) // 5
    assert seen.n == 1300


def test_a_mixture_of_calibrated_fits_is_of_their_predictions() -> None:
    torch.manual_seed(1)
    x, new = torch.randn(60, 3).double(), torch.randn(9, 3).double()
    y = (x[:, 0] + 0.5 * torch.randn(60) > 0).long()
    nets = [nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double() for _ in range(2)]
    for net in nets:
        net[2].weight.data *= 8
    members = [lw.laplace(net, (x, y), "classification").tuned() for net in nets]
    assert any(one.calibration is not None and one.calibration.choice.a < 1 for one in members)
    expected = 0.25 * members[0].predict(new).probs + 0.75 * members[1].predict(new).probs
    close(lw.mixture(members, weights=[1.0, 3.0]).predict(new).probs, expected, 1e-8)


def test_a_mixture_of_regressions_keeps_their_processes() -> None:
    torch.manual_seed(2)
    x, new = torch.randn(40, 2).double(), torch.randn(7, 2).double()
    y = x.sum(1, keepdim=True).sin()
    nets = [nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1)).double() for _ in range(2)]
    members = [lw.laplace(net, (x, y), "regression").tuned() for net in nets]
    expected = 0.5 * members[0].predict(new).mean + 0.5 * members[1].predict(new).mean
    close(lw.mixture(members).predict(new).mean, expected, 1e-8)


@pytest.mark.full
def test_many_classes_with_few_examples_each_keep_their_network() -> None:
    """600 classes, three examples each: a network that is right is not made modest by what its training data allow."""
    torch.manual_seed(0)
    means, y = torch.randn(600, 64), torch.arange(600).repeat(3)
    x, new = means[y] + 0.5 * torch.randn(1800, 64), means + 0.5 * torch.randn(600, 64)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 600))
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(150):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    la = lw.laplace(net.eval(), (x, y), "classification").tuned()
    label = torch.arange(600)[:200]
    network = nn.functional.cross_entropy(net(new[:200]), label)
    assert -la.predict(new[:200]).log_prob(label).mean() < network + 0.002
