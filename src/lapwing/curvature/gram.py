"""Sums of Gram matrices, G += RᵀR, kept as lower triangles: nearly half the multiplications."""

from __future__ import annotations

from torch import Tensor

NARROW_PANEL, WIDE_PANEL = 96, 256  # columns multiplied at a time
WIDE_FROM = 512  # columns in all, from which panels are wide


def panels(size: int) -> range:
    """Where panels start: narrow ones spare more, wide ones run faster where there are many."""
    return range(0, size, NARROW_PANEL if size < WIDE_FROM else WIDE_PANEL)


def add_gram(total: Tensor, rows: Tensor) -> None:
    """total (p, p) += rowsᵀ rows for rows (m, p), on and below the diagonal blocks; above them it means nothing."""
    starts = panels(total.shape[0])
    for start in starts:
        stop = start + starts.step
        total[start:, start:stop].addmm_(rows[:, start:].mT, rows[:, start:stop])


def mirrored(lower: Tensor) -> Tensor:
    """The symmetric matrices (..., p, p) of which `lower` holds the lower triangles, written over it."""
    starts = panels(lower.shape[-1])
    for start in starts:
        stop = start + starts.step
        lower[..., start:stop, stop:] = lower[..., stop:, start:stop].mT
        square = lower[..., start:stop, start:stop]
        square.copy_(square.tril() + square.tril(-1).mT)
    return lower
