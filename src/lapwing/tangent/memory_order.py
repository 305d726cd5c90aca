"""Convolutions with channels last: in float32 on a CPU their reverse pass takes two thirds of the time.

The weights of 2-D convolutions are given with channels last, and activations follow. Where such a tensor is flattened
it is copied to the usual order, in which `view` works too, and its gradient comes back with channels last: a kernel
that gets two tensors in different orders is ten times slower. A network that gives other outputs or gradients so, or
none, runs as it is (`ordered` finds out on a few examples, once).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lapwing import tree
from lapwing.tangent.evaluating import evaluating
from lapwing.tangent.kernels import plain_kernels

if TYPE_CHECKING:
    from lapwing.tangent.model import TangentModel

LAST = torch.channels_last
FLATTENS = {Tensor.view, Tensor.reshape, Tensor.flatten, torch.reshape, torch.flatten}


def channels_last(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Four-dimensional weights with channels last, the others as they are."""
    return {n: p.clone(memory_format=LAST) if p.ndim == 4 else p for n, p in params.items()}


def convolves_on_cpu(model: nn.Module, params: Mapping[str, Tensor]) -> bool:
    """Whether there is something to gain: 2-D convolutions in float32 on a CPU."""
    convolves = any(p.ndim == 4 for p in params.values()) and any(isinstance(m, nn.Conv2d) for m in model.modules())
    return convolves and all(p.dtype == torch.float32 and p.device.type == "cpu" for p in params.values())


class ChannelsLast(TorchFunctionMode):
    """Runs a network whose weights are `channels_last`; reverse: with a graph for a reverse pass (which torch.func
    does not take)."""

    def __init__(self, reverse: bool = True) -> None:
        super().__init__()
        self.reverse = reverse

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FLATTENS and args and isinstance(args[0], Tensor) and not args[0].is_contiguous():
            flat = Flattened.apply(args[0]) if self.reverse else args[0].contiguous()
            args = (flat, *args[1:])
        return func(*args, **(kwargs or {}))


class Flattened(torch.autograd.Function):
    """A tensor in the usual order, whose gradient comes back in the order that it had."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.last = x.ndim == 4 and x.is_contiguous(memory_format=LAST)
        return x.contiguous()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.contiguous(memory_format=LAST) if ctx.last else g

    @staticmethod
    def jvp(ctx: Any, v: Tensor) -> Tensor:
        return v.contiguous()


def ordered(tangent: TangentModel, x: Any, reverse: bool) -> tuple[dict[str, Tensor], AbstractContextManager[Any]]:
    """θ* in the order in which the network runs fastest, and the mode to apply it in."""
    facts = tangent.facts
    if facts.channels_last is None:
        facts.channels_last = convolves_on_cpu(tangent.model, tangent.params) and _same_results(tangent, x)
    return (tangent.channels_last, ChannelsLast(reverse)) if facts.channels_last else (tangent.params, nullcontext())


def _same_results(tangent: TangentModel, x: Any) -> bool:
    """Whether the outputs of a few examples, and the gradient of their sum, are the same with channels last, up to
    rounding. Checkpointed layers run again outside of the mode, and may fail there."""
    few = tree.rows_of(x, slice(0, 4)) if tangent.separable(x) else x

    def run(params: Mapping[str, Tensor], order: AbstractContextManager[Any]) -> tuple[Tensor, Tensor]:
        leaves = {n: p.detach().requires_grad_() for n, p in params.items()}
        ends = list(leaves.values())
        with evaluating(tangent.model), plain_kernels(), torch.enable_grad():
            with order:
                f = tangent.apply(leaves, few)
            grads = tangent.backward(leaves, lambda: torch.autograd.grad(f.sum(), ends, allow_unused=True))
        filled = [torch.zeros_like(t) if g is None else g for g, t in zip(grads, ends, strict=True)]
        return f.detach(), torch.cat([g.reshape(-1) for g in filled])

    try:
        each = zip(run(tangent.params, nullcontext()), run(tangent.channels_last, ChannelsLast()), strict=True)
        return all(bool((a - b).abs().max() <= 1e-3 * a.abs().max()) for a, b in each)
    except Exception:  # it looks at strides, in a way of its own; what else it may be will show as it is run
        return False
