"""The data of a sampler, read once and held in memory: it asks for all of them, or for some, many thousand times.

batches   as they were cut: of whole tensors CHUNK examples each, of a loader its own; full-data sums go by them
some(i)   the examples i (k, b), for k chains, of data that can be cut into examples
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lapwing import data as loading
from lapwing import fixed, tree
from lapwing.data import TensorBatches
from lapwing.errors import Unsupported
from lapwing.log_joint import LogJoint

CHUNK = 1024  # examples that run at once, for every chain, where whole tensors are given


@dataclass(frozen=True, eq=False)
class HeldExamples:
    """Batches (x, y) on the network's device."""

    batches: tuple[tuple[Any, Tensor], ...]
    n: int
    separable: bool  # whether batches may be cut into examples

    @staticmethod
    def of(joint: LogJoint) -> HeldExamples:
        """Those of a log joint density. Random augmentation, by which they would differ in every pass, is refused."""
        fixed.check_examples(joint.batches)
        cut = replace(joint.batches, size=CHUNK) if isinstance(joint.batches, TensorBatches) else joint.batches
        held = tuple(loading.passes(cut, joint.tangent.device))
        return HeldExamples(held, joint.n, joint.tangent.separable(held[0][0]))

    @cached_property
    def whole(self) -> tuple[Any, Tensor]:
        """All of them as one batch."""
        if not self.separable:
            raise Unsupported(
                "minibatches need data that can be cut into examples, and this network mixes those of a batch; use a "
                "sampler that reads all data, such as lw.samplers.hmc"
            )
        if len(self.batches) == 1:
            return self.batches[0]
        inputs, targets = ([tree.plain(batch[i]) for batch in self.batches] for i in (0, 1))
        return pytree.tree_map(_joined, *inputs), torch.cat(targets)

    def some(self, index: Tensor) -> tuple[Any, Tensor]:
        """x and y of the examples index (k, b): tensors (k, b, ...)."""
        x, y = self.whole
        return tree.map_tensors(lambda t: t[index], x), y[index]


def _joined(*leaves: Any) -> Any:
    return torch.cat(leaves) if isinstance(leaves[0], Tensor) else leaves[0]
