"""What the doctor says of tuning at the tangent MAP: its formulas on made-up rates, whose answers are known by hand,
and its rule for J in memory against the code that keeps it."""

import math
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import lapwing as lw
from lapwing import center
from lapwing.center import jacobian, space
from lapwing.curvature import Factor, Probe
from lapwing.curvature.cost import Needs, Rates, Task
from lapwing.doctor import plan, tangent, trial

NOTHING = Rates(*[0.0] * 8)
FREE = Needs(1000.0, 0.0, 0.0, 0.0, solve=0.0, exact=True)


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["lapwing.doctor.trial"], "QUICK", 0.01)


def net(outputs: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, outputs)).double().eval()


def made(n: int, outputs: int, positions: int = 1, likelihood: Any = None, working: int = 2**30) -> Task:
    """n examples of so many outputs, for a network of 39 parameters."""
    model = lw.linearize(net())
    x, y = torch.zeros(1, 5, dtype=torch.float64), torch.zeros(1, dtype=torch.long)
    seen = Probe(n, positions, outputs, model.layout.size, x)
    likelihood = likelihood or lw.likelihoods.Categorical()
    return Task(model, likelihood, Factor("exact"), seen, (x, y), 1, working, NOTHING)


def centered(need: Needs, task: Task, rates: Rates) -> Needs:
    return tangent.centered(need, replace(task, rates=rates))


# -- by passes ---------------------------------------------------------------------------------------------------


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> Task:
    monkeypatch.setattr(jacobian, "HELD_ROWS_BYTES", 0)
    monkeypatch.setattr(tangent, "SEARCH", 0.0)
    return made(100, 3)


@pytest.mark.parametrize(
    ("rates", "need", "each", "once"),
    [
        ({"push": 1.0}, {}, 50, 0),  # one pass in two pushes
        ({"pull": 1.0}, {}, 50, 0),
        ({"read": 1.0}, {}, 100, 200),  # outputs and the start of the prior are two readings more
        (
            {"gradient": 3.0},
            {},
            0,
            1000,
        ),  # a run forward; for four probes one more, and four backward of two
        ({}, {"solve": 1.0}, tangent.SOLVES, 0),
        ({}, {"tune": 7.0}, 0, 7),
    ],
)
def test_a_pass_is_half_a_push_and_half_a_pull_and_what_the_structure_does(streamed, rates, need, each, once):
    found = centered(replace(FREE, **need), streamed, replace(NOTHING, **rates))
    assert found.each == pytest.approx(each)
    assert found.tangent == pytest.approx(once + tangent.PASSES * each)


def test_known_directions_take_memory_up_to_the_room_for_them(streamed, monkeypatch):
    few, (p, m) = tangent.PASSES // 2, (39, 300)
    assert centered(FREE, streamed, NOTHING).work == 16 * few * (p + m) + 24 * few * m
    monkeypatch.setattr(space, "DIRECTION_BYTES", 5 * 8 * (p + m))
    assert centered(FREE, streamed, NOTHING).work == 16 * 5 * (p + m) + 24 * 5 * m


def test_products_that_cannot_be_told_leave_the_column_open(streamed):
    found = centered(FREE, streamed, replace(NOTHING, push=math.nan))
    assert math.isnan(found.tangent)
    assert math.isfinite(found.work)


# -- in memory ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("likelihood", "exact", "steps"),
    [("gaussian", True, "quadratic"), ("categorical", True, "exact"), ("gaussian", False, "approximate")],
)
def test_a_round_in_memory_is_a_factorization_and_its_steps(monkeypatch, likelihood, exact, steps):
    monkeypatch.setattr(tangent, "SEARCH", 0.0)
    kind = lw.likelihoods.Gaussian() if likelihood == "gaussian" else None
    problem, need = made(100, 3, likelihood=kind), replace(FREE, exact=exact, factorize=100.0, solve=1.0)
    count = tangent.STEPS_PER_ROUND[steps]
    found = centered(need, problem, NOTHING)
    assert found.each == pytest.approx(100 + count)
    assert found.tangent == pytest.approx(tangent.ROUNDS * (100 + count))
    swept = centered(need, problem, replace(NOTHING, sweep=1.0))
    assert swept.each - found.each == pytest.approx(2 * count * 300 * 39)
    assert swept.work == 16 * 300 * 39
    read = centered(need, problem, replace(NOTHING, gradient=3.0, read=1.0))
    assert read.tangent - found.tangent == pytest.approx(100 * (1 + 3 + 1))  # once forward, and once back an output


