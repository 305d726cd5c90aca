"""The processes that share the data, and the data that they share.

Columns (samples, right-hand sides, probes) are spread over ranks: of k columns each rank holds its `share`, in order.
What needs the data of all ranks sees the columns of all for a while (`joint`), and what it sums over the data goes back
to the ranks that own them (`returned`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lapwing.distributed.exchange import Exchange
from lapwing.distributed.meeting import hashed
from lapwing.errors import InvalidValue


class Ranks(Exchange):
    """The processes that share the data; one alone without a group."""

    def own(self, generator: torch.Generator) -> torch.Generator:
        """A generator of this rank's own, from one that is in the same state on all: its draws are no other rank's."""
        if self.alone:
            return generator
        seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
        return torch.Generator(generator.device).manual_seed(hashed(f"{seed} {self.rank}") % 2**62)

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
        if _mostly_padding(counts):
            found = mine.new_zeros(sum(counts), *mine.shape[1:], device=self.device)
            for r, part in enumerate(found.split(counts)):
                if len(part):
                    part.copy_(mine) if r == self.rank else None
                    self._call("gather", part.nbytes, dist.broadcast, part, dist.get_global_rank(self.group, r))
            return found.to(mine.device), counts
        padded = _padded(mine.detach(), max(counts)).to(self.device)
        found = padded.new_empty(len(counts), *padded.shape)
        self._call("gather", padded.nbytes, dist.all_gather, list(found.unbind()), padded)
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
        if _mostly_padding(counts):
            for r, part in enumerate(there.split(list(counts))):
                if len(part):
                    self._call("scatter", part.nbytes, dist.reduce, part, dist.get_global_rank(self.group, r))
            return there.split(list(counts))[self.rank].to(total.device)
        padded = [_padded(part, most) for part in there.split(list(counts))]
        mine = torch.empty_like(padded[0])
        self._call("scatter", sum(part.nbytes for part in padded), dist.reduce_scatter, mine, padded)
        return mine[: counts[self.rank]].to(total.device)


ALONE = Ranks()


@dataclass(frozen=True, eq=False)
class Shard:
    """This rank's part of the data; it may be empty, if that of another is not."""

    batches: Iterable[Any]
    ranks: Ranks

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def _mostly_padding(counts: Sequence[int]) -> bool:
    """Whether columns padded to the most of a rank would be twice as many, or more."""
    return len(counts) * max(counts) >= 2 * sum(counts)


def _padded(rows: Tensor, n: int) -> Tensor:
    """With rows of zeros, n in all."""
    return rows.contiguous() if len(rows) == n else torch.cat([rows, rows.new_zeros(n - len(rows), *rows.shape[1:])])
