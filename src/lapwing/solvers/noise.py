"""Random numbers that belong to a place, not to a turn: whoever holds a column, or a row of the data, draws the same.

    e[j, n, i] = Φ⁻¹(u),   u = hash(seed, column j, row n, entry i) in (0, 1)          standard normal

So columns and rows may be spread over processes, cut into batches and taken in any order. The hash is a chain of
that of splitmix64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.splitmix import GOLDEN, mixed, unsigned_shift


@dataclass(frozen=True, eq=False)
class Placed:
    """Standard normal numbers for some columns at some rows: what a generator is where order does not matter."""

    seed: int
    columns: Tensor  # (k,), int64
    rows: Tensor  # (n,), int64

    def normal(self, like: Tensor) -> Tensor:
        """(k, m, q) in the dtype and on the device of a tensor of that shape, m a multiple of n: positions of a row."""
        k, n = len(self.columns), len(self.rows)
        entries = torch.arange(like.numel() // max(1, k * n))
        key = mixed(torch.tensor(self.seed) * GOLDEN + 1)
        for place in (self.columns[:, None, None], self.rows[:, None], entries):
            key = mixed(key + (place.cpu() + 1) * GOLDEN)
        u = (unsigned_shift(key, 11).to(torch.float64) + 0.5) * 2.0**-53
        return torch.special.ndtri(u).reshape(like.shape).to(like)


def generator_of(seed: int, column: int) -> torch.Generator:
    """A generator of a column's own."""
    key = mixed(mixed(torch.tensor(seed) * GOLDEN + 2) + torch.tensor(column + 1) * GOLDEN)
    return torch.Generator().manual_seed(int(unsigned_shift(key, 2)))


def standard_normal(like: Tensor, generator: torch.Generator | Placed) -> Tensor:
    """Standard normal numbers of the shape, dtype and device of a tensor."""
    if isinstance(generator, Placed):
        return generator.normal(like)
    return torch.randn(like.shape, generator=generator, dtype=like.dtype, device=generator.device).to(like.device)
