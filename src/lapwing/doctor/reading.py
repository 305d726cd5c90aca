"""A few examples, read without a pass: the first batch twice, and some examples from all over the data.

Where the data can be indexed (a DataLoader over a map-style dataset, tensors, a list of batches) the examples are
spread evenly, since a dataset sorted by class would show one class in its first batches; a stream shows its first
batches. No worker process is started for data that can be indexed, and no more than a few batches are read.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset

from lapwing import data as loading
from lapwing import tree
from lapwing.errors import InvalidValue

EXAMPLES = 128  # looked at in one go
BATCHES = 3  # of a stream
INDICES = 1_000_000  # of a sampler, listed to spread over them

Batch = tuple[Any, Any]  # (inputs, targets)


@dataclass(frozen=True)
class Excerpt:
    """What was read of the data."""

    n: int | None  # examples in all, where that can be told without a pass
    batch: int  # examples a batch
    first: Batch  # of the first batch, EXAMPLES at the most
    again: Batch | None  # the same examples read a second time; None where that says nothing
    spread: tuple[Batch, ...]  # from all over the data
    labels: Tensor | None  # every target, where they lie in memory
    indexed: bool  # `again` was read by the same indices
    seconds: float = 0.0  # to read an example, where the data are not in memory


def read(batches: Iterable[Any], device: torch.device) -> Excerpt:
    """Read a sample; whatever the user's code raises on the way becomes an InvalidValue that names it."""
    try:
        if isinstance(batches, loading.TensorBatches):
            sample = _of_tensors(batches)
        elif _can_index(batches):
            sample = _of_loader(batches)  # type: ignore[arg-type]
        elif isinstance(batches, Sequence):
            sample = _of_list(batches)
        else:
            sample = _of_stream(batches)
    except InvalidValue:
        raise
    except Exception as error:  # the user's dataset, collate function or sampler
        raise InvalidValue(f"reading the data failed with {type(error).__name__}: {error}; mend the dataset") from error
    return _moved(sample, device)


def _of_tensors(batches: loading.TensorBatches) -> Excerpt:
    if batches.n == 0:
        raise _empty()

    def take(index: list[int]) -> Batch:
        return tree.map_tensors(lambda t: t[index], (batches.inputs, batches.targets))

    size = min(batches.size, batches.n)
    labels = batches.targets if isinstance(batches.targets, Tensor) else None
    first, spread = take(list(range(min(size, EXAMPLES)))), take(_evenly(range(batches.n)))
    return Excerpt(batches.n, size, first, None, (spread,), labels, True)


def _can_index(batches: Any) -> bool:
    return (
        isinstance(batches, DataLoader)
        and not isinstance(batches.dataset, IterableDataset)
        and hasattr(batches.dataset, "__getitem__")
    )


def _of_loader(loader: DataLoader) -> Excerpt:
    """Through the dataset and the collate function themselves, so that no worker starts."""
    fetch = _fetcher(loader)
    groups = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    heads: list[Any] = list(itertools.islice(iter(groups), BATCHES))
    if not heads:
        raise _empty(loader)
    if loader.batch_sampler is None:  # each item of the dataset is a batch
        spread = tuple(fetch(i) for i in heads)
        first, size = spread[0], _size(spread[0])
        again, took = _timed(fetch, heads[0])
        seconds = took / size
    else:
        size, index = len(heads[0]), list(heads[0])[:EXAMPLES]
        (first, a), (again, b) = _timed(fetch, index), _timed(fetch, index)
        usual = type(loader.batch_sampler) is BatchSampler and loader.batch_sampler.sampler is loader.sampler
        every = list(itertools.islice(iter(loader.sampler), INDICES)) if usual else [i for h in heads for i in h]
        picked = _evenly(every)
        one, c = _timed(fetch, picked)
        spread, seconds = (one,), min(a / len(index), b / len(index), c / len(picked))
    n = None if loader.batch_sampler is None else loading.examples(loader)
    tensors = loader.dataset.tensors if isinstance(loader.dataset, TensorDataset) else ()
    return Excerpt(n, size, first, again, spread, tensors[1] if len(tensors) == 2 else None, True, seconds)


def _timed(fetch: Callable[[Any], Batch], index: Any) -> tuple[Batch, float]:
    """A batch, and the seconds it took: those of this thread, unless it mostly waited (for a disk, say)."""
    wall, own = time.perf_counter(), time.thread_time()
    batch = fetch(index)
    wall, own = time.perf_counter() - wall, time.thread_time() - own
    return batch, own if wall < 4 * own else wall


def _fetcher(loader: DataLoader) -> Callable[[Any], Batch]:
    dataset: Any = loader.dataset

    def fetch(index: Any) -> Batch:
        if loader.batch_sampler is None:
            return loading.split(loader.collate_fn(dataset[index]))
        many = getattr(dataset, "__getitems__", None)
        return loading.split(loader.collate_fn(many(index) if callable(many) else [dataset[i] for i in index]))

    return fetch


def _of_list(batches: Sequence[Any]) -> Excerpt:
    if not len(batches):
        raise _empty()
    spread = tuple(_head(loading.split(batches[i])) for i in _evenly(range(len(batches)), BATCHES))
    first = loading.split(batches[0])
    return Excerpt(loading.examples(batches), _size(first), _head(first), None, spread, None, True)


def _of_stream(batches: Iterable[Any]) -> Excerpt:
    heads = [loading.split(b) for b in itertools.islice(iter(batches), BATCHES)]
    if not heads:
        raise _empty(batches)
    again = next((loading.split(b) for b in iter(batches)), None)
    if again is None:
        raise InvalidValue("the data hold nothing on a second pass; give a DataLoader, or data that can be read again")
    cut = tuple(_head(h) for h in heads)
    return Excerpt(loading.examples(batches), _size(heads[0]), cut[0], _head(again), cut, None, False)


def _empty(batches: Any = None) -> InvalidValue:
    if isinstance(batches, DataLoader) and batches.drop_last:
        return InvalidValue(
            f"the data hold no batch: drop_last=True drops the only one, smaller than batch_size={batches.batch_size}; "
            "build the loader with drop_last=False"
        )
    return InvalidValue("the data hold no batch; give at least one example")


def _evenly(items: Sequence[Any], count: int = EXAMPLES) -> list[Any]:
    """`count` items at even distances, the first and the last among them."""
    if len(items) <= count:
        return list(items)
    return [items[i * (len(items) - 1) // (count - 1)] for i in range(count)]


def _size(batch: Batch) -> int:
    try:
        return tree.batch_size(batch[1])
    except InvalidValue:
        return 1


def _head(batch: Batch) -> Batch:
    """The first EXAMPLES of a batch, where it can be cut."""
    x, y = batch
    try:
        if tree.batch_size(x) != tree.batch_size(y):
            return batch
    except InvalidValue:
        return batch
    index = slice(0, EXAMPLES)
    return tree.rows_of(x, index), tree.rows_of(y, index)


def _moved(sample: Excerpt, device: torch.device) -> Excerpt:
    def move(batch: Any) -> Any:
        return None if batch is None else tuple(tree.moved(part, device) for part in batch)

    spread = tuple(move(batch) for batch in sample.spread)
    return replace(sample, first=move(sample.first), again=move(sample.again), spread=spread)
