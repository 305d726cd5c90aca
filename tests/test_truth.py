"""The truth bench: on linear models, whose posterior is known, and against references that have not converged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.errors import BrokenFile, InvalidValue, NotConverged, Unsupported
from lapwing.truth import reference as references
from lapwing.truth.scores import variation

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
    assert bench.plot().axes[0].get_xscale() == "log"


def test_total_variation_of_normals_is_the_closed_form() -> None:
    def normal(mean: Tensor) -> lw.Prediction:
        return lw.Prediction(known(), lw.outputs.Normal(mean, torch.full((4, 1, 1), 1e-12).double()))

    apart = torch.tensor([[0.0], [0.2], [1.0], [40.0]]).double()
    exact = 2 * torch.special.ndtr(apart / (2 * NOISE)) - 1
    assert abs(variation(normal(torch.zeros(4, 1).double()), normal(apart)) - float(exact.mean())) < 2e-3


def test_an_unconverged_reference_is_refused() -> None:
    with pytest.raises(NotConverged, match=r"R-hat of its predictions is up to .*above 1.1 at"):
        run(reference={"chains": 4, "draws": 20, "warmup": 0, "leapfrog": 2, "step": 1e-3})
    model, data, _ = linear()
    standing = lw.samplers.hmc(model, data, known(), prior=PRECISION, chains=3, draws=8, warmup=0, step=1e-9)
    with pytest.raises(NotConverged, match="R-hat"):
        run(reference=standing)
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
        "swag": lambda p: m.swag(p, **short, snapshots=5, rank=3),
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
