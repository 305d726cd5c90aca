"""A posterior that has lost what its network learnt says so: in `tuned`, `predict` and its repr; the doctor, before."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.errors import LapwingWarning
from lapwing.predictive.own_data import EXAMPLES, training_nll, unfit

SAYS = r"own training data with an NLL of .*, where the network has .*tuned\(method='validation', data=\.\.\.\)"


def data(n: int = 90, noise: bool = False) -> tuple[Tensor, Tensor]:
    """Three classes that lie apart, or have nothing to do with the inputs."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 2, generator=generator, dtype=torch.float64)
    y = torch.arange(n) % 3
    middle = torch.tensor([[4.0, 0.0], [-4.0, 2.0], [0.0, -4.0]], dtype=torch.float64)
    return x if noise else x + middle[y], y


def network(x: Tensor, y: Tensor, steps: int) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 20), nn.ReLU(), nn.Linear(20, 3)).double()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return net.eval()


@pytest.fixture(scope="module")
def sure() -> tuple[nn.Module, Tensor, Tensor]:
    """A network that fits its data to the last label."""
    x, y = data()
    net = network(x, y, 300)
    assert float(nn.functional.cross_entropy(net(x), y).detach()) < 1e-2
    return net, x, y


@pytest.mark.parametrize("structure", ["full", "kron", "ekfac", "diag"])
@pytest.mark.parametrize("center", ["tangent", "map"])
def test_tuned_and_predict_warn(sure: Any, structure: str, center: str) -> None:
    net, x, y = sure
    with pytest.warns(LapwingWarning, match=SAYS):
        la = lw.laplace(net, (x, y), "categorical", structure=structure).tuned(center=center)
    mine, theirs = la.tuning.train_nll
    with pytest.warns(LapwingWarning, match=SAYS) as told:
        pred = la.predict(x[:EXAMPLES])
    assert Path(told[0].filename) == Path(__file__)
    torch.testing.assert_close(torch.tensor(mine), -pred.log_prob(y[:EXAMPLES]).mean(), check_dtype=False)
    plain = nn.functional.cross_entropy(net(x[:EXAMPLES]), y[:EXAMPLES]).detach()
    torch.testing.assert_close(torch.tensor(theirs), plain, check_dtype=False)
    assert "own training data" in repr(la)


@pytest.mark.parametrize("structure", ["kron", "matrix_free"])
def test_an_untuned_posterior_warns_when_it_predicts(sure: Any, structure: str) -> None:
    net, x, y = sure
    la = lw.laplace(net, (x, y), "categorical", structure=structure, prior=1e-3)
    with pytest.warns(LapwingWarning, match=SAYS):
        la.predict(x[:3])
    assert "own training data" in repr(la)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        la.replace(prior=1e8).predict(x[:3])  # the network, as good as alone


def test_a_file_says_it_too(sure: Any, tmp_path: Path) -> None:
    net, x, y = sure
    with pytest.warns(LapwingWarning, match=SAYS):
        la = lw.laplace(net, (x, y), "categorical", structure="kron").tuned()
    la.save(tmp_path / "la")
    loaded = lw.load(tmp_path / "la", net)
    assert loaded.tuning.train_nll == la.tuning.train_nll
    with pytest.warns(LapwingWarning, match=SAYS):
        loaded.predict(x[:3])
    lw.load(tmp_path / "la", net).replace(prior=1e-3).predict(x[:3])  # without data there is nothing to compare


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:tuning stopped at a bound")
def test_what_it_says_to_call_is_quiet(sure: Any) -> None:
    net, x, y = sure
    held_out = data(150)
    la = lw.laplace(net, (x, y), "categorical", structure="kron").tuned(method="validation", data=held_out)
    la.predict(x)
    better = -la.predict(held_out[0]).log_prob(held_out[1]).mean()
    assert float(better) < 0.1
    assert "own training data" not in repr(la)


