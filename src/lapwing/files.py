"""Files: one safetensors file, tensors plus a JSON header. No pickle anywhere.

A file is written under another name and renamed, so that it is whole or not there. Its kind is the key of its header:
"lapwing" for what `la.save` wrote, "lapwing.checkpoint" for a fit that is not done.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lapwing.errors import InvalidValue

SAVED, CHECKPOINT = "lapwing", "lapwing.checkpoint"
WHAT = {SAVED: "a saved fit: read it with lw.load", CHECKPOINT: "a checkpoint: give it to lw.laplace(checkpoint=...)"}


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


def write(path: str | os.PathLike[str], tensors: dict[str, Tensor], header: dict[str, Any], kind: str = SAVED) -> None:
    """Write atomically: to a temporary file beside the target, then rename."""
    target = check_target(path)
    name = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        name.touch(exist_ok=False)
        mode = name.stat().st_mode  # the user's own; safetensors writes files that only their owner may read
        plain = {k: v.detach().cpu().contiguous().clone() for k, v in tensors.items()}
        save_file(plain, name, metadata={kind: json.dumps(header)})
        name.chmod(mode)
        with open(name, "rb") as file:
            os.fsync(file.fileno())
        os.replace(name, target)
    except BaseException:
        name.unlink(missing_ok=True)
        raise


def remove_unfinished(path: str | os.PathLike[str]) -> None:
    """Remove what writers of this file left behind when they were killed."""
    target = Path(path)
    for name in target.parent.iterdir():
        if re.fullmatch(rf"\.{re.escape(target.name)}\.[0-9a-f]{{32}}\.tmp", name.name):
            name.unlink(missing_ok=True)


def read(
    path: str | os.PathLike[str], schema: int, kind: str = SAVED, again: str = "save it again"
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the header of a whole file of this kind and schema; of any other, an error that says `again`."""
    if not as_path(path).is_file():
        raise InvalidValue(f"there is no file {path}")
    try:
        with safe_open(str(path), "pt") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
    except SafetensorError as error:
        raise InvalidValue(f"{path} is not a whole safetensors file ({error}); {again}") from error
    if kind not in metadata:
        other = next((WHAT[key] for key in WHAT if key in metadata), "")
        raise InvalidValue(f"{path} is {other or 'a safetensors file, but not one that Lapwing saved'}")
    try:
        header = json.loads(metadata[kind])
        found = header["schema"]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidValue(f"{path} has a header that cannot be read ({error}); {again}") from error
    if found != schema:
        raise InvalidValue(f"{path} has schema {found}; this version of Lapwing reads schema {schema}")
    return tensors, header


# -- trees of tensors ----------------------------------------------------------------------------------------------


def pack_tree(x: Any, prefix: str, tensors: dict[str, Tensor]) -> Any:
    """What of a tree goes into the header; its tensors go into `tensors`, under names that begin with the prefix."""
    if isinstance(x, Tensor):
        while prefix in tensors:  # {"a": {"b": x}, "a.b": y}
            prefix += "_"
        tensors[prefix] = x
        return {"tensor": prefix}
    if type(x) in (list, tuple):
        return {type(x).__name__: [pack_tree(v, f"{prefix}.{i}", tensors) for i, v in enumerate(x)]}
    if isinstance(x, dict):
        return {"dict": {k: pack_tree(v, f"{prefix}.{k}", tensors) for k, v in x.items()}}
    if x is None or isinstance(x, (bool, int, float, str)):
        return {"value": x}
    raise InvalidValue(
        f"a dual state keeps its inputs, and {type(x).__name__} cannot be written to safetensors; give inputs as "
        "tensors, lists, tuples or dicts, or fit with lw.curvature.Full(form='primal')"
    )


def unpack_tree(spec: dict[str, Any], tensors: dict[str, Tensor], device: torch.device) -> Any:
    ((kind, value),) = spec.items()
    if kind == "tensor":
        return tensors[value].to(device)
    if kind == "dict":
        return {k: unpack_tree(v, tensors, device) for k, v in value.items()}
    if kind in ("list", "tuple"):
        parts = [unpack_tree(v, tensors, device) for v in value]
        return tuple(parts) if kind == "tuple" else parts
    return value
