"""Files: one safetensors file, tensors plus a JSON header, and a digest of all of it. No pickle anywhere.

The metadata have one entry, {kind: digest + header}. The kind is "lapwing" for what `la.save` wrote,
"lapwing.checkpoint" for a fit that is not done, "lapwing.conformal" for a calibration; the digest is BLAKE2b over every
byte of the file but its own 64 characters. A file is written under another name and renamed, so that it is whole or not
there. Its bytes are read once, so that they are one file's, though another takes its place meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from lapwing import locks
from lapwing.errors import BrokenFile, InvalidValue

SAVED, CHECKPOINT = "lapwing", "lapwing.checkpoint"
WALK, CONFORMAL = "lapwing.walk", "lapwing.conformal"
WHAT = {
    SAVED: "a saved fit: read it with lw.load",
    CHECKPOINT: "a checkpoint: give it to lw.laplace(checkpoint=...)",
    WALK: "a sampler's checkpoint: give it to the same call of lw.samplers, as checkpoint=",
    CONFORMAL: "a calibration: read it with lw.conformal.load",
}
DIGEST = 64  # characters
FAULTS = (SafetensorError, KeyError, ValueError, TypeError, RuntimeError, OverflowError)  # what its reader raises


def as_path(path: Any) -> Path:
    """The path that a user gave."""
    if not isinstance(path, (str, os.PathLike)):
        raise InvalidValue(f"a path must be a string or a pathlib.Path, got {type(path).__name__} {path!r}")
    return Path(path)


def check_target(path: str | os.PathLike[str]) -> Path:
    """The path, if a file can be made there."""
    target = as_path(path)
    if not target.parent.is_dir():
        raise InvalidValue(f"cannot save to {target}: the folder {target.parent} does not exist")
    if target.is_dir():
        raise InvalidValue(f"cannot save to {target}: it is a folder; give the name of a file")
    return target


# -- writing -------------------------------------------------------------------------------------------------------


def write(path: str | os.PathLike[str], tensors: dict[str, Tensor], header: dict[str, Any], kind: str = SAVED) -> None:
    """Write tensors and a header atomically: to a temporary file beside the target, then rename. What killed writers
    left goes."""
    check_target(path)
    write_whole(path, _sealed(tensors, header, kind))


def write_whole(path: str | os.PathLike[str], content: bytes | bytearray) -> None:
    """Write these bytes atomically, as `write` does."""
    target = check_target(path)
    try:
        remove_unfinished(target)
        with _beside(target) as name:
            with open(name, "wb") as file:
                _put(file, content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, target)
            _sync_folder(target.parent)
    except OSError as error:
        raise InvalidValue(
            f"cannot save to {target} ({error}); make room or check who may write there, or give another path"
        ) from error


def _put(file: IO[bytes], content: bytes | bytearray) -> None:
    file.write(content)


def _sealed(tensors: dict[str, Tensor], header: dict[str, Any], kind: str) -> bytearray:
    """The bytes of a file, with its digest."""
    for name, t in tensors.items():
        if t.layout is not torch.strided:
            raise InvalidValue(f"{name} is in layout {t.layout}, which safetensors files cannot hold")
    plain = {name: t.detach().cpu().clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}
    try:
        content = bytearray(safetensors.torch.save(plain, {kind: "0" * DIGEST + json.dumps(header)}))
    except FAULTS as error:
        raise InvalidValue(f"safetensors cannot hold these tensors ({error}); save in another dtype") from error
    place = _place(content, kind)
    content[place : place + DIGEST] = _digest(content, place)
    return content


def _place(content: bytes | bytearray, kind: str) -> int:
    """Where the digest is, or −1: the first characters of the metadata."""
    start = b'{"__metadata__":{"' + kind.encode() + b'":"'
    return 8 + len(start) if content[8 : 8 + len(start)] == start else -1


def _digest(content: bytes | bytearray, place: int) -> bytes:
    digest, view = hashlib.blake2b(digest_size=DIGEST // 2), memoryview(content)
    digest.update(view[:place])
    digest.update(view[place + DIGEST :])
    return digest.hexdigest().encode()


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
    if not as_path(path).is_file():
        raise InvalidValue(f"there is no file {path}")
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        raise InvalidValue(f"cannot read {path} ({error}); check that it may be read") from error
    tensors, text = _checked(content, path, kind, again)
    header = _json(text, f"{path} has a header that cannot be read", again)
    found = header.get("schema")
    if type(found) is not int or found != schema:
        raise InvalidValue(f"{path} has schema {found}; this version of Lapwing reads schema {schema}; {again}")
    return tensors, header


def _checked(content: bytes, path: Any, kind: str, again: str) -> tuple[dict[str, Tensor], str]:
    """The tensors and the text of the header, once the digest is found right."""
    whole, length = f"{path} is not a whole safetensors file", int.from_bytes(content[:8], "little")
    if length > len(content) - 8:
        raise BrokenFile(f"{whole} (of {len(content)} bytes, its header would take {length}); {again}")
    metadata = _json(content[8 : 8 + length], whole, again).get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise BrokenFile(f"{whole} (its metadata are not strings); {again}")
    if kind not in metadata:
        other = next((WHAT[key] for key in WHAT if key in metadata), "")
        raise InvalidValue(f"{path} is {other or 'a safetensors file, but not one that Lapwing saved'}")
    digest, place = metadata[kind][:DIGEST], _place(content, kind)
    if place < 0 or not re.fullmatch(f"[0-9a-f]{{{DIGEST}}}", digest):
        raise InvalidValue(f"{path} has no digest, as files of older versions of Lapwing; {again}")
    try:
        views = safetensors.torch.load(content)
    except FAULTS as error:
        raise BrokenFile(f"{whole} ({error}); {again}") from error
    if _digest(content, place).decode() != digest:
        raise BrokenFile(f"{path} was changed after it was saved: its bytes do not match its digest; {again}")
    # in memory that is aligned as torch's own: kernels round otherwise elsewhere, and a resumed fit must not
    return {name: view.clone() for name, view in views.items()}, metadata[kind][DIGEST:]


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