def test_a_network_that_does_not_fit_either_is_no_news() -> None:
    x, y = data(noise=True)
    la = lw.laplace(network(x, y, 5), (x, y), "categorical").tuned()
    assert len(la.tuning.train_nll) == 2
    la.predict(x)


def test_regressions_are_not_compared() -> None:
    x, _ = data()
    la = lw.laplace(nn.Linear(2, 1).double(), (x, x.sum(-1, keepdim=True)), "gaussian").tuned()
    assert la.tuning.train_nll == ()


L = lw.likelihoods


@pytest.mark.parametrize("kind", ["weighted", "class weights", "ignoring", "smoothed", "soft", "bernoulli", "ordinal"])
def test_every_likelihood_of_classes_is_compared(kind: str) -> None:
    x, y = data()
    likelihood, targets, outputs = {
        "weighted": (L.Weighted(L.Categorical()), L.Weighted(L.Categorical()).pack(y, torch.rand(len(y)).double()), 3),
        "class weights": (L.ClassWeighted(weights=(1.0, 2.0, 3.0)), y, 3),
        "ignoring": (L.Ignoring(L.Categorical()), torch.where(torch.arange(len(y)) < 9, -100, y), 3),
        "smoothed": (L.LabelSmoothing(0.1), y, 3),
        "soft": (L.SoftLabels(), nn.functional.one_hot(y).double(), 3),
        "bernoulli": (L.Bernoulli(), nn.functional.one_hot(y).double(), 3),
        "ordinal": (L.Ordinal((-1.0, 1.0)), y, 1),
    }[kind]
    torch.manual_seed(0)
    net = nn.Linear(2, outputs).double()
    la = lw.laplace(net, (x, targets), likelihood)
    mine, theirs = training_nll(la.posterior, la.likelihood, la.data, 2**30)
    f = net(x[:EXAMPLES])
    expected = -likelihood.log_prob(f, targets[:EXAMPLES]).sum() / EXAMPLES
    torch.testing.assert_close(torch.tensor(theirs), expected.detach(), check_dtype=False)
    close = la.replace(prior=1e12)
    again = training_nll(close.posterior, close.likelihood, la.data, 2**30)
    torch.testing.assert_close(torch.tensor(again[0]), torch.tensor(theirs), rtol=1e-4, atol=1e-4)
    assert mine > 0


def test_positions_are_rows_and_many_outputs_are_left_alone() -> None:
    x, y = data()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Unflatten(1, (2, 1)), nn.Linear(1, 3)).double()
    labels = y[:, None].expand(-1, 2).contiguous()
    la = lw.laplace(net, (x, labels), "categorical")
    found = training_nll(la.posterior, la.likelihood, la.data, 2**30)
    f = net(x[:EXAMPLES]).detach()
    expected = nn.functional.cross_entropy(f.reshape(-1, 3), labels[:EXAMPLES].reshape(-1))
    torch.testing.assert_close(torch.tensor(found[1]), expected, check_dtype=False)
    wide = lw.laplace(nn.Linear(2, 600).double(), (x, y), "categorical", structure="diag")
    assert training_nll(wide.posterior, wide.likelihood, wide.data, 2**30) == ()


def test_what_is_called_lost() -> None:
    assert not unfit(())
    assert not unfit((0.09, 0.0))
    assert not unfit((0.9, 0.5))
    assert unfit((0.11, 0.0))
    assert unfit((1.1, 0.5))


@pytest.mark.usefixtures("hasty_doctor")
def test_the_doctor_says_so_before(sure: Any) -> None:
    net, x, y = sure
    report = lw.doctor(net, (x, y), "categorical")
    (found,) = [f for f in report.findings if f.severity == "warning" and "validation" in f.message]
    assert "fits its training data" in found.message
    assert report.recommendation == "lw.laplace(model, data, 'classification').tuned()"
    x, y = data(noise=True)
    report = lw.doctor(network(x, y, 60), (x, y), "categorical")
    assert not any("validation" in f.message for f in report.findings)
