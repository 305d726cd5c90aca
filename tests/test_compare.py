"""lw.compare: evidences side by side, by their own terms, refused where they are of different things."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import lapwing as lw
from lapwing import tree
from lapwing.errors import InvalidValue, LapwingWarning, Unsupported


@pytest.fixture
def points() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(50, 4, generator=g).double()
    return x, x[:, :2] @ torch.randn(2, 2, generator=g).double() + 0.3 * torch.randn(50, 2, generator=g).double()


class Columns(nn.Module):
    """A linear model of some of the inputs."""

    def __init__(self, columns: list[int]) -> None:
        super().__init__()
        self.columns, self.linear = columns, nn.Linear(len(columns), 2).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x[:, self.columns])


def fit(model: nn.Module, x: Tensor, y: Tensor, **options: Any) -> lw.Laplace:
    return lw.laplace(model, (x, y), lw.likelihoods.Gaussian(0.3), **options)


def test_linear_models_rank_by_the_closed_form_evidence(points: tuple[Tensor, Tensor]) -> None:
    """log N(y; 0, σ²I + JA⁻¹Jᵀ), from plain linear algebra, for each subset of features."""
    x, y = points
    subsets = {"right": [0, 1], "too few": [0], "too many": [0, 1, 2, 3], "wrong": [2, 3]}
    table = lw.compare({name: fit(Columns(c), x, y).recentered() for name, c in subsets.items()})
    expected = {}
    for name, columns in subsets.items():
        phi = torch.cat([x[:, columns], torch.ones(50, 1).double()], 1)
        normal = torch.distributions.MultivariateNormal(
            torch.zeros(50).double(), 0.09 * torch.eye(50).double() + phi @ phi.mT
        )
        expected[name] = float(normal.log_prob(y.mT).sum())
    assert [row.name for row in table.rows] == sorted(expected, key=lambda name: -expected[name])
    assert table.best.name == "right"
    for row in table.rows:
        assert_close(row.log_evidence, expected[row.name], rtol=1e-8, atol=1e-8)
        assert_close(row.difference, expected[row.name] - expected["right"], rtol=1e-8, atol=1e-8)
        assert_close(row.fit - row.quadratic - row.occam, row.log_evidence, rtol=1e-8, atol=1e-8)
        assert row.parameters == 2 * (len(subsets[row.name]) + 1)
        assert 0 < row.effective_dimension < row.parameters
        assert (row.center, row.tuned, row.bound, row.nll) == ("tangent", "no", "exact", None)
    assert table["wrong"].fit == table.to_dict()["wrong"]["fit"]


def test_held_out_nll_is_the_mean_over_points(points: tuple[Tensor, Tensor]) -> None:
    x, y = points
    la = fit(Columns([0, 1]), x[:30], y[:30])
    expected = float(-la.predict(x[30:]).log_prob(y[30:]).mean())
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x[30:], y[30:]), batch_size=7)
    for held_out in ((x[30:], y[30:]), loader):
        assert_close(lw.compare({"a": la}, held_out)["a"].nll, expected, rtol=1e-12, atol=1e-12)


def test_prints_as_a_table(points: tuple[Tensor, Tensor]) -> None:
    x, y = points
    models = {"a <b>": fit(Columns([0]), x, y), "c": fit(Columns([0, 1]), x, y, structure="diag")}
    table = lw.compare(models, (x, y))
    lines = repr(table).splitlines()
    assert lines[0].split()[0] == "model"
    assert "held-out NLL" in lines[0]
    assert lines[1].startswith(table.best.name)
    assert "50 examples over all weights" in lines[-2]
    assert "exact: a <b>" in lines[-1]
    assert "lower bound of the full curvature's: c" in lines[-1]
    assert max(len(line) for line in lines[:-2]) < 140
    page = table._repr_html_()
    assert page.count("<tr>") == 3
    assert "a &lt;b&gt;" in page
    assert "held-out NLL" not in repr(lw.compare(models))


def test_plots_or_names_what_is_missing(points: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = points
    models = {"a": fit(Columns([0]), x, y), "b": fit(Columns([0, 1]), x, y)}
    assert len(lw.compare(models).plot().axes) == 1
    assert len(lw.compare(models, (x, y)).plot().axes) == 2
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(Unsupported, match=r"lapwing\[demo\]"):
        lw.compare(models).plot()


def test_evidences_of_different_things_are_refused(points: tuple[Tensor, Tensor]) -> None:
    x, y = points
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    base = fit(model, x, y)
    moved = y.clone()
    moved[17, 1] += 1e-3
    labels = (y[:, 0] > 0).long()
    others = {
        "different targets": fit(model, x, moved),
        "in other units": fit(model, x, 10 * y),
        "different numbers of examples": fit(model, x[:40], y[:40]),
        "different likelihoods": lw.laplace(model, (x, labels), "categorical"),
        r"different weight subsets \(all weights; the last layer's weights\)": fit(model, x, y, subset="last_layer"),
        r"\(all weights; some layers' weights\)": fit(model, x, y, subset=["0.*"]),
        r"\(all weights; a mask of weights\)": fit(model, x, y, subset={"0.weight": torch.eye(3, 4, dtype=torch.bool)}),
    }
    for message, other in others.items():
        with pytest.raises(InvalidValue, match=message):
            lw.compare({"base": base, "other": other})
    last = fit(model, x, y, subset="last_layer")
    assert lw.compare({"a": last, "b": fit(model, x, y, subset="last_layer", structure="diag")}).weights.startswith(
        "the"
    )
    for bad in ({}, [], base):
        with pytest.raises(InvalidValue, match="compare takes"):
            lw.compare(bad)  # type: ignore[arg-type]
    with pytest.raises(InvalidValue, match="'x' is a Sequential"):
        lw.compare({"x": model})
    with pytest.raises(InvalidValue, match="no model 'z'"):
        lw.compare({"a": base})["z"]


def test_mixtures_of_tuned_and_centers_are_warned_of(points: tuple[Tensor, Tensor]) -> None:
    x, y = points
    a, b = fit(Columns([0, 1]), x, y), fit(Columns([0]), x, y)
    with pytest.warns(LapwingWarning, match=r"\['b'\] are not tuned and \['a'\] are"):
        lw.compare({"a": a.tuned(center="map"), "b": b})
    with pytest.warns(LapwingWarning, match="centers differ"):
        lw.compare({"a": a.recentered(), "b": b})


def test_order_batches_shards_and_files_do_not_make_other_data(points: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    x, y = points
    model = Columns([0, 1])
    whole, turn = fit(model, x, y), torch.randperm(50, generator=torch.Generator().manual_seed(0))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x[turn], y[turn]), batch_size=9)
    shuffled = lw.laplace(model, loader, lw.likelihoods.Gaussian(0.3))
    grown = fit(model, x[:20], y[:20]).updated((x[20:], y[20:]))
    single = lw.laplace(Columns([0, 1]).float(), (x.float(), y.float()), lw.likelihoods.Gaussian(0.3))
    whole.save(tmp_path / "a.safetensors")
    again = lw.load(tmp_path / "a.safetensors", model)
    models = {"whole": whole, "shuffled": shuffled, "grown": grown, "float32": single, "file": again}
    assert len({la.state.targets for la in models.values()}) == 1
    table = lw.compare(models)
    assert_close(table["grown"].log_evidence, table["whole"].log_evidence, rtol=1e-10, atol=1e-8)


def test_digest_adds_and_tells_rows_apart(generator: torch.Generator) -> None:
    rows = torch.randn(200, 3, generator=generator)
    assert tree.digest(rows) == (tree.digest(rows[:77]) + tree.digest(rows[77:])) % 2**64
    assert tree.digest(rows) == tree.digest(rows.flip(0)) == tree.digest(rows.double())
    assert tree.digest(rows) != tree.digest(rows.flip(1))
    assert tree.digest(rows) != tree.digest(rows.roll(1, 0).roll(1, 1))
    seen = {tree.digest(torch.tensor([[i]])) for i in range(3000)}
    assert len(seen) == 3000
    swapped = rows.clone()
    swapped[0, 0], swapped[1, 0] = rows[1, 0], rows[0, 0]
    assert tree.digest(rows) != tree.digest(swapped)
    labels = torch.randint(10, (500,), generator=generator)
    changed = labels.clone()
    changed[3] = (changed[3] + 1) % 10
    assert tree.digest(labels) != tree.digest(changed)
