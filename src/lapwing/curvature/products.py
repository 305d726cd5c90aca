"""Products with the Jacobian of a whole data set, streamed: what needs J but never its rows.

    transport(tangent, batches, V, middle)  =  Σ_n J_nᵀ middle(f_n, J_n V, y_n)        V (k, p) -> (k', p)

One run forward and one backward a batch for all k vectors. With Λ_n = S_n S_nᵀ in the middle it is the generalized
Gauss-Newton product G V (`gauss_newton`); with a score in the middle it is a gradient of the tangent model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from lapwing import data as loading
from lapwing.curvature.accumulate import flat_outputs, flat_targets
from lapwing.likelihoods import Likelihood
from lapwing.tangent import TangentModel

AT_ONCE = 16  # vectors pushed through the network together

Middle = Callable[[Tensor, Tensor, Tensor], Tensor]  # f (m, c), J V (k, m, c), y -> (k', m, c), one row a position


@torch.inference_mode(False)
def transport(
    tangent: TangentModel, batches: Iterable[Any], v: Tensor, middle: Middle, progress: bool = False, label: str = ""
) -> Tensor:
    """Σ_n J_nᵀ middle(f_n, J_n v, y_n) over the data, in float64."""
    total: Tensor | None = None
    for x, y in loading.passes(batches, tangent.device, progress, label or "products"):
        pushed = [tangent.jvps(x, some) for some in v.split(AT_ONCE)]
        f, jv = pushed[0][0].detach(), torch.cat([out for _, out in pushed]).detach()
        flat = flat_outputs(f)
        u = middle(flat, jv.reshape(len(v), *flat.shape).to(flat), flat_targets(f, y))
        pulled = tangent.vjps(x, u.reshape(len(u), *f.shape)).to(torch.float64)
        total = pulled if total is None else total + pulled
    assert total is not None  # passes raise on data without a batch
    return total


def output_curvature(likelihood: Likelihood, f: Tensor, v: Tensor) -> Tensor:
    """Λ v at outputs f (m, c), at the likelihood's own noise: v (k, m, c) -> (k, m, c)."""
    root = likelihood.hessian_root(f)  # (m, c, q), unit scale
    weights = likelihood.curvature_weights("exact").to(root)
    inner = torch.einsum("mcq,kmc->kmq", root, v.to(root))
    return torch.einsum("mcq,kmq->kmc", root, inner * (weights if len(weights) > 1 else weights[0]))


def gauss_newton(
    tangent: TangentModel, likelihood: Likelihood, batches: Iterable[Any], v: Tensor, progress: bool = False
) -> Tensor:
    """G v for vectors v (k, p), with the exact output factor: (k, p), float64."""
    return transport(tangent, batches, v, lambda f, jv, _: output_curvature(likelihood, f, jv), progress)
