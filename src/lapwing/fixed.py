"""Whether data are a fixed set of examples: the same in every pass, each once, in any order.

    sums of a pass    (n, Σ r, Σ r², Σ d, Σ d²)    r_n = a · x_n for the d numbers x_n of an example, a fixed and random

Shuffling leaves the sums as they are, and random augmentation does not. They are compared to a millionth, since what
is computed for a whole batch may round otherwise in another. NaN stands for inputs that are no rows of numbers (a
graph, a sparse matrix); where d varies, rows are padded to their batch, and nothing is compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lapwing import tree
from lapwing.data import Joined, passes, split, unchanged_rng
from lapwing.distributed import Shard
from lapwing.errors import InvalidValue

SEEDS = (1_000_003, 2_000_003)  # of two readings that should be the same
FEW = 16  # examples to read twice: a flip of every other one is missed once in 65,000 times
SAME = 1e-6  # of sums over the same inputs, relative
WIDTHS = 16  # of inputs, whose random vectors are kept
SUMS = 5  # numbers that a pass is known by

# -- inputs as sums ------------------------------------------------------------------------------------------------


def no_sums() -> Tensor:
    """The sums of no example, (5,)."""
    return torch.zeros(SUMS, dtype=torch.float64)


def input_sums(x: Any, n: int) -> Tensor:
    """The sums of n examples, (5,), float64 on the CPU."""
    tensors = tree.tensors(x)
    if not tensors or any(t.layout is not torch.strided or t.ndim == 0 or len(t) != n for t in tensors):
        return torch.tensor([n, torch.nan, torch.nan, 0, 0], dtype=torch.float64)
    with torch.no_grad():
        rows = [(torch.view_as_real(t) if t.is_complex() else t).reshape(n, -1).to(torch.float64) for t in tensors]
        r = torch.stack([row @ _vector(row.shape[1], i).to(row.device) for i, row in enumerate(rows)]).sum(0)
        d = sum(row.shape[1] for row in rows)
        return torch.tensor([n, float(r.sum()), float(r.square().sum()), n * d, n * d**2], dtype=torch.float64)


@lru_cache(WIDTHS)
def _vector(d: int, place: int) -> Tensor:
    return torch.randn(d, generator=torch.Generator().manual_seed(place), dtype=torch.float64)


def same_inputs(found: Tensor | None, fitted: Tensor | None) -> bool:
    """Whether two passes over as many examples had the same inputs, as far as their sums can tell."""
    if found is None or fitted is None or found[0] != fitted[0]:
        return True
    if not _comparable(found) or not _comparable(fitted):
        return True
    size = torch.stack([fitted[0], (fitted[0] * fitted[2]).sqrt(), fitted[2], fitted[3], fitted[4]])
    return bool(((found - fitted).abs() <= SAME * size).all())


def _comparable(sums: Tensor) -> bool:
    n, _, square, d, d2 = sums.tolist()
    return square == square and abs(n * d2 - d**2) <= SAME * d**2


def check_inputs(found: Tensor | None, fitted: Tensor | None) -> None:
    """Raise unless another pass over the data had the inputs of the fit."""
    if not same_inputs(found, fitted):
        raise InvalidValue(
            "two passes over the data gave different inputs for as many examples; curvature and evidence are sums over "
            "a fixed set of examples: give data without random augmentation, the same in every pass (shuffling does no "
            "harm, but with drop_last=True it leaves out others each time)"
        )


# -- examples read twice -------------------------------------------------------------------------------------------


def check_examples(batches: Any) -> None:
    """Raise if examples of a map-style dataset change when they are read under another random state."""
    for part in _parts(batches):
        if isinstance(part, DataLoader) and not isinstance(part.dataset, IterableDataset):
            _read_twice(part)


def _read_twice(loader: DataLoader) -> None:
    with unchanged_rng(loader):
        groups = iter(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)
        first = next(groups, None)
    if first is None:
        return
    single = loader.batch_sampler is None  # each item is a batch
    again = _like(loader, sampler=[first], batch_size=None) if single else _like(loader, batch_sampler=[_few(first)])
    one, two = ([split(batch) for batch in _loaded(again, seed)] for seed in SEEDS)
    for a, b in zip(one, two, strict=True):
        found = [what for what, s, t in zip(("inputs", "targets"), a, b, strict=True) if not tree.same(s, t)]
        if found:
            raise InvalidValue(
                f"two reads of the same examples give different {' and '.join(found)}: a random augmentation is on. "
                "Curvature and evidence are sums over a fixed set of examples; fit on a dataset without it (a second "
                "one, if the first is for training)"
            )


def _few(index: Any) -> Any:
    return index[:FEW] if isinstance(index, (list, tuple)) else index


def _like(loader: DataLoader, **reading: Any) -> DataLoader:
    """A loader of the same dataset, whose examples are made in the same way, by one worker at the most."""
    workers = min(1, loader.num_workers)
    return DataLoader(
        loader.dataset,
        num_workers=workers,
        collate_fn=loader.collate_fn,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context if workers else None,
        timeout=loader.timeout if workers else 0,
        **reading,
    )


def _loaded(loader: DataLoader, seed: int) -> list[Any]:
    with unchanged_rng(loader, seed):
        return list(loader)


def _parts(batches: Any) -> Iterator[Any]:
    if isinstance(batches, Joined):
        for part in batches.parts:
            yield from _parts(part)
    else:
        yield batches.batches if isinstance(batches, Shard) else batches


# -- streams counted -----------------------------------------------------------------------------------------------


def count(batches: Iterable[Any], device: torch.device) -> tuple[int, Tensor]:
    """How many examples a pass gives, and the sums of their inputs, under another random state than the user's."""
    if isinstance(batches, Joined):
        parts = [count(part, device) for part in batches.parts]
        return sum(n for n, _ in parts), torch.stack([sums for _, sums in parts]).sum(0)
    n, sums, marks = 0, no_sums(), []
    workers = _streaming_workers(batches)
    for x, y in passes(batches, device, label="counting", seed=SEEDS[0]):
        n, sums = n + len(y), sums + input_sums(x, len(y))
        if workers > 1:
            marks.append(_marks(x, y))
    if marks:
        _check_workers(next(_parts(batches)), n, torch.cat(marks))
    return n, sums


