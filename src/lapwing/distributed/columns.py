"""Columns (samples, right-hand sides, probes) spread over ranks: of k columns each rank holds its `share`, in order.

What needs the data of all ranks sees the columns of all for a while (`joint`), and what it sums over the data goes back
to the ranks that own them (`returned`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lapwing.distributed.meeting import Meeting


class Columns(Meeting):
    """Ranks that each own some of k columns, (k_r, ...)."""

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


def _mostly_padding(counts: Sequence[int]) -> bool:
    """Whether columns padded to the most of a rank would be twice as many, or more."""
    return len(counts) * max(counts) >= 2 * sum(counts)


def _padded(rows: Tensor, n: int) -> Tensor:
    """With rows of zeros, n in all."""
    return rows.contiguous() if len(rows) == n else torch.cat([rows, rows.new_zeros(n - len(rows), *rows.shape[1:])])
