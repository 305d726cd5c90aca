"""Class labels as Gaussian observations of the logits up to a shift that all share (Eq. 25).

Softmax does not see a common shift of the logits, so nothing should be said of it. The observations ỹ and variances σ²
of a label are those of `dirichlet.py`; of them only contrasts count, Vᵀỹ ~ N(Vᵀf, Vᵀ diag(σ²) V) for V (c, c − 1) with
VᵀV = I and Vᵀ1 = 0: isometric log-ratios. With w = 1/σ², W = Σ w and r = ỹ − f,

    log p = −½ [Σ w r² − (Σ w r)²/W] − ½ [Σ log σ² + log W − log c + (c − 1) log 2π]
    −∂²_f log p = diag(w) − w wᵀ/W = S Sᵀ,   S = diag(√w) − w √wᵀ/W
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.likelihoods.base import standard_normal
from lapwing.likelihoods.dirichlet import Dirichlet
from lapwing.solvers.noise import Placed


@dataclass(frozen=True)
class LogRatio(Dirichlet):
    """Labels y (n,), or probabilities y (n, c), of c classes, with logits f (n, c)."""

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        target, variance = self.observations(f, y)
        w, c = variance.reciprocal(), f.shape[-1]
        logdet = variance.log().sum(-1) + (w.sum(-1) / c).log()
        return -0.5 * (((target - f) * self.score(f, y)).sum(-1) + logdet + (c - 1) * math.log(2 * math.pi))

    def score(self, f: Tensor, y: Tensor) -> Tensor:
        target, variance = self.observations(f, y)
        return _shiftless(variance.reciprocal(), (target - f) / variance)

    def curvature_root(self, f: Tensor, y: Tensor) -> Tensor:
        w = self.observations(f, y)[1].reciprocal()
        return torch.diag_embed(w.sqrt()) - (_share(w).unsqueeze(-1) * w.sqrt().unsqueeze(-2))

    def curvature_product(self, f: Tensor, y: Tensor, v: Tensor) -> Tensor:
        w = self.observations(f, y)[1].reciprocal()
        return _shiftless(w, w * v.to(w))

    def curvature_trace(self, f: Tensor, y: Tensor) -> Tensor:
        w = self.observations(f, y)[1].reciprocal()
        return (w * (1 - _share(w))).sum(-1)

    def curvature_noise(self, f: Tensor, y: Tensor, k: int, generator: torch.Generator | Placed) -> Tensor:
        w = self.observations(f, y)[1].reciprocal()
        return _shiftless(w, standard_normal(w.expand(k, *w.shape), generator) * w.sqrt())


def _share(w: Tensor) -> Tensor:
    """w/W, (n, c)."""
    return w / w.sum(-1, keepdim=True)


def _shiftless(w: Tensor, g: Tensor) -> Tensor:
    """g − w Σg/W, (..., n, c): it sums to nothing over the classes."""
    return g - _share(w) * g.sum(-1, keepdim=True)
