"""Convolutions with channels last: in float32 on a CPU their reverse pass takes two thirds of the time.

The weights of 2-D convolutions are given with channels last, and activations follow. Where such a tensor is flattened
it is copied to the usual order, in which `view` works too, and its gradient comes back with channels last: a kernel
that gets two tensors in different orders is ten times slower. A network that gives other outputs or gradients so, or
none, runs as it is (`TangentModel.ordered` finds out on a few examples, once).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

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
