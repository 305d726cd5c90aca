"""What must be the same on every rank, compared: facts in words, tensors by a checksum, and vectors of an iteration,
which machines round differently, by their distance from rank 0's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lapwing.distributed.meeting import Meeting
from lapwing.errors import InvalidValue
from lapwing.splitmix import GOLDEN

ROUNDING = 1e-3  # by how much vectors of an iteration may differ between ranks, relative: machines round differently
CHUNK = 2**22  # numbers that are hashed at a time


class Agreement(Meeting):
    """Ranks that hold the same things, or say which of them does not."""

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
