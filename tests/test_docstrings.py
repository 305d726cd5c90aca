"""Every public function, class, method and property says what it gives: one line or more.

An override may leave it to what it overrides, as `help` does. The fields of a dataclass are no docstring.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any

import lapwing as lw


def modules() -> Iterator[Any]:
    for found in pkgutil.walk_packages(lw.__path__, "lapwing."):
        try:
            yield importlib.import_module(found.name)
        except ImportError as error:  # an integration without its library, which names the extra
            if "pip install 'lapwing[" not in str(error):
                raise


def members(thing: Any) -> Iterator[tuple[str, Any]]:
    """What a module or a class defines itself and shows to others: functions, classes and properties."""
    for name, value in vars(thing).items():
        if name.startswith("_"):
            continue
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        elif isinstance(value, functools.cached_property):
            value = value.func
        elif not isinstance(value, property) and not inspect.isclass(value):
            value = inspect.unwrap(value) if callable(value) else None
        home = value.fget if isinstance(value, property) else value
        if getattr(home, "__qualname__", None) and home.__module__.startswith("lapwing"):
            yield name, value


def documented(thing: Any) -> bool:
    text = inspect.getdoc(thing) or ""
    return bool(text) and not (inspect.isclass(thing) and text.startswith(f"{thing.__name__}("))


def silent(module: Any) -> list[str]:
    out = []
    for name, thing in members(module):
        if thing.__module__ != module.__name__ or thing.__name__.startswith("_"):
            continue
        out += [] if documented(thing) else [name]
        if inspect.isclass(thing):
            out += [f"{name}.{key}" for key, one in members(thing) if not documented(one)]
    return out


def test_what_is_public_says_what_it_gives() -> None:
    """One test of all rooms: collecting a test for each would import every optional library in every worker."""
    rooms = list(modules())
    assert [room.__name__ for room in rooms if not room.__doc__] == []
    assert [f"{room.__name__}.{name}" for room in rooms for name in silent(room)] == []
