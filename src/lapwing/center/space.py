"""Directions d whose images J d are known: over v + Σ_i α_i d_i the log joint density takes no pass over the data.

The search for its maximum there is Newton's method in α, with a line search that a convex problem allows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lapwing.center.jacobian import Jacobian
from lapwing.center.tangent_joint import TangentJoint
from lapwing.operators import linalg

NEWTON_STEPS = 50  # in the space of known directions
DEPENDENT = 1e-13  # share of the largest eigenvalue below which directions count as dependent
MAX_DIRECTIONS = 64  # that are known at a time
DIRECTION_BYTES = 2**29  # that they and their images may take; two are always kept


@dataclass(frozen=True, eq=False)
class Space:
    """Directions d of length 1 and their images J d: no pass is needed to move along them."""

    directions: Tensor  # (k, p)
    images: Tensor  # (k, m, c)
    most: int  # directions that are kept

    @classmethod
    def empty(cls, v: Tensor, z: Tensor, jacobian: Jacobian) -> Space:
        """No directions yet, with room for as many as memory allows."""
        most = min(MAX_DIRECTIONS, max(2, DIRECTION_BYTES // (8 * (v.numel() + max(jacobian.counts)))))
        return cls(v.new_zeros(0, *v.shape), z.new_zeros(0, *z.shape), most)

    def plus(self, d: Tensor, jd: Tensor) -> Space:
        """With one more, and without the oldest where there are too many."""
        first, length = max(0, len(self.directions) + 1 - self.most), d.norm()
        return Space(
            torch.cat([self.directions[first:], (d / length).unsqueeze(0)]),
            torch.cat([self.images[first:], (jd / length).unsqueeze(0)]),
            self.most,
        )

    def maximum(self, density: TangentJoint, v: Tensor, z: Tensor, tolerance: float) -> tuple[Tensor, Tensor] | None:
        """d and J d from v, whose h(·, v) is z, to the maximum over this space, by Newton's method, to a tenth of the
        tolerance; None where v is there already. As sums of known pairs, d and J d belong together to the last digit,
        which differences of v and of z would not."""
        moves, images = [], self.images.flatten(1)
        prior = linalg.mv(density.a, self.directions) @ self.directions.mT
        for _ in range(NEWTON_STEPS if len(images) else 0):
            pushed = density.curvature_times(z, self.images).flatten(1)
            curved, slope = density.jacobian.total(pushed @ images.mT, images @ density.score(z).flatten())
            slope = slope - self.directions @ linalg.mv(density.a, v - density.m)
            alpha = _semidefinite_solve(curved + prior, slope)
            if not float(alpha @ slope) > (0.1 * tolerance * density.size(v)) ** 2:
                break
            d, jd = self.combined(alpha)
            t = _step_length(density, v, z, d, jd)
            v, z = v + t * d, z + t * jd
            moves.append(t * alpha)
        return self.combined(torch.stack(moves).sum(0)) if moves else None

    def combined(self, alpha: Tensor) -> tuple[Tensor, Tensor]:
        """Σ α d and Σ α J d."""
        return alpha @ self.directions, torch.tensordot(alpha, self.images, 1)


def _semidefinite_solve(matrix: Tensor, b: Tensor) -> Tensor:
    """x of least size (in units of the diagonal) with M x = b: directions may depend on one another."""
    unit = matrix.diagonal().clamp(min=torch.finfo(matrix.dtype).tiny).rsqrt()
    values, vectors = torch.linalg.eigh(unit.unsqueeze(-1) * matrix * unit)
    inverse = torch.where(values > DEPENDENT * values[-1], 1 / values, 0)
    return unit * (vectors @ (inverse * (vectors.mT @ (unit * b))))


def _step_length(density: TangentJoint, v: Tensor, z: Tensor, d: Tensor, jd: Tensor) -> float:
    """t along d. The slope of a concave density is monotone in t: the search is for where it is nearly zero, first at
    t = 1, and takes a t short of the maximum, or beyond it by little and with a gain."""

    def look(t: float) -> tuple[float, float]:
        """The slope, NaN beyond the likelihood's domain, and the value."""
        there, outputs = v + t * d - density.m, z + t * jd
        score = (density.score(outputs) * jd).sum()
        score, fit = density.jacobian.total(score, density.likelihood.log_prob(outputs, density.jacobian.y).sum())
        pull = linalg.mv(density.a, there)
        value = float(fit - 0.5 * (pull * there).sum())
        return float((pull * d).sum() - score) if value > -float("inf") else float("nan"), value

    start, here = look(0.0)
    at_zero, low, high, t = -start, 0.0, float("inf"), 1.0
    for _ in range(100):
        now, value = look(t)
        if -0.5 * at_zero <= now <= 0:
            break
        if 0 < now <= 0.1 * at_zero and value >= here - 1e-12 * abs(here):
            break
        low, high = (t, high) if now < 0 else (low, t)  # NaN, beyond the likelihood's domain, is too far
        t = 2 * t if high == float("inf") else 0.5 * (low + high)
    return t
