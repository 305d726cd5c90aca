"""Output factors: what stands in the middle of G = Σ_n J_nᵀ S_n S_nᵀ J_n. S (n, c, k), at unit scale.

    exact        S Sᵀ = −∂²_f log p              generalized Gauss-Newton = Fisher for our canonical links
    monte_carlo  k scores at sampled targets, /√k      the same in expectation
    empirical    the score at the data's targets       empirical Fisher, k = 1
    hessian      no factor: the true Hessian of the log-likelihood (structure "full" only)

Outputs (n, q, c) with positions q (tokens, pixels) are independent given f: the exact factor has q·k columns an
example, one position each; sampled scores have mean zero, so all positions share a column.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing import given
from lapwing.errors import InvalidValue
from lapwing.likelihoods import Likelihood

KINDS = ("exact", "monte_carlo", "empirical", "hessian")


@dataclass(frozen=True)
class Factor:
    """Which output factor is used: kind "exact", "monte_carlo", "empirical" or "hessian"."""

    kind: str = "exact"
    samples: int = 8  # of monte_carlo

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidValue(f"factor must be one of {KINDS}, got {self.kind!r}{given.near(self.kind, KINDS)}")
        given.whole(self.samples, "the number of samples of a monte_carlo factor", 1)

    def __str__(self) -> str:
        many = "" if self.samples == 1 else "s"
        return f"monte_carlo ({self.samples} sample{many})" if self.kind == "monte_carlo" else self.kind

    def columns(self, outputs: int, positions: int) -> int:
        """Cotangents an example, at the most."""
        return {"exact": outputs * positions, "monte_carlo": self.samples, "empirical": 1, "hessian": 1}[self.kind]


def output_factor(factor: Factor, likelihood: Likelihood, f: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
    """S (m, c, k) for outputs f (m, c) and targets y, one row a position; of a Hessian, which has none, zeros."""
    if factor.kind == "hessian":
        return f.new_zeros(len(f), 1, 1)
    if factor.kind == "exact":
        return likelihood.curvature_root(f, y)
    if factor.kind == "empirical":
        return likelihood.score(f, y).unsqueeze(-1)
    return likelihood.sampled_scores(f, y, factor.samples, generator)


def cotangents(factor: Factor, S: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Vectors to pull back, u (n, K, q, c), and the column of S that each came from, (K,)."""
    m, c, k = S.shape
    q = m // n
    S = S.reshape(n, q, c, k)
    if q == 1 or factor.kind != "exact":
        return S.permute(0, 3, 1, 2), torch.arange(k, device=S.device)
    u = torch.zeros(n, q, k, q, c, dtype=S.dtype, device=S.device)
    u.diagonal(dim1=1, dim2=3).copy_(S.permute(0, 3, 2, 1))  # (n, k, c, q) at position = position
    return u.reshape(n, q * k, q, c), torch.arange(k, device=S.device).repeat(q)
