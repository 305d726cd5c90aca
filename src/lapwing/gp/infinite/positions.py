"""Layers that move along positions: convolutions, average pools, and the end of positions.

    Conv       K ↦ w mean_δ K(s + δ, t + δ) + b,   δ in the window       Θ ↦ K' + w mean_δ Θ(s + δ, t + δ)
    Pool       K ↦ mean_{δ, ε} K(s + δ, t + ε)                           and Θ
    Flatten    K ↦ mean_s K(s, s)                                        and Θ

w and b are the variances of weights, N(0, w / fan_in), and of biases. Padding counts as zeros in a mean.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from lapwing.errors import InvalidValue
from lapwing.gp.infinite.moments import Moments


@dataclass(frozen=True)
class Window:
    """Of a convolution or a pool along one axis of positions."""

    size: int
    stride: int = 1
    dilation: int = 1
    padding: tuple[int, int] = (0, 0)
    circular: bool = False

    def mean(self, k: Tensor, axes: tuple[int, ...]) -> Tensor:
        """The mean over the window, which moves along these axes together."""
        for axis in axes:
            k = self._padded(k, axis)
        count = (k.shape[axes[0]] - self.dilation * (self.size - 1) - 1) // self.stride + 1
        if count < 1:
            raise InvalidValue(f"a window of {self.size} does not fit {k.shape[axes[0]]} positions, padding included")
        total = torch.zeros(())
        for i in range(self.size):
            start = i * self.dilation
            some: list[slice] = [slice(None)] * k.ndim
            for axis in axes:
                some[axis] = slice(start, start + (count - 1) * self.stride + 1, self.stride)
            total = total + k[tuple(some)]
        return total / self.size

    def _padded(self, k: Tensor, axis: int) -> Tensor:
        before, after = self.padding
        if not before and not after:
            return k
        length = k.shape[axis]
        if self.circular:
            return k.index_select(axis, torch.arange(-before, length + after) % length)
        shape = list(k.shape)
        shape[axis] += before + after
        out = k.new_zeros(shape)
        out.narrow(axis, before, length).copy_(k)
        return out


@dataclass(frozen=True)
class Conv:
    """A convolution: one window for each axis of positions."""

    pools: ClassVar[bool] = False
    weighs: ClassVar[bool] = True
    windows: tuple[Window, ...]
    inputs: int | None = None
    bias: bool = True

    def __call__(self, moments: Moments, w: float, b: float) -> Moments:
        """K ↦ w mean_δ K(s + δ, t + δ) + b."""
        moments.check_axes(len(self.windows), "a convolution")
        moments.check_channels(self.inputs)
        d = moments.axes

        def moved(k: Tensor, lead: int, full: bool = moments.full) -> Tensor:
            for i, window in enumerate(self.windows):
                k = window.mean(k, (lead + i, lead + d + i) if full else (lead + i,))
            return k

        return moments.mapped(moved, lambda m: moved(m, 1, full=False)).weighed(w, b * self.bias)


@dataclass(frozen=True)
class Pool:
    """An average pool: one window for each axis of positions, or none, which is the mean over all positions."""

    pools: ClassVar[bool] = True
    weighs: ClassVar[bool] = False
    windows: tuple[Window, ...] | None = None

    def __call__(self, moments: Moments, w: float, b: float) -> Moments:
        """K ↦ mean_{δ, ε} K(s + δ, t + ε)."""
        d = moments.axes
        moments.check_axes(max(1, d) if self.windows is None else len(self.windows), "a pool")
        if self.windows is None:
            both = lambda k, lead: k.mean(tuple(range(lead, lead + 2 * d)))  # noqa: E731
            return replace(moments.mapped(both, lambda m: m.flatten(1).mean(1)), axes=0, full=False)

        def pooled(k: Tensor, lead: int, sides: int = 2) -> Tensor:
            for side in range(sides):
                for i, window in enumerate(self.windows or ()):
                    k = window.mean(k, (lead + side * d + i,))
            return k

        return moments.mapped(pooled, lambda m: pooled(m, 1, sides=1))


@dataclass(frozen=True)
class Flatten:
    """All positions of all units side by side."""

    pools: ClassVar[bool] = False
    weighs: ClassVar[bool] = False

    def __call__(self, moments: Moments, w: float, b: float) -> Moments:
        """K ↦ mean_s K(s, s)."""
        d = moments.axes
        if not d:
            return moments

        def flat(k: Tensor, lead: int) -> Tensor:
            if moments.full:
                s = k.shape[lead : lead + d].numel()
                k = k.reshape(*k.shape[:lead], s, s).diagonal(dim1=-2, dim2=-1)
            return k.flatten(lead).mean(lead)

        s = moments.cross.shape[moments.lead : moments.lead + d].numel()
        channels = None if moments.channels is None else s * moments.channels
        made = moments.mapped(flat, lambda m: m.flatten(1).mean(1))
        return replace(made, axes=0, full=False, channels=channels, gaussian=moments.gaussian and s == 1)
