"""All that the processes that share the data can do together, and the data that they share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lapwing.distributed.agreement import Agreement
from lapwing.distributed.columns import Columns
from lapwing.distributed.gathering import Gathering
from lapwing.distributed.meeting import hashed
from lapwing.distributed.sums import Sums
from lapwing.errors import InvalidValue


class Ranks(Agreement, Sums, Gathering, Columns):
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


ALONE = Ranks()


@dataclass(frozen=True, eq=False)
class Shard:
    """This rank's part of the data; it may be empty, if that of another is not."""

    batches: Iterable[Any]
    ranks: Ranks

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)