def _streaming_workers(batches: Any) -> int:
    """Processes that each read a stream; 0 where there is none."""
    loader = next(_parts(batches))
    stream = isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)
    return loader.num_workers if stream else 0


def _marks(x: Any, y: Tensor) -> Tensor:
    """A hash of each example, or of the whole batch where it cannot be cut: (n,) or (1,)."""
    tensors = tree.tensors((x, y))
    if all(t.ndim and len(t) == len(y) for t in tensors):
        return tree.row_digests(tensors)
    return tree.row_digests([t.reshape(1, -1) for t in tensors])


def _check_workers(loader: DataLoader, n: int, marks: Tensor) -> None:
    """Raise if each worker reads the whole stream: then every example comes as often as there are workers, and one
    worker alone gives the fewer. (Data may hold every example twice; then one worker gives as many.)"""
    workers = loader.num_workers
    if not bool((marks.unique(return_counts=True)[1] % workers == 0).all()):
        return
    single = _like(loader, batch_size=loader.batch_size, drop_last=loader.drop_last)
    alone = sum(len(split(batch)[1]) for batch in _loaded(single, SEEDS[0]))
    if n == workers * alone:
        raise InvalidValue(
            f"each of the {workers} worker processes reads the whole stream: one gives {alone} examples and "
            f"{workers} give {n}, so that each would count {workers} times; share the stream out in its __iter__ by "
            "torch.utils.data.get_worker_info(), or build the loader with num_workers=1"
        )


def starts_twice(loader: Any, heads: Sequence[Any]) -> bool:
    """Whether two workers, which take turns, begin with the same batch: as far as the first batches can tell, each
    reads the whole stream."""
    return _streaming_workers(loader) > 1 and len(heads) > 1 and tree.same(heads[0], heads[1])
