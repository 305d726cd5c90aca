"""Ridge regression on features φ, each example left out in closed form, from sums over the data.

K = Φ Φᵀ,  M = (K + jI)⁻¹,  G = Φᵀ Φ,  h_n = φ_nᵀ (G + j)⁻¹ φ_n,  M_nn = (1 − h_n) / j

For targets with the mean taken off, r (n, c): the others foretell r_n − e_n, where e_n = [M r]_n / M_nn is the residual
over 1 − h_n. As a process, that has the covariance B / M_nn, B = rᵀ M r / n, of which B j is noise; at a new input the
covariance is B j φᵀ (G + j)⁻¹ φ, without noise. The noise j of a fit to labels is the one that the evidence of
N(0, s(K + jI)) picks, at its best s; that of a fit to the network's logits is small, since they are a function of the
inputs. Shapes: n data, m of them that are looked at, d features, c outputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

LOGIT_NOISE = 0.003  # j of logits, where K has a mean diagonal of 1
NOISES = torch.logspace(-4, 2, 49, dtype=torch.float64)  # j of labels


@dataclass(frozen=True, eq=False)
class RidgeFit:
    """`weights` (d, c) and `offset` (c,): φ(x) w + offset, with B as `between` (c, c) and √j (G + j)^(−½) as `root`
    (d, d); and left out at m rows, `mean` (m, c) and `spread` (m,), 1/√M_nn, of which the noise's part is j."""

    weights: Tensor
    offset: Tensor
    between: Tensor
    root: Tensor
    mean: Tensor
    spread: Tensor
    noise: float

    def __call__(self, phi: Tensor) -> Tensor:
        """(n, c) at features (n, d)."""
        return phi @ self.weights + self.offset

    @property
    def doubt(self) -> Tensor:
        """√(1/M_nn − j), the spread without noise, (m,)."""
        return (self.spread.square() - self.noise).clamp(min=0).sqrt()


@dataclass(frozen=True, eq=False)
class Sums:
    """Over all the data, of features and of targets t: Φᵀ Φ, Φᵀ t, Φᵀ 1, tᵀ t, tᵀ 1, and their number."""

    gram: Tensor
    cross: Tensor
    features: Tensor
    square: Tensor
    total: Tensor
    n: int

    def fitted(self, phi: Tensor, t: Tensor, noise: float | None = None) -> RidgeFit:
        """Given rows φ (m, d) and t (m, c) of the data, which are left out one by one. noise: j; None for that of the
        evidence."""
        E, U = self._spectrum
        mean = self.total / self.n
        cross, square = self.cross - torch.outer(self.features, mean), self.square - self.n * torch.outer(mean, mean)
        z = U.mT @ cross  # (d, c)
        j = self._likeliest(E, z, square) if noise is None else noise
        D = E + j
        w = U @ (z / D[:, None])
        residual = t - mean - phi @ w
        outside = (1 - ((phi @ U).square() / D).sum(1)).clamp(min=torch.finfo(D.dtype).eps)  # 1 − h
        between = (square - z.mT @ (z / D[:, None])) / (j * self.n)
        root = (U * (j / D).sqrt()).contiguous()  # as a file gives it back: the order of memory rounds
        return RidgeFit(w, mean, between, root, t - residual / outside[:, None], (j / outside).sqrt(), j)

    @property
    def _spectrum(self) -> tuple[Tensor, Tensor]:
        E, U = torch.linalg.eigh(self.gram)
        return E.clamp(min=0), U

    def _likeliest(self, E: Tensor, z: Tensor, square: Tensor) -> float:
        """argmax_j of −½ (n c log rᵀM r + c log|K + jI|)."""
        c, power = z.shape[1], z.square().sum(1)

        def evidence(j: float) -> float:
            D = E + j
            quadratic = ((square.trace() - (power / D).sum()) / j).clamp(min=torch.finfo(D.dtype).tiny)
            logdet = D.log().sum() + (self.n - len(E)) * math.log(j)
            return float(-0.5 * c * (self.n * quadratic.log() + logdet))

        return max(NOISES.tolist(), key=evidence)
