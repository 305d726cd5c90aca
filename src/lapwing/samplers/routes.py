"""A density of many chains by one run: batched over chains by vmap, traced once for inputs of each shape, and replayed.

    replayed     the operations of value and gradient in order, without Python, autograd or vmap: the fastest
    batched      vmap and autograd, where tracing fails
    one by one   chain after chain, where torch cannot batch the network over weights; with a warning

A route is used after it has given, at the first inputs of each shape, what the chains give one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.func import vmap
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from lapwing import tree
from lapwing.errors import warn
from lapwing.tangent.kernels import out_of_memory

aten = torch.ops.aten
VIEWS = {aten.detach.default, aten.view.default, aten._unsafe_view.default, aten.expand.default, aten.slice.Tensor}
SCALED = {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.pow.Tensor_Scalar}  # by one
FEW = 4  # chains that a route is held to
Found = tuple[Tensor, ...]  # values (k,), and gradients (k, d) where they are asked for
Run = Callable[..., Found]  # of q (k, d) and the tensors of a batch


@dataclass(eq=False)
class Routes:
    """`density`(q (d,), x, y, share) of one chain, made one of k chains; `eps` the rounding of its dtype."""

    density: Callable[[Tensor, Any, Tensor, Any], Tensor]
    eps: float
    known: dict[Any, Run] = field(default_factory=dict)
    held: dict[Any, tuple[Any, Tensor, Run, list[Tensor]]] = field(default_factory=dict)  # batches that come again
    alone: bool = False  # torch cannot batch this network

    def __call__(self, q: Tensor, x: Any, y: Tensor, share: Any, own: bool, slopes: bool) -> Found:
        """Of chains q (k, d) on a batch, which is each chain's own, tensors (k, b, ...), or one for all of them; share:
        what the density takes besides, hashable."""
        again = (id(x), id(y), share, slopes, q.shape)
        if again in self.held and not own:
            _, _, run, tensors = self.held[again]
            return run(q, *tensors)
        leaves, spec = pytree.tree_flatten((tree.plain(x), y))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        key = (share, own, slopes, q.shape, str(spec), *((t.shape, t.dtype) for t in tensors))
        if key not in self.known:
            one = partial(self._one, leaves=leaves, spec=spec, share=share)
            found, self.known[key] = self._proved(one, q, tensors, own, slopes)
            return found
        if not own:
            self.held[again] = x, y, self.known[key], tensors  # it keeps them alive, so that no id is another's
        return self.known[key](q, *tensors)

    def _one(self, q: Tensor, *tensors: Tensor, leaves: list[Any], spec: Any, share: Any) -> Tensor:
        """The density of one chain, from the tensors among the leaves of its batch."""
        left = iter(tensors)
        filled = [next(left) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        x, y = pytree.tree_unflatten(filled, spec)
        return self.density(q, x, y, share)

    def _proved(
        self, one: Callable[..., Tensor], q: Tensor, tensors: list[Tensor], own: bool, slopes: bool
    ) -> tuple[Found, Run]:
        """The fastest route that gives what chains give one by one, with that."""
        single = _graded(partial(_one_by_one, one, own=own), slopes)
        if self.alone:
            return single(q, *tensors), single
        truth = single(q[:FEW], *(t[:FEW] if own else t for t in tensors))
        batched = _graded(vmap(one, in_dims=(0, *[0 if own else None] * len(tensors))), slopes)
        for make in (lambda: _folded(make_fx(batched)(q, *tensors)), lambda: batched):
            try:
                run = make()
                found = run(q, *tensors)
            except RuntimeError as error:
                if out_of_memory(error):
                    raise
                continue
            if all(_near(a[:FEW], b, self.eps) for a, b in zip(found, truth, strict=True)):
                return found, run
        self.alone = True
        warn(
            "chains run one by one: torch cannot batch this network over weights (vmap), or gives other numbers",
        )
        return single(q, *tensors), single


def _graded(density: Callable[..., Tensor], slopes: bool) -> Run:
    """A density of k chains, with its gradients if those are asked for."""

    def run(q: Tensor, *tensors: Tensor) -> Found:
        if not slopes:
            with torch.no_grad():
                return (density(q, *tensors),)
        with torch.enable_grad():
            q = q.detach().requires_grad_()
            value = density(q, *tensors)
            (slope,) = torch.autograd.grad(value, q, torch.ones(len(q), dtype=value.dtype, device=q.device))
        return value.detach(), slope

    return run


def _folded(traced: GraphModule) -> GraphModule:
    """The same operations but for those that do nothing, and those that need no input: they are done now, once. Where
    some write in place, or draw random numbers, all are left as they are."""
    graph = traced.graph
    kinds = {node.target for node in graph.nodes if isinstance(node.target, OpOverload)}
    if any(kind._schema.is_mutable or torch.Tag.nondeterministic_seeded in kind.tags for kind in kinds):
        return traced
    done: dict[Node, Any] = {}
    for node in list(graph.nodes):
        if node.op == "get_attr":
            done[node] = getattr(traced, node.target)
        elif node.op == "call_function" and _does_nothing(node):
            node.replace_all_uses_with(node.args[0])
        elif node.op == "call_function" and all(one in done for one in node.all_input_nodes):
            args, kwargs = map_arg((node.args, node.kwargs), done.__getitem__)
            done[node] = node.target(*args, **kwargs)
            if isinstance(done[node], Tensor):
                name = f"_folded_{node.name}"
                traced.register_buffer(name, done[node])
                with graph.inserting_before(node):
                    constant = graph.get_attr(name)
                done[constant] = done[node]
                node.replace_all_uses_with(constant)
    graph.eliminate_dead_code()
    traced.recompile()
    return traced


def _does_nothing(node: Node) -> bool:
    """Views of the same shape, and products with one, which batching and autograd leave behind."""
    before, after = (getattr(one, "meta", {}).get("val") for one in (node.args[0] if node.args else None, node))
    if before is None or after is None:
        return False
    if node.target in VIEWS:
        return before.shape == after.shape and before.stride() == after.stride()
    return bool(node.target in SCALED and node.args[1] == 1 and before.dtype == after.dtype)


def _one_by_one(one: Callable[..., Tensor], q: Tensor, *tensors: Tensor, own: bool) -> Tensor:
    return torch.stack([one(q[i], *(t[i] if own else t for t in tensors)) for i in range(len(q))])


def _near(found: Tensor, truth: Tensor, eps: float) -> bool:
    """To rounding; what is not finite must not be so for both."""
    fine = torch.isfinite(truth)
    if found.shape != truth.shape or not torch.equal(torch.isfinite(found), fine):
        return False
    return bool((found - truth)[fine].norm() <= 1e3 * eps * truth[fine].norm())
