"""The truth bench: on linear models, whose posterior is known, and against references that have not converged."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.errors import BrokenFile, InvalidValue, NotConverged, Unsupported
from lapwing.truth import Trial
from lapwing.truth import reference as references
from lapwing.truth.scores import scored, variation

NOISE, PRECISION = 0.5, 2.0
FAST = {"chains": 3, "draws": 150, "warmup": 100, "leapfrog": 5}


def linear() -> tuple[nn.Linear, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(3)
    mix = torch.tensor([[1.0, 0.9, 0.7], [0, 0.4, 0.5], [0, 0, 0.3]]).double()
    x = torch.randn(60, 3, generator=g, dtype=torch.float64) @ mix
    x[15:] *= 3
    y = x[:, :1] - 0.3 + NOISE * torch.randn(60, 1, generator=g, dtype=torch.float64)
    data, test = (x[:15], y[:15]), (x[15:], y[15:])
    J = torch.cat([data[0], torch.ones(15, 1).double()], 1)
    mean = torch.linalg.solve(J.T @ J / NOISE**2 + PRECISION * torch.eye(4).double(), J.T @ data[1] / NOISE**2)
    model = nn.Linear(3, 1).double()
    with torch.no_grad():
        model.weight.copy_(mean[:3].T)
        model.bias.copy_(mean[3])
    return model, data, test


def known() -> lw.likelihoods.Gaussian:
    return lw.likelihoods.Gaussian(noise=NOISE)


def run(methods: Any = ("laplace full",), reference: Any = FAST, **told: Any) -> lw.truth.TruthBench:
    model, data, test = linear()
    return lw.truth_bench(model, data, known(), PRECISION, methods, reference, test=test, **told)


def test_an_exact_posterior_is_as_near_as_chains_are_to_each_other_and_its_diagonal_is_not() -> None:
    bench = run(["map", "laplace full", "laplace diag"], {**FAST, "draws": 300})
    full, diag, halves = bench["laplace full"], bench["laplace diag"], bench["hmc"]["variation"]
    assert full["variation"] < halves + 0.01 < diag["variation"]
    assert full["variation"] < 0.05
    assert abs(full["nll"] - bench["hmc"]["nll"]) < 0.02
    for kappa in (1, 2, 5):
        assert abs(full[f"joint {kappa}"] - bench["hmc"][f"joint {kappa}"]) < 0.1 * kappa
    assert bench["map"]["epochs"] == 0
    assert full["epochs"] == 1
    assert bench["hmc"]["epochs"] == 3 * 400 * 5
    assert "R-hat of predictions at most 1.0" in repr(bench)
    (axes,) = bench.plot().axes
    assert [label.get_text() for label in axes.get_yticklabels()] in (
        ["map", "laplace diag", "laplace full"],  # the nearest on top
        ["laplace diag", "map", "laplace full"],
    )
    assert "1" in [text.get_text() for text in axes.texts]


def test_total_variation_of_normals_is_the_closed_form() -> None:
    def normal(mean: Tensor) -> lw.Prediction:
        return lw.Prediction(known(), lw.outputs.Normal(mean, torch.full((4, 1, 1), 1e-12).double()))

    apart = torch.tensor([[0.0], [0.2], [1.0], [40.0]]).double()
    exact = 2 * torch.special.ndtr(apart / (2 * NOISE)) - 1
    assert abs(variation(normal(torch.zeros(4, 1).double()), normal(apart)) - float(exact.mean())) < 2e-3


@pytest.mark.parametrize("far", [30.0, 1e30])
def test_a_draw_far_out_counts_by_its_share(far: float) -> None:
    """One of four: bins may not be as wide as it is away, or the others all look alike."""
    for away, share in ((0.0, 0.25), (10 * NOISE, 1.0)):
        near, x = torch.zeros(4, 3, 1).double(), torch.full((4, 3, 1), away).double()
        x[0] = far
        p, q = (lw.Prediction(known(), lw.outputs.Draws(f)) for f in (x, near))
        assert variation(p, q) == pytest.approx(share, abs=1e-6)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # ArviZ, of chains that stand still
def test_an_unconverged_reference_is_refused() -> None:
    with pytest.raises(NotConverged, match=r"R-hat of its predictions is up to .*above 1.1 at"):
        run(reference={"chains": 4, "draws": 20, "warmup": 0, "leapfrog": 2, "step": 1e-3})
    model, data, _ = linear()
    standing = lw.samplers.hmc(model, data, known(), prior=PRECISION, chains=3, draws=8, warmup=0, step=1e-9)
    with pytest.raises(NotConverged, match="R-hat"):
        run(reference=standing)
    target = lw.log_joint(model, data, known(), PRECISION)
    stuck = lw.posterior.Chains(target.tangent, target.start.expand(24, -1), None, (8, 8, 8))  # its R-hat is NaN
    with pytest.raises(NotConverged, match="R-hat of its predictions is up to inf"):
        run(reference=target.fitted(stuck, "hmc"))
    with pytest.raises(InvalidValue, match="needs 3 chains"):
        run(reference={**FAST, "chains": 2})
    with pytest.raises(InvalidValue, match="has no chains"):
        run(reference=lw.ensembles.deep([model], known()))


def test_references_are_cached_by_all_that_they_follow_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(cache=tmp_path)
    (file,) = tmp_path.iterdir()
    monkeypatch.setattr(references, "hmc", None)  # nothing is drawn again
    again = run(cache=tmp_path)
    assert {k: v for k, v in first["hmc"].items() if k != "seconds"} == {
        k: v for k, v in again["hmc"].items() if k != "seconds"
    }
    assert again.convergence == first.convergence
    model, data, test = linear()
    others = [
        (model, data, lw.likelihoods.Gaussian(noise=0.6), PRECISION, FAST, 0),
        (model, data, known(), 1.0, FAST, 0),
        (model, data, known(), PRECISION, {**FAST, "draws": 151}, 0),
        (model, data, known(), PRECISION, FAST, 1),
        (model, (data[0], -data[1]), known(), PRECISION, FAST, 0),
        (nn.Sequential(model, nn.Identity()), data, known(), PRECISION, FAST, 0),
    ]
    for net, some, likelihood, prior, reference, seed in others:
        with pytest.raises(TypeError, match="not callable"):
            lw.truth_bench(net, some, likelihood, prior, ["map"], reference, test=test, cache=tmp_path, seed=seed)
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(BrokenFile):
        run(cache=tmp_path)


@pytest.mark.full
def test_networks_of_the_same_words_and_weights_have_references_of_their_own(tmp_path: Path) -> None:
    class Net(nn.Linear):
        def __init__(self, act: Any) -> None:
            super().__init__(3, 1, dtype=torch.float64)
            self.act = act

        def forward(self, x: Tensor) -> Tensor:
            return self.act(super().forward(x))

    model, data, test = linear()
    for act in (torch.tanh, lambda f: f):
        net = Net(act)
        net.load_state_dict(model.state_dict())
        lw.truth_bench(net, data, known(), PRECISION, ["map"], FAST, test=test, cache=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_reference_that_is_given_is_of_the_same_problem_and_its_chains_are_whole() -> None:
    model, data, test = linear()
    fit = lw.samplers.hmc(model, data, known(), prior=PRECISION, start="prior", **FAST)
    assert run(["map"], fit).convergence.epochs is None
    moved, noisy = (data[0], data[1] + 1), lw.likelihoods.Poisson()
    for what, net, some, likelihood, prior in [
        ("targets", model, moved, known(), PRECISION),
        ("prior", model, data, known(), 1.0),
        ("parameters", nn.Linear(3, 1, bias=False).double(), data, known(), PRECISION),
        ("likelihood", model, (data[0], data[1].abs().round()), noisy, PRECISION),
    ]:
        with pytest.raises(InvalidValue, match=f"of another problem: its .*{what}"):
            lw.truth_bench(net, some, likelihood, prior, ["map"], fit, test=test)
    chains = fit.posterior
    cut = dataclasses.replace(chains, weights=chains.weights[:-9], lengths=(150, 150, 141), told={}, latent={})
    with pytest.raises(NotConverged, match=r"diverged after \(150, 150, 141\) draws"):
        run(["map"], dataclasses.replace(fit, posterior=cut))


def test_the_tangent_center_needs_no_mode() -> None:
    model, data, test = linear()
    with torch.no_grad():
        model.weight += 0.5
    methods = ["laplace full", "laplace tangent", "laplace matrix-free", "variational tangent"]
    bench = lw.truth_bench(model, data, known(), PRECISION, methods, FAST, test=test)
    assert bench["laplace tangent"]["variation"] < bench["hmc"]["variation"] + 0.01
    assert bench["laplace full"]["variation"] > 0.3
    assert abs(bench["laplace matrix-free"]["variation"] - bench["laplace full"]["variation"]) < 0.05
    assert bench["laplace tangent"]["epochs"] == 2  # J twice
    assert bench["laplace full"]["epochs"] == 1
    assert bench["laplace matrix-free"]["epochs"] > 1
    assert abs(bench["variational tangent"]["variation"] - bench["laplace tangent"]["variation"]) < 1e-3
    assert bench["variational tangent"]["epochs"] == 1


def sharp(a: float) -> nn.Module:
    """p(1 | x) = σ(a x)."""
    net = nn.Linear(1, 2).double()
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[0.0], [a]]))
        net.bias.zero_()
    return net


def test_metrics_of_known_probabilities_are_those_by_hand() -> None:
    x = torch.linspace(-3, 4, 131, dtype=torch.float64)[:, None]
    y = (torch.rand(131, generator=torch.Generator().manual_seed(5)) < 0.6).long()
    slopes = (0.5, 2.0, -0.3)
    fit, truth = lw.ensembles.deep([sharp(a) for a in slopes], "categorical"), sharp(0.2)
    row = scored(Trial(fit), x, y, lw.ensembles.deep([truth], "categorical").predict(x), unknown=x[40:60] / 9)
    each = np.stack([1 / (1 + np.exp(-a * x[:, 0].numpy())) for a in slopes])  # p_s(1 | x_n), (s, n)
    p, q = each.mean(0), 1 / (1 + np.exp(-0.2 * x[:, 0].numpy()))
    assert row["agreement"] == pytest.approx(((p > 0.5) == (q > 0.5)).mean())
    assert row["variation"] == pytest.approx(np.abs(p - q).mean())
    assert row["accuracy"] == pytest.approx(((p > 0.5) == y.numpy()).mean())
    right = np.where(y.numpy() == 1, each, 1 - each)
    assert row["nll"] == pytest.approx(-np.log(right.mean(0)).mean())
    for kappa in range(1, 6):
        assert row[f"joint {kappa}"] == pytest.approx(by_dyadic_sampling(right, kappa))
    doubt = lambda p: np.minimum(p, 1 - p)  # noqa: E731
    far = 1 / (1 + np.exp(-np.outer(slopes, x[40:60, 0].numpy() / 9)))
    pairs = doubt(far.mean(0))[:, None] - doubt(p)[None]
    assert row["ood"] == pytest.approx(((pairs > 0) + 0.5 * (pairs == 0)).mean())


def by_dyadic_sampling(right: np.ndarray, kappa: int) -> float:
    """Mean log (1/S) Σ_s Π_i p_s(y_i), i each of the τ labels drawn, in pieces of 60 inputs."""
    found = []
    for start in range(0, right.shape[1], 60):
        piece = right[:, start : start + 60]
        n, g = piece.shape[1], torch.Generator().manual_seed(0)
        sets = -(-n // kappa)
        order = torch.randperm(n, generator=g).tolist()
        drawn = torch.randint(kappa, (sets, 1 if kappa == 1 else 10 * (kappa - 1)), generator=g).tolist()
        for k, labels in enumerate(drawn):
            anchors = [order[(k * kappa + i) % n] for i in range(kappa)]
            found.append(np.log(np.mean(np.prod([piece[:, anchors[i]] for i in labels], axis=0))))
    return float(np.mean(found))


def test_a_normal_prediction_of_labels_together_is_that_of_its_draws() -> None:
    _, (x, real), _ = linear()
    y = (real[:, 0] > 0).long()
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    la = lw.laplace(net, (x, y), "categorical", prior=0.1)
    row = scored(Trial(la), x, y, la.predict(x))
    f = la.function_samples(20_000, generator=torch.Generator().manual_seed(1))(x)
    right = torch.softmax(f, -1)[:, torch.arange(15), y].numpy()
    for kappa in (1, 2, 3):
        assert abs(row[f"joint {kappa}"] - by_dyadic_sampling(right, kappa)) < 0.05 * kappa


def test_swag_spreads_by_minibatches_about_the_trained_network() -> None:
    model, data, _ = linear()
    trial = lw.truth.methods.swag(lw.truth.Problem(model, data, known(), PRECISION), 400, 1e-2, batch=5, rank=3)
    theta = torch.cat([p.detach().flatten() for p in model.parameters()])
    weights = trial.fit.posterior.weights
    assert trial.epochs == 400 * 5 / 15
    assert bool((weights.std(0) > 1e-3).all())
    assert bool(((weights.mean(0) - theta).abs() < 3 * weights.std(0)).all())


@pytest.mark.full
def test_a_killed_reference_goes_on_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lapwing.samplers.hmc import Hmc

    whole, step, calls = run(cache=tmp_path / "a"), Hmc.step, 0

    def dying(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 180:
            raise KeyboardInterrupt
        return step(*args)

    with monkeypatch.context() as patch:
        patch.setattr(Hmc, "step", dying)
        with pytest.raises(KeyboardInterrupt):
            run(cache=tmp_path / "b")
    assert [p.suffix for p in (tmp_path / "b").glob("hmc-*")] == [".walk"]
    calls = 180
    monkeypatch.setattr(Hmc, "step", dying)
    assert run(cache=tmp_path / "b")["hmc"]["nll"] == whole["hmc"]["nll"]
    assert calls - 180 == 150  # the first 100 of 250 steps were in the checkpoint


@pytest.mark.full
def test_every_method_of_the_list_runs_on_classes() -> None:
    torch.manual_seed(0)
    x = torch.randn(40, 2).double()
    y = (x[:, 0] * x[:, 1] > 0).long()
    net = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Dropout(0.1), nn.Linear(6, 3)).double()
    fit = lw.ensembles.train(small, (x, y), "categorical", 3, steps=60)
    short = {"steps": 20}
    m = lw.truth.methods
    quick = {
        **{name: None for name in lw.truth.METHODS if name.startswith(("map", "laplace"))},
        "mean-field": lambda p: m.mean_field(p, **short),
        "sgld": lambda p: m.by_steps(p, lw.samplers.sgld, draws=5, warmup=10, thin=2),
        "cyclical sghmc": lambda p: m.by_steps(p, lw.samplers.sghmc, draws=5, warmup=10, thin=2, cycles=5),
        "ensemble": lambda p: m.ensemble(p, **short),
        "mixture of laplaces": lambda p: m.laplaces(p, 2, **short, structure="diag"),
        "swag": lambda p: m.swag(p, **short, snapshots=5, rank=3, samples=8),
        "dropout": lambda p: m.dropout(p, **short),
        "my own": fit,
    }
    bench = lw.truth_bench(
        net,
        (x, y),
        "categorical",
        1.0,
        quick,
        {**FAST, "draws": 150, "leapfrog": 15},
        test=(x[:20], y[:20]),
        unknown=5 * x,
        yardstick=fit,
    )
    keys = {"accuracy", "nll", "ece", "agreement", "variation", "members", "ood", "seconds"}
    keys |= {f"joint {k}" for k in range(1, 6)}
    assert list(bench.rows) == ["hmc", *quick]
    for name, row in bench.rows.items():
        assert keys <= set(row), name
        assert abs(row["joint 1"] + row["nll"]) < 0.05, name
        assert ("epochs" in row) == (name != "my own")
    assert bench["ensemble"]["epochs"] == 100
    assert bench["sgld"]["epochs"] == 4 * 20 * 32 / 40
    assert net[2].p == 0.1  # the user's network is as it was


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def test_bad_input_is_named() -> None:
    with pytest.raises(InvalidValue, match="methods are"):
        run(["laplace ful"])
    with pytest.raises(InvalidValue, match="'hmc' is that of the reference"):
        run({"hmc": lw.ensembles.deep([linear()[0]], known())})
    with pytest.raises(InvalidValue, match="list of names"):
        run("laplace")
    with pytest.raises(InvalidValue, match="gives a fit, or a fit"):
        lw.truth.methods.tried(lw.truth.Problem(*linear()[:2], known(), PRECISION), "mine", lambda problem: 3)
    with pytest.raises(InvalidValue, match="reference is 'hmc'"):
        run(reference="nuts")
    with pytest.raises(InvalidValue, match="reference knows"):
        run(reference={"draw": 3})
    with pytest.raises(InvalidValue, match="yardstick is"):
        run(yardstick=lw.laplace(*linear()[:2], known()))

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3, 1).double())

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.w

    with pytest.raises(Unsupported, match="no reset_parameters"):
        lw.truth.METHODS["ensemble"](lw.truth.Problem(Bare(), linear()[1], known(), PRECISION))
