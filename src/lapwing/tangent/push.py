"""J v: how outputs move with the weights, v (p,) -> (n, ..., c).

Forward mode; where a kernel lacks it or has it wrong, the same by unfused kernels, by two reverse passes, or by all
rows of the Jacobian. Several vectors at once by torch's batching rules, where those are right.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lapwing.tangent import proof
from lapwing.tangent.evaluating import evaluating
from lapwing.tangent.kernels import any_batching_rule, out_of_memory, plain_kernels
from lapwing.tangent.pull import pullback
from lapwing.tangent.rows import one_by_one, units, warn_slow

if TYPE_CHECKING:
    from lapwing.tangent.model import TangentModel

WAYS = ("forward", "unfused", "double", "rows")  # to J v, the quickest first


def jvp(tangent: TangentModel, x: Any, v: Mapping[str, Tensor]) -> Tensor:
    """J v by the first of the ways that runs and is right."""
    facts = tangent.facts
    for way in WAYS[WAYS.index(facts.push) : -1]:  # from the one that worked last
        try:
            out = _push(tangent, x, v, way)
        except RuntimeError as error:
            if out_of_memory(error):
                raise
            continue
        if _proved(tangent, x, v, way, out):
            facts.push = way
            return out
    out = _push(tangent, x, v, "rows")
    if facts.push != "rows":
        warn_slow("has no derivative of its derivative in torch", "neither forward mode nor two reverse passes")
        facts.push = "rows"
    return out


def _push(tangent: TangentModel, x: Any, v: Mapping[str, Tensor], way: str) -> Tensor:
    if way == "rows":
        return _by_rows(tangent, x, v)
    return _by_two_pulls(tangent, x, v) if way == "double" else _forward(tangent, x, v, onednn=way == "forward")


def _proved(tangent: TangentModel, x: Any, v: Mapping[str, Tensor], way: str, out: Tensor) -> bool:
    along = tangent.layout.flatten(v).unsqueeze(0)

    def right() -> bool:
        return proof.pushes(tangent, x, along, out.unsqueeze(0), lambda at, x: _push(at, x, v, way).unsqueeze(0))

    return proof.once(tangent, f"J v, {way}", proof.shapes(x, along), right)


def jvps(tangent: TangentModel, x: Any, v: Tensor) -> tuple[Tensor, Tensor]:
    """f(x) and J v for several vectors v (k, p) by one run of the network: (n, ..., c) and (k, n, ..., c)."""

    def right(both: tuple[Tensor, Tensor]) -> bool:
        return proof.pushes(tangent, x, v, both[1], lambda at, x: _pushes(at, x, v)[1])

    if tangent.facts.push in ("forward", "unfused"):
        lacks = RuntimeError, ValueError  # forward mode, or a batching rule
        both = proof.attempt(tangent, "jvps", proof.shapes(x, v), lambda: _pushes(tangent, x, v), right, lacks)
        if both is not None:
            return both
    return tangent(x), torch.stack([tangent.jvp(x, tangent.layout.unflatten(one.to(tangent.dtype))) for one in v])


def _pushes(tangent: TangentModel, x: Any, v: Tensor) -> tuple[Tensor, Tensor]:
    tangents = {n: t.to(tangent.params[n].dtype) for n, t in tangent.layout.unflatten(v).items()}
    params, order = tangent.ordered(x, reverse=False)

    def push(one: dict[str, Tensor]) -> Any:
        return torch.func.jvp(lambda p: tangent.apply(p, x), (params,), (one,))

    onednn = tangent.facts.push == "forward"
    with evaluating(tangent.model), plain_kernels(onednn), order, any_batching_rule():
        return torch.func.vmap(push, out_dims=(None, 0))(tangents)  # type: ignore[arg-type]


# -- the ways ------------------------------------------------------------------------------------------------------


def _forward(tangent: TangentModel, x: Any, v: Mapping[str, Tensor], onednn: bool) -> Tensor:
    with evaluating(tangent.model), plain_kernels(onednn):
        tangents = {n: t.to(tangent.params[n].dtype) for n, t in v.items()}
        return torch.func.jvp(lambda p: tangent.apply(p, x), (tangent.params,), (tangents,))[1]


def _by_two_pulls(tangent: TangentModel, x: Any, v: Mapping[str, Tensor]) -> Tensor:
    """J v as the derivative of u ↦ Jᵀu, which is linear, pulled back by v."""
    held: list[Tensor] = []

    def zero(out: Tensor) -> Tensor:
        held.append(torch.zeros_like(out, requires_grad=True))
        return held[0]

    with evaluating(tangent.model), plain_kernels(onednn=False):
        leaves, grads = pullback(tangent, x, zero)
        used = [(g, v[n].to(g)) for n, g in zip(leaves, grads, strict=True) if g is not None and g.requires_grad]
        if not used:
            return torch.zeros_like(held[0])
        along = [t for _, t in used]
        return tangent.backward(leaves, lambda: torch.autograd.grad([g for g, _ in used], held[0], along)[0])


def _by_rows(tangent: TangentModel, x: Any, v: Mapping[str, Tensor]) -> Tensor:
    """J v by a reverse pass for each output, which nothing but plain autograd takes part in."""
    f, vector = tangent(x), tangent.layout.flatten(v)
    with evaluating(tangent.model), plain_kernels():
        rows = one_by_one(tangent, x, units(f), tangent.layout.names)
    return (rows @ vector.to(rows)).reshape(f.shape)
