"""Data spread over the processes of a torch.distributed group: sums over data are sums over ranks.

    Σ_n  =  Σ_r Σ_(n in shard r)

`Shard(batches, ranks)` is data like any other; whoever reads data asks `data.ranks_of` for the ranks that share them.
Local work is done inside `sharing_errors`, at whose end the ranks meet: an error on one is an error on all, and ranks
that fell out of step are an error too, so that nobody waits for what will not come. A rank that died, or does not come
within the group's timeout, ends the others with an error. What ranks compute from sums over ranks is the same on all,
since the sums are, bit by bit; where it could differ all the same (eigenvectors, right-hand sides) it is compared.

Columns (samples, right-hand sides, probes) are spread over ranks: of k columns each rank holds its `share`, in order.
What needs the data of all ranks sees the columns of all for a while (`joint`), and what it sums over the data goes back
to the ranks that own them (`returned`).

`traffic` counts bytes and messages as they are handed to a collective: "sum", "gather" and "scatter" for what
docs/reference/cost_model.md counts (as they are, also where they travel with a header), "control" for the rest.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from lapwing import tree
from lapwing.errors import InvalidValue, RankFailed
from lapwing.splitmix import GOLDEN

WORDS = 126  # numbers that travel with a header
SMALL = 2**16  # bytes up to which tensors travel together
ROUNDING = 1e-3  # by how much vectors of an iteration may differ between ranks, relative: machines round differently
CHUNK = 2**22  # numbers that are hashed at a time
SHARED = "shared_with_all_ranks"  # an attribute of an error that every rank has raised, or knows of


@dataclass(frozen=True, eq=False)
class Ranks:
    """The processes that share the data; one alone without a group."""

    group: Any = None
    traffic: Counter[str] = field(default_factory=Counter)

    @property
    def size(self) -> int:
        """The number of processes."""
        if self.group is not None and not dist.is_initialized():
            raise RankFailed("the process group of these data was destroyed; destroy it after the last pass over them")
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """Which of them this is, from 0 on."""
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def alone(self) -> bool:
        """Whether there is only one."""
        return self.size == 1

    @property
    def device(self) -> torch.device:
        """Where the group's backend takes tensors from."""
        return torch.device("cuda" if dist.get_backend(self.group) == "nccl" else "cpu")

    # -- in step ----------------------------------------------------------------------------------------------------

    @contextmanager
    def sharing_errors(self, what: str) -> Iterator[None]:
        """Local work: if it fails on one rank, every rank raises, at its end or where they meet next inside."""
        error: Exception | None = None
        try:
            yield
        except Exception as found:
            if self.alone or getattr(found, SHARED, False):
                raise
            error = found
        self.meet(what, error)

    def meet(self, what: str, error: Exception | None = None, words: Tensor | None = None) -> list[Tensor]:
        """Wait for every rank to come to the same point; raise on all if one comes with an error. A few int64 that each
        brings are given to all, in the order of ranks."""
        brought = torch.zeros(0, dtype=torch.int64) if words is None else words
        if self.alone:
            return [brought]
        header = torch.zeros(2 + WORDS, dtype=torch.int64)  # of one size, whatever a rank comes for
        header[:2] = torch.tensor([error is not None, _hashed(what)])
        header[2 : 2 + len(brought)] = brought
        found = self._headers(header)
        if any(bool(one[0]) for one in found):
            texts = self.gather(None if error is None else f"{type(error).__name__}: {error}")
            if error is not None:
                raise _shared(error)
            reasons = "; ".join(f"rank {r}: {text}" for r, text in enumerate(texts) if text is not None)
            raise _shared(RankFailed(f"{what} failed on another rank, and so on all. {reasons}"))
        if len({int(one[1]) for one in found}) > 1:
            places = "; ".join(f"rank {r}: {place}" for r, place in enumerate(self.gather(what)))
            raise _shared(
                RankFailed(
                    f"the ranks are out of step. {places}. Every rank must call the same methods, with the same "
                    "arguments and in the same order"
                )
            )
        return [one[2 : 2 + len(brought)] for one in found]

    def agree(self, facts: Mapping[str, str], do: str) -> None:
        """Raise on every rank, and say which rank differs in what, unless all have the same facts in the same order."""
        if self.alone:
            return
        found = [tuple(theirs.items()) for theirs in self.gather(dict(facts))]
        usual = Counter(found).most_common(1)[0][0]
        differ = {r: _difference(theirs, usual, found.index(usual)) for r, theirs in enumerate(found)}
        differences = [f"rank {r} {difference}" for r, difference in differ.items() if difference]
        if differences:
            raise InvalidValue(f"the ranks do not fit the same posterior: {'; '.join(differences)}. {do}")

    def same(self, tensor: Tensor, what: str) -> Tensor:
        """A tensor that all ranks have: rank 0's, where they differ by rounding; more is an error."""
        if self.agrees({f"{what} {tuple(tensor.shape)}": tensor}):
            return tensor
        lead = self.lead({what: tensor})[what]
        with self.sharing_errors(what):
            apart = float((tensor - lead).norm() / lead.norm().clamp(min=torch.finfo(lead.dtype).tiny))
            if not apart <= ROUNDING:
                raise InvalidValue(
                    f"{what} must be the same on every rank; those of ranks 0 and {self.rank} differ by {apart:.2g}: "
                    "call with the same arguments, and with generators in the same state, on every rank"
                )
        return lead

    def agrees(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether tensors are the same on all ranks, bit by bit."""
        if self.alone:
            return True
        mine = torch.tensor([_checksum(list(tensors.values()))])
        return len({int(one) for one in self.meet(f"comparing {list(tensors)}", words=mine)}) == 1

    # -- what all ranks hold together -------------------------------------------------------------------------------

    def total(self, tensors: Sequence[Tensor], what: str) -> list[Tensor]:
        """Sums over ranks, the same on all bit by bit; large tensors are written over. Small ones travel together,
        a few numbers with the header."""
        if self.alone or not tensors:
            return list(tensors)
        what = f"{what}: sums of {[(tuple(t.shape), str(t.dtype)) for t in tensors]}"
        few = all(t.element_size() == 8 for t in tensors) and sum(t.numel() for t in tensors) <= WORDS
        words = [t.detach().cpu().contiguous().reshape(-1).view(torch.int64) for t in tensors] if few else []
        found = self.meet(what, words=torch.cat(words) if few else None)
        if few:
            self._count("sum", sum(8 * t.numel() for t in tensors))
            sizes = [t.numel() for t in tensors]
            each = zip(*(one.split(sizes) for one in found), strict=True)
            return [_added(parts, t) for parts, t in zip(each, tensors, strict=True)]
        out: list[Any] = [None] * len(tensors)
        small: dict[torch.dtype, list[int]] = {}
        for i, tensor in enumerate(tensors):
            if _bytes(tensor) <= SMALL:
                small.setdefault(tensor.dtype, []).append(i)
            else:
                out[i] = self._sum(tensor.detach().contiguous())
        for places in small.values():
            flat = self._sum(torch.cat([tensors[i].detach().reshape(-1).to(self.device) for i in places]))
            for i, part in zip(places, flat.split([tensors[i].numel() for i in places]), strict=True):
                out[i] = part.reshape(tensors[i].shape).to(tensors[i].device, copy=True)
        return out

    def totals(self, tensors: Mapping[str, Tensor], what: str) -> dict[str, Tensor]:
        """Sums over ranks, by name, as `total` gives them."""
        return dict(zip(tensors, self.total(list(tensors.values()), what), strict=True))

    def count(self, n: int, what: str) -> int:
        """The sum of a whole number over ranks, modulo 2⁶⁴."""
        words = self.meet(what, words=torch.tensor([(n + 2**63) % 2**64 - 2**63]))
        return sum(int(one) for one in words) % 2**64

    def most(self, n: int, what: str) -> int:
        """The largest of a whole number over ranks."""
        return max(int(one) for one in self.meet(what, words=torch.tensor([n])))

    def anywhere(self, here: bool, what: str) -> bool:
        """Whether it is so on any rank."""
        return any(bool(one) for one in self.meet(what, words=torch.tensor([int(here)])))

    def gather(self, thing: Any, what: str = "") -> list[Any]:
        """What each rank has, in the order of ranks; small things."""
        if self.alone:
            return [thing]
        if what:
            self.meet(what)
        out: list[Any] = [None] * self.size
        self._call("control", 0, dist.all_gather_object, out, thing)
        return out

    def first(self, thing: Any, what: str) -> Any:
        """That of the first rank that has one, on every rank; None where none has."""
        brought = self.meet(what, words=torch.tensor([int(thing is not None)]))
        having = [r for r, has in enumerate(brought) if bool(has)]
        if self.alone or not having:
            return thing
        box = [tree.map_tensors(lambda t: t.cpu(), thing) if self.rank == having[0] else None]
        self._call("control", 0, dist.broadcast_object_list, box, dist.get_global_rank(self.group, having[0]))
        return box[0]

    def lead(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Rank 0's tensors, on every rank."""
        out = {}
        for key, tensor in tensors.items():
            copy = tensor.detach().to(self.device, copy=True).contiguous()
            self._call("lead", _bytes(copy), dist.broadcast, copy, dist.get_global_rank(self.group, 0))
            out[key] = copy.to(tensor.device)
        return out

    def joined(self, things: Sequence[Any], what: str) -> list[Any]:
        """The trees of tensors that ranks have, rank after rank; their bytes travel padded to those of the largest."""
        if self.alone:
            return list(things)
        held = tree.tensors(list(things))
        device = held[0].device if held else torch.device("cpu")
        parts = [tree.raw(one) for one in held]
        flat = torch.cat([torch.zeros(0, dtype=torch.uint8), *parts])
        shapes = tree.map_tensors(lambda t: _Packed(tuple(t.shape), t.dtype), list(things))  # type: ignore[arg-type, return-value]
        brought = self.gather((len(flat), shapes), what)
        longest = max(length for length, _ in brought)
        padded = torch.cat([flat, flat.new_zeros(longest - len(flat))]).to(self.device)
        found = [torch.empty_like(padded) for _ in brought]
        self._call("gather", longest, dist.all_gather, found, padded)
        return [
            one
            for (_, theirs), data in zip(brought, found, strict=True)
            for one in _unpacked(theirs, data.cpu(), device)
        ]

    def own(self, generator: torch.Generator) -> torch.Generator:
        """A generator of this rank's own, from one that is in the same state on all: its draws are no other rank's."""
        if self.alone:
            return generator
        seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
        return torch.Generator(generator.device).manual_seed(_hashed(f"{seed} {self.rank}") % 2**62)

    def seed(self, generator: torch.Generator) -> int:
        """A number from a generator, which must be in the same state on all ranks."""
        drawn = torch.randint(2**62, (1,), generator=generator, device=generator.device)
        if len({int(one) for one in self.meet("a seed", words=drawn.cpu())}) > 1:
            raise InvalidValue(
                "generators must be in the same state on every rank, and give different numbers; seed them alike, and "
                "call with them in the same order"
            )
        return int(drawn)

    # -- columns that are spread over ranks -------------------------------------------------------------------------

    def share(self, k: int) -> slice:
        """Which of k columns are this rank's: as many as others', or one more."""
        each, more = divmod(k, self.size)
        start = self.rank * each + min(self.rank, more)
        return slice(start, start + each + (self.rank < more))

    def joint(self, mine: Tensor, what: str) -> tuple[Tensor, list[int]]:
        """The columns (k_r, ...) of all ranks, in order, and how many each has. They travel padded to the most that one
        has, or from one owner after the other where that would double them."""
        if self.alone:
            return mine, [len(mine)]
        what = f"{what}: columns of {tuple(mine.shape[1:])}, {mine.dtype}"
        counts = [int(one) for one in self.meet(what, words=torch.tensor([len(mine)]))]
        if _sparse(counts):
            found = mine.new_zeros(sum(counts), *mine.shape[1:], device=self.device)
            for r, part in enumerate(found.split(counts)):
                if len(part):
                    part.copy_(mine) if r == self.rank else None
                    self._call("gather", _bytes(part), dist.broadcast, part, dist.get_global_rank(self.group, r))
            return found.to(mine.device), counts
        padded = _padded(mine.detach(), max(counts)).to(self.device)
        found = padded.new_empty(len(counts), *padded.shape)
        self._call("gather", _bytes(padded), dist.all_gather, list(found.unbind()), padded)
        even = len(set(counts)) == 1
        parts = [part[:n] for part, n in zip(found, counts, strict=True)]
        return (found.flatten(0, 1) if even else torch.cat(parts)).to(mine.device), counts

    def whole(self, mine: Tensor, what: str) -> Tensor:
        """The columns of all ranks, on every rank."""
        return self.joint(mine, what)[0]

    def returned(self, total: Tensor, counts: Sequence[int], what: str) -> Tensor:
        """Σ over ranks of what each has for the columns of all, (Σ_r k_r, ...): to each rank its own. Written over."""
        if self.alone or not len(total):
            return total
        self.meet(f"{what}: sums of columns {tuple(counts)} of {tuple(total.shape[1:])}")
        most, there = max(counts), total.to(self.device)
        if _sparse(counts):
            for r, part in enumerate(there.split(list(counts))):
                if len(part):
                    self._call("scatter", _bytes(part), dist.reduce, part, dist.get_global_rank(self.group, r))
            return there.split(list(counts))[self.rank].to(total.device)
        padded = [_padded(part, most) for part in there.split(list(counts))]
        mine = torch.empty_like(padded[0])
        self._call("scatter", sum(map(_bytes, padded)), dist.reduce_scatter, mine, padded)
        return mine[: counts[self.rank]].to(total.device)

    # -- collectives ------------------------------------------------------------------------------------------------

    def _sum(self, tensor: Tensor) -> Tensor:
        there = tensor.to(self.device)
        self._call("sum", _bytes(there), dist.all_reduce, there)
        return there.to(tensor.device)

    def _headers(self, mine: Tensor) -> list[Tensor]:
        there = mine.to(self.device)
        found = [torch.empty_like(there) for _ in range(self.size)]
        self._call("control", _bytes(there), dist.all_gather, found, there)
        return [header.cpu() for header in found]

    def _call(self, kind: str, size: int, collective: Any, *args: Any) -> None:
        try:
            collective(*args, group=self.group)
        except RuntimeError as error:
            raise _shared(
                RankFailed(
                    f"rank {self.rank} of {self.size} lost the group ({error}). A process died, does not call what the "
                    "others call, or took longer than the group's timeout: look for the first error in the output of "
                    "the other ranks; then start all of them again, with a longer init_process_group(timeout=) if one "
                    "is slow"
                )
            ) from error
        self._count(kind, size)

    def _count(self, kind: str, size: int) -> None:
        self.traffic[f"{kind} bytes"] += size
        self.traffic[f"{kind} messages"] += 1


ALONE = Ranks()


@dataclass(frozen=True, eq=False)
class Shard:
    """This rank's part of the data; it may be empty, if that of another is not."""

    batches: Iterable[Any]
    ranks: Ranks

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


@dataclass(frozen=True)
class _Packed:
    """A tensor whose bytes travel apart."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def _unpacked(things: Any, data: Tensor, device: torch.device) -> Any:
    """Trees with their tensors again, from the bytes of all of them in order."""
    leaves, spec = pytree.tree_flatten(things)
    pieces = iter(
        data[: sum(leaf.size for leaf in leaves if isinstance(leaf, _Packed))].split(
            [leaf.size for leaf in leaves if isinstance(leaf, _Packed)]
        )
    )
    filled = [
        next(pieces).clone().view(leaf.dtype).reshape(leaf.shape).to(device) if isinstance(leaf, _Packed) else leaf
        for leaf in leaves
    ]
    return pytree.tree_unflatten(filled, spec)


def _difference(theirs: tuple[tuple[str, str], ...], usual: tuple[tuple[str, str], ...], rank: int) -> str:
    """What the first difference is, in words."""
    for (what, value), (other, expected) in zip(theirs, usual, strict=False):
        if what != other:
            return f"has {what}, where rank {rank} has {other}"
        if value != expected:
            return f"differs from rank {rank} in {what}: {value}, there {expected}"
    if len(theirs) == len(usual):
        return ""
    more, of = (theirs, "has") if len(theirs) > len(usual) else (usual, "lacks")
    return f"{of} {more[min(len(theirs), len(usual))][0]}, unlike rank {rank}"


def _shared(error: Exception) -> Exception:
    setattr(error, SHARED, True)
    return error


def _sparse(counts: Sequence[int]) -> bool:
    """Whether columns padded to the most of a rank would be twice as many, or more."""
    return len(counts) * max(counts) >= 2 * sum(counts)


def _padded(rows: Tensor, n: int) -> Tensor:
    """With rows of zeros, n in all."""
    return rows.contiguous() if len(rows) == n else torch.cat([rows, rows.new_zeros(n - len(rows), *rows.shape[1:])])


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


def _added(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """The sum of what ranks brought as int64, in the order of ranks."""
    return torch.stack([part.view(like.dtype) for part in parts]).sum(0).reshape(like.shape).to(like.device)


def _checksum(tensors: Sequence[Tensor]) -> int:
    """Of numbers and their places, by one pass where they are."""
    total = 0
    pieces = (part for tensor in tensors for part in tensor.detach().reshape(-1).to(torch.float64).split(CHUNK))
    for i, part in enumerate(pieces):
        words = part.contiguous().view(torch.int64)
        place = torch.arange(1, len(words) + 1, device=words.device) * GOLDEN | 1
        total += (2 * i + 1) * int(((words ^ (words >> 29)) * place).sum())
    return (total + 2**63) % 2**64 - 2**63
