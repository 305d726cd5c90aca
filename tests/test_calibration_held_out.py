"""How sure a classifier may be by held-out labels: the choice against all near it, scored by predictions themselves."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from helpers import close, seeded
from lapwing.calibration import features, record
from lapwing.errors import InvalidValue

Pair = tuple[Tensor, Tensor]


@pytest.fixture(autouse=True)
def few_features(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "COUNT", 24)
    monkeypatch.setattr(record, "COUNT", 24)


def data_of(n: int, seed: int, classes: int = 3) -> Pair:
    """Classes of near inputs, a tenth of them wrong."""
    x = torch.randn(n, 2, generator=seeded(seed), dtype=torch.float64)
    y = ((x @ torch.tensor([[1.0, 0.5], [-0.3, 1.0]]).double()) * 1.5).sum(1).round().long().clamp(-1, 1) + 1
    wrong = torch.rand(n, generator=seeded(seed + 1)) < 0.1
    return x, torch.where(wrong, torch.randint(classes, (n,), generator=seeded(seed + 2)), y) % classes


def network(train: Pair, classes: int = 3, steps: int = 400) -> nn.Module:
    """Trained until it has learnt what is wrong."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 24), nn.Tanh(), nn.Linear(24, classes)).double()
    optimizer = torch.optim.Adam(net.parameters(), 0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(train[0]), train[1]).backward()
        optimizer.step()
    return net.eval()


TRAIN, HELD = data_of(60, 0), data_of(50, 10)


@pytest.fixture(scope="module")
def net() -> nn.Module:
    return network(TRAIN)


def at(la: lw.Laplace, **moved: float) -> lw.Laplace:
    """The same with another choice."""
    assert la.calibration is not None
    choice = dataclasses.replace(la.calibration.choice, **moved)
    return dataclasses.replace(
        la, temperature=choice.scale, calibration=dataclasses.replace(la.calibration, choice=choice)
    )


def loss(la: lw.Laplace, held: Pair = HELD) -> float:
    return -float(la.predict(held[0]).log_prob(held[1]).mean())


@pytest.mark.parametrize("pooling", [True, False])
def test_no_other_choice_predicts_the_held_out_labels_better(net: nn.Module, pooling: bool) -> None:
    """By predictions, whose nodes are others than the search's: to a thousandth of a nat."""
    default = lw.laplace(net, TRAIN, "classification").tuned()
    if not pooling:
        default = unpooled(default)
    la = default.tuned(method="validation", data=HELD)
    assert la.calibration is not None
    one, best = la.calibration.choice, loss(la)
    assert (one.b > 0) == pooling
    assert best == pytest.approx(one.left_out, abs=2e-3)
    assert loss(default) == pytest.approx(one.network, abs=2e-3)
    assert best <= loss(default) + 1e-3
    for factor in (0.5, 0.8, 1.25, 2.0):
        assert loss(at(la, scale=min(1.0, one.scale * factor))) >= best - 1e-3, factor
        assert loss(at(la, a=one.a * factor, b=one.b * factor)) >= best - 1e-3, factor
    before = default.calibration.choice  # type: ignore[union-attr]
    assert one.b * before.a == pytest.approx(before.b * one.a)


def unpooled(la: lw.Laplace) -> lw.Laplace:
    """With a choice that no labels of near inputs are in."""
    return dataclasses.replace(
        la, temperature=0.5, calibration=record.Calibration(record.Choice(0.5, 1.0, 0.0, 0.01), 60)
    )


def test_logits_that_are_far_too_large_are_cooled(net: nn.Module) -> None:
    """Five times the last layer, and labels that say how sure it may be: a falls to where −log p is least."""
    sure = network(TRAIN)
    with torch.no_grad():
        sure[-1].weight *= 5
        sure[-1].bias *= 5
    held = data_of(2000, 20)
    la = lw.laplace(sure, TRAIN, "classification").tuned(method="validation", data=held)
    f = sure(held[0]).detach()
    plain, cooled = (float(nn.functional.cross_entropy(a * f, held[1])) for a in (1.0, 0.2))
    assert la.calibration.choice.a < 0.4  # type: ignore[union-attr]
    assert loss(la, held) < cooled < plain


