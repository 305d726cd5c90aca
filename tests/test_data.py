"""Data as batches: what is taken, what is refused, and the user's random state left as it was."""

from __future__ import annotations

import random
import warnings
from collections import UserDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from lapwing import data
from lapwing.curvature import Full
from lapwing.curvature.accumulate import accumulate
from lapwing.data import BATCH, as_batches, check_finite, dropped, examples, passes, split
from lapwing.errors import InvalidValue, LapwingWarning
from lapwing.likelihoods import Gaussian
from lapwing.tangent import linearize

CPU = torch.device("cpu")


def pair(n: int) -> tuple[Tensor, Tensor]:
    return torch.arange(3.0 * n).reshape(n, 3), torch.arange(float(n)).reshape(n, 1)


def whole(batches: Any) -> tuple[Tensor, Tensor]:
    """Every example of a pass, in order."""
    seen = list(passes(as_batches(batches), CPU))
    return torch.cat([x for x, _ in seen]), torch.cat([y for _, y in seen])


class Stream(IterableDataset):
    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(*pair(self.n), strict=True)


# -- what is taken ---------------------------------------------------------------------------------------------------


def sources(n: int) -> dict[str, Any]:
    x, y = pair(n)
    return {
        "pair": (x, y),
        "pair in a list": [x, y],
        "pair of arrays": (x.numpy(), y.numpy()),
        "dataset": TensorDataset(x, y),
        "loader": DataLoader(TensorDataset(x, y), batch_size=4),
        "loader of a stream": DataLoader(Stream(n), batch_size=4),
        "loader with a batch sampler": DataLoader(
            TensorDataset(x, y), batch_sampler=BatchSampler(SequentialSampler(range(n)), 4, False)
        ),
        "list of batches": [(x[:4], y[:4]), (x[4:], y[4:])],
        "list of one batch": [(x, y)],
        "list of listed batches": [[x[:4], y[:4]], [x[4:], y[4:]]],
    }


@pytest.mark.parametrize("kind", sources(11))
def test_every_source_gives_every_example(kind: str) -> None:
    x, y = whole(sources(11)[kind])
    assert torch.equal(x, pair(11)[0])
    assert torch.equal(y, pair(11)[1])
    batches = as_batches(sources(11)[kind])
    first, second = ([b[0].shape for b in passes(batches, CPU)] for _ in range(2))
    assert first == second  # and again


@pytest.mark.parametrize("kind", ["pair", "dataset"])
def test_whole_data_are_cut_into_batches(kind: str) -> None:
    batches = as_batches(sources(2 * BATCH + 3)[kind])
    assert [len(y) for _, y in passes(batches, CPU)] == [BATCH, BATCH, 3]
    assert len(batches) == 3  # type: ignore[arg-type]


def test_arrays_keep_their_dtype() -> None:
    batches = as_batches((np.zeros((2, 3), dtype=np.float64), np.zeros(2, dtype=np.int32)))
    ((x, y),) = passes(batches, CPU)
    assert x.dtype == torch.float64
    assert y.dtype == torch.int32


@pytest.mark.parametrize("kind", ["tuple", "list", "dict", "nested"])
def test_inputs_may_be_any_tree(kind: str) -> None:
    a, b, y = np.arange(10.0).reshape(5, 2), torch.arange(5.0), torch.arange(5)
    trees: dict[str, Any] = {"tuple": (a, b), "list": [a, b], "dict": {"a": a, "b": b}, "nested": {"a": (a,), "b": [b]}}
    batches = as_batches((trees[kind], y))
    ((x, targets),) = passes(batches, CPU)
    leaves = data.tree.tensors(x)
    assert type(x) is type(trees[kind])
    assert [t.tolist() for t in leaves] == [a.tolist(), b.tolist()]
    assert torch.equal(targets, y)
    assert examples(batches) == 5


def test_two_batches_in_a_list_are_two_batches() -> None:
    x, y = pair(6)
    mappings = [{"x": x[:2], "labels": y[:2]}, {"x": x[2:], "labels": y[2:]}]
    seen = list(passes(as_batches(mappings), CPU))
    assert [len(t) for _, t in seen] == [2, 4]
    assert all(set(inputs) == {"x"} for inputs, _ in seen)


@pytest.mark.parametrize("kind", [dict, UserDict])
@pytest.mark.parametrize("name", ["labels", "label"])
def test_a_mapping_has_its_targets_under_labels(kind: Any, name: str) -> None:
    x, y = pair(2)
    inputs, targets = split(kind({"ids": x, "mask": y, name: y}))
    assert set(inputs) == {"ids", "mask"}
    assert inputs["ids"] is x
    assert targets is y


