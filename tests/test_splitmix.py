"""The hash of splitmix64, against whole numbers of Python: noise by its place, digests of rows, random test vectors."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from statistics import NormalDist

import pytest
import torch

from lapwing import splitmix, tree
from lapwing.solvers.noise import Placed

WORD = 2**64 - 1


def signed(z: int) -> int:
    return z - 2**64 if z >> 63 else z


def hashed(z: int, shift: Callable[[int, int], int] = lambda z, bits: z >> bits) -> int:
    """The finalizer, on whole numbers of [0, 2⁶⁴)."""
    z = (z ^ shift(z, 30)) * 0xBF58476D1CE4E5B9 & WORD
    z = (z ^ shift(z, 27)) * 0x94D049BB133111EB & WORD
    return z ^ shift(z, 31)


def arithmetic(z: int, bits: int) -> int:
    return signed(z) >> bits & WORD


@pytest.mark.parametrize("seed", range(3))
def test_hashes_are_those_of_whole_numbers(seed: int) -> None:
    words = [0, 1, WORD, 2**63, *(random.Random(seed).getrandbits(64) for _ in range(50))]
    z = torch.tensor([signed(word) for word in words])
    assert splitmix.mixed(z).tolist() == [signed(hashed(word)) for word in words]
    assert splitmix.mixed_signed(z).tolist() == [signed(hashed(word, arithmetic)) for word in words]
    assert splitmix.unsigned_shift(z, 11).tolist() == [word >> 11 for word in words]


def test_its_sequence_is_the_published_one() -> None:
    numbers = splitmix.mixed(1234567 + torch.arange(1, 6) * splitmix.GOLDEN).tolist()
    assert [n % 2**64 for n in numbers] == [
        6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821,
    ]  # fmt: skip


def test_noise_is_a_chain_of_hashes() -> None:
    golden = 0x9E3779B97F4A7C15
    made = Placed(5, torch.tensor([3, 0]), torch.tensor([7, 2, 9])).normal(torch.empty(2, 3, 4, dtype=torch.float64))
    for j, column in enumerate((3, 0)):
        for n, row in enumerate((7, 2, 9)):
            for i in range(4):
                key = hashed(5 * golden + 1 & WORD)
                for place in (column, row, i):
                    key = hashed(key + (place + 1) * golden & WORD)
                expected = NormalDist().inv_cdf(((key >> 11) + 0.5) * 2.0**-53)
                torch.testing.assert_close(float(made[j, n, i]), expected, rtol=1e-9, atol=1e-12)


def test_digests_of_rows_are_sums_of_hashes() -> None:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    total = 0
    for row in x.tolist():
        words = [struct.unpack("<i", struct.pack("<f", value))[0] for value in row]
        each = [hashed(word + hashed(i + 1, arithmetic) & WORD, arithmetic) for i, word in enumerate(words)]
        total += hashed(sum(each) & WORD, arithmetic)
    assert tree.digest(x) == total & WORD
