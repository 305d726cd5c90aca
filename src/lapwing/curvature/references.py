"""Structures that stand for the true curvature where another is held to it."""

from __future__ import annotations

from lapwing.curvature.layered import Diagonal
from lapwing.curvature.matrix_free import MatrixFree
from lapwing.curvature.structure import Structure


def sketch(rank: int, memory_budget: int) -> Structure:
    """Products with the exact curvature, whose companion is a Nyström sketch of it."""
    return MatrixFree(preconditioner="nystrom", rank=rank, memory_budget=memory_budget)


def trace(memory_budget: int) -> Diagonal:
    """The exact diagonal."""
    return Diagonal(memory_budget=memory_budget)
