"""What goes into a file, as JSON and tensors, and what comes out, held to its types before anything is made of it.

    tree      numbers, strings and None as they are; {"tensor": name}, {"list": []}, {"tuple": []}, {"dict": {}}
    plain     a dataclass of numbers, strings and tuples of them: {field: value}
    object    a dataclass that files can name (registry.py): {"kind", "module", "fields": {field: tree}}

Entries and tensors are taken out one by one, and what is left over in the end is an error.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from lapwing import registry
from lapwing.errors import BrokenFile, InvalidValue, LapwingError

DEPTH = 64  # of a tree
HOW = {
    "likelihood": "derive it from lw.likelihoods.Likelihood",
    "posterior": "register it with lw.posterior.register",
    "prior": "derive it from lw.priors.Prior",
    "structure": "decorate its class with @lw.curvature.register, above @dataclass",
}


# -- entries -------------------------------------------------------------------------------------------------------


def _is(*types: type) -> Callable[[Any], bool]:
    return lambda x: type(x) in types


def _all(kind: str) -> Callable[[Any], bool]:
    return lambda x: type(x) in (list, tuple) and all(KINDS[kind](v) for v in x)


KINDS: dict[str, Callable[[Any], bool]] = {  # as annotations spell them; in JSON a tuple is a list
    "int": _is(int),
    "float": _is(int, float),
    "bool": _is(bool),
    "str": _is(str),
    "str | None": lambda x: x is None or type(x) is str,
    "int | None": lambda x: x is None or type(x) is int,
    "tuple[str, ...]": _all("str"),
    "tuple[float, ...]": _all("float"),
    "tuple[int, int, int]": lambda x: _all("int")(x) and len(x) == 3,
    "list": _is(list),
    "dict": _is(dict),
    "dict | None": lambda x: x is None or type(x) is dict,
}


@dataclass
class Entries:
    """An object of JSON: each entry is taken once."""

    left: dict[str, Any]
    where: str = "it"

    def __post_init__(self) -> None:
        if type(self.left) is not dict:
            raise self.broken(f"should be an object, and is {_short(self.left)}")
        self.left = dict(self.left)

    def broken(self, what: str) -> BrokenFile:
        """The error that something is wrong with these entries."""
        return BrokenFile(f"{self.where} {what}")

    def take(self, key: str, kind: str, least: float | None = None, most: float = math.inf) -> Any:
        """The value of a key, of a kind of KINDS; of numbers, finite ones from `least` on, if told."""
        if key not in self.left:
            raise self.broken(f"has no {key!r}")
        value = self.left.pop(key)
        if not KINDS[kind](value):
            raise self.broken(f"has {key} = {_short(value)}, which is no {kind}")
        if least is not None and value is not None and not (least <= value <= most and math.isfinite(value)):
            raise self.broken(f"has {key} = {_short(value)}, which is not within [{least}, {most}]")
        return value

    def done(self) -> None:
        """Raise if entries are left that nobody took."""
        if self.left:
            raise self.broken(f"has {sorted(self.left)}, which nobody knows")


def _short(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


# -- tensors -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """What a tensor of numbers must be like."""

    shapes: tuple[tuple[int, ...], ...]  # one of these
    squares: bool = False  # sums of squares: no entry is negative
    gram: bool = False  # matrices (..., p, p) of the first shape are symmetric; with squares, sums of x xᵀ
    orthonormal: bool = False  # the rows of matrices (..., k, p)
    optional: bool = False


@dataclass
class Tensors:
    """The tensors of a file: each is taken once."""

    left: dict[str, Tensor]
    path: Any

    def __post_init__(self) -> None:
        self.left = dict(self.left)

    def broken(self, what: str) -> BrokenFile:
        """The error that something is wrong with the tensors."""
        return BrokenFile(f"it {what}")

    def take(self, name: str, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor, of a shape and dtype if given; each is taken once."""
        if name not in self.left:
            raise self.broken(f"has no tensor {name!r}")
        t = self.left.pop(name)
        if shape is not None and tuple(t.shape) != shape:
            raise self.broken(f"has {name} of shape {tuple(t.shape)}, not {shape}")
        if dtype is not None and t.dtype != dtype:
            raise self.broken(f"has {name} in {t.dtype}, not {dtype}")
        return t

    def finite(self, name: str, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor of real numbers, all of them finite."""
        t = self.take(name, shape, dtype)
        if not t.is_floating_point() or not bool(torch.isfinite(t).all()):
            raise self.broken(f"has {name} in {t.dtype}, which must be finite real numbers")
        return t

    def under(self, prefix: str) -> list[str]:
        """Names that begin so, without that."""
        return [name.removeprefix(prefix) for name in self.left if name.startswith(prefix)]

    def expected(self, prefix: str, wanted: dict[str, Expected]) -> dict[str, Tensor]:
        """The tensors of this prefix, which must be those that are wanted."""
        there = self.under(prefix)
        missing = [name for name, one in wanted.items() if name not in there and not one.optional]
        unknown = [name for name in there if name not in wanted]
        if missing or unknown:
            raise self.broken(f"lacks {[prefix + n for n in missing]} and has {[prefix + n for n in unknown]} instead")
        return {name: self._one(prefix + name, wanted[name]) for name in there}

    def _one(self, name: str, wanted: Expected) -> Tensor:
        t = self.take(name)
        if tuple(t.shape) not in wanted.shapes or t.dtype not in (torch.float32, torch.float64):
            shapes = " or ".join(map(str, wanted.shapes))
            raise self.broken(f"has {name} of shape {tuple(t.shape)} in {t.dtype}, not {shapes} of floats")
        low, high = (float(v) for v in t.aminmax()) if t.numel() else (0.0, 0.0)
        if not math.isfinite(low) or not math.isfinite(high):
            raise self.broken(f"has NaN or infinite values in {name}")
        size, least = max(abs(low), abs(high)), low
        if wanted.gram and tuple(t.shape) == wanted.shapes[0]:
            if not _symmetric(t, size):
                raise self.broken(f"has a matrix {name} that is not symmetric")
            least = float(t.diagonal(dim1=-2, dim2=-1).min()) + 1e-6 * size  # it may have been rounded
        if wanted.squares and least < 0:
            raise self.broken(f"has {least:.3g} in {name}, which is a sum of squares")
        if wanted.orthonormal and not _orthonormal(t):
            raise self.broken(f"has a basis {name} that is not orthonormal")
        return t

    def done(self) -> None:
        """Raise if tensors are left that nobody took."""
        if self.left:
            raise self.broken(f"has tensors {sorted(self.left)}, which nobody knows")


def _symmetric(t: Tensor, size: float) -> bool:
    """(..., p, p), to rounding; a few rows at a time, as matrices can be as large as memory allows."""
    p = t.shape[-1]
    for start in range(0, p, 512):
        rows = slice(start, start + 512)
        if float((t[..., rows, :] - t[..., :, rows].mT).abs().max()) > 1e-3 * size:
            return False
    return True


def _orthonormal(t: Tensor) -> bool:
    """Whether T Tᵀ v = v for T (..., k, p) and a vector v, to rounding."""
    v = torch.arange(1, t.shape[-2] + 1).to(t).cos().expand(t.shape[:-1]).unsqueeze(-1)
    return bool(((t @ (t.mT @ v) - v).norm(dim=-2) <= 1e-3 * v.norm(dim=-2)).all())


# -- trees ---------------------------------------------------------------------------------------------------------


def pack_tree(x: Any, prefix: str, tensors: dict[str, Tensor]) -> Any:
    """What of a tree goes into the header; its tensors go into `tensors`, under names that begin with the prefix."""
    if isinstance(x, Tensor):
        while prefix in tensors:  # {"a": {"b": x}, "a.b": y}
            prefix += "_"
        tensors[prefix] = x
        return {"tensor": prefix}
    if type(x) in (list, tuple):
        return {type(x).__name__: [pack_tree(v, f"{prefix}.{i}", tensors) for i, v in enumerate(x)]}
    if isinstance(x, Mapping) and all(type(k) is str for k in x):
        return {"dict": {k: pack_tree(v, f"{prefix}.{k}", tensors) for k, v in x.items()}}
    if x is None or isinstance(x, (bool, int, float, str)):
        return x
    raise InvalidValue(
        f"{prefix} is a {type(x).__name__}, which a file cannot hold; give tensors, numbers, strings, and lists, "
        "tuples or dicts (with strings as keys) of them. lw.curvature.Full(form='primal') keeps no inputs"
    )


def unpack_tree(spec: Any, tensors: Tensors, device: torch.device | None = None, depth: int = 0) -> Any:
    """The inverse."""
    if spec is None or type(spec) in (bool, int, float, str):
        return spec
    if type(spec) is not dict or len(spec) != 1 or depth > DEPTH:
        raise tensors.broken(f"has {_short(spec)} where a tree should be")
    ((kind, value),) = spec.items()
    if kind == "tensor" and type(value) is str:
        return tensors.take(value).to(device)
    if kind == "dict" and type(value) is dict:
        return {k: unpack_tree(v, tensors, device, depth + 1) for k, v in value.items()}
    if kind in ("list", "tuple") and type(value) is list:
        parts = [unpack_tree(v, tensors, device, depth + 1) for v in value]
        return tuple(parts) if kind == "tuple" else parts
    raise tensors.broken(f"has {_short(spec)} where a tree should be")


# -- dataclasses ---------------------------------------------------------------------------------------------------


def pack_plain(thing: Any, names: Iterable[str] | None = None) -> dict[str, Any]:
    """Numbers, strings and tuples of them, by field."""
    return {name: getattr(thing, name) for name in (names or [f.name for f in fields(thing)])}


def unpack_plain(cls: Any, spec: Any, where: str, names: Iterable[str] | None = None) -> dict[str, Any]:
    """The fields of a dataclass, each of the type that it is annotated with."""
    entries, annotated = Entries(spec, where), _annotations(cls)
    found = {name: entries.take(name, annotated[name]) for name in (names or annotated)}
    entries.done()
    return {name: tuple(value) if type(value) is list else value for name, value in found.items()}


@contextlib.contextmanager
def sound(what: str) -> Iterator[None]:
    """Where something is made of what a file holds: whatever is said against that, the file is broken."""
    try:
        yield
    except BrokenFile:
        raise
    except LapwingError as error:
        raise BrokenFile(f"{what} cannot be: {error}") from error
    except Exception as error:  # a class that is not Lapwing's, or torch, refuses in words of its own
        raise BrokenFile(f"{what} cannot be ({type(error).__name__}: {error})") from error


def pack_object(thing: Any, family: str, prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """A dataclass that files can name, with its fields; those that its class names as `unsaved` belong to one fit."""
    module, name = registry.name_of(family, type(thing), HOW[family])
    kept: dict[str, Any] = {}
    for field in _kept(type(thing)):
        value = getattr(thing, field)
        if is_dataclass(value):
            kept[field] = {"object": pack_object(value, family, f"{prefix}{field}.", tensors)}
        else:
            kept[field] = pack_tree(value, f"{prefix}{field}", tensors)
    return {"kind": name, "module": module, "fields": kept}


def unpack_object(
    spec: Any, family: str, tensors: Tensors, depth: int = 0, bound: Mapping[str, Any] | None = None
) -> Any:
    """The inverse, with what its class names as `unsaved`. What comes out must hold what the file holds."""
    entries = Entries(spec, f"its {family}")
    if depth > DEPTH:
        raise tensors.broken(f"has a {family} of more than {DEPTH} levels")
    cls = registry.find(family, entries.take("module", "str"), entries.take("kind", "str"), tensors.path)
    held = Entries(entries.take("fields", "dict"), f"its {cls.__name__}")
    entries.done()
    annotated = _annotations(cls)
    given = {}
    for name in _kept(cls):
        value = held.left.get(name)
        if name not in held.left or (annotated[name] in ("int", "float", "bool", "str")):
            value = held.take(name, annotated[name])
        elif type(value) is dict and value.keys() == {"object"}:
            value = unpack_object(held.left.pop(name)["object"], family, tensors, depth + 1)
        else:
            value = unpack_tree(held.left.pop(name), tensors)
        given[name] = value
    held.done()
    with sound(f"its {cls.__name__}"):
        found = cls(**given, **(bound or {}))
    for name, value in given.items():
        if not _equal(getattr(found, name), value):
            raise tensors.broken(f"has a {cls.__name__} whose {name} does not stay as it is saved, {_short(value)}")
    return found


def _annotations(cls: Any) -> dict[str, str]:
    """Of its fields, as their source spells them."""
    return {f.name: f.type if isinstance(f.type, str) else getattr(f.type, "__name__", "") for f in fields(cls)}


def _kept(cls: Any) -> list[str]:
    return [f.name for f in fields(cls) if f.init and f.name not in getattr(cls, "unsaved", ())]


def _equal(a: Any, b: Any) -> bool:
    """Of trees and objects that were made of them, in values, dtypes and shapes."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        both = isinstance(a, Tensor) and isinstance(b, Tensor)
        return both and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.cpu(), b.cpu())
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    return True if is_dataclass(a) else a == b
