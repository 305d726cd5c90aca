"""Symmetric matrices as weights of fixed columns: with C = [e_a | e_a + e_b, a < b] (c, h), h = c(c + 1)/2,

    Π = C diag(w) Cᵀ,      w_a = Π_aa − Σ_{b≠a} Π_ab,      w_ab = Π_ab

linear both ways, so that curvature kept apart by column serves every Π; w has both signs. Structures that add their
sums up take w as it is. Those that need a root of the curvature take that of Π, over the unit columns alone.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def columns(c: int) -> Tensor:
    """C (c, h): those of single outputs come first."""
    a, b = pairs(c)
    eye = torch.eye(c, dtype=torch.float64)
    return torch.cat([eye, eye[:, a] + eye[:, b]], -1)


def weights_of(matrix: Tensor) -> Tensor:
    """w (h,) of Π (c, c)."""
    a, b = pairs(len(matrix))
    return torch.cat([2 * matrix.diagonal() - matrix.sum(-1), matrix[a, b]])


def matrix_of(weights: Tensor) -> Tensor:
    """Π (c, c) of w (h,)."""
    c = outputs(len(weights))
    a, b = (index.to(weights.device) for index in pairs(c))
    upper = weights.new_zeros(c, c).index_put((a, b), weights[c:])
    across = upper + upper.mT
    return across + torch.diag_embed(weights[:c] + across.sum(-1))


def outputs(h: int) -> int:
    """c of h = c(c + 1)/2."""
    return (math.isqrt(8 * h + 1) - 1) // 2


def pairs(c: int) -> tuple[Tensor, Tensor]:
    """a < b, in order."""
    a, b = torch.triu_indices(c, c, offset=1)
    return a, b
