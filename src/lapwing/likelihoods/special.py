"""The regularized incomplete beta function, which PyTorch lacks: distribution functions of counts and of Student's t.

    I_x(a, b) = x^a (1 − x)^b / (a B(a, b)) · 1/(1 + d_1/(1 + d_2/(1 + …)))            (Lentz's algorithm)
    d_2m = m (b − m) x / ((a + 2m − 1)(a + 2m)),   d_2m+1 = −(a + m)(a + b + m) x / ((a + 2m)(a + 2m + 1))

for x < (a + 1)/(a + b + 2), and beyond by I_x(a, b) = 1 − I_{1−x}(b, a). Source: Numerical Recipes, 6.4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lapwing.errors import NotConverged

TERMS = 10_000


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
