"""Products with the Jacobian of a whole data set, streamed: what needs J but never its rows.

    gauss_newton(tangent, likelihood, batches, V)  =  Σ_n J_nᵀ Λ_n J_n V        Λ_n = S_n S_nᵀ,  V (k, p) -> (k, p)

All k vectors share the network's run at its weights: one run forward and one backward a batch, beside which each vector
costs a push and a pull.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from lapwing import data as loading
from lapwing.curvature.accumulate import flat_outputs
from lapwing.likelihoods import Likelihood
from lapwing.tangent import TangentModel

AT_ONCE = 16  # vectors pushed through the network together
SMALL = 2**18  # numbers in the vectors of a small network, which are pushed through it together
MAX_VECTORS_TIMES_EXAMPLES = 128  # that convolutions run on at once: more leave the caches
MAX_EXAMPLES = 64  # of them


@torch.inference_mode(False)
def gauss_newton(
    tangent: TangentModel, likelihood: Likelihood, batches: Iterable[Any], v: Tensor, progress: bool = False
) -> Tensor:
    """G v for vectors v (k, p), with the exact output factor: (k, p), float64."""
    ranks = loading.ranks_of(batches)
    v = ranks.same(v, "vectors of a product")
    total = torch.zeros(v.shape, dtype=torch.float64, device=tangent.device)
    with ranks.sharing_errors("a product"):
        for x, y in loading.passes(batches, tangent.device, progress, "products"):
            for piece, targets in pieces(tangent, x, y, len(v)):

                def middle(f: Tensor, jv: Tensor, y: Any = targets) -> Tensor:
                    return output_curvature(likelihood, f, likelihood.rows(y, len(f)), jv)

                carry(tangent, piece, v, middle, total)
    return ranks.total([total], "a product")[0]


def carry(tangent: TangentModel, x: Any, v: Tensor, middle: Callable[[Tensor, Tensor], Tensor], total: Tensor) -> None:
    """total (k, p) += Jᵀ middle(f, J v) of one batch, for f and J v with one row a position."""

    def between(f: Tensor, jv: Tensor) -> Tensor:  # f (n, ..., c), jv (k, n, ..., c)
        flat = flat_outputs(f)
        return middle(flat, jv.reshape(len(jv), *flat.shape).to(flat)).reshape(jv.shape)

    if len(v) == 1:  # forward mode beside the graph of the reverse pass: one run for both
        total[0].add_(tangent.through(x, v[0], lambda f, jv: between(f, jv.unsqueeze(0))[0])[1])
        return
    size = at_once(tangent)
    for some, into in zip(v.split(size), total.split(size), strict=True):
        f, jv = tangent.jvps(x, some)
        into.add_(tangent.vjps(x, between(f.detach(), jv.detach())))


def at_once(tangent: TangentModel) -> int:
    """How many vectors are run through the network together."""
    return max(AT_ONCE, SMALL // tangent.layout.size) if tangent.columns_at_once else AT_ONCE


def pieces(tangent: TangentModel, x: Any, y: Any, k: int) -> Iterator[tuple[Any, Any]]:
    """A batch in pieces of as many examples as k vectors are best run with: whole, unless there are convolutions."""
    few = min(MAX_EXAMPLES, MAX_VECTORS_TIMES_EXAMPLES // min(k, AT_ONCE))
    return tangent.pieces(x, y, len(y) if tangent.columns_at_once else few)


def output_curvature(likelihood: Likelihood, f: Tensor, y: Tensor, v: Tensor) -> Tensor:
    """Λ v at outputs f (m, c) and their targets, at the likelihood's own noise: v (k, m, c) -> (k, m, c)."""
    weights = likelihood.curvature_weights("exact")
    if len(weights) == 1:
        out = likelihood.curvature_product(f, y, v)
        return out * weights[0].to(out)
    root = likelihood.curvature_root(f, y)  # (m, c, q), unit scale
    inner = torch.einsum("mcq,kmc->kmq", root, v.to(root))
    return torch.einsum("mcq,kmq->kmc", root, inner * weights.to(root))
