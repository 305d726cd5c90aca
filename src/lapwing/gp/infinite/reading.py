"""The infinitely wide network of which an nn.Sequential is one of finite width: its layers, read off one by one.

Widths are forgotten, and so are the values of the weights: weights become N(0, weight_variance / fan_in) and biases, of
layers that have them, N(0, bias_variance). Scales and shifts of a layer norm stay 1 and 0. What has no rule is named.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn

from lapwing.errors import Unsupported
from lapwing.gp.infinite.activations import LeakyReLU
from lapwing.gp.infinite.kernel import Kernel, as_activation
from lapwing.gp.infinite.layers import Act, Affine, BranchSum, Layer, LayerNorm
from lapwing.gp.infinite.positions import Conv, Flatten, Pool, Window

Reader = Callable[[Any], tuple[Layer, ...]]
R = TypeVar("R", bound=Reader)


class Residual(nn.Module):
    """x + branch(x), or shortcut(x) + branch(x): a module for an nn.Sequential, of finite width or read off by `of`."""

    def __init__(self, branch: nn.Module, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.branch, self.shortcut = branch, shortcut

    def forward(self, x: Tensor) -> Tensor:
        """The sum of both."""
        return (x if self.shortcut is None else self.shortcut(x)) + self.branch(x)


def of(model: nn.Module, kind: str = "nngp", weight_variance: float = 2.0, bias_variance: float = 0.0) -> Kernel:
    """The kernel of a network as it becomes infinitely wide: `kind` "nngp" or "ntk". model: an nn.Sequential of linear
    layers, convolutions, average pools, activations, layer norms and `Residual` blocks, nested as you like; its weights
    are not looked at. `register` adds rules."""
    return Kernel(read(model), kind, weight_variance, bias_variance)


def register(*kinds: type[nn.Module]) -> Callable[[R], R]:
    """Let `of` read modules of a class by a function that gives their layers: as a decorator."""

    def add(reader: R) -> R:
        for one in kinds:
            read.register(one)(reader)
        return reader

    return add


@functools.singledispatch
def read(module: Any) -> tuple[Layer, ...]:
    """The layers of a module."""
    known = sorted(one.__name__ for one in read.registry if one is not object)
    raise Unsupported(
        f"{type(module).__name__} has no rule at infinite width; those of {', '.join(known)} are known, and "
        "lw.gp.infinite.register adds others"
    )


@read.register
def _(module: nn.Sequential) -> tuple[Layer, ...]:
    return tuple(layer for one in module for layer in read(one))


@read.register
def _(module: Residual) -> tuple[Layer, ...]:
    return (BranchSum(read(module.branch), () if module.shortcut is None else read(module.shortcut)),)


@read.register
def _(module: nn.Linear) -> tuple[Layer, ...]:
    return (Affine(module.in_features, module.bias is not None),)


@register(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def _convolution(module: Any) -> tuple[Layer, ...]:
    if module.groups != 1 or module.padding_mode not in ("zeros", "circular"):
        raise Unsupported(
            f"a convolution has a rule at infinite width with one group, padded by zeros or in a circle; got {module}"
        )
    d, pads = len(module.kernel_size), module._reversed_padding_repeated_twice  # last axis first
    padding = [(pads[2 * (d - 1 - i)], pads[2 * (d - 1 - i) + 1]) for i in range(d)]
    sizes = zip(module.kernel_size, module.stride, module.dilation, padding, strict=True)
    windows = tuple(Window(*one, circular=module.padding_mode == "circular") for one in sizes)
    return (Conv(windows, module.in_channels, module.bias is not None),)


@register(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
def _pool(module: Any) -> tuple[Layer, ...]:
    d = {nn.AvgPool1d: 1, nn.AvgPool2d: 2, nn.AvgPool3d: 3}[type(module)]
    size, stride, padding = (_each(v, d) for v in (module.kernel_size, module.stride, module.padding))
    other = module.ceil_mode or getattr(module, "divisor_override", None) is not None
    if other or (any(padding) and not module.count_include_pad):
        raise Unsupported(
            f"an average pool has a rule at infinite width if all its windows have one size; got {module}"
        )
    windows = [Window(k, s, 1, (p, p)) for k, s, p in zip(size, stride, padding, strict=True)]
    return (Pool(tuple(windows)),)


@register(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
def _global_pool(module: Any) -> tuple[Layer, ...]:
    size = module.output_size
    if any(v != 1 for v in (size if isinstance(size, tuple) else (size,))):
        raise Unsupported(f"an adaptive pool has a rule at infinite width if it leaves one position; got {module}")
    return (Pool(),)


@read.register
def _(module: nn.Flatten) -> tuple[Layer, ...]:
    if (module.start_dim, module.end_dim) != (1, -1):
        raise Unsupported(f"a flattening has a rule at infinite width if it keeps the inputs alone; got {module}")
    return (Flatten(),)


@read.register
def _(module: nn.LayerNorm) -> tuple[Layer, ...]:
    return (LayerNorm(module.eps, len(module.normalized_shape) - 1),)


@read.register
def _(module: nn.GroupNorm) -> tuple[Layer, ...]:
    if module.num_groups != 1:
        raise Unsupported(f"a group norm has a rule at infinite width with one group; got {module}")
    return (LayerNorm(module.eps),)


@register(nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
def _nothing(module: nn.Module) -> tuple[Layer, ...]:
    return ()  # a dropout is one in eval mode, where networks are used


@read.register
def _(module: nn.ReLU) -> tuple[Layer, ...]:
    return (Act(LeakyReLU()),)


@read.register
def _(module: nn.LeakyReLU) -> tuple[Layer, ...]:
    return (Act(LeakyReLU(module.negative_slope)),)


@register(
    nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.Softplus, nn.ELU, nn.CELU, nn.SELU, nn.Mish, nn.Softsign, nn.LogSigmoid,
    nn.Tanhshrink,
)  # fmt: skip
def _integrated(module: nn.Module) -> tuple[Layer, ...]:
    return (Act(as_activation(module)),)


def _each(value: Any, axes: int) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,) * axes
