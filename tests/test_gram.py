"""Sums of Gram matrices by panels of their lower triangles, against the product itself."""

from __future__ import annotations

import pytest
import torch

from lapwing.curvature.gram import add_gram, mirrored, panels


@pytest.mark.parametrize("size", [1, 95, 96, 97, 300, 511, 512, 700])
def test_a_sum_of_two_batches(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    batches = [torch.randn(m, size, dtype=torch.float64, generator=generator) for m in (7, 30)]
    total = torch.zeros(size, size, dtype=torch.float64)
    for rows in batches:
        add_gram(total, rows)
    wanted = sum(rows.mT @ rows for rows in batches)
    torch.testing.assert_close(mirrored(total), wanted, rtol=1e-12, atol=1e-12)


def test_there_are_several_panels() -> None:
    assert [len(panels(size)) for size in (95, 97, 511, 512)] == [1, 2, 6, 2]
