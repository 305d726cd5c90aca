"""The regularized incomplete beta function, which PyTorch lacks: distribution functions of counts and of Student's t.

    I_x(a, b) = x^a (1 − x)^b / (a B(a, b)) · 1/(1 + d_1/(1 + d_2/(1 + …)))            (Lentz's algorithm)
    d_2m = m (b − m) x / ((a + 2m − 1)(a + 2m)),   d_2m+1 = −(a + m)(a + b + m) x / ((a + 2m)(a + 2m + 1))

for x < (a + 1)/(a + b + 2), and beyond by I_x(a, b) = 1 − I_{1−x}(b, a). Source: Numerical Recipes, 6.4.

A fraction takes tens of terms, and a quantile of a mixture thousands of numbers of the same ν. With cot w = |z|/√ν,

    P(T_ν > |z|) = ½ I_{sin²w}(ν/2, ½) = w^ν exp p(w²),      0 ≤ w ≤ π/2

where p is analytic (the tail is ∝ ∫_0^w sin^{ν−1}), and for ν ≤ 100 a polynomial of degree 23, to a relative 1e-12 or
better.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from lapwing.errors import NotConverged

TERMS = 10_000
DEGREES, LARGEST = 24, 100.0  # Chebyshev coefficients of p, and the ν up to which they are enough


def betainc(a: Tensor, b: Tensor, x: Tensor, rest: Tensor) -> Tensor:
    """I_x(a, b) for x in [0, 1] and rest = 1 − x, which is given for the sake of its digits; they broadcast."""
    a, b, x, rest = torch.broadcast_tensors(a, b, x, rest)
    flip = x > (a + 1) / (a + b + 2)
    a, b, x, rest = torch.where(flip, b, a), torch.where(flip, a, b), *_swapped(flip, x, rest)
    log_front = torch.lgamma(a + b) - torch.lgamma(a) - torch.lgamma(b) + torch.xlogy(a, x) + torch.xlogy(b, rest)
    out = torch.exp(log_front - a.log()) / _fraction(a, b, x)
    return torch.where(flip, 1 - out, out)


def _swapped(flip: Tensor, x: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(flip, rest, x), torch.where(flip, x, rest)


def _fraction(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    """1 + d_1/(1 + d_2/(1 + …))."""
    tiny, eps = torch.finfo(x.dtype).tiny ** 0.5, torch.finfo(x.dtype).eps

    def apart(t: Tensor) -> Tensor:
        return torch.where(t.abs() < tiny, tiny, t)

    out, c, d = torch.ones_like(x), torch.ones_like(x), torch.zeros_like(x)
    for j in range(1, TERMS):
        m = j // 2
        if j % 2:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d, c = 1 / apart(1 + term * d), apart(1 + term / c)
        out = out * c * d
        if j > 2 and bool(((c * d - 1).abs() <= 4 * eps).all()):
            return out
    raise NotConverged(f"an incomplete beta function did not converge in {TERMS:,} terms")


def student_tail(z: Tensor, nu: Tensor) -> Tensor:
    """P(T_ν > |z|); ν is a number, or one for each of z's last dimension."""
    if bool((nu > LARGEST).any()):
        square = z.square()
        return 0.5 * betainc(0.5 * nu, torch.full_like(nu, 0.5), nu / (nu + square), square / (nu + square))
    w = torch.atan2(nu.sqrt(), z.abs())
    p = torch.stack([_log_tail(value) for value in nu.reshape(-1).tolist()], -1).reshape(DEGREES, *nu.shape).to(z)
    return torch.exp(nu * w.log() + _clenshaw(p, (8 / math.pi**2) * w.square() - 1))


@functools.lru_cache(maxsize=64)
def _log_tail(nu: float) -> Tensor:
    """Chebyshev coefficients of p over w² in [0, π²/4], from its values at the Chebyshev points."""
    angle = math.pi * (torch.arange(DEGREES, dtype=torch.float64) + 0.5) / DEGREES
    w = math.pi / 2 * (0.5 * angle).cos()  # w² = π²/8 (1 + cos angle)
    a, b = torch.tensor(0.5 * nu, dtype=torch.float64), torch.tensor(0.5, dtype=torch.float64)
    values = (0.5 * betainc(a, b, w.sin().square(), w.cos().square())).log() - nu * w.log()
    each = torch.cos(torch.outer(torch.arange(DEGREES, dtype=torch.float64), angle)) @ values * (2 / DEGREES)
    return torch.cat([0.5 * each[:1], each[1:]])


def _clenshaw(coefficients: Tensor, x: Tensor) -> Tensor:
    """Σ_k c_k T_k(x)."""
    twice, here, last = 2 * x, torch.zeros_like(x), torch.zeros_like(x)
    for c in coefficients[1:].flip(0):
        here, last = torch.addcmul(c - last, twice, here), here
    return coefficients[0] + x * here - last
