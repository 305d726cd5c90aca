"""The study of classifiers: rows that get seeds one after another are those of all seeds at once."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

STUDIES = Path(__file__).parents[1] / "studies"
Row = dict[str, Any]


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(str(STUDIES))
    import classifiers

    return classifiers


def losses(seed: int, column: str) -> tuple[np.ndarray, np.ndarray]:
    """Losses of a column and of the network, on as many examples as no other seed has."""
    rng = np.random.default_rng(seed)
    network = rng.exponential(size=20 + 7 * seed)
    return network + (0.0 if column == "network" else 0.1 + 0.3 * rng.normal(size=len(network))), network


def line(seed: int, *columns: str) -> Row:
    scores = {}
    for column in columns:
        own, network = losses(seed, column)
        d, n = own - network, len(own)
        figures = dict.fromkeys(("nll", "ece", "brier", "accuracy", "joint"), float(own.mean()))
        spreads = {"nll spread": float(own.std()), "ece spread": 0.1 * seed + 0.1}
        pairs = {what: [float(d.mean()), float(d.var(ddof=1))] for what in ("nll", "accuracy")}
        scores[column] = {"n": n, **figures, "auroc": None, **spreads, "seconds": {"fit": seed}, "difference": pairs}
    about = {"part": "small", "set": "digits80", "kind": "plain", "regime": "end", "seed": seed}
    return {**about, "row": ["digits80", "plain", "end"], "choice": {"scale": seed}, "columns": scores}


def saved(study: ModuleType, lines: list[Row], record: list[Row]) -> list[Row]:
    return json.loads(json.dumps(study.rows_of(lines, record)))


def same(one: Any, other: Any) -> None:
    assert str(type(one)) == str(type(other))
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            same(one[key], other[key])
    elif isinstance(one, list):
        for mine, its in zip(one, other, strict=True):
            same(mine, its)
    elif isinstance(one, float):
        assert one == pytest.approx(other, rel=1e-10)
    else:
        assert one == other


COLUMNS = ("network", "dirichlet", "default")


def test_means_and_errors_are_those_of_all_examples(study: ModuleType) -> None:
    (row,) = study.rows_of([line(seed, *COLUMNS) for seed in range(5)], [])
    d = np.concatenate([np.subtract(*losses(seed, "dirichlet")) for seed in range(5)])
    found = row["columns"]["dirichlet"]
    assert found["nll − network"] == pytest.approx(d.mean())
    assert found["nll error"] == pytest.approx(d.std(ddof=1) / len(d) ** 0.5)
    assert row["n_test"] == len(d)


@pytest.mark.parametrize("cut", [1, 3])
def test_seeds_that_join_the_record_make_the_row_of_all(study: ModuleType, cut: int) -> None:
    lines = [line(seed, *COLUMNS) for seed in range(5)]
    before = saved(study, lines[:cut], [])
    for column in before[0]["columns"].values():  # an old record says nothing of a column's own
        del column["n"], column["seeds"]
    after = saved(study, lines[cut:], before)
    same(after, saved(study, lines, []))
    same(saved(study, lines[cut:], after), after)


def test_a_row_that_is_scored_anew_replaces_the_record(study: ModuleType) -> None:
    before, lines = saved(study, [line(0, *COLUMNS)], []), [line(seed, *COLUMNS) for seed in range(2)]
    before[0]["columns"]["default"]["nll"] = 99.0
    same(saved(study, lines, before), saved(study, lines, []))


def test_a_rival_is_held_to_the_default_on_its_own_networks(study: ModuleType) -> None:
    lines = [line(0, *COLUMNS), line(1, *COLUMNS, "process"), line(2, *COLUMNS, "process")]
    (row,) = saved(study, lines[2:], saved(study, lines[:2], []))
    (whole,) = saved(study, lines, [])
    same(row, whole)
    expected = np.concatenate([losses(seed, "default")[0] for seed in (1, 2)]).mean()
    assert row["columns"]["process"]["default"] == pytest.approx(expected)
    assert study.seeds_of(row, "process") == [1, 2]


def test_what_the_record_has_is_not_scored_again(study: ModuleType) -> None:
    unit = study.Unit("small", "digits80", "plain", "end", 12)
    units = [unit, *(study.Unit(*unit.row, seed) for seed in (10, 14))]
    lines = [line(seed, *study.COLUMNS) for seed in (10, 12)]
    record = saved(study, lines[:1], [])
    left = list(study.missing(units, lines[1:], record))
    assert [(unit.seed, columns) for unit, columns in left] == [(14, study.COLUMNS)]
    assert not study.fresh(lines[0], {("digits80, plain, end", c, 10) for c in study.COLUMNS})
    assert study.fresh(lines[1], {("digits80, plain, end", c, 10) for c in study.COLUMNS})


def test_moved_images(study: ModuleType) -> None:
    """A pixel to each side, background where nothing was; drawn images are among the nine."""
    import torch
    from _classifiers_networks import augmented, moved, views

    x = torch.randn(6, 12, generator=torch.Generator().manual_seed(0)).reshape(6, 1, 12)[..., :9]
    around = moved(x.reshape(6, 3, 3))
    assert torch.equal(around[:, 1, 1], x.reshape(6, 3, 3))
    assert torch.equal(around[:, 0, 1, 1:], x.reshape(6, 3, 3)[:, :-1])  # one down
    assert bool((around[:, 0, 1, 0] == x.min()).all())
    assert [one.shape for one in views(x, 3, True)] == [x.shape] * 5
    drawn = augmented(3, False)(x, torch.Generator().manual_seed(1)).reshape(6, 1, 9)
    assert bool((drawn == around.reshape(6, 9, 9)).all(2).any(1).all())
