"""Batches cut into examples: whether each output depends on its own example alone, found by running a part."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lapwing import tree
from lapwing.errors import InvalidValue
from lapwing.tangent.evaluating import evaluating
from lapwing.tangent.kernels import plain_kernels

if TYPE_CHECKING:
    from lapwing.tangent.model import TangentModel


def separable(tangent: TangentModel, x: Any) -> bool:
    """Whether a batch may be cut into examples, as the first batch of several examples tells."""
    try:
        n = tree.batch_size(x)
    except InvalidValue:
        return False
    facts = tangent.facts
    if facts.separable is None and n > 1:
        n = min(n, 8)
        facts.separable = _parts_give_the_whole(tangent, x, n, min(n - 1, 3))
    return facts.separable is not False


def _parts_give_the_whole(tangent: TangentModel, x: Any, n: int, k: int) -> bool:
    """Whether the first k of n examples, and the last one alone, give what they give together with the others:
    the edges of a graph that all point forwards would pass the first."""
    cuts = slice(0, n), slice(0, k), slice(n - 1, n)
    try:
        with torch.no_grad(), evaluating(tangent.model), plain_kernels():
            whole, *found = (tangent.apply(tangent.params, tree.rows_of(x, index)) for index in cuts)
    except Exception:  # the parts do not fit together
        tangent(x)  # what fails on the whole batch too is no matter of cutting, and raises
        return False
    parts = list(zip(cuts[1:], found, strict=True))
    if len(whole) != n or any(part.shape != whole[index].shape for index, part in parts):
        return False
    gap = max(float((part - whole[index]).abs().max()) for index, part in parts)
    eps = max(tangent.eps, torch.finfo(whole.dtype).eps)
    if not gap <= 1e4 * eps * float(whole.abs().max().clamp(min=1e-30)):
        return False
    tangent.facts.output_shapes[_shapes(x, alone=True)] = _positions_and_outputs(whole)
    return True


def output_shape(tangent: TangentModel, x: Any) -> tuple[int, int]:
    """Positions and outputs c of an example, by a run of one; remembered for inputs of the same shapes."""
    alone = tangent.separable(x)
    key, known = _shapes(x, alone), tangent.facts.output_shapes
    if key not in known:
        known[key] = _positions_and_outputs(tangent(tree.rows_of(x, slice(0, 1)) if alone else x))
    return known[key]


def _shapes(x: Any, alone: bool) -> Hashable:
    return tuple(t.shape[1:] if alone else t.shape for t in tree.tensors(x))


def _positions_and_outputs(f: Tensor) -> tuple[int, int]:
    return f[0, ..., 0].numel(), f.shape[-1]


def pieces(tangent: TangentModel, x: Any, y: Tensor, size: int) -> Iterator[tuple[Any, Tensor]]:
    """A batch and its targets or cotangents y (n, ...) in pieces of at most `size` examples, where it can be cut."""
    if len(y) <= size or not tangent.separable(x):
        yield x, y
        return
    for start in range(0, len(y), size):
        index = slice(start, start + size)
        yield tree.rows_of(x, index), y[index]