def test_labels_are_the_targets_where_a_label_stands_beside_them() -> None:
    x, y = pair(2)
    inputs, targets = split({"label": x, "labels": y})
    assert set(inputs) == {"label"}
    assert targets is y


def test_an_empty_batch_says_nothing() -> None:
    x, y = pair(3)
    assert [len(t) for _, t in passes([(x, y), (x[:0], y[:0]), (x, y)], CPU)] == [3, 3]


def test_tensors_are_moved_to_the_device_of_the_model() -> None:
    x, y = pair(2)
    ((inputs, targets),) = passes([({"x": x, "flag": "kept"}, y)], torch.device("meta"))
    assert inputs["x"].device.type == targets.device.type == "meta"
    assert inputs["flag"] == "kept"


# -- how many --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sources(11))
def test_examples_are_counted_where_that_needs_no_pass(kind: str) -> None:
    assert examples(as_batches(sources(11)[kind])) == (None if "stream" in kind else 11)


def test_a_sampler_says_how_many_examples_it_gives() -> None:
    dataset = TensorDataset(*pair(11))
    subset = SubsetRandomSampler(range(5))
    assert examples(DataLoader(dataset, batch_size=4, sampler=subset)) == 5
    assert examples(DataLoader(dataset, batch_sampler=BatchSampler(subset, 4, False))) == 5
    assert examples(DataLoader(dataset, batch_size=4, sampler=RandomSampler(dataset, True, 30))) == 30


def test_items_that_are_batches_are_not_counted_as_examples() -> None:
    x, y = pair(6)

    class Batches(Dataset):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
            return x[3 * i : 3 * i + 3], y[3 * i : 3 * i + 3]

    loader = DataLoader(Batches(), batch_size=None)
    assert examples(loader) is None
    assert len(whole(loader)[0]) == 6


def test_a_curvature_counts_examples_not_batches() -> None:
    x, y = (t.double() for t in pair(6))
    model = nn.Linear(3, 1).double()
    for source in ((x, y), [(x[:4], y[:4]), (x[4:], y[4:])], DataLoader(TensorDataset(x, y), batch_size=4)):
        assert accumulate(Full(), linearize(model), Gaussian(), source).n == 6


# -- the last batch ----------------------------------------------------------------------------------------------------


def test_dropping_the_last_batch_is_said() -> None:
    dataset = TensorDataset(*pair(11))
    loader = DataLoader(dataset, batch_size=4, drop_last=True)
    with pytest.warns(LapwingWarning, match=r"leaves out 3 of 11 examples.*drop_last=False"):
        assert as_batches(loader) is loader
    made = DataLoader(dataset, batch_sampler=BatchSampler(SequentialSampler(dataset), 4, True))
    with pytest.warns(LapwingWarning, match="leaves out 3 of 11 examples"):
        as_batches(made)
    few = DataLoader(dataset, batch_size=4, drop_last=True, sampler=SubsetRandomSampler(range(6)))
    with pytest.warns(LapwingWarning, match="leaves out 2 of 6 examples"):
        as_batches(few)


def test_nothing_dropped_is_nothing_said() -> None:
    dataset = TensorDataset(*pair(12))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        as_batches(DataLoader(dataset, batch_size=4, drop_last=True))
        as_batches(DataLoader(dataset, batch_size=5))
        as_batches(DataLoader(dataset, batch_size=None))
        as_batches(DataLoader(Stream(5), batch_size=4))
    assert dropped(DataLoader(dataset, batch_size=5, drop_last=True)) == 2
    assert dropped((dataset, None)) == 0


# -- what is refused -------------------------------------------------------------------------------------------------


def test_one_pass_iterators_are_refused() -> None:
    x, y = pair(4)
    loader = DataLoader(TensorDataset(x, y))
    for once in (iter([(x, y)]), ((x, y) for _ in range(2)), iter(loader), zip([x], [y], strict=True)):
        with pytest.raises(InvalidValue, match="one-pass iterator"):
            as_batches(once)


@pytest.mark.parametrize("wrong", [torch.zeros(3), np.zeros(3), "data", {"x": torch.zeros(3)}, 3, None])
def test_what_is_no_data_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidValue, match=f"got {type(wrong).__name__}"):
        as_batches(wrong)


