"""Samples of the posterior of a trained network over all its weights, with the exact output curvature.

The curvature G = Σ_n J_nᵀ Λ_n J_n of 50,000 images has a term λ vvᵀ for each eigenpair of each Λ_n, nearly all of them
next to nothing: the network is sure of its training images. A term is kept with probability min(1, λ/τ) and then counts
max(λ, τ), so that of 500,000 rows √λ vᵀJ some thousands stand for all, E RᵀR = G, and can be held in memory:

    z = (RᵀR + A)⁻¹ (Rᵀe + A^½ e₀)

For one prior precision δ by the eigenvectors of R Rᵀ, z = z₀ + Rᵀ(R Rᵀ + δI)⁻¹(e − R z₀) with z₀ = e₀/√δ, and for
A = δ diag(h) in the unit of h, R diag(h)^-½. R says less than G does where the prior is weak and the data determine
more directions than R has rows.

The mode of the tangent model is that of a few images (`Few`), exactly, by the kernel J Jᵀ.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

import lapwing as lw
from lapwing.curvature.cover import cover
from lapwing.curvature.rows import RowMaker

SAMPLES = 32
BUDGET, TOGETHER, SIDE = 2**31, 32, 512
HELD = 2**32  # bytes of rows that the kernel of a few images is made from at once


def drawn(f: Tensor, threshold: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Of eigenpairs of Λ(f_n), which are kept: their images (m,), and √max(λ, τ) v, (m, c)."""
    p = f.double().softmax(-1)
    values, vectors = torch.linalg.eigh(torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2))
    kept = torch.rand(values.shape, generator=generator, dtype=values.dtype) * threshold < values
    weights = values.clamp(min=threshold)[kept].sqrt()
    return kept.nonzero()[:, 0], (weights.unsqueeze(-1) * vectors.mT[kept]).float()


