"""J v and Jᵀu for u = middle(f, J v), by one run of the network: forward mode beside the graph of the reverse pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lapwing.tangent import proof
from lapwing.tangent.evaluating import evaluating
from lapwing.tangent.kernels import plain_kernels

if TYPE_CHECKING:
    from lapwing.tangent.model import TangentModel

Middle = Callable[[Tensor, Tensor], Tensor]  # f, J v -> u, (n, ..., c) each


def through(tangent: TangentModel, x: Any, v: Tensor, middle: Middle) -> tuple[Tensor, Tensor]:
    """J v (n, ..., c) and Jᵀu (p,) for v (p,), by one run; by a run each where that cannot be, or is not right."""
    run = lambda: _through(tangent, x, v, middle)  # noqa: E731
    found = proof.attempt(tangent, "through", proof.shapes(x), run, lambda found: _proved(tangent, x, v, *found))
    if found is not None:
        jv, _, pulled = found
        return jv, tangent.layout.flatten(pulled).to(v)
    f, pushed = tangent.jvps(x, v.unsqueeze(0))
    jv = pushed[0].detach()
    return jv, tangent.vjps(x, middle(f.detach(), jv).unsqueeze(0))[0]


def _proved(tangent: TangentModel, x: Any, v: Tensor, jv: Tensor, u: Tensor, pulled: dict[str, Tensor]) -> bool:
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
