"""What a user gives, checked for its type: arrays, numbers, counts, levels, targets, generators, words. And what is not
installed."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from lapwing.errors import InvalidValue, Unsupported

F = TypeVar("F", bound=Callable[..., Any])


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


def array(value: Any) -> Any:
    """A NumPy array, a frame or series (pandas, polars), or a list of numbers as a tensor of the same dtype; anything
    else as it is."""
    if isinstance(value, Tensor):
        return value
    if tabular(value):
        value = _table(value)
    elif isinstance(value, list) and value and _numbers(value):
        value = _rectangular(value)
    return _tensor(value) if isinstance(value, np.ndarray) else value


def is_array(value: Any) -> bool:
    """Whether `array` makes a tensor of it."""
    return isinstance(value, (Tensor, np.ndarray)) or tabular(value) or (isinstance(value, list) and _numbers(value))


def tabular(value: Any) -> bool:
    """Whether it is a frame or a series, of whatever library."""
    return hasattr(value, "to_numpy") and (hasattr(value, "dtype") or hasattr(value, "dtypes"))


def _numbers(value: Any) -> bool:
    """Whether a list holds numbers alone, or lists of them."""
    if isinstance(value, list):
        return bool(value) and all(_numbers(one) for one in value)
    return isinstance(value, (Real, np.generic))


def _rectangular(value: list[Any]) -> np.ndarray:
    try:
        return np.array(value)
    except ValueError as error:
        raise InvalidValue(f"lists of numbers must be of equal lengths: {error}") from error


def _table(value: Any) -> np.ndarray:
    """A frame's columns, or a series, as numbers."""
    found = value.to_numpy()
    names = list(getattr(value, "columns", ()))
    if found.dtype.kind in "biuf" or not names:
        return found
    columns = [value[name].to_numpy() for name in names]
    for name, column in zip(names, columns, strict=True):
        if column.dtype.kind not in "biuf":
            raise InvalidValue(
                f"column {name!r} holds {column.dtype}, which is no number (or has values missing); encode it as "
                "numbers, or leave it out"
            )
    return np.column_stack(columns)


def _tensor(found: np.ndarray) -> Tensor:
    if found.dtype.kind not in "biufc":
        raise InvalidValue(
            f"an array holds {found.dtype}, which is no number (or has values missing); encode it as numbers: classes "
            "as 0, 1, 2, ..."
        )
    found = np.ascontiguousarray(found, found.dtype.newbyteorder("="))
    found = found if found.flags.writeable else found.copy()  # a view of a frame: torch would warn of it
    try:
        return torch.from_numpy(found)
    except TypeError as error:
        raise InvalidValue(f"an array of {found.dtype} has no dtype in torch; cast it to float64") from error


def near(word: Any, known: Iterable[str]) -> str:
    """ "; did you mean 'categorical'?" where a word is near one that is known; else ""."""
    found = difflib.get_close_matches(word, list(known), 1, 0.6) if isinstance(word, str) else []
    return f"; did you mean {found[0]!r}?" if found else ""


def keywords(elsewhere: Mapping[str, str]) -> Callable[[F], F]:
    """A decorator: a keyword that a function does not take is an error that names the one that is meant, and so are
    arguments that are too many. elsewhere: what other libraries call things, and what to say here."""

    def decorate(function: F) -> F:
        known = inspect.signature(function).parameters
        placed = [name for name, one in known.items() if one.kind is one.POSITIONAL_OR_KEYWORD]

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            if len(args) > len(placed):
                pair = "; inputs and targets are one argument, (X, y)" if "data" in placed else ""
                names = ", ".join(placed)
                raise Unsupported(
                    f"{function.__name__}() takes {names} by their places, got {len(args)} arguments{pair}"
                )
            for name in kwargs.keys() - known.keys():
                hint = f"; use {elsewhere[name]}" if name in elsewhere else near(name, known)
                raise Unsupported(f"{function.__name__}() takes no {name}={hint}")
            return function(*args, **kwargs)

        return run  # type: ignore[return-value]

    return decorate


def targets(y: Any, device: torch.device) -> Tensor:
    """Targets y, on a device."""
    y = array(y)
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
