"""Moments of any activation φ, to about 1e-10 if φ is smooth but for a kink or jump at 0.

By its Hermite series where that has converged. With h_j the orthonormal Hermite polynomials and ρ the correlation,

    E[φ(√k₁₁ z) φ(√k₂₂ w)] = Σ_j a_j(k₁₁) a_j(k₂₂) ρʲ,   a_j(k) = E[φ(√k z) h_j(z)]            (Mehler 1866)
    |Σ_{j ≥ J}| ≤ |ρ|ᴶ √(t(k₁₁) t(k₂₂)),                  t(k) = E[φ²] − Σ_{j < J} a_j²          (Parseval)

so J terms take the place of an integral for each pair. Where a kink lets it converge slowly, near |ρ| = 1, by a rule in
polar coordinates:

    u = √k₁₁ r cos α,   v = √k₂₂ r cos(α − θ),   ρ = cos θ,   E[F(u, v)] = (1/2π) ∫ dα ∫ dr r e^(−r²/2) F

u and v change sign at four angles, between which F is smooth: Gauss-Legendre on each arc, of lengths θ and π − θ, and
on r the Gauss rule of the weight r e^(−r²/2). φ' is φ's derivative by torch.func.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lapwing.errors import InvalidValue, warn
from lapwing.gp.infinite.activations import correlation

TERMS = (16, 32, 64, 128, 256)  # of the series, the least that is enough
TAIL = 1e-12  # of the root mean squares, that the rest of a series may be
RADII, ANGLES = 64, 32  # nodes of the polar rule in r, and on each of the four arcs
AT_ONCE = 2**20  # values of φ made at once
OFF = 1e-6  # relative difference to a finer rule, of which one is told
Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class IntegratedActivation:
    """Any φ: a function of a tensor, elementwise, that torch can differentiate."""

    function: Function

    def second(self, k11: Tensor, k22: Tensor, k12: Tensor) -> Tensor:
        """E[φ(u)φ(v)]."""
        return expected(self.function, k11, k22, k12)

    def slope(self, k11: Tensor, k22: Tensor, k12: Tensor) -> Tensor:
        """E[φ'(u)φ'(v)]."""
        return expected(self._derivative, k11, k22, k12)

    def mean(self, k: Tensor) -> Tensor:
        """E[φ(u)], the first term of the series."""
        return _coefficients(self.function, k, 1)[0][0]

    def _derivative(self, u: Tensor) -> Tensor:
        return torch.func.jvp(self.function, (u,), (torch.ones_like(u),))[1]


def integrated(function: Function) -> IntegratedActivation:
    """An activation by quadrature, held to finer nodes; what they differ by is told."""
    found = IntegratedActivation(function)
    k = torch.tensor([0.5, 1.0, 2.0, 4.0], dtype=torch.float64)
    theta = torch.tensor([0.3, 1.0, 2.0, 3.0], dtype=torch.float64)
    worst = 0.0
    for moment in (function, found._derivative):
        rough, fine = (_polar(moment, k.sqrt(), k.flip(0).sqrt(), theta, n, n // 2) for n in (RADII, 2 * RADII))
        if rough.shape != k.shape or not bool(torch.isfinite(fine).all()):
            raise InvalidValue(f"an activation is elementwise and has finite moments; {function!r} gave {fine}")
        worst = max(worst, float(((rough - fine).abs() / fine.abs().clamp(min=1e-3)).max()))
    if worst > OFF:
        warn(
            f"moments of the activation {function!r} are known to {worst:.1g} only: it is taken to be smooth but for "
            "0; for kinks elsewhere, give an object with second, slope and mean of its own",
        )
    return found


def expected(function: Function, k11: Tensor, k22: Tensor, k12: Tensor) -> Tensor:
    """E[F(u)F(v)], by the series where it has converged, else by the polar rule."""
    _, rho = correlation(k11, k22, k12)
    left, tail_left = _coefficients(function, k11, TERMS[-1])
    right, tail_right = _coefficients(function, k22, TERMS[-1])
    most = max(float(tail_left[0].max()), float(tail_right[0].max()), torch.finfo(torch.float64).tiny)
    for terms in TERMS:
        rest = rho.abs() ** terms * (tail_left[terms] * tail_right[terms]).sqrt()
        missed = rest > TAIL * most
        if not bool(missed.any()):
            break
    total, power = left[0] * right[0] + 0 * rho, rho.clone()
    for a, b in zip(left[1:terms], right[1:terms], strict=True):
        total += power * a * b
        power *= rho
    if bool(missed.any()):
        u, v = (k.sqrt().expand(rho.shape)[missed] for k in (k11, k22))
        total[missed] = _polar(function, u, v, torch.acos(rho[missed]), RADII, ANGLES)
    return total


def _coefficients(function: Function, k: Tensor, terms: int) -> tuple[Tensor, Tensor]:
    """a_j(k), (terms, *k.shape), and what is left of E[F²] after the first j of them, (terms + 1, *k.shape)."""
    z, weight, hermite = _hermite(terms)
    values = function(k.sqrt().reshape(-1, 1) * z)  # (m, nodes)
    a = hermite @ (values * weight).mT
    squares = torch.cat([torch.zeros_like(a[:1]), a.square().cumsum(0)])
    rest = ((values.square() * weight).sum(1) - squares).clamp(min=0)
    return a.reshape(terms, *k.shape), rest.reshape(terms + 1, *k.shape)


def _polar(function: Function, left: Tensor, right: Tensor, theta: Tensor, radii: int, angles: int) -> Tensor:
    """E[F(u)F(v)] for pairs (m,) with standard deviations left and right, at the angle θ."""
    step = max(1, AT_ONCE // (radii * angles))
    parts = zip(left.split(step), right.split(step), theta.split(step), strict=True)
    return torch.cat([_polar_some(function, *part, radii, angles) for part in parts])


def _polar_some(function: Function, left: Tensor, right: Tensor, theta: Tensor, radii: int, angles: int) -> Tensor:
    place, weight = (torch.from_numpy(v) for v in np.polynomial.legendre.leggauss(angles))
    r, radial = _radial(radii)
    total = torch.zeros_like(theta)
    for start, length in ((torch.full_like(theta, -math.pi / 2), theta), (theta - math.pi / 2, math.pi - theta)):
        angle = start[:, None] + 0.5 * length[:, None] * (place + 1)  # (m, a)
        u = (left[:, None] * angle.cos())[..., None] * r  # (m, a, r)
        v = (right[:, None] * (angle - theta[:, None]).cos())[..., None] * r
        both = function(u) * function(v) + function(-u) * function(-v)  # the arc, and the one across
        total += length / (4 * math.pi) * torch.einsum("mar,a,r->m", both, weight, radial)
    return total


@functools.lru_cache(maxsize=4)
def _hermite(terms: int) -> tuple[Tensor, Tensor, Tensor]:
    """Nodes z and weights of the standard normal law, split at 0, and h_j (terms, nodes) there."""
    place, weight = np.polynomial.legendre.leggauss(256)
    half = 7.0 * (place + 1)  # to 14 standard deviations
    z, w = np.concatenate([-half[::-1], half]), np.concatenate([weight[::-1], weight])
    w = 7.0 * w * np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi)
    h = np.ones((terms + 1, len(z)))
    h[1] = z
    for j in range(1, terms):
        h[j + 1] = (z * h[j] - math.sqrt(j) * h[j - 1]) / math.sqrt(j + 1)
    return torch.from_numpy(z), torch.from_numpy(w), torch.from_numpy(h[:terms])


@functools.lru_cache(maxsize=4)
def _radial(nodes: int) -> tuple[Tensor, Tensor]:
    """Gauss' rule of the weight r e^(−r²/2) on r > 0: by Lanczos on a fine rule, whose moments it shares."""
    place, weight = np.polynomial.legendre.leggauss(600)
    r = 7.0 * (place + 1)
    mass = 7.0 * weight * r * np.exp(-0.5 * r**2)
    basis = np.zeros((nodes + 1, len(r)))
    basis[0] = np.sqrt(mass / mass.sum())
    diagonal, beside = np.zeros(nodes), np.zeros(nodes)
    for j in range(nodes):
        new = r * basis[j]
        diagonal[j] = new @ basis[j]
        for _ in range(2):
            new -= basis[: j + 1].T @ (basis[: j + 1] @ new)
        beside[j] = np.linalg.norm(new)
        basis[j + 1] = new / beside[j]
    values, vectors = np.linalg.eigh(np.diag(diagonal) + np.diag(beside[:-1], 1) + np.diag(beside[:-1], -1))
    return torch.from_numpy(values), torch.from_numpy(mass.sum() * vectors[0] ** 2)
