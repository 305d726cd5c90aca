"""Pushing with a graph to the inputs: f(x) ~ N(f(x, θ*), J(x) M⁻¹ J(x)ᵀ) where J(x) can be differentiated by x.

M does not depend on x, so ∂(M⁻¹ r) = M⁻¹ ∂r: one solve for each direction that a gradient comes back along, for every
operator that has a solve. Where M⁻¹ is known by samples z_k, Cov f ≈ (1/k) Σ_k (J z_k)(J z_k)ᵀ, as in `streamed.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lapwing.errors import Unsupported
from lapwing.operators import linalg
from lapwing.outputs import Normal
from lapwing.push.runs import At
from lapwing.tangent import TangentModel
from lapwing.tangent.graph import with_graph


def graphed(precision: Any, at: At) -> Normal:
    """The outputs at some inputs, with a graph to them."""
    f, J = with_graph(at.tangent, at.x, at.budget)
    if at.joint:
        at.check_joint(f)
    cov = together(precision, J, f.numel() if at.joint else f.shape[-1])
    shape = (*f.shape, *(f.shape if at.joint else f.shape[-1:]))
    samples = len(precision.spread) if linalg.by_samples(precision) else None
    return Normal(f, cov.reshape(shape), at.joint, samples=samples)


def together(precision: Any, J: Tensor, size: int) -> Tensor:
    """J M⁻¹ Jᵀ of each `size` rows of J (..., p) that follow each other, (k, size, size)."""
    rows = J.reshape(-1, size, J.shape[-1])
    if not linalg.by_samples(precision):
        cov = rows @ Solved.apply(rows, precision).mT
        return 0.5 * (cov + cov.mT)
    if not precision.ranks.alone:
        raise Unsupported(
            "samples are spread over ranks, through which no gradient in the inputs goes; call la = la.gathered() first"
        )
    away = rows @ precision.spread.to(J).mT  # (k, size, samples)
    return away @ away.mT / away.shape[-1]


def covariance(away: Tensor, joint: bool) -> Tensor:
    """(1/k) Σ_k a aᵀ for a (k, n, ..., c): (n, ..., c, c), or (n, ..., c, n, ..., c) if joint."""
    if not joint:
        return torch.einsum("k...a,k...b->...ab", away, away) / len(away)
    flat = away.flatten(1)
    return (flat.mT @ flat / len(away)).reshape(*away.shape[1:], *away.shape[1:])


class Solved(torch.autograd.Function):
    """M⁻¹ r of rows r (..., p): symmetric, so its derivative is itself, to any order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, precision: Any) -> Tensor:
        """M⁻¹ r."""
        ctx.precision = precision
        return linalg.solve(precision, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """M⁻¹ g."""
        return Solved.apply(grad, ctx.precision), None


def pushed_with_graph(tangent: TangentModel, z: Tensor, x: Any, budget: int = 2**30) -> tuple[Tensor, Tensor]:
    """f (n, ..., c) and J z (k, n, ..., c), in float32 or better, with a graph to x."""
    f, J = with_graph(tangent, x, budget)
    f = f.to(torch.promote_types(f.dtype, torch.float32))
    return f, (J @ z.to(J).mT).movedim(-1, 0).reshape(len(z), *f.shape).to(f)
