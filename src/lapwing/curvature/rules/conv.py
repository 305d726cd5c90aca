"""Convolutions in 1, 2 and 3 dimensions: a linear map shared over output positions, one block a group.

The inputs of a position are its patch, (channel of the group, kernel offsets) in the order of the weight.
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

    def inputs(self, module: Any, x: Tensor, n: int) -> Tensor:
        dims, b = len(module.kernel_size), module.groups
        windows = patches(_padded(module, x), module.kernel_size, module.stride, module.dilation)  # (n', c, *out, *k)
        windows = windows.unflatten(1, (b, -1))  # (n', b, c, *out, *k)
        order = (0, *range(3, 3 + dims), 1, 2, *range(3 + dims, 3 + 2 * dims))
        return windows.permute(order)  # (n', *out, b, c, *k), without a copy

    def outputs(self, module: Any, g: Tensor, n: int) -> Tensor:
        k, m, b = g.shape[0], g.shape[1], module.groups
        g = g.reshape(k, m, b, module.out_channels // b, -1).permute(0, 1, 4, 2, 3)  # (k, n', s, b, o)
        return g if m == n else g.reshape(k, n, -1, *g.shape[3:])


def _padded(module: Any, x: Tensor) -> Tensor:
    if isinstance(module.padding, str):  # 'same' or 'valid'
        amounts = (
            module._reversed_padding_repeated_twice if module.padding == "same" else [0] * (2 * len(module.stride))
        )
    else:
        amounts = [amount for side in reversed(module.padding) for amount in (side, side)]
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    return F.pad(x, amounts, mode=mode) if any(amounts) else x


def patches(x: Tensor, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]) -> Tensor:
    """All windows of x (n, c, *in) as a view, (n, c, *out, *kernel)."""
    x = x.contiguous()
    size = [
        (length - d * (k - 1) - 1) // s + 1
        for length, k, s, d in zip(x.shape[2:], kernel, stride, dilation, strict=True)
    ]
    steps = x.stride()[2:]
    moves = [s * step for s, step in zip(stride, steps, strict=True)]
    offsets = [d * step for d, step in zip(dilation, steps, strict=True)]
    return torch.as_strided(x, (*x.shape[:2], *size, *kernel), (*x.stride()[:2], *moves, *offsets))
