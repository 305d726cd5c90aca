"""Classes that files name. A class enters when it is defined; what has not entered cannot be saved, nor loaded.

A file holds a class's family ("likelihood", "prior", "structure"), name and module, and never code. Loading looks the
name up here, and imports nothing but rooms of the package itself (`later`), so a file cannot make Python run anything.
A class that is defined again (a notebook cell that is run again) takes the place of the one before. Classes that are
defined inside a function have no name of their own, since each call defines another, and are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

from lapwing.errors import InvalidValue

OWN = "lapwing"  # stands for all its modules: a file survives a class that moves between them

_classes: dict[tuple[str, str, str], type] = {}
_later: list[Callable[[], None]] = []


def enter(family: str, cls: type) -> None:
    """Let files name a class; the bases of likelihoods and priors call this for every subclass."""
    _classes[(family, *_name(cls))] = cls


def later(define: Callable[[], None]) -> None:
    """Put off what defines classes of the package, until a file holds a name that has not entered."""
    _later.append(define)


def complete() -> None:
    """Define what was put off."""
    while _later:
        _later.pop()()


def name_of(family: str, cls: type, how: str) -> tuple[str, str]:
    """The module and the name under which a file knows a class; `how` says how to let one enter."""
    module, name = _name(cls)
    if "<locals>" in name:
        raise InvalidValue(
            f"cannot save a {cls.__name__}: it is defined inside a function, so no file can name it; define the class "
            "at the top level of a module"
        )
    if not is_dataclass(cls):
        raise InvalidValue(f"cannot save a {cls.__name__}: a file holds the fields of a dataclass; make it one")
    known = _classes.get((family, module, name))
    if known is None:
        raise InvalidValue(f"cannot save a {cls.__name__}: {how}, so that files can name it")
    if _fields(known) != _fields(cls):
        raise InvalidValue(
            f"cannot save a {cls.__name__}: the class was defined again with the fields {_fields(known)}, and this "
            f"object has {_fields(cls)}; fit again with the new class"
        )
    return module, name


def find(family: str, module: str, name: str, where: Any) -> type:
    """The class that a file names, if it has entered."""
    if (family, module, name) not in _classes:
        complete()
    found = _classes.get((family, module, name))
    if found is not None and is_dataclass(found):
        return found
    if module == OWN:
        raise InvalidValue(f"{where} holds a {family} {name!r}, which this version of Lapwing does not know")
    do = "define the class again" if module == "__main__" else f"import {module}"
    raise InvalidValue(f"{where} holds a {family} {name!r} of the module {module}, which is not loaded; {do} first")


def _name(cls: type) -> tuple[str, str]:
    own = cls.__module__ == OWN or cls.__module__.startswith(f"{OWN}.")
    return OWN if own else cls.__module__, cls.__qualname__


def _fields(cls: Any) -> list[str]:
    return [f.name for f in fields(cls)]
