"""What ranks bring together: sums, the same on all bit by bit; what one rank has, given to all; what each has, rank
after rank. The bytes of tensors travel as one tensor.

What must be the same on every rank is compared: facts in words, tensors by a checksum, and vectors of an iteration,
which machines round differently, by their distance from rank 0's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from lapwing import tree
from lapwing.distributed.meeting import WORDS, Meeting
from lapwing.errors import InvalidValue
from lapwing.splitmix import GOLDEN

SMALL = 2**16  # bytes up to which tensors travel together
ROUNDING = 1e-3  # by how much vectors of an iteration may differ between ranks, relative: machines round differently
CHUNK = 2**22  # numbers that are hashed at a time


class Exchange(Meeting):
    """Ranks that add up, or show one another, what each has; what must be the same is compared."""

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
            if tensor.nbytes <= SMALL:
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

    def _sum(self, tensor: Tensor) -> Tensor:
        there = tensor.to(self.device)
        self._call("sum", there.nbytes, dist.all_reduce, there)
        return there.to(tensor.device)

    def first(self, thing: Any, what: str) -> Any:
        """That of the first rank that has one, on every rank; None where none has."""
        brought = self.meet(what, words=torch.tensor([int(thing is not None)]))
        having = [r for r, has in enumerate(brought) if bool(has)]
        if self.alone or not having:
            return thing
        box = [tree.map_tensors(lambda t: t.cpu(), thing) if self.rank == having[0] else None]
        self._call("control", 0, dist.broadcast_object_list, box, dist.get_global_rank(self.group, having[0]))
        return box[0]

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
        each = (_unpacked(theirs, data.cpu(), device) for (_, theirs), data in zip(brought, found, strict=True))
        return [one for theirs in each for one in theirs]

    # -- what must be the same ---------------------------------------------------------------------------------------

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

    def lead(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Rank 0's tensors, on every rank."""
        out = {}
        for key, tensor in tensors.items():
            copy = tensor.detach().to(self.device, copy=True).contiguous()
            self._call("lead", copy.nbytes, dist.broadcast, copy, dist.get_global_rank(self.group, 0))
            out[key] = copy.to(tensor.device)
        return out


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
    sizes = [leaf.size for leaf in leaves if isinstance(leaf, _Packed)]
    pieces = iter(data[: sum(sizes)].split(sizes))
    filled = [
        next(pieces).clone().view(leaf.dtype).reshape(leaf.shape).to(device) if isinstance(leaf, _Packed) else leaf
        for leaf in leaves
    ]
    return pytree.tree_unflatten(filled, spec)


def _added(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """The sum of what ranks brought as int64, in the order of ranks."""
    return torch.stack([part.view(like.dtype) for part in parts]).sum(0).reshape(like.shape).to(like.device)


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


def _checksum(tensors: Sequence[Tensor]) -> int:
    """Of numbers and their places, by one pass where they are."""
    total = 0
    pieces = (part for tensor in tensors for part in tensor.detach().reshape(-1).to(torch.float64).split(CHUNK))
    for i, part in enumerate(pieces):
        words = part.contiguous().view(torch.int64)
        place = torch.arange(1, len(words) + 1, device=words.device) * GOLDEN | 1
        total += (2 * i + 1) * int(((words ^ (words >> 29)) * place).sum())
    return (total + 2**63) % 2**64 - 2**63
