"""Cutting a batch into pieces of examples that fit a memory budget."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from lapwing import tree
from lapwing.errors import InvalidValue


def separable(x: Any, n: int | None = None) -> bool:
    """Whether the inputs can be cut into (n) examples along their first dimension."""
    try:
        return tree.batch_size(x) == n if n is not None else tree.batch_size(x) >= 0
    except InvalidValue:
        return False


def pieces_of(x: Any, u: Tensor, bytes_each: int, budget: int) -> Iterator[tuple[Any, Tensor]]:
    """Cut a batch and its cotangents u (n, ...) into pieces of examples of bytes_each that stay within the budget;
    a batch that cannot be cut (a graph under a forward hook) stays whole."""
    n = len(u)
    size = max(1, budget // max(1, bytes_each))
    if size >= n or not separable(x, n):
        yield x, u
        return
    for start in range(0, n, size):
        index = slice(start, start + size)
        yield tree.rows_of(x, index), u[index]
