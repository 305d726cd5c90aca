"""What a prediction shows: in a terminal, in a notebook, as arrays and as pictures."""

from __future__ import annotations

import builtins
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import lapwing as lw


def prediction(kind: str, n: int = 7, c: int = 3, joint: bool = False) -> lw.Prediction:
    g = torch.Generator().manual_seed(0)
    mean = torch.randn(n, c, generator=g, dtype=torch.float64)
    root = torch.randn(n * c, n * c, generator=g, dtype=torch.float64) / c
    cov = (root @ root.mT).reshape(n, c, n, c)
    if not joint:
        cov = torch.stack([cov[i, :, i] for i in range(n)])
    made: dict[str, Any] = {
        "gaussian": lw.likelihoods.Gaussian(0.3),
        "categorical": lw.likelihoods.Categorical(),
        "bernoulli": lw.likelihoods.Bernoulli(),
        "poisson": lw.likelihoods.Poisson(),
    }
    return lw.Prediction(made[kind], lw.outputs.Normal(mean, cov, joint=joint))


KINDS = ("gaussian", "categorical", "bernoulli", "poisson")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("joint", [False, True])
def test_arrays_are_the_tensors(kind: str, joint: bool) -> None:
    pred = prediction(kind, joint=joint)
    arrays = pred.to_numpy()
    for name in ("mean", "std", "epistemic", "aleatoric", "total", "f_mean", "f_var"):
        assert isinstance(arrays[name], np.ndarray)
        np.testing.assert_array_equal(arrays[name], getattr(pred, name).numpy())
    assert ("mutual_information" in arrays) == pred.likelihood.classes


@pytest.mark.parametrize("kind", KINDS)
def test_text_and_table_show_the_same_numbers(kind: str) -> None:
    pred = prediction(kind)
    text, table = repr(pred), pred._repr_html_()
    assert text.count("\n") == 7  # a head, the names, five inputs and an ellipsis
    numbers = [
        f"{float(v):.4g}" for values in (pred.mean, pred.std, pred.epistemic.sqrt()) for v in values[:5].flatten()
    ]
    for number in numbers:
        assert number in text
        assert number in table
    rows = re.findall(r"<tr>(.*?)</tr>", table)
    assert len(rows) == 7
    assert all(row.count("<td>") + row.count("<th>") == 3 for row in rows)


def test_a_few_inputs_show_no_ellipsis_and_positions_are_told() -> None:
    assert "..." not in repr(prediction("gaussian", n=2, c=2))
    f = torch.zeros(2, 4, 3, dtype=torch.float64)
    pred = lw.Prediction(
        lw.likelihoods.Gaussian(1.0), lw.outputs.Normal(f, torch.zeros(2, 4, 3, 3, dtype=torch.float64))
    )
    assert "2 inputs, 3 outputs at 4 positions" in repr(pred)


def test_what_is_not_known_is_left_out() -> None:
    known = lw.likelihoods.KnownNoise()
    pred = lw.Prediction(known, lw.outputs.Normal(torch.ones(2, 1).double(), torch.ones(2, 1, 1).double()))
    assert "epistemic std" in repr(pred)
    assert " std " not in repr(pred).replace("epistemic std", "")
    assert set(pred.to_numpy()) == {"mean", "epistemic", "f_mean", "f_var"}
    with pytest.raises(lw.errors.Unsupported, match="not known"):
        pred.std  # noqa: B018
    cauchy = lw.Prediction(
        lw.likelihoods.StudentT(1.0, 1.0), lw.outputs.Normal(torch.ones(2, 1).double(), torch.ones(2, 1, 1).double())
    )
    assert "studentt" in repr(cauchy)


# -- pictures --------------------------------------------------------------------------------------------------------


def bands(figure: Any) -> list[np.ndarray]:
    return [c.get_paths()[0].vertices for c in figure.axes[0].collections]


@pytest.mark.parametrize("c", [1, 2])
def test_a_line_has_the_interval_of_y_and_within_it_the_epistemic_band(c: int) -> None:
    pred, x = prediction("gaussian", c=c), torch.tensor([3.0, 1, 2, 0, 6, 5, 4])
    figure = pred.plot(x[:, None], (x[:, None], torch.zeros(7, c)), level=0.9)
    low, high = pred.interval(0.9)
    order = x.argsort()
    drawn = figure.axes[0].lines[0].get_data()
    np.testing.assert_allclose(drawn[0], np.arange(7))
    np.testing.assert_allclose(drawn[1], pred.mean[order, 0])
    assert len(bands(figure)) == 2 * c
    outer, inner = bands(figure)[:2]
    at = {i: outer[outer[:, 0] == i, 1] for i in range(7)}
    for i in range(7):
        assert at[i].min() == pytest.approx(float(low[order[i], 0]))
        assert at[i].max() == pytest.approx(float(high[order[i], 0]))
        part = inner[inner[:, 0] == i, 1]
        assert at[i].min() < part.min() <= part.max() < at[i].max()
        half = float(torch.special.ndtri(torch.tensor(0.95).double()) * pred.epistemic[order[i], 0].sqrt())
        assert part.max() - part.min() == pytest.approx(2 * half)


@pytest.mark.parametrize("kind", ["categorical", "bernoulli", "poisson"])
def test_other_likelihoods_over_a_line(kind: str) -> None:
    pred = prediction(kind)
    figure = pred.plot(torch.arange(7.0))
    assert len(figure.axes[0].lines) == 3
    assert len(bands(figure)) == (6 if kind == "poisson" else 3)


@pytest.mark.parametrize(
    ("kind", "c", "panels"),
    [("gaussian", 1, 3), ("gaussian", 2, 6), ("categorical", 3, 3), ("bernoulli", 2, 6), ("categorical", 2, 3)],
)
def test_over_the_plane_mean_epistemic_and_aleatoric_stand_side_by_side(kind: str, c: int, panels: int) -> None:
    pred, x = prediction(kind, c=c), torch.randn(7, 2, generator=torch.Generator().manual_seed(1))
    labels: Tensor = torch.zeros(7, c) if kind != "categorical" else torch.zeros(7, dtype=torch.long)
    figure = pred.plot(x, (x, labels))
    axes = [a for a in figure.axes if a.get_title()]
    assert len(axes) == panels
    values = axes[1].collections[0].get_array()
    expected = pred.epistemic[:, 0].sqrt() if kind == "gaussian" else pred.mutual_information.reshape(7, -1)[:, 0]
    np.testing.assert_allclose(np.asarray(values), expected.numpy())


def test_pictures_that_cannot_be_made_are_refused() -> None:
    pred = prediction("gaussian")
    with pytest.raises(lw.errors.InvalidValue, match=r"\(n, 1\) or \(n, 2\)"):
        pred.plot(torch.zeros(7, 3))
    with pytest.raises(lw.errors.InvalidValue, match=r"\(n, 1\) or \(n, 2\)"):
        pred.plot(torch.zeros(6, 1))
    with pytest.raises(lw.errors.InvalidValue, match="at least 3 inputs"):
        prediction("gaussian", n=2).plot(torch.zeros(2, 2))
    with pytest.raises(lw.errors.Unsupported, match="too many"):
        prediction("gaussian", c=7).plot(torch.zeros(7, 1))


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def missing(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return imported(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(lw.errors.Unsupported, match=r"lapwing\[demo\]"):
        prediction("gaussian").plot(torch.zeros(7, 1))


def test_a_paired_comparison_prints_in_one_line() -> None:
    found = lw.metrics.paired(torch.arange(100.0), torch.zeros(100))
    assert len(repr(found)) < 200
    assert "49.5" in repr(found)
