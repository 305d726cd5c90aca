"""Products with the Jacobian of a whole data set, streamed: what needs J but never its rows.

    transport(tangent, batches, V, middle)  =  Σ_n J_nᵀ middle(f_n, J_n V, y_n)        V (k, p) -> (k, p)

All k vectors share the network's run at its weights: one run forward and one backward a batch, beside which each vector
costs a push and a pull. With Λ_n = S_n S_nᵀ in the middle it is the generalized Gauss-Newton product G V
(`gauss_newton`); with a score in the middle it is a gradient of the tangent model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from lapwing import data as loading
from lapwing import tree
from lapwing.curvature.accumulate import flat_outputs, flat_targets
from lapwing.likelihoods import Categorical, Likelihood
from lapwing.tangent import TangentModel

AT_ONCE = 16  # vectors pushed through the network together
SMALL = 2**18  # numbers in the vectors of a small network, which are pushed through it together
TOGETHER, LARGEST = 128, 64  # vectors times examples, and examples, that convolutions run on at once: more leave caches

Middle = Callable[[Tensor, Tensor, Tensor], Tensor]  # f (m, c), J V (k, m, c), y -> (k, m, c), one row a position


@torch.inference_mode(False)
def transport(
    tangent: TangentModel, batches: Iterable[Any], v: Tensor, middle: Middle, progress: bool = False, label: str = ""
) -> Tensor:
    """Σ_n J_nᵀ middle(f_n, J_n v, y_n) over the data, in float64."""
    ranks = loading.ranks_of(batches)
    v = ranks.same(v, "vectors of a product")
    total = torch.zeros(v.shape, dtype=torch.float64, device=tangent.device)
    with ranks.told("a product"):
        for x, y in loading.passes(batches, tangent.device, progress, label or "products"):
            for piece, targets in pieces(tangent, x, y, len(v)):

                def between(f: Tensor, jv: Tensor, y: Any = targets) -> Tensor:
                    return middle(f, jv, flat_targets(f, y))

                carry(tangent, piece, v, between, total)
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
    n, size = len(y), max(1, min(LARGEST, TOGETHER // min(k, AT_ONCE)))
    if n <= size or tangent.columns_at_once or not tangent.separable(x):
        yield x, y
        return
    for start in range(0, n, size):
        index = slice(start, start + size)
        yield tree.rows_of(x, index), y[index]


# -- the middle ---------------------------------------------------------------------------------------------------


def output_curvature(likelihood: Likelihood, f: Tensor, v: Tensor) -> Tensor:
    """Λ v at outputs f (m, c), at the likelihood's own noise: v (k, m, c) -> (k, m, c)."""
    weights = likelihood.curvature_weights("exact")
    if len(weights) == 1:
        out = unit_curvature(likelihood, f, v)
        return out * weights[0].to(out)
    root = likelihood.hessian_root(f)  # (m, c, q), unit scale
    inner = torch.einsum("mcq,kmc->kmq", root, v.to(root))
    return torch.einsum("mcq,kmq->kmc", root, inner * weights.to(root))


@functools.singledispatch
def unit_curvature(likelihood: Likelihood, f: Tensor, v: Tensor) -> Tensor:
    """S Sᵀ v at unit scale, v (k, m, c)."""
    root = likelihood.hessian_root(f)
    return torch.einsum("mcq,kmq->kmc", root, torch.einsum("mcq,kmc->kmq", root, v.to(root)))


@unit_curvature.register
def _(likelihood: Categorical, f: Tensor, v: Tensor) -> Tensor:
    p = torch.softmax(f, -1)  # p∘v − p pᵀv: no matrix of outputs by outputs
    pv = p * v.to(p)
    return pv - p * pv.sum(-1, keepdim=True)


@functools.singledispatch
def curvature_trace(likelihood: Likelihood, f: Tensor) -> float:
    """Σ tr S Sᵀ over outputs f (m, c), at unit scale."""
    return float(likelihood.hessian_root(f).square().sum())


@curvature_trace.register
def _(likelihood: Categorical, f: Tensor) -> float:
    p = torch.softmax(f, -1)
    return float((p * (1 - p)).sum())


@functools.singledispatch
def colored(likelihood: Likelihood, f: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """S e for k standard normal e, which has the covariance Λ at unit scale: (k, m, c)."""
    root = likelihood.hessian_root(f)
    return torch.einsum("mcq,kmq->kmc", root, _normal((k, len(root), root.shape[-1]), generator, root))


@colored.register
def _(likelihood: Categorical, f: Tensor, k: int, generator: torch.Generator) -> Tensor:
    p = torch.softmax(f, -1)
    e = p.sqrt() * _normal((k, *p.shape), generator, p)  # (diag √p − p √pᵀ) e
    return e - p * e.sum(-1, keepdim=True)


def _normal(shape: tuple[int, ...], generator: torch.Generator, like: Tensor) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=like.dtype, device=generator.device).to(like.device)


def gauss_newton(
    tangent: TangentModel, likelihood: Likelihood, batches: Iterable[Any], v: Tensor, progress: bool = False
) -> Tensor:
    """G v for vectors v (k, p), with the exact output factor: (k, p), float64."""
    return transport(tangent, batches, v, lambda f, jv, _: output_curvature(likelihood, f, jv), progress)
