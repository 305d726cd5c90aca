"""Convolutions in 1, 2 and 3 dimensions: a linear map shared over output positions, one block a group.

The inputs of a position are its patch in the order (kernel offsets, channel of the group): with channels running
fastest a patch is a few long runs of memory, which copies several times faster than the weight's own order.

Transposed convolutions are convolutions of their input with zeros put between its elements and the kernel reversed,

    out[y] = Σ_k x₀[y + padding − dilation·k] W[k],   x₀[stride·j] = x[j], zero elsewhere

so they are linear maps shared over *output* positions, with the bias joined, exactly like convolutions.

Windows are views, which tracing cannot follow; there they are the layer's own outputs under unit kernels.
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
        return _by_group(patches(_padded(module, x), module.kernel_size, module.stride, module.dilation), module)

    def traced(self, module: Any, x: Tensor, n: Any) -> Tensor:
        z = self.convolved(module, x, _unit_kernels(self.shape(module), module, x))  # (n', b i, *out)
        b, _, i = self.shape(module)
        return z.unflatten(1, (b, i)).flatten(3).permute(0, 3, 1, 2).reshape(n, -1, b, i)

    def convolved(self, module: Any, x: Tensor, kernels: Tensor) -> Tensor:
        """What the layer gives with kernels (o', channels, *offsets) of any number o', and without a bias."""
        return module._conv_forward(x, kernels, None)

    def outputs(self, module: Any, g: Tensor, n: int) -> Tensor:
        k, m, b = g.shape[0], g.shape[1], module.groups
        g = g.reshape(k, m, b, module.out_channels // b, -1).permute(0, 1, 4, 2, 3)  # (k, n', s, b, o)
        return g if m == n else g.reshape(k, n, -1, *g.shape[3:])


@register(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
class ConvTransposeRule(ConvRule):
    transposed = True

    def inputs(self, module: Any, x: Tensor, n: int) -> Tensor:
        dims = len(module.kernel_size)
        windows = patches(_spread(module, x), module.kernel_size, (1,) * dims, module.dilation)
        windows = windows.flip(tuple(range(1 + dims, 1 + 2 * dims)))  # offset k of the kernel looks back by k
        return _by_group(windows, module)

    def convolved(self, module: Any, x: Tensor, kernels: Tensor) -> Tensor:
        stored = kernels.unflatten(0, (module.groups, -1)).transpose(1, 2).flatten(0, 1)  # (b channels, o', *offsets)
        run = getattr(F, f"conv_transpose{len(module.kernel_size)}d")
        return run(
            x, stored, None, module.stride, module.padding, module.output_padding, module.groups, module.dilation
        )


def _unit_kernels(shape: tuple[int, int, int], module: Any, like: Tensor) -> Tensor:
    """Kernels that each pick one input of a window, (b i, channels, *offsets)."""
    b, _, i = shape
    unit = torch.eye(i, dtype=like.dtype, device=like.device).unflatten(1, (math.prod(module.kernel_size), -1))
    return unit.mT.reshape(i, -1, *module.kernel_size).repeat(b, *[1] * (1 + len(module.kernel_size)))


def _by_group(windows: Tensor, module: Any) -> Tensor:
    """Windows (n, *out, *k, b c) as (n, *out, b, *k, c), without a copy."""
    dims = len(module.kernel_size)
    return windows.unflatten(-1, (module.groups, -1)).movedim(1 + 2 * dims, 1 + dims)


def _padded(module: Any, x: Tensor) -> Tensor:
    """The padded input with channels last, (n, *in, c), contiguous."""
    if module.padding == "valid":
        amounts = [0] * (2 * len(module.stride))
    elif module.padding == "same":
        amounts = module._reversed_padding_repeated_twice
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
    lengths = zip(x.shape[1:-1], kernel, stride, dilation, strict=True)
    size = [(length - d * (k - 1) - 1) // s + 1 for length, k, s, d in lengths]
    first, *steps, last = x.stride()
    moves = [s * step for s, step in zip(stride, steps, strict=True)]
    offsets = [d * step for d, step in zip(dilation, steps, strict=True)]
    return torch.as_strided(x, (len(x), *size, *kernel, x.shape[-1]), (first, *moves, *offsets, last))


def _spread(module: Any, x: Tensor) -> Tensor:
    """x₀ with channels last and padded so that each window of the kernel's reach is one output's, (n, *in, c)."""
    long = [(size - 1) * s + 1 for size, s in zip(x.shape[2:], module.stride, strict=True)]
    out = x.new_zeros(len(x), *long, x.shape[1])
    out[(slice(None), *[slice(None, None, s) for s in module.stride])] = x.movedim(1, -1)
    amounts = [0, 0]  # the channels
    each = zip(module.kernel_size, module.dilation, module.padding, module.output_padding, strict=True)
    for k, d, p, more in reversed(list(each)):
        reach = d * (k - 1) - p
        amounts += [reach, reach + more]  # a negative amount cuts
    return F.pad(out, amounts).contiguous()
