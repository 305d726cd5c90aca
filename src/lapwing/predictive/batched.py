"""Predictions at inputs as people have them: a batch, an array, a frame; or a loader or dataset, batch by batch.

Batches are predicted one by one and put together: what comes out is what one call on all of them would give. Draws are
of the same weights at every batch, so they are of the same functions at all inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler
from tqdm.auto import tqdm

from lapwing import data as loading
from lapwing import given, tree
from lapwing.errors import InvalidValue, warn
from lapwing.predictive.prediction import Prediction
from lapwing.tangent import TangentModel


def predicted(
    one: Callable[[Any], Prediction],
    tangent: TangentModel,
    x: Any,
    joint: bool,
    progress: bool,
    generator: torch.Generator | None = None,
) -> Prediction:
    """one(inputs) at all inputs of x: whole, if they are together or nobody watches; else batch by batch."""
    loader = loading.as_loader(x)
    if loader is not None:
        batches = _batches(loader, tangent.device, progress)
        return one(tree.joined(_some(batches))) if joint else in_turn(one, batches, generator)
    inputs = loading.network_inputs(x, tangent.device)
    if progress and not joint and tangent.separable(inputs):
        cuts = tqdm(range(0, tree.batch_size(inputs), loading.BATCH), desc="predictions", leave=False)
        pieces = (tree.rows_of(inputs, slice(start, start + loading.BATCH)) for start in cuts)
        made = in_turn(one, pieces, generator)
    else:
        made = one(inputs)
    return replace(made, index=getattr(x, "index", None)) if given.tabular(x) else made


def _batches(loader: DataLoader, device: torch.device, progress: bool) -> Iterator[Any]:
    """The inputs of each batch of a loader, which come with targets or without."""
    if isinstance(loader.sampler, RandomSampler):
        warn(
            "the loader shuffles, and predictions come in its order, not in its dataset's; build it with shuffle=False"
        )
    if loader.drop_last:
        left = loading.dropped(loader) or "the last"
        warn(f"the loader has drop_last=True: {left} examples are not predicted; build it with drop_last=False")
    for batch in loading.raw_pass(loader, progress, "predictions"):
        listed = isinstance(batch, (tuple, list))
        alone = batch if not listed else batch[0] if len(batch) == 1 else loading.split(batch)[0]
        yield tree.detached(loading.network_inputs(alone, device))


def in_turn(
    one: Callable[[Any], Prediction], batches: Iterable[Any], generator: torch.Generator | None = None
) -> Prediction:
    """one(inputs) at each batch of inputs, put together."""
    start = None if generator is None else generator.get_state()
    made: list[Prediction] = []
    for inputs in batches:
        if generator is not None and start is not None:
            generator.set_state(start)
        made.append(one(inputs))
    first, *rest = _some(made)
    return replace(first, outputs=first.outputs.followed_by([other.outputs for other in rest])) if rest else first


def _some(batches: Iterable[Any]) -> list[Any]:
    found = list(batches)
    if not found:
        raise InvalidValue("the inputs hold no example to predict at; give at least one")
    return found