def test_it_tunes_first_where_nothing_was_chosen_yet(net: nn.Module) -> None:
    fitted = lw.laplace(net, TRAIN, "classification")
    one, two = (la.tuned(method="validation", data=HELD) for la in (fitted, fitted.tuned()))
    assert one.calibration.choice == two.calibration.choice  # type: ignore[union-attr]
    assert float(one.prior.precision) == float(fitted.tuned().prior.precision)


def test_batches_do_not_matter(net: nn.Module) -> None:
    la = lw.laplace(net, TRAIN, "classification").tuned()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*HELD), batch_size=7)
    whole, parts = (la.tuned(method="validation", data=data).calibration for data in (HELD, loader))
    for key in ("scale", "a", "b", "left_out"):
        assert getattr(whole.choice, key) == pytest.approx(getattr(parts.choice, key), rel=1e-6)


def test_one_logit(net: nn.Module) -> None:
    binary = nn.Sequential(net, nn.Linear(3, 1).double()).eval()
    (x, y), (u, v) = TRAIN, HELD
    default = lw.laplace(binary, (x, (y > 1).double()[:, None]), "classification").tuned()
    held = u, (v > 1).double()[:, None]
    assert loss(default.tuned(method="validation", data=held), held) <= loss(default, held) + 1e-3


def test_what_is_known_of_it_is_said_saved_and_looked_at(net: nn.Module, tmp_path: Path) -> None:
    la = lw.laplace(net, TRAIN, "classification").tuned(method="validation", data=HELD)
    assert la.tuning.method == "validation"  # type: ignore[union-attr]
    assert la.calibration.findings == ()  # type: ignore[union-attr]
    assert "by 50 held-out labels: −log p" in repr(la.check())
    la.save(tmp_path / "la.safetensors")
    again = lw.load(tmp_path / "la.safetensors", net)
    assert again.calibration.held_out == 50
    assert torch.equal(again.predict(HELD[0]).probs, la.predict(HELD[0]).probs)
    more = data_of(40, 30)
    close(
        again.tuned(method="validation", data=more).predict(HELD[0]).probs,
        la.tuned(method="validation", data=more).predict(HELD[0]).probs,
        1e-6,
    )


def test_held_out_labels_that_the_network_foretells_leave_it_as_it_is() -> None:
    """Soft labels that are its own probabilities: −Σ p log q is least at q = p."""
    soft = network(TRAIN, steps=15)
    la = unpooled(lw.laplace(soft, TRAIN, "classification").tuned())
    with pytest.warns(lw.errors.LapwingWarning, match="held-out data prefer the plain network"):
        found = la.tuned(method="validation", data=(HELD[0], soft(HELD[0]).detach().softmax(1)))
    assert found.calibration.choice.a == pytest.approx(1, abs=0.01)
    assert found.tuning.at_bound == ("temperature",)  # type: ignore[union-attr]


def test_what_is_not_taken_is_refused(net: nn.Module) -> None:
    la = lw.laplace(net, TRAIN, "classification").tuned()
    with pytest.raises(InvalidValue, match="needs held-out data"):
        la.tuned(method="validation")
    with pytest.raises(InvalidValue, match="leave the prior to the evidence; drop fixed="):
        la.tuned(method="validation", data=HELD, fixed=("precision",))
    with pytest.raises(InvalidValue, match="drop mean='tangent'"):
        la.tuned(method="validation", data=HELD, mean="tangent")
    with pytest.raises(InvalidValue, match=r"labels|classes"):
        la.tuned(method="validation", data=(HELD[0], HELD[1] + 5))


def test_what_labels_of_near_inputs_leave_open_grows_with_how_sure_it_is(net: nn.Module) -> None:
    """Labels that it foretells make it as sure as may be; then its figure is still that of its predictions."""
    default = lw.laplace(net, TRAIN, "classification").tuned()
    foretold = HELD[0], default.predict(HELD[0]).probs.argmax(1)
    la = default.tuned(method="validation", data=foretold)
    one, before = la.calibration.choice, default.calibration.choice  # type: ignore[union-attr]
    assert one.b > 1.5 * before.b > 0
    assert loss(la, foretold) == pytest.approx(one.left_out, abs=2e-3)
