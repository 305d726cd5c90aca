"""What one rank has, given to all; and what each has, rank after rank. The bytes of tensors travel as one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from lapwing import tree
from lapwing.distributed.meeting import Meeting


class Gathering(Meeting):
    """Ranks that show one another trees of tensors."""

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
        return [
            one
            for (_, theirs), data in zip(brought, found, strict=True)
            for one in _unpacked(theirs, data.cpu(), device)
        ]


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
