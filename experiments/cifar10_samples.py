"""Samples of the posterior of a trained network over all its weights, with the exact output curvature.

The curvature G = Σ_n J_nᵀ Λ_n J_n of 50,000 images has a term λ vvᵀ for each eigenpair of each Λ_n, nearly all of them
next to nothing: the network is sure of its training images. A term is kept with probability min(1, λ/τ) and then counts
max(λ, τ), so that of 500,000 rows √λ vᵀJ some thousands stand for all, E RᵀR = G, and can be held in memory:

    z = (RᵀR + A)⁻¹ (Rᵀe + A^½ e₀)

By conjugate gradients from the prior draw A^-½ e₀ (`Streamed` of the library takes any R that gives products), or, for
one prior precision δ, from the eigenvectors of R Rᵀ, z = z₀ + Rᵀ(R Rᵀ + δI)⁻¹(e − R z₀) with z₀ = e₀/√δ. R says less
than G does where the prior is weak and the data determine more directions than R has rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

import lapwing as lw
from lapwing.center import read, tangent_map
from lapwing.curvature.cover import cover
from lapwing.curvature.rows import RowMaker
from lapwing.operators import Plan, Streamed, linalg

SAMPLES, TOLERANCE = 32, 2e-2
BUDGET, TOGETHER, SIDE = 2**31, 32, 512


def drawn(f: Tensor, threshold: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Of eigenpairs of Λ(f_n), which are kept: their images (m,), and √max(λ, τ) v, (m, c)."""
    p = f.double().softmax(-1)
    values, vectors = torch.linalg.eigh(torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2))
    kept = torch.rand(values.shape, generator=generator, dtype=values.dtype) * threshold < values
    weights = values.clamp(min=threshold)[kept].sqrt()
    return kept.nonzero()[:, 0], (weights.unsqueeze(-1) * vectors.mT[kept]).float()


@dataclass(frozen=True, eq=False)
class HeldRoot:
    """R (m, p) in memory, as conjugate gradients take it."""

    rows: Tensor
    passes: int = 0  # over data: none

    @classmethod
    def made(cls, tangent: Any, x: Tensor, index: Tensor, u: Tensor) -> HeldRoot:
        """Rows uᵀJ(x_i)."""
        maker, out = RowMaker(tangent, cover(tangent, x[:TOGETHER])), torch.empty(len(u), tangent.layout.size)
        for start in range(0, len(u), TOGETHER):
            some = slice(start, start + TOGETHER)
            batch, cotangent = x[index[some]], u[some].unsqueeze(1)
            torch.cat(list(maker.rows(maker.run(batch), batch, cotangent, BUDGET)), out=out[some].unsqueeze(1))
        return cls(out)

    @property
    def size(self) -> int:
        return self.rows.shape[1]

    def product(self, v: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        pushed = v.float() @ self.rows.mT
        return (weights[0] * (pushed @ self.rows)).double(), pushed.double().square().sum(-1, keepdim=True)

    def noise(self, k: int, generator: torch.Generator) -> Tensor:
        return (torch.randn(k, len(self.rows), generator=generator) @ self.rows).double().unsqueeze(0)

    @cached_property
    def spectrum(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues (m,) and eigenvectors (m, m) of R Rᵀ."""
        gram = torch.zeros(len(self.rows), len(self.rows), dtype=torch.float64)
        for i in range(0, len(gram), SIDE):
            gram[i : i + SIDE, : i + SIDE] = (self.rows[i : i + SIDE] @ self.rows[: i + SIDE].mT).double()
        values, vectors = torch.linalg.eigh(gram)  # of the lower triangle
        return values.clamp(min=0), vectors

    def gamma(self, precision: float) -> float:
        """The effective dimension, tr G (G + δI)⁻¹."""
        values = self.spectrum[0]
        return float((values / (values + precision)).sum())

    def draw(self, precision: float, seed: int = 0) -> Tensor:
        """Draws of N(0, (RᵀR + δI)⁻¹), of the same noise for every δ, (k, p)."""
        generator = torch.Generator().manual_seed(seed)
        e, e0 = (torch.randn(SAMPLES, n, generator=generator) for n in self.rows.shape)
        z0 = e0 / math.sqrt(precision)
        values, vectors = self.spectrum
        inner = (e - z0 @ self.rows.mT).double() @ vectors / (values + precision)
        return z0 + (inner @ vectors.mT).float() @ self.rows


def solved(root: HeldRoot, near: Any, prior: Any) -> tuple[Tensor, dict[str, float]]:
    """Draws under any prior by conjugate gradients, with an operator near RᵀR to precondition, and what they took."""
    plan = Plan(SAMPLES, "cg", "kron", TOLERANCE, 500, 0, BUDGET)
    op = Streamed(root, torch.ones(1, dtype=torch.float64), near, plan)
    found = linalg.shift(op, prior.operator()).samples
    return found.z.float(), {"steps": found.steps, "residual": found.residual, "gamma": found.dimension.value}


def at_weights(root: HeldRoot, square: float) -> float:
    """The precision that the evidence at the trained weights picks, the fixed point δ = γ(δ) / ‖θ‖²."""
    value = 1.0
    for _ in range(200):
        value = root.gamma(value) / square
    return value


def at_tangent(root: HeldRoot, start: float, state: Any, few: Any, share: float, steps: int = 12) -> dict[str, Any]:
    """The same at v* of the tangent model, δ = γ(δ) / ‖v*‖², from `few` of the data (batches) that count 1/share times
    each: the prior times the share, and `state`, whose curvature is near theirs, belong to them counted once."""
    factor = lw.curvature.Factor("monte_carlo", 1)
    own = lw.laplace(state.tangent.model, few, "categorical", structure="diag", factor=factor)
    jacobian, center, value, path = read(own.state, own.likelihood, few), None, start, []
    for _ in range(steps):
        prior = lw.priors.Gaussian(share * value).bind(state.layout)
        center = tangent_map(state, prior, own.likelihood, jacobian, center, tolerance=2e-2, strict=False, steps=8)
        before, value = value, root.gamma(value) / float(prior.scatter(center.vector))
        path.append(value)
        print(f"  tangent: precision {value:.4g}, residual {center.residual:.2g}, {jacobian.passes} passes", flush=True)
        if abs(math.log(value / before)) < 0.05 and center.residual < 0.05:
            return {"precision": value, "path": path, "residual": center.residual, "passes": jacobian.passes}
    raise lw.errors.NotConverged(f"the tangent evidence's precision did not settle in {steps} steps: {path}")
