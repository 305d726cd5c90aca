"""Runs of the network over inputs to predict at, in pieces whose gradients fit the memory budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lapwing import tree
from lapwing.curvature.capture import Record
from lapwing.curvature.memory import physical_memory
from lapwing.curvature.parts import Part
from lapwing.errors import InvalidValue
from lapwing.tangent import TangentModel

LARGEST = 128  # examples run at once: more only leave the caches


@dataclass(frozen=True, eq=False)
class At:
    """Inputs that a posterior over a network's weights is pushed to."""

    tangent: TangentModel
    x: Any
    joint: bool = False
    budget: int = 2**30
    parts: tuple[Part, ...] = ()  # of a precision that is cut into parts

    def runs(self, run: Callable[[Any], Record]) -> Iterator[tuple[Any, Record]]:
        """Pieces of the inputs with the network run at them; one piece if they are joint."""
        for piece, record in in_pieces(self.tangent, run, self.x, self.joint, self.budget):
            if self.joint:
                self.check_joint(record.f)
            yield piece, record

    def check_joint(self, f: Tensor) -> None:
        """Raise where the covariance of all outputs together is too large."""
        size, limit = 8 * f.numel() ** 2, physical_memory() // 4
        if size > limit:
            raise InvalidValue(
                f"the joint covariance of {f.numel():,} outputs is {size / 1e9:.3g} GB, more than a quarter of the "
                "memory; predict fewer inputs together, or use function_samples"
            )


def in_pieces(
    tangent: TangentModel, run: Callable[[Any], Record], x: Any, whole: bool, budget: int
) -> Iterator[tuple[Any, Record]]:
    """Runs of the network over pieces of the inputs whose gradients, for all outputs, fit the budget."""
    if whole or not tangent.separable(x):
        yield x, run(x)
        return
    shapes = tuple(t.shape[1:] for t in tree.tensors(x))
    known = tangent.facts.example_bytes
    if shapes not in known:
        one = run(tree.rows_of(x, slice(0, 1)))
        outputs = one.f[0].numel()
        known[shapes] = 2 * one.column_bytes * outputs + 16 * outputs**2 + 1
    size = max(1, min(LARGEST, budget // 2 // known[shapes]))
    for start in range(0, tree.batch_size(x), size):
        piece = tree.rows_of(x, slice(start, start + size))
        yield piece, run(piece)
