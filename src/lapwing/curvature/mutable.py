"""What changes of an object while a pass runs, taken out as a tree and put back.

An object names its attributes that change as `mutable`: tensors, numbers, lists, tuples and dicts of them, and objects
that have `mutable` too. What is put back must be like what a pass begins with; an object whose attributes begin as None
or empty may have `check()`, which raises unless it can go on from what it was given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lapwing.errors import BrokenFile


def check_like(now: Any, kept: Any, name: str) -> None:
    """Raise unless a tree is like the one that a pass begins with: what is None or empty there may be anything."""
    if isinstance(kept, Tensor) and kept.is_floating_point() and not bool(torch.isfinite(kept).all()):
        raise BrokenFile(f"it has NaN or infinite values in {name}")
    if isinstance(now, dict) and isinstance(kept, dict):
        if now and now.keys() != kept.keys():
            raise BrokenFile(f"it has {list(kept)} in {name}, not {list(now)}")
        for key, value in kept.items():
            check_like(now.get(key), value, f"{name}.{key}")
    elif isinstance(now, Tensor) and isinstance(kept, Tensor):
        if (now.shape, now.dtype) != (kept.shape, kept.dtype):
            raise BrokenFile(f"it has {kept.dtype} {tuple(kept.shape)} in {name}, not {now.dtype} {tuple(now.shape)}")
    elif now is not None and type(now) is not type(kept):
        raise BrokenFile(f"it has a {type(kept).__name__} in {name}, not a {type(now).__name__}")


def check_objects(thing: Any) -> None:
    """Ask each object with `check` whether it can go on."""
    if isinstance(thing, dict):
        for value in thing.values():
            check_objects(value)
    elif hasattr(thing, "mutable"):
        for name in thing.mutable:
            check_objects(getattr(thing, name))
        if hasattr(thing, "check"):
            thing.check()


def held(thing: Any) -> Any:
    """What changes of an object, as a tree."""
    if hasattr(thing, "mutable"):
        return {name: held(getattr(thing, name)) for name in thing.mutable}
    if isinstance(thing, dict):
        return {key: held(value) for key, value in thing.items()}
    return thing


def put_back(thing: Any, kept: dict[str, Any]) -> None:
    """The inverse of `held`."""
    for name in thing.mutable:
        now = getattr(thing, name)
        if hasattr(now, "mutable"):
            put_back(now, kept[name])
        elif isinstance(now, dict) and any(hasattr(value, "mutable") for value in now.values()):
            for key, value in now.items():
                put_back(value, kept[name][key])
        else:
            setattr(thing, name, kept[name])
