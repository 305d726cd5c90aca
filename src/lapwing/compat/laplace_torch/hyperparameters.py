"""Prior precision, prior mean and noise as laplace-torch takes them: numbers or tensors, kept with their gradient.

prior_precision   one number, one for each parameter tensor, or one for each weight    (1,), (layers,) or (p,)
prior_mean        one number, or one for each weight                                   () or (p,)
sigma_noise       one standard deviation                                               ()
"""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from lapwing.errors import InvalidValue
from lapwing.operators import Diagonal
from lapwing.operators.memo import Grouping


def as_tensor(value: Any, name: str, like: Tensor) -> Tensor:
    """A number or a tensor of at most one dimension, in the dtype and on the device of a tensor."""
    if isinstance(value, Real):
        return torch.tensor(float(value), dtype=like.dtype, device=like.device)
    if not isinstance(value, Tensor):
        raise InvalidValue(f"{name} must be a number or a tensor, got {type(value).__name__}")
    if value.ndim > 1:
        raise InvalidValue(f"{name} must have at most one dimension, got {tuple(value.shape)}")
    return value.to(like)


def as_precision(value: Any, lengths: tuple[int, ...], like: Tensor) -> Tensor:
    """A prior precision of one of these lengths, always of one dimension."""
    out = as_tensor(value, "prior_precision", like).reshape(-1)
    if len(out) not in (1, *lengths):
        raise InvalidValue(f"prior_precision must have 1 value or {' or '.join(map(str, lengths))}, got {len(out)}")
    return out


def as_mean(value: Any, size: int, like: Tensor) -> Tensor:
    """A prior mean: one number, or one for each weight."""
    out = as_tensor(value, "prior_mean", like)
    if out.ndim and len(out) not in (1, size):
        raise InvalidValue(f"prior_mean must have 1 value or {size}, one for each weight; got {len(out)}")
    return out


def as_noise(value: Any, like: Tensor) -> Tensor:
    """A standard deviation of the noise, 0-dim."""
    out = as_tensor(value, "sigma_noise", like)
    if out.numel() != 1:
        raise InvalidValue(f"sigma_noise is one standard deviation for all outputs, got {out.numel()} values")
    return out.reshape(())


@dataclass(frozen=True, eq=False)
class Groups:
    """Which parameter tensor each weight belongs to: what a precision for each of them needs, made once."""

    sizes: tuple[int, ...]  # elements of each parameter tensor
    by_layer: Grouping = field(default_factory=Grouping)
    by_weight: Grouping = field(default_factory=Grouping)
    index: list[Tensor] = field(default_factory=list)  # made when it is asked for

    @property
    def size(self) -> int:
        """p."""
        return sum(self.sizes)

    def operator(self, precision: Tensor) -> Diagonal:
        """A (p, p) of a precision of 1, p or as many values as there are parameter tensors, with its gradient."""
        values = precision.to(torch.float64)
        if len(values) == 1:
            return Diagonal(values, self.size)
        if len(values) == self.size:
            return Diagonal(values, self.size, grouping=self.by_weight)
        if not self.index:
            each = torch.tensor(self.sizes, device=values.device)
            self.index.append(torch.arange(len(self.sizes), device=values.device).repeat_interleave(each))
        return Diagonal(values, self.size, self.index[0], grouping=self.by_layer)
