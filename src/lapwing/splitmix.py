"""The hash of splitmix64 (Steele, Lea and Flood 2014), on tensors of int64 that wrap around.

    z ← (z ⊕ z ≫ 30) · a,    z ← (z ⊕ z ≫ 27) · b,    z ⊕ z ≫ 31

Its n-th number is mixed(seed + n · GOLDEN): bit for bit the same on every machine and device.
"""

from __future__ import annotations

from torch import Tensor

GOLDEN = -7046029254386353131  # 2⁶⁴ / φ, odd, as a signed number
FIRST, SECOND = -4658895280553007687, -7723592293110705685  # a and b, as signed numbers


def mixed(z: Tensor) -> Tensor:
    """The finalizer of splitmix64, of each entry."""
    z = (z ^ unsigned_shift(z, 30)) * FIRST
    z = (z ^ unsigned_shift(z, 27)) * SECOND
    return z ^ unsigned_shift(z, 31)


def mixed_signed(z: Tensor) -> Tensor:
    """The same with shifts that keep the sign: other numbers, as good a hash. Files hold digests made by it."""
    z = (z ^ (z >> 30)) * FIRST
    z = (z ^ (z >> 27)) * SECOND
    return z ^ (z >> 31)


def unsigned_shift(z: Tensor, bits: int) -> Tensor:
    """z ≫ bits, without its sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
