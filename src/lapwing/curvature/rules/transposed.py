"""Transposed convolutions: convolutions of their input with zeros put between its elements and the kernel reversed.

    out[y] = Σ_k x₀[y + padding − dilation·k] W[k],   x₀[stride·j] = x[j], zero elsewhere

so they are linear maps shared over *output* positions, with the bias joined, exactly like convolutions.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from lapwing.curvature.rules.base import register
from lapwing.curvature.rules.conv import ConvRule, patches


@register(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
class ConvTransposeRule(ConvRule):
    transposed = True

    def shape(self, module: Any) -> tuple[int, int, int]:
        b = module.groups
        return b, module.out_channels // b, module.in_channels // b * math.prod(module.kernel_size)

    def inputs(self, module: Any, x: Tensor, n: int) -> Tensor:
        dims, b = len(module.kernel_size), module.groups
        spread = _spread(module, x)
        windows = patches(spread, module.kernel_size, (1,) * dims, module.dilation)
        windows = windows.flip(tuple(range(1 + dims, 1 + 2 * dims)))  # offset k of the kernel looks back by k
        windows = windows.unflatten(-1, (b, -1))
        order = (*range(1 + dims), 1 + 2 * dims, *range(1 + dims, 1 + 2 * dims), 2 + 2 * dims)
        return windows.permute(order)  # (n, *out, b, *k, c)


def _spread(module: Any, x: Tensor) -> Tensor:
    """x₀ with channels last and padded so that each window of the kernel's reach is one output's, (n, *in, c)."""
    sizes = x.shape[2:]
    long = [(size - 1) * s + 1 for size, s in zip(sizes, module.stride, strict=True)]
    out = x.new_zeros(len(x), *long, x.shape[1])
    out[(slice(None), *[slice(None, None, s) for s in module.stride])] = x.movedim(1, -1)
    amounts = [0, 0]  # the channels
    for k, d, p, more in reversed(
        list(zip(module.kernel_size, module.dilation, module.padding, module.output_padding, strict=True))
    ):
        reach = d * (k - 1) - p
        amounts += [reach, reach + more]  # a negative amount cuts
    return F.pad(out, amounts).contiguous()
