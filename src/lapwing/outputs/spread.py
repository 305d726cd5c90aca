"""f ~ N(μ, V) with V known by s draws f_k of it, where outputs are too many for a covariance matrix:

    V = (1/s) Σ_k a_k a_kᵀ,   a_k = f_k − μ;        f_j = μ + (1/√s) Σ_k z_jk a_k,   z quasi-random

Nodes are such combinations, and many more than the draws: an average of softmaxes over the few draws themselves would
be far noisier. Shapes: n inputs, c outputs, s draws, j nodes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.outputs import nodes
from lapwing.outputs.draws import Draws
from lapwing.outputs.nodes import Nodes
from lapwing.outputs.points import DRAWS, quasi_normal

NUMBERS = 2**20  # in the nodes of one row, where outputs are so many that it binds


@dataclass(frozen=True, eq=False)
class Spread(Draws):
    """`values` (s, n, ..., c), draws of a Gaussian about `known_mean` (n, ..., c)."""

    @property
    def sources(self) -> int:
        """One: a node is no single draw."""
        return 1

    def size(self, steps: int | None) -> int:
        """Numbers in the nodes of one row."""
        return self._count * self.mean.shape[-1]

    def nodes(self, rows: Tensor, steps: int | None) -> Nodes:
        """Combinations of the draws, the same at every input."""
        c = self.mean.shape[-1]
        mean, values = self.mean.reshape(-1, c)[rows], self.values.reshape(len(self.values), -1, c)[:, rows]
        return nodes.drawn(_combined(mean.double(), values.double(), quasi_normal(self._count, len(values))))

    def sample(self, n: int, generator: torch.Generator) -> tuple[Tensor, None]:
        """n draws, (n, *mean.shape)."""
        z = torch.randn((n, len(self.values)), generator=generator, dtype=torch.float64, device=generator.device)
        return _combined(self.mean, self.values, z), None

    def __str__(self) -> str:
        return f"a Gaussian known by {len(self.values)} draws"

    @property
    def _count(self) -> int:
        """j: twice the draws at the least."""
        return max(2 * len(self.values), min(2 * DRAWS, NUMBERS // self.mean.shape[-1]))


def _combined(mean: Tensor, values: Tensor, z: Tensor) -> Tensor:
    """μ + (1/√s) Σ_k z_jk a_k, (j, *mean.shape)."""
    return mean + torch.tensordot(z.to(mean) / math.sqrt(len(values)), values - mean, 1)
