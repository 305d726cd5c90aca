"""What ranks bring together: sums, the same on all bit by bit; what one rank has, given to all; what each has, rank
after rank. The bytes of tensors travel as one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from lapwing import tree
from lapwing.distributed.meeting import WORDS, Meeting

SMALL = 2**16  # bytes up to which tensors travel together


class Exchange(Meeting):
    """Ranks that add up, or show one another, what each has."""

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
