"""Random numbers that belong to a place, not to a turn: whoever holds a column, or a row of the data, draws the same.

    e[j, n, i] = Φ⁻¹(u),   u = hash(seed, column j, row n, entry i) in (0, 1)          standard normal

So columns and rows may be spread over processes, cut into batches and taken in any order. The hash is a chain of the
finalizer of splitmix64 (Steele, Lea and Flood 2014).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GOLDEN = -7046029254386353131  # 2⁶⁴ / φ, odd


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
        key = _mixed(torch.tensor(self.seed) * GOLDEN + 1)
        for place in (self.columns[:, None, None], self.rows[:, None], entries):
            key = _mixed(key + (place.cpu() + 1) * GOLDEN)
        u = (_right(key, 11).to(torch.float64) + 0.5) * 2.0**-53
        return torch.special.ndtri(u).reshape(like.shape).to(like)


def generator_of(seed: int, column: int) -> torch.Generator:
    """A generator of a column's own."""
    key = _mixed(_mixed(torch.tensor(seed) * GOLDEN + 2) + torch.tensor(column + 1) * GOLDEN)
    return torch.Generator().manual_seed(int(_right(key, 2)))


def _mixed(z: Tensor) -> Tensor:
    z = (z ^ _right(z, 30)) * -4658895280553007687
    z = (z ^ _right(z, 27)) * -7723592293110705685
    return z ^ _right(z, 31)


def _right(z: Tensor, bits: int) -> Tensor:
    """z >> bits without its sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
