"""What structures say of what they take, against their own states, and the doctor's view of a structure that it has
never heard of."""

import ast
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing.curvature import Full, Probe
from lapwing.curvature.cost import Needs, Rates, Task, of_dense
from lapwing.doctor import trial
from lapwing.doctor.plan import survey
from lapwing.doctor.reading import read
from lapwing.errors import InvalidValue
from lapwing.operators import Diagonal

UNIT = Rates(*[1.0] * 8)
FREE = Rates(*[0.0] * 8)


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "QUICK", 0.01)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double().eval()


def classes(n: int = 40) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, 5, generator=generator, dtype=torch.float64), torch.arange(n) % 3


def task(rates: Rates = FREE, n: int = 40) -> Task:
    sample = read(lw.data.as_batches(classes(n)), torch.device("cpu"))
    return survey(lw.linearize(net()), lw.likelihoods.Categorical(), sample, 2**30, rates)


# -- counts ------------------------------------------------------------------------------------------------------


def test_the_whole_matrix_takes_what_one_dense_part_of_all_weights_takes():
    found, dense = Full("primal").needs(task(UNIT)), of_dense(39, task(UNIT))
    assert (found.state, found.solve, found.factorize) == (dense.state, dense.solve, dense.factorize)
    assert found.state == 8 * 39**2
    assert found.exact


def test_parts_add():
    whole, twice = lw.curvature.Block().needs(task(UNIT)), task(UNIT)
    parts = [of_dense(part.size, twice) for part in twice.parts]
    assert sum(part.size for part in twice.parts) == 39
    for name in ("state", "factors", "solve", "factorize"):
        assert getattr(whole, name) == pytest.approx(sum(getattr(part, name) for part in parts))
    assert whole.side == 24


def test_kron_is_counted_by_hand():
    """Layers (o, i) of (4, 6) and (3, 5), the bias counted in; two columns of a softmax with three outputs."""
    rates = replace(FREE, product32=1.0)
    found = lw.curvature.Kronecker().needs(task(rates))
    assert found.fit == 40 * ((36 + 2 * 16) + (25 + 2 * 9))
    assert found.predict == 1000 * ((36 + 3 * (16 + 24)) + (25 + 3 * (9 + 15)))
    assert found.state == 8 * (36 + 16 + 25 + 9)


@pytest.mark.parametrize("name", ["full", "kron", "block", "diag"])
def test_time_is_in_proportion_to_the_data(name):
    rates = replace(FREE, gradient=1.0)
    few, many = (
        lw.arguments.as_structure(name, None, 2**30).resolved(one.probe, one.factor).needs(one)
        for one in (task(rates), replace(task(rates), probe=replace(task().probe, n=120)))
    )
    assert many.fit == pytest.approx(3 * few.fit)
    assert many.predict == few.predict


def test_rows_grow_with_the_data_and_need_their_number():
    dual = Full("dual").needs(task(UNIT))
    assert dual.grows
    assert dual.factorize > Full("primal").needs(task(UNIT)).factorize


# -- a structure of one's own ------------------------------------------------------------------------------------


class Trace:
    mutable = ("total",)

    def __init__(self, tangent: Any) -> None:
        self.tangent, self.total = tangent, torch.zeros(1, dtype=torch.float64)

    def forward(self, x: Any) -> Tensor:
        return self.tangent(x)

    def observe(self, x: Any, y: Tensor, f: Tensor, u: Tensor, column: Tensor) -> None:
        self.total += self.tangent.pulled(x, u).square().sum()

    def finish(self) -> tuple[dict[str, Tensor], tuple[Any, ...]]:
        return {"total": self.total}, ()


@dataclass(frozen=True)
class Isotropic(lw.curvature.Structure):
    """G ≈ (tr G / P) I; it says nothing of what it takes."""

    def __str__(self) -> str:
        return "isotropic"

    def resolved(self, probe: Probe, factor: Any) -> Any:
        return self

    def start(self, tangent: Any, likelihood: Any, factor: Any, probe: Probe) -> Trace:
        return Trace(tangent)

    def operator(self, state: Any, weights: Tensor) -> Diagonal:
        return Diagonal(weights[0] * state.sums["total"] / state.layout.size, state.layout.size)

    def coverage(self, parts: Any, tangent: Any) -> dict[str, str]:
        return dict.fromkeys(tangent.layout.names, "by its trace")


@dataclass(frozen=True)
class Telling(Isotropic):
    def needs(self, task: Task) -> Needs:
        return Needs(memory=10.0**15, state=10.0**15, fit=1.0, tune=2.0, predict=3.0, note="huge")


def test_a_structure_that_says_nothing_is_known_by_trials_and_recommended():
    model, data, structure = net(), classes(), Isotropic()
    report = lw.doctor(model, data, "categorical", structure=structure)
    cost = report.plan["isotropic"]
    assert cost.fits
    assert cost.fit > 0
    assert cost.predict > 0
    assert math.isnan(cost.tune)
    assert "structure=structure" in report.recommendation
    assert set(report.parameters.values()) == {"by its trace"}
    la = eval(report.recommendation, {"lw": lw, "model": model, "data": data, "structure": structure})
    assert la.state.structure == structure


def test_a_structure_is_believed_and_another_recommended_where_it_does_not_fit():
    report = lw.doctor(net(), classes(), "categorical", structure=Telling())
    cost = report.plan["isotropic"]
    assert not cost.fits
    assert cost.note == "huge"
    assert cost.memory > 10**15
    assert cost.predict / cost.tune == pytest.approx(3 / 2 * 40 / 1000)  # passes over 1,000 inputs, epochs over 40
    assert "structure='full'" in report.recommendation


@pytest.mark.parametrize("word", ["ekfac", "lowrank", "matrix_free", "diag"])
@pytest.mark.filterwarnings("ignore:tuning stopped at a bound")
def test_every_structure_can_be_asked_for_by_name(word):
    report = lw.doctor(net(), classes(), "categorical", structure=word)
    assert report.ok, str(report)
    assert f"structure={word!r}" in report.recommendation
    assert not [f for f in report.by("warning") if f.topic == "plan"], str(report)
    assert max(map(len, str(report).splitlines())) <= 100


def test_a_structure_that_makes_no_sense_is_refused():
    with pytest.raises(InvalidValue, match="structure must be"):
        lw.doctor(net(), classes(), "categorical", structure="kronecker")


# -- the room itself ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(Path(lw.doctor.__code__.co_filename).parent.glob("*.py")), ids=lambda p: p.stem)
def test_the_doctor_names_no_structure_and_no_likelihood(path):
    """In strings that are compared, and classes that are imported."""
    words = {*lw.arguments.STRUCTURES, *lw.arguments.LIKELIHOODS}
    tree = ast.parse(path.read_text())
    compared = [n for node in ast.walk(tree) if isinstance(node, ast.Compare) for n in ast.walk(node)]
    assert not words & {n.value for n in compared if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    names = {one.__name__ for table in (lw.arguments.STRUCTURES, lw.arguments.LIKELIHOODS) for one in table.values()}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("lapwing.curvature", "lapwing.like")):
            assert not names & {alias.name for alias in node.names}
