"""Jᵀu: cotangents pulled back to the weights and summed over examples, u (n, ..., c) -> (p,).

By plain autograd, which takes every network and by which every other route is judged; several cotangents at once by its
batching rules, where those are right. For u = middle(f, J v), in the run that makes J v: forward mode beside the graph
of the reverse pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lapwing.tangent import proof
from lapwing.tangent.evaluating import evaluating
from lapwing.tangent.kernels import any_batching_rule, plain_kernels

if TYPE_CHECKING:
    from lapwing.tangent.model import TangentModel

Middle = Callable[[Tensor, Tensor], Tensor]  # f, J v -> u, (n, ..., c) each


def pullback(
    tangent: TangentModel, x: Any, cotangent: Callable[[Tensor], Tensor], names: tuple[str, ...] | None = None
) -> tuple[dict[str, Tensor], Any]:
    """Leaves and Jᵀu for some parameters (all by default) and u = cotangent(f), None where no output depends on one;
    differentiable in u where u requires grad."""
    with torch.enable_grad():
        leaves = {n: tangent.params[n].detach().requires_grad_() for n in names or tangent.params}
        params = {**tangent.params, **leaves}
        out = tangent.apply(params, x)
        u = cotangent(out)
        if not out.requires_grad:
            return leaves, (None,) * len(leaves)
        ends, keep = list(leaves.values()), u.requires_grad
        reverse = lambda: torch.autograd.grad(out, ends, u, create_graph=keep, allow_unused=True)  # noqa: E731
        return leaves, tangent.backward(params, reverse)


def vjps(tangent: TangentModel, x: Any, u: Tensor) -> Tensor:
    """Jᵀu for several cotangents u (k, n, ..., c) by one run of the network: (k, p)."""

    def right(found: dict[str, Tensor]) -> bool:
        return proof.pulls(tangent, x, u, found, lambda at, x, u: _pulls(at, x, u, batched=True))

    found = None
    if len(u) > 1 and tangent.columns_at_once:
        key = proof.shapes(x, u)
        found = proof.attempt(tangent, "vjps", key, lambda: _pulls(tangent, x, u, batched=True), right)
    return _flat(tangent, _pulls(tangent, x, u, batched=False) if found is None else found, len(u))


def _pulls(tangent: TangentModel, x: Any, u: Tensor, batched: bool) -> dict[str, Tensor]:
    """{name: (k, *shape)} for the parameters that the outputs depend on."""
    params, order = tangent.ordered(x)
    with evaluating(tangent.model), plain_kernels(), torch.enable_grad():
        leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
        with order:
            out = tangent.apply(leaves, x)
        if not out.requires_grad:
            return {}
        ends = list(leaves.values())

        def pull(some: Tensor) -> Any:
            settings = {"retain_graph": True, "allow_unused": True, "is_grads_batched": batched}
            return torch.autograd.grad(out, ends, some.to(out), **settings)

        if batched:
            with any_batching_rule():
                grads = tangent.backward(leaves, lambda: pull(u))
        else:
            columns = tangent.backward(leaves, lambda: [pull(one) for one in u])
            grads = [None if g[0] is None else torch.stack(g) for g in zip(*columns, strict=True)]
    return {n: g for n, g in zip(leaves, grads, strict=True) if g is not None}


def _flat(tangent: TangentModel, grads: Mapping[str, Tensor], k: int) -> Tensor:
    filled = [grads[n] if n in grads else p.new_zeros(k, *p.shape) for n, p in tangent.params.items()]
    return torch.cat([g.reshape(k, -1) for g in filled], -1)


def through(tangent: TangentModel, x: Any, v: Tensor, middle: Middle) -> tuple[Tensor, Tensor]:
    """J v (n, ..., c) and Jᵀu (p,) for v (p,), by one run; by a run each where that cannot be, or is not right."""
    run = lambda: _through(tangent, x, v, middle)  # noqa: E731
    right = lambda found: _proved_through(tangent, x, v, *found)  # noqa: E731
    found = proof.attempt(tangent, "through", proof.shapes(x), run, right)
    if found is not None:
        jv, _, pulled = found
        return jv, tangent.layout.flatten(pulled).to(v)
    f, pushed = tangent.jvps(x, v.unsqueeze(0))
    jv = pushed[0].detach()
    return jv, tangent.vjps(x, middle(f.detach(), jv).unsqueeze(0))[0]


def _proved_through(tangent: TangentModel, x: Any, v: Tensor, jv: Tensor, u: Tensor, pulled: dict[str, Tensor]) -> bool:
    along, one = v.unsqueeze(0), {n: g.unsqueeze(0) for n, g in pulled.items()}

    def push_again(at: TangentModel, x: Any) -> Tensor:
        return _through(at, x, v, lambda _, jv: jv)[0].unsqueeze(0)

    def pull_again(at: TangentModel, x: Any, u: Tensor) -> dict[str, Tensor]:
        return {n: g.unsqueeze(0) for n, g in _through(at, x, v, lambda *_: u[0])[2].items()}

    pushes = proof.pushes(tangent, x, along, jv.unsqueeze(0), push_again)
    return pushes and proof.pulls(tangent, x, u.unsqueeze(0), one, pull_again)


def _through(tangent: TangentModel, x: Any, v: Tensor, middle: Middle) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """J v, u, and Jᵀu by name. It raises where there is no forward mode, or a checkpoint saves no tangents."""
    along = tangent.layout.unflatten(v)
    params, order = tangent.ordered(x)
    with evaluating(tangent.model), plain_kernels(), torch.enable_grad():
        leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
        with forward_ad.dual_level(), order:
            tangents = {n: torch.empty_like(leaf).copy_(along[n]) for n, leaf in leaves.items()}  # in its order
            duals = {n: forward_ad.make_dual(leaf, tangents[n]) for n, leaf in leaves.items()}
            f, pushed = forward_ad.unpack_dual(tangent.apply(duals, x))
            jv = torch.zeros_like(f) if pushed is None else pushed.detach().clone()
        u = middle(f.detach(), jv).to(f)  # outside the dual level, lest the reverse pass be pushed forward too
        grads: Any = (None,) * len(leaves)
        if f.requires_grad:
            reverse = lambda: torch.autograd.grad(f, list(leaves.values()), u, allow_unused=True)  # noqa: E731
            grads = tangent.backward(leaves, reverse)
    filled = {n: torch.zeros_like(t) if g is None else g for (n, t), g in zip(leaves.items(), grads, strict=True)}
    return jv, u, filled
