"""Checks of what likelihoods are given: hyperparameters that are positive, targets that belong to outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lapwing import given
from lapwing.errors import InvalidValue


def as_positive(name: str, value: Any) -> Tensor:
    """A float64 tensor of one value, or one for each output."""
    value = given.real(value, name)
    if value.ndim > 1 or not value.numel():
        raise InvalidValue(f"{name} must be one value, or one for each output, got shape {tuple(value.shape)}")
    if not bool((torch.isfinite(value) & (value > 0)).all()):
        raise InvalidValue(f"{name} must be positive and finite, got {value.tolist()}")
    return value


def check_deviation(name: str, value: Tensor) -> None:
    """A standard deviation has a variance and a precision, so its square and their inverse must be float64 too."""
    if not bool(((value > 1e-150) & (value < 1e150)).all()):
        raise InvalidValue(
            f"{name} is a standard deviation between 1e-150 and 1e150, got {value.tolist()}; its square is beyond "
            "float64: scale the targets"
        )


def check_same_shape(f: Tensor, y: Tensor) -> None:
    """One target for each output."""
    if y.shape != f.shape:
        hint = "; add the output dimension with y.unsqueeze(-1)" if y.ndim == f.ndim - 1 else ""
        raise InvalidValue(f"targets of shape {tuple(y.shape)} do not match outputs {tuple(f.shape)}{hint}")


def check_labels(f: Tensor, y: Tensor, classes: int, name: str) -> None:
    """One of 0, ..., classes − 1 for each row of outputs."""
    if y.shape != f.shape[:-1]:
        raise InvalidValue(
            f"targets of shape {tuple(y.shape)} do not match outputs {tuple(f.shape)}; "
            f"give labels of shape {tuple(f.shape[:-1])}"
        )
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise InvalidValue(f"{name} targets must be integer class labels, got {y.dtype}; use y.long()")
    if y.numel() and (int(y.min()) < 0 or int(y.max()) >= classes):
        raise InvalidValue(f"labels run from {int(y.min())} to {int(y.max())}, outside 0..{classes - 1}")


def check_real(f: Tensor, y: Tensor, name: str) -> None:
    """A real number for each output."""
    if not y.is_floating_point():
        raise InvalidValue(
            f"{name} targets must be floating point, got {y.dtype}; for class labels use 'categorical', "
            "for real targets use y.float()"
        )
    check_same_shape(f, y)
    check_finite(y)


def check_finite(y: Tensor) -> None:
    """Raise if targets hold NaN or infinite values."""
    if not torch.isfinite(y).all():
        raise InvalidValue("the targets hold NaN or infinite values; clean the data before fitting")