@pytest.mark.parametrize("positions", [1, 2])
@pytest.mark.parametrize("by", ["rows", "budget"])
@pytest.mark.parametrize("more", [0, -1])
def test_j_is_in_memory_where_the_center_keeps_it(monkeypatch, positions, by, more):
    """On both sides of both limits, to the byte."""
    n, c = 11, 3
    x = torch.randn(n, 5, dtype=torch.float64) if positions == 1 else torch.randn(n, positions, 5, dtype=torch.float64)
    y = torch.zeros(n, dtype=torch.long) if positions == 1 else torch.zeros(n, positions, dtype=torch.long)
    la = lw.laplace(net(c), (x, y), "categorical", structure="diag")
    size, budget = 8 * n * positions * c * la.state.layout.size, 2**30
    if by == "rows":
        monkeypatch.setattr(jacobian, "HELD_ROWS_BYTES", size * c + more)
    else:
        budget = 2 * size + more
    kept = center.read(la.state, la.likelihood, la.data, budget).rows is not None
    assert kept == (more == 0)
    assert tangent.in_memory(made(n, c, positions, working=budget)) == kept


def test_memory_is_that_of_the_larger_center(monkeypatch):
    """The state stays between fit and prediction, and the tangent MAP works beside it."""
    monkeypatch.setattr(plan, "LIBRARIES", 0)
    task, copies = made(100, 3), 8 * 39
    for kept, whole in ((400.0, 1000), (800.0, 1300)):
        found = plan._cost_of(replace(FREE, kept=kept, work=500.0), task, 1.0, 1000 + copies)
        assert found.memory - copies == whole
        assert found.memory_at_map - copies == 1000
        assert found.fits == (whole == 1000)


# -- the whole visit ---------------------------------------------------------------------------------------------


def test_every_row_tells_both_centers_and_the_report_says_that_passes_are_typical():
    torch.manual_seed(0)
    x, y = torch.randn(60, 5, dtype=torch.float64), torch.arange(60) % 3
    report = lw.doctor(net(), (x, y), "categorical")
    assert all(cost.tangent > cost.tune and cost.each > 0 for cost in report.plan.values())
    text = str(report)
    assert "tangent  predict" in text
    assert f"typical {tangent.PASSES} passes over the data" in text
    assert f"{tangent.SEEN[0]} to {tangent.SEEN[1]} have been seen" in text
    assert max(map(len, text.splitlines())) <= 100
    assert "tangent" in report._repr_html_()


def test_without_a_number_of_examples_neither_center_is_told():
    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            generator = torch.Generator().manual_seed(0)
            return ((torch.randn(5, generator=generator).double(), torch.tensor(i % 3)) for i in range(20))

    report = lw.doctor(net(), DataLoader(Stream(), batch_size=5), "categorical")
    assert all(math.isnan(cost.tangent) and math.isnan(cost.each) for cost in report.plan.values())


def test_the_last_layer_has_products_of_its_own(monkeypatch):
    sizes = []

    def recorded(model: Any, batch: Any) -> tuple[float, float]:
        sizes.append(model.layout.size)
        return 1e-6, 1e-6

    monkeypatch.setattr(trial, "jacobian_seconds", recorded)
    x, y = torch.randn(30, 5, dtype=torch.float64), torch.arange(30) % 3
    lw.doctor(net(), (x, y), "categorical")
    assert sizes == [39, 15]


def test_a_network_that_j_cannot_be_multiplied_by_keeps_its_other_costs(monkeypatch):
    def fail(*_: Any) -> Any:
        raise RuntimeError("no derivative today")

    monkeypatch.setattr(trial, "jacobian_seconds", fail)
    monkeypatch.setattr(jacobian, "HELD_ROWS_BYTES", 0)
    x, y = torch.randn(30, 5, dtype=torch.float64), torch.arange(30) % 3
    report = lw.doctor(net(), (x, y), "categorical")
    assert all(math.isnan(cost.tangent) and math.isfinite(cost.tune) for cost in report.plan.values())
    (said,) = [f.message for f in report.by("warning") if f.topic == "plan"]
    assert "center='tangent'" in said
    assert "no derivative today" in said


@pytest.mark.parametrize("positions", [(), (2,)])
def test_products_are_timed_over_whole_passes(monkeypatch, positions):
    """A clock that counts batches: a pass over b batches of n examples takes b/(b n) of a batch for each."""
    model = lw.linearize(net())
    x, y = torch.randn(7, *positions, 5, dtype=torch.float64), torch.zeros(7, *positions, dtype=torch.long)
    counts = {"push": 0, "pull": 0}

    def counting(name: str) -> Any:
        method = getattr(center.Jacobian, f"_{name}")

        def run(self: Any, *args: Any) -> Tensor:
            counts[name] += 1
            return method(self, *args)

        return run

    for name in counts:
        monkeypatch.setattr(center.Jacobian, f"_{name}", counting(name))

    def clocked(run: Any, *_: Any) -> float:
        before = dict(counts)
        run()
        return sum(counts.values()) - sum(before.values())

    monkeypatch.setattr(trial, "seconds", clocked)
    assert trial.jacobian_seconds(model, (x, y)) == (1 / 7, 1 / 7)