def test_pairs_that_do_not_fit_are_refused() -> None:
    x, y = pair(4)
    with pytest.raises(InvalidValue, match="X has 4 examples and y has 3"):
        as_batches((x, y[:3]))
    with pytest.raises(InvalidValue, match=r"first dimensions \[3, 4\]"):
        as_batches(({"a": x, "b": y[:3]}, y))
    with pytest.raises(InvalidValue, match="0-dimensional"):
        as_batches((x, torch.tensor(1.0)))
    with pytest.raises(InvalidValue, match="hold no tensor"):
        as_batches(({"a": 1}, y))
    for targets in ((x, y), {"y": y}, None):
        with pytest.raises(InvalidValue, match=rf"y is no tensor, got {type(targets).__name__}"):
            as_batches((x, targets))


def test_batches_that_are_no_pair_are_refused() -> None:
    x, y = pair(4)
    cases: list[tuple[Any, str]] = [
        (x, "got Tensor"),
        ((x, y, y), "tuple of length 3"),
        ([x], "list of length 1"),
        ({"x": x, "y": y}, r"mapping with 'labels' or 'label'; got dict with \['x', 'y'\]"),
    ]
    for batch, text in cases:
        with pytest.raises(InvalidValue, match=text):
            list(passes(as_batches([batch, batch, batch]), CPU))


def empty_sources() -> dict[str, Any]:
    x, y = pair(0)
    return {
        "pair": (x, y),
        "loader": DataLoader(TensorDataset(x, y), batch_size=4),
        "list": [],
        "list of empty batches": [(x, y), (x, y), (x, y)],
        "stream": DataLoader(Stream(0), batch_size=4),
    }


@pytest.mark.parametrize("kind", empty_sources())
def test_data_without_an_example_are_refused(kind: str) -> None:
    with pytest.raises(InvalidValue, match="no batch"):
        list(passes(as_batches(empty_sources()[kind]), CPU))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_inputs_that_are_not_finite_are_refused(bad: float) -> None:
    x, _ = pair(4)
    x[1, 2] = x[3, 0] = bad
    with pytest.raises(InvalidValue, match="the inputs hold 2 NaN or infinite values"):
        check_finite({"ids": torch.arange(4), "x": [x]}, "the inputs")
    check_finite({"ids": torch.arange(4), "mask": torch.ones(4, dtype=torch.bool), "name": "x"}, "the inputs")


# -- the user's random state -------------------------------------------------------------------------------------------


class Augmented(Dataset):
    """Draws from every global generator for each example."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        noise = [float(torch.rand(())), float(np.random.rand()), random.random()]  # noqa: NPY002
        return torch.tensor(noise), torch.tensor([float(i)])


def state(loader: DataLoader) -> list[Any]:
    own = loader.generator.get_state().tolist() if loader.generator is not None else None
    legacy = np.random.get_state()  # noqa: NPY002
    return [torch.get_rng_state().tolist(), legacy[1].tolist(), legacy[2], random.getstate(), own]


@pytest.fixture(params=["global", "own"])
def shuffled(request: pytest.FixtureRequest) -> DataLoader:
    generator = torch.Generator().manual_seed(3) if request.param == "own" else None
    return DataLoader(Augmented(), batch_size=2, shuffle=True, generator=generator)


def test_a_pass_gives_the_random_state_back(shuffled: DataLoader) -> None:
    before = state(shuffled)
    first = list(passes(shuffled, CPU))
    assert state(shuffled) == before
    second = list(passes(shuffled, CPU))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, second, strict=True))  # so passes see the same data


def test_a_pass_that_ends_early_gives_the_random_state_back(shuffled: DataLoader) -> None:
    before = state(shuffled)
    unfinished = passes(shuffled, CPU)
    next(unfinished)
    assert state(shuffled) == before  # between batches, too
    unfinished.close()  # type: ignore[attr-defined]
    assert state(shuffled) == before


def test_a_pass_that_fails_gives_the_random_state_back(shuffled: DataLoader) -> None:
    class Broken(Augmented):
        def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
            super().__getitem__(i)
            raise OSError("a file is gone")

    loader = DataLoader(Broken(), batch_size=2, shuffle=True, generator=shuffled.generator)
    before = state(loader)
    with pytest.raises(OSError, match="a file is gone"):
        list(passes(loader, CPU))
    assert state(loader) == before


def test_draws_inside_a_pass_do_not_repeat(shuffled: DataLoader) -> None:
    """The state is swapped, not reset: examples are augmented differently; what the loop draws is its own."""
    drawn, inside = [], []
    for x, _ in passes(shuffled, CPU):
        drawn += x.tolist()
        inside.append(float(torch.rand(())))
    assert [len(set(column)) for column in zip(*drawn, strict=True)] == [5, 5, 5]  # torch's, NumPy's, Python's
    torch.manual_seed(0)
    assert inside == [float(torch.rand(())) for _ in inside]
