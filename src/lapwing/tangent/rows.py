"""Rows of the Jacobian, example by example: uᵀJ(x_n) for cotangents u (n, k, ..., c) -> (n, k, p).

Batched over examples and cotangents; over examples alone, or not at all, where torch has no rule for that, or a wrong
one.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import vmap

from lapwing import tree
from lapwing.errors import warn
from lapwing.tangent import proof
from lapwing.tangent.evaluating import evaluating
from lapwing.tangent.kernels import any_batching_rule, out_of_memory, plain_kernels

if TYPE_CHECKING:
    from lapwing.tangent.model import TangentModel

WAYS = ("vmap", "columns", "loop")  # batched over examples and cotangents, over examples, not batched
vjp: Any = torch.func.vjp  # its annotation leaves the two-value form out


def units(f: Tensor) -> Tensor:
    """One cotangent for each output of an example at each position, (n, q·c, ..., c)."""
    eye = torch.eye(f[0].numel(), dtype=f.dtype, device=f.device).reshape(-1, *f.shape[1:])
    return eye.expand(len(f), *eye.shape)


def pulled(tangent: TangentModel, x: Any, u: Tensor, names: tuple[str, ...], graph: bool = False) -> Tensor:
    """uᵀJ(x_n) for these parameters, by the first of the ways that runs and is right; graph: to be differentiated."""
    facts = tangent.facts
    with evaluating(tangent.model), plain_kernels():
        if facts.rows is None and not tangent.separable(x):
            warn_slow("cannot be cut into examples", "inputs of unequal length, or outputs that mix the batch")
            facts.rows = "loop"
        cause = ""
        for way in WAYS[WAYS.index(facts.rows or WAYS[0]) : -1]:
            try:
                found = _batched(tangent, x, u, names, way)
            except (RuntimeError, ValueError) as error:
                if out_of_memory(error):
                    raise
                cause = cause or str(error).splitlines()[0][:200]
            else:
                plain = {n: t.detach() for n, t in found.items()}
                prove = functools.partial(_proved, tangent, tree.detached(x), u, names, way, plain)
                if proof.once(tangent, f"rows, {way}", (names, proof.shapes(x, u)), prove):
                    facts.rows = way
                    return torch.cat([found[n].reshape(*u.shape[:2], -1) for n in names], dim=-1)
                cause = "its rules do not give the gradient that autograd gives"
        if facts.rows != "loop":
            warn_slow("cannot be batched over examples by torch.func.vmap", cause)
            facts.rows = "loop"
        return one_by_one(tangent, x, u, names, graph)


def _proved(
    tangent: TangentModel, x: Any, u: Tensor, names: tuple[str, ...], way: str, found: dict[str, Tensor]
) -> bool:
    return proof.rows(tangent, x, u, names, found, lambda at, x, u: _batched(at, x, u, names, way))


def _batched(tangent: TangentModel, x: Any, u: Tensor, names: tuple[str, ...], way: str) -> dict[str, Tensor]:
    """{name: (n, k, *shape)}."""

    def pull_one(moving: dict[str, Tensor], x: Any, u: Tensor) -> dict[str, Tensor]:
        one = tree.map_tensors(lambda t: t.unsqueeze(0), x)
        _, pull = vjp(lambda p: tangent.apply({**tangent.params, **p}, one)[0], moving)
        if way == "vmap":
            return vmap(lambda cotangent: pull(cotangent)[0])(u)
        columns = [pull(cotangent)[0] for cotangent in u]
        return {n: torch.stack([column[n] for column in columns]) for n in moving}

    moving = {n: tangent.params[n] for n in names}
    with evaluating(tangent.model), plain_kernels(), any_batching_rule():
        return vmap(pull_one, in_dims=(None, tree.batch_dims(x), 0))(moving, tree.plain(x), u)


def one_by_one(tangent: TangentModel, x: Any, u: Tensor, names: tuple[str, ...], graph: bool = False) -> Tensor:
    """The same without batching over examples: one example a time, or, where inputs cannot be cut into
    examples (a graph), one cotangent of one example a time over the whole batch."""
    leaves = {n: tangent.params[n].detach().requires_grad_() for n in names}
    params, ends, out = {**tangent.params, **leaves}, list(leaves.values()), []
    with torch.enable_grad():
        whole = None if tangent.separable(x) else tangent.apply(params, x)
        for i, cotangents in enumerate(u):
            f = tangent.apply(params, tree.rows_of(x, slice(i, i + 1)))[0] if whole is None else whole[i]
            grads: Any = [[None] * len(ends)] * len(cotangents)  # if this example does not use them
            if f.requires_grad:
                grads = tangent.backward(params, functools.partial(_gradients, f, ends, cotangents, graph))
            out.append(torch.stack([_flat(gs, ends) for gs in grads]))
    return torch.stack(out)


def _gradients(f: Tensor, ends: list[Tensor], cotangents: Tensor, graph: bool) -> list[Any]:
    kept: dict[str, Any] = {"retain_graph": True, "create_graph": graph, "allow_unused": True}
    return [torch.autograd.grad(f, ends, u, **kept) for u in cotangents]


def _flat(grads: Any, ends: list[Tensor]) -> Tensor:
    return torch.cat([(torch.zeros_like(t) if g is None else g).reshape(-1) for g, t in zip(grads, ends, strict=True)])


def warn_slow(what: str, cause: str) -> None:
    """That rows are made one example at a time, at the line that asked the tangent model for a product."""
    warn(
        f"this network {what}, so Jacobian rows are made one example at a time, which is slow; the cause: {cause}",
    )
