"""The processes of a group, and how they keep in step.

Local work is done inside `sharing_errors`, at whose end the ranks meet: an error on one is an error on all, and ranks
that fell out of step are an error too, so that nobody waits for what will not come. A rank that died, or does not come
within the group's timeout, ends the others with an error.

`traffic` counts bytes and messages as they are handed to a collective: "sum", "gather" and "scatter" for what
docs/reference/cost_model.md counts (as they are, also where they travel with a header), "control" for the rest.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lapwing.errors import RankFailed

WORDS = 126  # numbers that travel with a header
SHARED = "shared_with_all_ranks"  # an attribute of an error that every rank has raised, or knows of


@dataclass(frozen=True, eq=False)
class Meeting:
    """Processes that meet, raise together and gather small things; one alone without a group."""

    group: Any = None
    traffic: Counter[str] = field(default_factory=Counter)  # it grows with every call, and is no part of who sends

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
        header[:2] = torch.tensor([error is not None, hashed(what)])
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
            do = "Every rank must call the same methods, with the same arguments and in the same order"
            raise _shared(RankFailed(f"the ranks are out of step. {places}. {do}"))
        return [one[2 : 2 + len(brought)] for one in found]

    def gather(self, thing: Any, what: str = "") -> list[Any]:
        """What each rank has, in the order of ranks; small things."""
        if self.alone:
            return [thing]
        if what:
            self.meet(what)
        out: list[Any] = [None] * self.size
        self._call("control", 0, dist.all_gather_object, out, thing)
        return out

    def _headers(self, mine: Tensor) -> list[Tensor]:
        there = mine.to(self.device)
        found = [torch.empty_like(there) for _ in range(self.size)]
        self._call("control", there.nbytes, dist.all_gather, found, there)
        return [header.cpu() for header in found]

    def _call(self, kind: str, size: int, collective: Any, *args: Any) -> None:
        try:
            collective(*args, group=self.group)
        except RuntimeError as error:
            message = (
                f"rank {self.rank} of {self.size} lost the group ({error}). A process died, does not call what the "
                "others call, or took longer than the group's timeout: look for the first error in the output of the "
                "other ranks; then start all of them again, with a longer init_process_group(timeout=) if one is slow"
            )
            raise _shared(RankFailed(message)) from error
        self._count(kind, size)

    def _count(self, kind: str, size: int) -> None:
        self.traffic[f"{kind} bytes"] += size
        self.traffic[f"{kind} messages"] += 1


def _shared(error: Exception) -> Exception:
    setattr(error, SHARED, True)
    return error


def hashed(text: str) -> int:
    """Eight bytes of a digest, the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)
