"""Files: one safetensors file, tensors plus a JSON header, and a digest of all of it. No pickle anywhere.

    8 bytes                                    the length of the JSON
    {"__metadata__": {"digest": d, kind: header}, name: {dtype, shape, data_offsets}, ...}
    bytes of the tensors

d is BLAKE2b over every byte of the file but its own 64 characters, whose place is fixed. A file is written under
another name and renamed, so that it is whole or not there. It is read once, through one open file, so that it is one
file though another takes its place meanwhile. Its kind is a key of the metadata: "lapwing" for what `la.save` wrote,
"lapwing.checkpoint" for a fit that is not done.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from lapwing import locks, tree
from lapwing.errors import BrokenFile, InvalidValue

SAVED, CHECKPOINT = "lapwing", "lapwing.checkpoint"
WHAT = {SAVED: "a saved fit: read it with lw.load", CHECKPOINT: "a checkpoint: give it to lw.laplace(checkpoint=...)"}
DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    **{"BOOL": torch.bool, "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
START = b'{"__metadata__":{"digest":"'  # of the JSON; the digest follows
DIGEST = 64  # characters
LONGEST = 100_000_000  # bytes of JSON that safetensors takes
PIECE = 2**24  # bytes that are read at a time


def check_target(path: str | os.PathLike[str]) -> Path:
    """The path, if a file can be made there."""
    target = Path(path)
    if not target.parent.is_dir():
        raise InvalidValue(f"cannot save to {target}: the folder {target.parent} does not exist")
    if target.is_dir():
        raise InvalidValue(f"cannot save to {target}: it is a folder; give the name of a file")
    return target


# -- writing -------------------------------------------------------------------------------------------------------


def write(path: str | os.PathLike[str], tensors: dict[str, Tensor], header: dict[str, Any], kind: str = SAVED) -> None:
    """Write atomically: to a temporary file beside the target, then rename. What killed writers left goes."""
    target = check_target(path)
    ordered = dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))  # each is aligned
    described = _described(ordered, header, kind)
    try:
        remove_unfinished(target)
        with _beside(target) as name:
            with open(name, "wb") as file:
                _put(file, ordered, described)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, target)
            _sync_folder(target.parent)
    except OSError as error:
        raise InvalidValue(
            f"cannot save to {target} ({error}); make room or check who may write there, or give another path"
        ) from error


@contextlib.contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """A new file's name, locked while its writer lives; gone if it fails."""
    while True:
        name = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
        with locks.opened(name, os.O_RDWR | os.O_CREAT | os.O_EXCL) as descriptor:
            locks.locked(descriptor, wait=True)
            if not locks.is_at(descriptor, name):
                continue  # another saver took it for a dead one's, before it was locked
            try:
                yield name
            except BaseException:
                name.unlink(missing_ok=True)
                raise
            return


def remove_unfinished(target: Path) -> None:
    """Remove what writers of this file left behind when they were killed: what nobody holds a lock on."""
    for name in list(target.parent.iterdir()):
        if not re.fullmatch(rf"\.{re.escape(target.name)}\.[0-9a-f]{{32}}\.tmp", name.name):
            continue
        # gone meanwhile, or another user's; on Windows, also what is open. Without locks a living writer's cannot be
        # told from a dead one's, so both stay.
        with contextlib.suppress(FileNotFoundError, PermissionError), locks.opened(name, os.O_RDWR) as descriptor:
            if locks.locked(descriptor):
                name.unlink()


