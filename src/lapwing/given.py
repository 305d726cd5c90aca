"""What a user gives, checked for its type: numbers, counts, levels, targets, generators. And what is not installed."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from lapwing.errors import InvalidValue, Unsupported


def real(value: Any, what: str) -> Tensor:
    """A number or tensor, as a tensor in float64."""
    if isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype == torch.bool):
        raise InvalidValue(f"{what} must be a real number, or a tensor of them; got {_short(value)}")
    if isinstance(value, Tensor) and (value.is_complex() or value.is_meta):
        where = "on the meta device, which holds no values" if value.is_meta else f"{value.dtype}"
        raise InvalidValue(f"{what} is {where}; give real numbers")
    try:
        return torch.as_tensor(value, dtype=torch.float64)  # 0.1 is not float32's 0.10000000149
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidValue(f"{what} must be a real number, or a tensor of them; got {_short(value)}") from error


def whole(value: Any, what: str, least: int = 0) -> int:
    """A whole number."""
    if not isinstance(value, Integral) or isinstance(value, bool) or value < least:
        raise InvalidValue(f"{what} must be a whole number, at least {least}; got {_short(value)}")
    return int(value)


def memory(value: Any, what: str = "memory_budget", least: int = 1) -> int:
    """Bytes of memory, a whole number: 2e9 is one, and so is 2_000_000_000."""
    whole = isinstance(value, Integral) or (isinstance(value, Real) and float(value).is_integer())
    if not whole or isinstance(value, bool) or value < least:
        raise InvalidValue(f"{what} is a whole number of bytes, at least {least} (2e9 is 2 GB); got {_short(value)}")
    return int(value)


def share(value: Any, what: str) -> float:
    """A number strictly between 0 and 1."""
    if not isinstance(value, Real) or not 0 < float(value) < 1:
        raise InvalidValue(f"{what} lies strictly between 0 and 1, got {_short(value)}")
    return float(value)


def targets(y: Any, device: torch.device) -> Tensor:
    """Targets y, on a device."""
    if not isinstance(y, Tensor):
        raise InvalidValue(f"targets must be a tensor, got {_short(y)}")
    if y.is_meta:
        raise InvalidValue("the targets are on the meta device, which holds no values; load the data first")
    return y.to(device)


def figure(what: str, **options: Any) -> Any:
    """An empty figure of matplotlib; an error that names the extra, where it is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        why = f"{what} needs matplotlib, which is not installed; pip install 'lapwing[demo]'"
        raise Unsupported(why) from error
    return Figure(layout="constrained", **options)


def generator(value: Any) -> torch.Generator:
    """The user's generator; None means one with seed 0."""
    if value is not None and not isinstance(value, torch.Generator):
        raise InvalidValue(
            f"generator must be a torch.Generator, got {_short(value)}; use torch.Generator().manual_seed(0)"
        )
    return value or torch.Generator().manual_seed(0)


def _short(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:40] + '...'}"