@dataclass(frozen=True, eq=False)
class HeldRoot:
    """R (m, p) in memory."""

    rows: Tensor

    @classmethod
    def made(cls, tangent: Any, x: Tensor, index: Tensor, u: Tensor, names: tuple[str, ...] | None = None) -> HeldRoot:
        """Rows uᵀJ(x_i), of the parameters `names` (all by default)."""
        maker = RowMaker(tangent, cover(tangent, x[:TOGETHER]), names)
        out = torch.empty(len(u), maker.width)
        for start in range(0, len(u), TOGETHER):
            some = slice(start, start + TOGETHER)
            batch, cotangent = x[index[some]], u[some].unsqueeze(1)
            torch.cat(list(maker.rows(maker.run(batch), batch, cotangent, BUDGET)), out=out[some].unsqueeze(1))
        return cls(out)

    @cached_property
    def gram(self) -> Tensor:
        """R Rᵀ (m, m), in float64."""
        out = torch.zeros(len(self.rows), len(self.rows), dtype=torch.float64)
        for i in range(0, len(out), SIDE):
            out[i : i + SIDE, : i + SIDE] = (self.rows[i : i + SIDE] @ self.rows[: i + SIDE].mT).double()
        return out.tril() + out.tril(-1).mT

    @cached_property
    def spectrum(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues (m,) and eigenvectors (m, m) of R Rᵀ."""
        values, vectors = torch.linalg.eigh(self.gram)
        return values.clamp(min=0), vectors

    def rescaled(self, by: Tensor) -> HeldRoot:
        """R diag(by), in the memory of this R, which is lost: two may be too many."""
        return HeldRoot(self.rows.mul_(by.float()))

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


def at_weights(root: HeldRoot, square: float) -> float:
    """The precision that the evidence at the trained weights picks, the fixed point δ = γ(δ) / ‖θ‖²."""
    value = 1.0
    for _ in range(200):
        value = root.gamma(value) / square
    return value


@dataclass(frozen=True)
class Few:
    """The tangent model of a few images, h = f − Jθ* + J v: all that its mode depends on."""

    base: Tensor  # f − Jθ*, (n, c), where v = 0
    kernel: Tensor  # J Jᵀ, (n·c, n·c)
    y: Tensor  # (n,)
    times: float  # how often each image counts

    @classmethod
    def read(cls, tangent: Any, x: Tensor, y: Tensor, f: Tensor, times: float) -> Few:
        n, c = f.shape
        index, u = torch.arange(n).repeat_interleave(c), torch.eye(c).repeat(n, 1)
        base, kernel = f.double(), torch.zeros(n * c, n * c, dtype=torch.float64)
        for names, theta in _groups(tangent, HELD // (4 * n * c)):
            root = HeldRoot.made(tangent, x, index, u, names)
            base -= torch.cat([rows.double() @ theta for rows in root.rows.split(SIDE)]).reshape(n, c)
            kernel += root.gram
        return cls(base, kernel, y, times)

    def first(self, n: int) -> Few:
        """The first n of them, counting for all."""
        each = self.base.shape[1] * n
        return Few(self.base[:n], self.kernel[:each, :each], self.y[:n], self.times * len(self.y) / n)

    def mode(self, precision: float, alpha: Tensor | None = None) -> tuple[Tensor, float, float]:
        """α of the mode v* = Jᵀα/δ, ‖v*‖², and the nats that the last step of Newton's method gained.

        With W = diag of the images' Λ times how often they count, W = S Sᵀ, a step goes to
        α = b − S (I + Sᵀ K S/δ)⁻¹ Sᵀ K b/δ,  b = W (h − base) + ∂ log p, or half as far until it gains."""
        kernel, (n, c) = self.kernel / precision, self.base.shape
        alpha = torch.zeros(n * c, dtype=torch.float64) if alpha is None else alpha
        loss, gain = self._loss(alpha, kernel), math.inf
        for _ in range(100):
            h = self.base + (kernel @ alpha).reshape(n, c)
            p = h.softmax(-1)
            wanted = self.times * (torch.nn.functional.one_hot(self.y, c) - p)
            S = math.sqrt(self.times) * (torch.diag_embed(p.sqrt()) - p.unsqueeze(-1) * p.sqrt().unsqueeze(-2))
            b = ((S @ (S.mT @ (h - self.base).unsqueeze(-1))).squeeze(-1) + wanted).reshape(-1)
            half = _blocks(S.mT, kernel)  # Sᵀ K/δ
            inner = _blocks(S.mT, half.mT)
            inner.diagonal().add_(1.0)
            solved = torch.cholesky_solve((half @ b).unsqueeze(-1), torch.linalg.cholesky(inner)).reshape(n, c, 1)
            step = b - (S @ solved).reshape(-1) - alpha
            length = 1.0
            while (found := self._loss(alpha + length * step, kernel)) > loss and length > 1e-4:
                length /= 2
            gain, loss, alpha = loss - found, min(found, loss), alpha + length * step
            if gain < 1e-3:
                return alpha, float(alpha @ (kernel @ alpha)) / precision, gain
        raise lw.errors.NotConverged(f"the mode of {n} images at precision {precision:g} gains {gain:.2g} nats a step")

    def _loss(self, alpha: Tensor, kernel: Tensor) -> float:
        moved = kernel @ alpha
        h = self.base + moved.reshape(self.base.shape)
        return float(self.times * torch.nn.functional.cross_entropy(h, self.y, reduction="sum") + alpha @ moved / 2)


def _groups(tangent: Any, width: int) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Parameters in groups of at most so many weights each (or of one parameter), and their values."""
    theta, names, start = tangent.theta.double(), [], 0
    for name, s in tangent.layout.slices().items():
        if names and s.stop - start > width:
            yield tuple(names), theta[start : s.start]
            names, start = [], s.start
        names.append(name)
    yield tuple(names), theta[start:]


def _blocks(blocks: Tensor, matrix: Tensor) -> Tensor:
    """The product of a block-diagonal matrix, (n, c, c), and a matrix (n·c, m)."""
    n, c, _ = blocks.shape
    return (blocks @ matrix.reshape(n, c, -1)).reshape(n * c, -1)


def at_tangent(root: HeldRoot, start: float, few: Few, steps: int = 60) -> dict[str, Any]:
    """The same at the mode v* of the tangent model of a few images, which count for all: δ = γ(δ) / ‖v*‖²."""
    value, alpha, path = start, None, []
    for _ in range(steps):
        alpha, square, gain = few.mode(value, alpha)
        before, value = value, root.gamma(value) / square
        path.append(value)
        print(f"  tangent, {len(few.y)} images: precision {value:.4g}, ‖v*‖² {square:.4g}", flush=True)
        if abs(math.log(value / before)) < 0.02:
            return {"precision": value, "path": path, "images": len(few.y), "gain": gain}
    raise lw.errors.NotConverged(f"the tangent evidence's precision did not settle in {steps} steps: {path}")
