"""Convolutions in 1, 2 and 3 dimensions: a linear map shared over output positions, one block a group.

The inputs of a position are its patch in the order (kernel offsets, channel of the group): with channels running
fastest a patch is a few long runs of memory, which copies several times faster than the weight's own order.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lapwing.curvature.rules.base import Rule, register


@register(nn.Conv1d, nn.Conv2d, nn.Conv3d)
class ConvRule(Rule):
    def shape(self, module: Any) -> tuple[int, int, int]:
        b = module.groups
        return b, module.out_channels // b, module.in_channels // b * math.prod(module.kernel_size)

    def kernel(self, module: Any) -> int:
        return math.prod(module.kernel_size)

    def inputs(self, module: Any, x: Tensor, n: int) -> Tensor:
        dims, b = len(module.kernel_size), module.groups
        windows = patches(_padded(module, x), module.kernel_size, module.stride, module.dilation)  # (n', *out, *k, c)
        windows = windows.unflatten(-1, (b, -1))
        order = (*range(1 + dims), 1 + 2 * dims, *range(1 + dims, 1 + 2 * dims), 2 + 2 * dims)
        return windows.permute(order)  # (n', *out, b, *k, c), without a copy

    def outputs(self, module: Any, g: Tensor, n: int) -> Tensor:
        k, m, b = g.shape[0], g.shape[1], module.groups
        g = g.reshape(k, m, b, module.out_channels // b, -1).permute(0, 1, 4, 2, 3)  # (k, n', s, b, o)
        return g if m == n else g.reshape(k, n, -1, *g.shape[3:])


def _padded(module: Any, x: Tensor) -> Tensor:
    """The padded input with channels last, (n, *in, c), contiguous."""
    if isinstance(module.padding, str):  # 'same' or 'valid'
        amounts = (
            module._reversed_padding_repeated_twice if module.padding == "same" else [0] * (2 * len(module.stride))
        )
    else:
        amounts = [amount for side in reversed(module.padding) for amount in (side, side)]
    if any(amounts) and module.padding_mode != "zeros":
        x, amounts = F.pad(x, amounts, mode=module.padding_mode), [0] * len(amounts)
    last = x.movedim(1, -1)
    if not any(amounts):
        return last.contiguous()
    sides = list(zip(amounts[-2::-2], amounts[-1::-2], strict=True))  # of each dimension, in order
    sizes = [left + size + right for (left, right), size in zip(sides, x.shape[2:], strict=True)]
    out = x.new_zeros(len(x), *sizes, x.shape[1])
    inside = [slice(left, left + size) for (left, _), size in zip(sides, x.shape[2:], strict=True)]
    out[(slice(None), *inside)] = last
    return out


def patches(x: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]) -> Tensor:
    """All windows of x (n, *in, c) as a view, (n, *out, *kernel, c)."""
    size = [
        (length - d * (k - 1) - 1) // s + 1
        for length, k, s, d in zip(x.shape[1:-1], kernel, stride, dilation, strict=True)
    ]
    first, *steps, last = x.stride()
    moves = [s * step for s, step in zip(stride, steps, strict=True)]
    offsets = [d * step for d, step in zip(dilation, steps, strict=True)]
    return torch.as_strided(x, (len(x), *size, *kernel, x.shape[-1]), (first, *moves, *offsets, last))
