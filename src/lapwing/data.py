"""Data as batches of (inputs, targets): what a user hands over, checked and made iterable.

`as_batches` takes a DataLoader (or any re-iterable of batches), a Dataset, or a pair (X, y) of trees of tensors.
A batch is (inputs, targets), inputs any tree that the model takes; or a mapping with its targets under "labels" or
"label", which the model is never given. Mappings of any class reach it as dicts. Arrays, frames and lists of numbers
become tensors of the same dtype. Tensors and mappings, lists and tuples of them are moved to the model's device;
objects of other classes are handed on as they are.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset
from tqdm.auto import tqdm

from lapwing import given, tree
from lapwing.distributed import ALONE, Ranks, Shard
from lapwing.errors import InvalidValue, Unsupported, warn

BATCH = 256  # examples a batch where the user gives whole tensors or a Dataset


@dataclass(frozen=True)
class TensorBatches:
    """A pair (X, y) of whole tensors, cut into batches in order."""

    inputs: Any
    targets: Any
    size: int = BATCH

    def __len__(self) -> int:
        return -(-self.n // self.size)

    @property
    def n(self) -> int:
        """The number of examples."""
        return tree.batch_size(self.inputs)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for start in range(0, self.n, self.size):
            index = slice(start, start + self.size)
            yield tree.rows_of(self.inputs, index), tree.rows_of(self.targets, index)


class ReadAsTheyCome:
    """Batches that are read as a loop of the user's own reads them: what they draw moves the user's random state."""


@dataclass(frozen=True)
class Joined:
    """Several sets of batches, one after the other."""

    parts: tuple[Iterable[Any], ...]

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(self.parts)


def ranks_of(batches: Any) -> Ranks:
    """The processes that hold a shard of these data each."""
    if isinstance(batches, Joined):
        return next((ranks for part in batches.parts if not (ranks := ranks_of(part)).alone), ALONE)
    return batches.ranks if isinstance(batches, Shard) else ALONE


def as_batches(data: Any, sharded: bool = False) -> Iterable[Any]:
    """Make batches from a DataLoader, a Dataset, a pair (X, y), a mapping with targets, or any re-iterable of batches.

    A pair is a tuple whose X may be any tree of tensors; a list is a list of batches, unless it holds two tensors.
    sharded: whether the caller can read data of which this process holds a Shard.
    """
    if isinstance(data, Shard):
        if not sharded:
            raise Unsupported("this reads the data in one process, and got a Shard of them; give all the data")
        batches = as_batches(data.batches)
        _check_sampler(batches)
        return Shard(batches, data.ranks)
    if target_name(data) is not None:
        data = split(data)
    two = isinstance(data, (tuple, list)) and len(data) == 2
    if two and (isinstance(data, tuple) or given.is_array(data[0])):
        inputs, targets = (as_tensors(part) for part in data)
        if not isinstance(targets, Tensor):
            raise InvalidValue(
                f"y is no tensor, got {type(targets).__name__}; give a tensor, an array or a list of numbers (batches "
                "go in a list)"
            )
        n, m = tree.batch_size(inputs), tree.batch_size(targets)
        if n != m:
            raise InvalidValue(f"X has {n} examples and y has {m}; give one target for each example")
        _check_cuts(inputs, n)
        return TensorBatches(inputs, targets)
    loader = as_loader(data)
    if loader is not None:
        _warn_dropped(loader)
        return loader
    if isinstance(data, Iterator):
        raise InvalidValue("data is a one-pass iterator; give a DataLoader, a Dataset, a list of batches or (X, y)")
    if isinstance(data, Iterable) and not given.is_array(data) and not isinstance(data, (str, Mapping)):
        return data
    raise InvalidValue(
        "data must be a DataLoader, a Dataset, a list of batches, a pair (X, y) or a mapping with 'labels' or 'label'; "
        f"got {_described(data)}"
    )


def as_loader(data: Any) -> DataLoader | None:
    """A DataLoader as it is, or one of a Dataset, torch's or Hugging Face's; None of anything else."""
    if isinstance(data, DataLoader):
        return data
    if hasattr(data, "with_format") and hasattr(data, "column_names"):  # of the library `datasets`
        data = data.with_format("torch")
    elif not isinstance(data, Dataset):
        return None
    return DataLoader(data, batch_size=BATCH)


def _check_cuts(inputs: Any, n: int) -> None:
    """Whole tensors are cut into batches; a list of n strings or numbers beside them is not."""
    if n <= BATCH or isinstance(inputs, Tensor):
        return
    if isinstance(inputs, (tuple, list)) and len(inputs) == n and not tree.tensors(inputs):
        raise InvalidValue(
            f"X holds a {type(inputs).__name__} of {n} values that are no tensors, which cannot be cut into batches; "
            "give a Dataset, a DataLoader or a list of batches"
        )
    if isinstance(inputs, (Mapping, tuple, list)):
        for part in inputs.values() if isinstance(inputs, Mapping) else inputs:
            _check_cuts(part, n)


def as_tensors(part: Any) -> Any:
    """Arrays, frames, and lists of numbers that are all of it, become tensors of the same dtype; nothing is cast."""
    found = given.array(part)
    return found if isinstance(found, Tensor) else _arrays_within(part)


def _arrays_within(part: Any) -> Any:
    """Numbers and lists of them within a tree go along to the network as they are."""
    if isinstance(part, np.ndarray) or given.tabular(part):
        return given.array(part)
    if isinstance(part, Mapping):
        return {key: _arrays_within(value) for key, value in part.items()}
    if type(part) in (tuple, list):
        return type(part)(_arrays_within(value) for value in part)
    return part


def _warn_dropped(loader: DataLoader) -> None:
    if loader.drop_last and isinstance(loader.dataset, IterableDataset):
        each = "" if loader.num_workers < 2 else f" of each of its {loader.num_workers} workers"
        warn(
            f"the loader has drop_last=True and leaves out the last examples of its stream{each}, up to "
            f"{(loader.batch_size or 1) - 1}, which are not counted; curvature and evidence are sums over data: build "
            "it with drop_last=False",
        )
    if dropped(loader):
        warn(
            f"the loader has drop_last=True and leaves out {dropped(loader)} of {examples(loader)} examples; "
            "curvature and evidence are sums over data: build it with drop_last=False",
        )


def _check_sampler(batches: Any) -> None:
    """DistributedSampler makes its shards equal by repeating examples, or by leaving some out."""
    sampler = getattr(getattr(batches, "batch_sampler", None), "sampler", None)
    if not isinstance(sampler, DistributedSampler):
        return
    extra = sampler.total_size - len(sampler.dataset)  # type: ignore[arg-type]
    if extra:
        raise InvalidValue(
            f"DistributedSampler {'repeats' if extra > 0 else 'leaves out'} {abs(extra)} of {len(sampler.dataset)} "  # type: ignore[arg-type]
            "examples to make its shards equal; curvature and evidence are sums over data: give each rank "
            "torch.utils.data.Subset(dataset, range(rank, len(dataset), world_size)), of any size"
        )


def dropped(loader: Any) -> int:
    """How many examples a DataLoader leaves out because of drop_last."""
    loader = loader.batches if isinstance(loader, Shard) else loader
    sampler = getattr(loader, "batch_sampler", None)  # the loader's own, or one that the user made
    if not isinstance(loader, DataLoader) or not getattr(sampler, "drop_last", False):
        return 0
    n, size = examples(loader), getattr(sampler, "batch_size", None)
    return n % size if n and size else 0


def examples(batches: Iterable[Any]) -> int | None:
    """The number of examples (of a shard, its own), where it can be told without a pass; else None."""
    batches = batches.batches if isinstance(batches, Shard) else batches
    if isinstance(batches, TensorBatches):
        return batches.n
    if isinstance(batches, DataLoader) and not isinstance(batches.dataset, IterableDataset):
        own = type(batches.batch_sampler) is BatchSampler  # another, or none, may give batches of any size
        sampler = batches.batch_sampler.sampler if own else None  # type: ignore[union-attr]
        return len(sampler) if isinstance(sampler, Sized) else None
    if isinstance(batches, Joined):
        counts = [examples(part) for part in batches.parts]
        return None if None in counts else sum(counts)  # type: ignore[arg-type]
    if isinstance(batches, (list, tuple)):
        return sum(tree.batch_size(split(batch)[1]) for batch in batches)
    return None


def split(batch: Any) -> tuple[Any, Any]:
    """Cut a batch into inputs and targets."""
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return as_tensors(batch[0]), as_tensors(batch[1])
    name = target_name(batch)
    if name is not None:
        return as_tensors(inputs_of(batch)), as_tensors(batch[name])
    raise InvalidValue(
        f"a batch must be (inputs, targets) or a mapping with 'labels' or 'label'; got {_described(batch)}"
    )


def target_name(batch: Any) -> str | None:
    """Under which name a mapping holds its targets, if it does: "labels" where it has both."""
    return next((name for name in ("labels", "label") if name in batch), None) if isinstance(batch, Mapping) else None


def _described(data: Any) -> str:
    has = f" with {[*data]}" if isinstance(data, Mapping) else ""
    return type(data).__name__ + (f" of length {len(data)}" if isinstance(data, (tuple, list)) else has)


def inputs_of(batch: Any) -> Any:
    """What the model is given of inputs: all of it, but for the targets that a mapping may hold."""
    if isinstance(batch, Mapping):
        targets = target_name(batch)
        return {key: value for key, value in batch.items() if key != targets}
    return batch


def check_finite(inputs: Any, what: str) -> None:
    """Raise if tensors of a tree hold NaN or infinite values; `what` names them."""
    for tensor in tree.tensors(inputs):
        if tensor.layout is not torch.strided:
            tensor = (tensor.coalesce() if tensor.is_sparse else tensor).values()
        if not tensor.is_floating_point() or bool(torch.isfinite(tensor.sum())):  # a finite sum has finite terms
            continue
        if not torch.isfinite(tensor).all():
            bad = int((~torch.isfinite(tensor)).sum())
            raise InvalidValue(f"{what} hold {bad} NaN or infinite values; clean the data")


def passes(
    batches: Iterable[Any], device: torch.device, progress: bool = False, label: str = "data", seed: int | None = None
) -> Iterator[tuple[Any, Any]]:
    """One pass over the data, on the model's device, with the user's random state left as it was.

    It starts from that state, as every pass does, or from a seed: what is random then comes out otherwise."""
    seen = False
    for batch in raw_pass(batches, progress, label, seed):
        inputs, targets = split(batch)
        if not tree.tensors(targets) or tree.batch_size(targets):  # an empty batch says nothing
            seen = True
            yield tree.detached(tree.moved(inputs, device)), tree.detached(tree.moved(targets, device, "the targets"))
    if not seen and ranks_of(batches).alone:
        raise InvalidValue("the data hold no batch; give at least one example")


def raw_pass(batches: Iterable[Any], progress: bool, label: str, seed: int | None = None) -> Iterator[Any]:
    """The batches as they come, in a random state of their own where they may draw."""
    if isinstance(batches, (TensorBatches, ReadAsTheyCome)):
        yield from _shown(batches, progress, label)
        return
    rng = _PassRng(batches, seed)
    with rng.swapped():
        iterator = iter(_shown(batches, progress, label))
    while True:
        with rng.swapped():
            batch = next(iterator, _END)
        if batch is _END:
            return
        yield batch


def _shown(batches: Iterable[Any], progress: bool, label: str) -> Iterable[Any]:
    """The batches with a bar. It is given an iterator: of a loader tqdm makes one for itself too, with workers."""
    return tqdm(iter(batches), total=_length(batches), desc=label, disable=not progress, leave=False)


def network_inputs(x: Any, device: torch.device) -> Any:
    """Inputs as users give them, as tensors on a device, without targets that a mapping may hold."""
    return tree.moved(as_tensors(inputs_of(x)), device)


def first_inputs(batches: Iterable[Any], device: torch.device) -> Any:
    """The inputs of the first batch; of shards, that of the first rank that has one, so that all ranks see the same."""
    ranks = ranks_of(batches)
    with ranks.sharing_errors("reading the first batch"):
        mine = next((x for x, _ in passes(batches, device)), None)
    found = ranks.first(mine, "the first batch")
    if found is None:
        raise InvalidValue("the data hold no batch on any rank; give at least one example")
    return tree.moved(found, device)


def _length(batches: Iterable[Any]) -> int | None:
    batches = batches.batches if isinstance(batches, Shard) else batches
    try:
        return len(batches) if isinstance(batches, Sized) else None
    except TypeError:  # a DataLoader over a stream has __len__, and raises
        return None


_END = object()


class _PassRng:
    """Shuffling and augmenting draw from the global generators (torch, NumPy, Python) or from the loader's own. A
    pass has a state of its own, swapped in only while a batch is made, so that the user's is never moved: not
    between batches, not by a pass that ends early, not by an error whose traceback keeps the pass alive."""

    def __init__(self, batches: Any, seed: int | None = None) -> None:
        self.own = _generators(batches)
        self.state: tuple[Any, ...] | None = None
        if seed is not None:
            with self.swapped():
                _set_seed(seed, self.own)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        users = _rng_state(self.own)
        if self.state is not None:
            _set_rng_state(self.state, self.own)
        try:
            yield
        finally:
            self.state = _rng_state(self.own)
            _set_rng_state(users, self.own)


@contextmanager
def unchanged_rng(batches: Any = None, seed: int | None = None) -> Iterator[None]:
    """Whatever is drawn inside, the user's generators, and the loader's own, are given back as they were found."""
    with _PassRng(batches, seed).swapped():
        yield


def _rng_state(own: list[torch.Generator]) -> tuple[Any, ...]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    legacy = np.random.get_state()  # noqa: NPY002 - it is the user's legacy state that is kept
    return random.getstate(), legacy, torch.get_rng_state(), cuda, [g.get_state() for g in own]


def _set_rng_state(state: tuple[Any, ...], own: list[torch.Generator]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])  # noqa: NPY002
    torch.set_rng_state(state[2])
    if state[3]:
        torch.cuda.set_rng_state_all(state[3])
    for generator, mine in zip(own, state[4], strict=True):
        generator.set_state(mine)


def _set_seed(seed: int, own: list[torch.Generator]) -> None:
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
    for generator in own:
        generator.manual_seed(seed)


def _generators(batches: Any) -> list[torch.Generator]:
    """The generators that a DataLoader and its samplers hold."""
    if isinstance(batches, Joined):
        return [generator for part in batches.parts for generator in _generators(part)]
    if isinstance(batches, Shard):
        return _generators(batches.batches)
    if not isinstance(batches, DataLoader):
        return []
    holders = (batches, batches.sampler, batches.batch_sampler)
    found = [getattr(holder, "generator", None) for holder in holders]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())
