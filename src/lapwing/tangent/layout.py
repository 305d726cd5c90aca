"""Convolutions with channels last: in float32 on a CPU their reverse pass then takes half the time.

The weights of 2-D convolutions are given with channels last, and activations follow. Where such a tensor is flattened
it is copied to the usual order, in which `view` works too, and its gradient comes back with channels last: a kernel
that gets two tensors in different orders is ten times slower. A network that gives other outputs so, or none, runs as
it is; `chosen` finds out on a few examples, once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lapwing import tree
from lapwing.tangent.kernels import plain_kernels
from lapwing.tangent.linearize import TangentModel, evaluating

LAST = torch.channels_last
FLATTENS = {Tensor.view, Tensor.reshape, Tensor.flatten, torch.reshape, torch.flatten}
FEW = 4  # examples to try it on
SAME = 1e-3  # of the largest output: rounding, and no more


def channels_last(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Four-dimensional weights with channels last, the others as they are."""
    return {n: p.clone(memory_format=LAST) if p.ndim == 4 else p for n, p in params.items()}


def chosen(tangent: TangentModel, x: Any) -> bool:
    """Whether to run the network so."""
    route = tangent.route
    if "channels_last" not in route and "recomputes" in route:  # known once the layers have been looked at
        route["channels_last"] = not route["recomputes"] and _apt(tangent) and _same(tangent, x)
    return bool(route.get("channels_last"))


def _apt(tangent: TangentModel) -> bool:
    weights = [p for p in tangent.params.values() if p.ndim == 4]
    convolves = bool(weights) and any(isinstance(m, nn.Conv2d) for m in tangent.model.modules())
    return convolves and all(p.dtype == torch.float32 and p.device.type == "cpu" for p in tangent.params.values())


def _same(tangent: TangentModel, x: Any) -> bool:
    few = tree.rows_of(x, slice(0, FEW)) if tangent.separable(x) else x
    f = tangent(few)
    try:
        with torch.no_grad(), evaluating(tangent.model), plain_kernels(), ChannelsLast():
            other = tangent.apply(channels_last(tangent.params), few)
    except RuntimeError:  # it looks at strides, in a way of its own
        return False
    return bool((f - other).abs().max() <= SAME * f.abs().max())


class ChannelsLast(TorchFunctionMode):
    """Runs a network whose weights are `channels_last`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FLATTENS and args and isinstance(args[0], Tensor) and not args[0].is_contiguous():
            args = (Flattened.apply(args[0]), *args[1:])
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
