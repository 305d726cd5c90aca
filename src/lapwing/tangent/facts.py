"""What a tangent model finds out about its network as it runs, each kind of fact in a field of its own.

A fact is found once and saves work afterwards. None is written to a file: a loaded fit finds them again.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Facts:
    """Mutable, and shared by copies of a tangent model that run the same network."""

    separable: bool | None = None  # whether batches can be cut into examples; None: no batch of several was seen yet
    channels_last: bool | None = None  # whether it runs with channels last; None: not tried yet
    push: str = "forward"  # the way to J v that worked last, of `push.WAYS`
    rows: str | None = None  # the way to rows that worked last, of `rows.WAYS`; None: none was asked for yet
    closed: set[str] = field(default_factory=set)  # routes that failed, or gave wrong numbers: not tried again
    proved: set[tuple[str, Hashable]] = field(default_factory=set)  # routes, and shapes on which autograd agreed
    output_shapes: dict[Hashable, tuple[int, int]] = field(default_factory=dict)  # positions and c, by inputs' shapes
    example_bytes: dict[Hashable, int] = field(default_factory=dict)  # of a run for all outputs, by inputs' shapes
    parts: tuple[Any, ...] | None = None  # those of `curvature.cover`; their class lies above this room
