"""Points that stand for a Gaussian: f = μ + L z, L Lᵀ = V, with fixed quasi-random z, the same in every prediction."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

DRAWS = 512


@functools.lru_cache(maxsize=8)
def quasi_normal(draws: int, dims: int) -> Tensor:
    """Fixed scrambled Sobol points turned normal, (draws, dims) float64: the same for every prediction."""
    if dims > torch.quasirandom.SobolEngine.MAXDIM:
        return torch.randn(draws, dims, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    points = torch.quasirandom.SobolEngine(dims, scramble=True, seed=0).draw(draws, dtype=torch.float64)
    return math.sqrt(2) * torch.erfinv((2 * points - 1).clamp(-1 + 1e-12, 1 - 1e-12))


def psd_root(cov: Tensor) -> Tensor:
    """L with L Lᵀ = V for positive semidefinite V (..., c, c): Cholesky, or the eigenvector root where singular."""
    root, info = torch.linalg.cholesky_ex(cov)
    if bool((info > 0).any()):
        values, vectors = torch.linalg.eigh(cov)
        eigen = vectors * values.clamp(min=0).sqrt().unsqueeze(-2)
        root = torch.where((info > 0)[..., None, None], eigen, root)
    return root