def _described(tensors: dict[str, Tensor], header: dict[str, Any], kind: str) -> bytes:
    """The JSON, with zeros for the digest."""
    described: dict[str, Any] = {"__metadata__": {"digest": "0" * DIGEST, kind: json.dumps(header)}}
    start = 0
    for name, t in tensors.items():
        if t.dtype not in CODES or t.layout is not torch.strided:
            raise InvalidValue(f"{name} is {t.dtype} in layout {t.layout}, which safetensors files cannot hold")
        end = start + t.numel() * t.element_size()
        described[name] = {"dtype": CODES[t.dtype], "shape": list(t.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(described, separators=(",", ":")).encode()
    assert text.startswith(START)
    return text + b" " * (-len(text) % 8)


def _put(file: IO[bytes], tensors: dict[str, Tensor], described: bytes) -> None:
    digest = hashlib.blake2b(digest_size=DIGEST // 2)
    length, place = len(described).to_bytes(8, "little"), len(START)
    for part in (length, described[:place], described[place + DIGEST :]):
        digest.update(part)
    file.write(length + described)
    for t in tensors.values():
        if t.numel():
            numbers = tree.raw(t).numpy().data
            digest.update(numbers)
            file.write(numbers)
    file.seek(len(length) + place)
    file.write(digest.hexdigest().encode())


def _sync_folder(folder: Path) -> None:
    """The new name, too, outlives a loss of power."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that cannot; the file is there
            raise
    finally:
        os.close(descriptor)


# -- reading -------------------------------------------------------------------------------------------------------


def read(
    path: str | os.PathLike[str], schema: int, kind: str = SAVED, again: str = "save it again"
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the header of a whole file of this kind and schema; of any other, an error that says `again`."""
    if not Path(path).is_file():
        raise InvalidValue(f"there is no file {path}")
    try:
        with open(path, "rb") as file:
            tensors, text = _content(file, path, kind, again)
    except OSError as error:
        raise InvalidValue(f"cannot read {path} ({error}); check that it may be read") from error
    header = _json(text, f"{path} has a header that cannot be read", again)
    found = header.get("schema")
    if type(found) is not int or found != schema:
        raise InvalidValue(f"{path} has schema {found}; this version of Lapwing reads schema {schema}; {again}")
    return tensors, header


def _content(file: IO[bytes], path: Any, kind: str, again: str) -> tuple[dict[str, Tensor], str]:
    """The tensors and the text of the header, once the digest is found right."""
    whole = f"{path} is not a whole safetensors file"
    size, head = os.fstat(file.fileno()).st_size, file.read(8)
    length = int.from_bytes(head, "little")
    if len(head) < 8 or length > min(size - 8, LONGEST):
        raise BrokenFile(f"{whole} (of {size} bytes, its header would take {length}); {again}")
    described = file.read(length)
    entries = _json(described, whole, again)
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise BrokenFile(f"{whole} (its metadata are not strings); {again}")
    if kind not in metadata:
        other = next((WHAT[key] for key in WHAT if key in metadata), "")
        raise InvalidValue(f"{path} is {other or 'a safetensors file, but not one that Lapwing saved'}")
    if not described.startswith(START):
        raise InvalidValue(f"{path} has no digest, as files of older versions of Lapwing; {again}")
    empty = _allocated(entries, size - 8 - length, whole, again)
    digest, place = hashlib.blake2b(digest_size=DIGEST // 2), len(START)
    for part in (head, described[:place], described[place + DIGEST :]):
        digest.update(part)
    for t in empty.values():
        _fill(file, t, digest, whole, again)
    if file.read(1) or digest.hexdigest().encode() != described[place : place + DIGEST]:
        raise BrokenFile(f"{path} was changed after it was saved: its bytes do not match its digest; {again}")
    return empty, metadata[kind]


def _json(text: bytes | str, what: str, again: str) -> dict[str, Any]:
    """An object in JSON, without keys that come twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a key comes twice")
        return found

    try:
        found = json.loads(text.decode() if isinstance(text, bytes) else text, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise BrokenFile(f"{what} ({error}); {again}") from error
    if not isinstance(found, dict):
        raise BrokenFile(f"{what} (its JSON is no object); {again}")
    return found


def _allocated(entries: dict[str, Any], size: int, whole: str, again: str) -> dict[str, Tensor]:
    """Memory for the tensors, in the order of their bytes, which must fill the file without gaps."""
    for name, entry in entries.items():
        if not _is_entry(entry):
            raise BrokenFile(f"{whole} (what it says of {name!r} cannot be read); {again}")
    out, start = {}, 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape, (begin, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        if begin != start or end - begin != math.prod(shape) * dtype.itemsize or end > size:
            raise BrokenFile(f"{whole} (the {size} bytes of its tensors do not fit {name!r}); {again}")
        try:
            out[name] = torch.empty(shape, dtype=dtype)
        except (RuntimeError, TypeError, OverflowError) as error:
            raise BrokenFile(f"{whole} ({name!r} has the shape {shape}); {again}") from error
        start = end
    if start != size:
        raise BrokenFile(f"{whole} ({size - start} bytes belong to no tensor); {again}")
    return out


def _is_entry(entry: Any) -> bool:
    """{dtype, shape, data_offsets}, of numbers that are not negative."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        return False
    lists = [entry["shape"], entry["data_offsets"]]
    if not isinstance(entry["dtype"], str) or not all(isinstance(one, list) for one in lists):
        return False
    numbers = all(type(n) is int and 0 <= n < 2**63 for one in lists for n in one)
    return numbers and entry["dtype"] in DTYPES and len(lists[1]) == 2


def _fill(file: IO[bytes], t: Tensor, digest: Any, whole: str, again: str) -> None:
    """Read a tensor's bytes into it."""
    if not t.numel():
        return
    view = t.view(-1).view(torch.uint8).numpy().data
    for start in range(0, len(view), PIECE):
        piece = view[start : start + PIECE]
        if file.readinto(piece) != len(piece):  # type: ignore[attr-defined]
            raise BrokenFile(f"{whole} (it ended while it was read); {again}")
        digest.update(piece)
