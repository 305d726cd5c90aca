"""The processes that torchrun starts. `fit` and `tune` share the data out; all else is rank 0's work alone.

Rank 0 prints and writes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import typer

from lapwing.distributed import ALONE, Ranks


def first() -> bool:
    """Whether this process prints and writes: rank 0, or the only one."""
    return os.environ.get("RANK", "0") == "0"


def alone() -> None:
    """For a command that is one process's work: the others are done."""
    if not first():
        raise typer.Exit


def local(device: str) -> str:
    """The device of this process: "cuda" is its own card."""
    return f"cuda:{os.environ['LOCAL_RANK']}" if device == "cuda" and "LOCAL_RANK" in os.environ else device


@contextmanager
def together(device: torch.device) -> Iterator[Ranks]:
    """The processes of torchrun, by the environment that it sets; without it, one alone."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        yield ALONE
        return
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Ranks(dist.group.WORLD)
    finally:
        dist.destroy_process_group()
