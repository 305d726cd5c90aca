"""Sums of Gram matrices, G += RᵀR, kept as lower triangles: nearly half the multiplications."""

from __future__ import annotations

from torch import Tensor

PANEL = 256  # columns multiplied at a time


def add_gram(total: Tensor, rows: Tensor) -> None:
    """total (p, p) += rowsᵀ rows for rows (m, p), on and below the diagonal blocks; above them it means nothing."""
    for start in range(0, total.shape[0], PANEL):
        stop = start + PANEL
        total[start:, start:stop].addmm_(rows[:, start:].mT, rows[:, start:stop])


def mirrored(lower: Tensor) -> Tensor:
    """The symmetric matrices (..., p, p) of which `lower` holds the lower triangles, written over it."""
    for start in range(0, lower.shape[-1], PANEL):
        stop = start + PANEL
        lower[..., start:stop, stop:] = lower[..., stop:, start:stop].mT
        square = lower[..., start:stop, start:stop]
        square.copy_(square.tril() + square.tril(-1).mT)
    return lower
