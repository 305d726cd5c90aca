"""What users name on the command line, as objects: `module:factory`, a checkpoint, a device.

Whatever fails in a module or a file is an InvalidValue, whose message fits a line.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import nn

from lapwing import given
from lapwing.errors import OURS, InvalidValue

LONGEST = 300  # characters of what another library says


# -- modules -------------------------------------------------------------------------------------------------------


def named(text: str, what: str) -> Any:
    """What "module:name" names; modules of the current folder are found too."""
    module, colon, name = text.partition(":")
    if not (module and colon and name):
        raise InvalidValue(f"{what} is given as module:name, such as nets:make for make() in nets.py; got {text!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    found = attempted(lambda: _imported(module), f"importing {module}")
    if not hasattr(found, name):
        place = getattr(found, "__file__", "built in")
        raise InvalidValue(f"module {module} ({place}) has no {name!r}{given.near(name, dir(found))}")
    return getattr(found, name)


def _imported(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):  # something that it imports
            raise
        where = "in the current folder nor installed"
        raise InvalidValue(f"there is no module {error.name}, neither {where}{_without_suffix(module)}") from error


def _without_suffix(module: str) -> str:
    return f"; give {module.removesuffix('.py')}, without .py" if module.endswith(".py") else ""


def attempted(run: Callable[[], Any], what: str) -> Any:
    """What the user's own code returns; an error that names the line where it failed."""
    try:
        return run()
    except InvalidValue:
        raise
    except (Exception, SystemExit) as error:
        passed = (*OURS, importlib.__file__, "<frozen")
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(passed)]
        place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
        raise InvalidValue(f"{what} raised {type(error).__name__}: {short(error)}{place}") from error


def short(error: BaseException) -> str:
    """What another library says, in one line that is not too long."""
    line = " ".join(str(error).split()) or "no message"
    return line if len(line) <= LONGEST else line[:LONGEST] + " ..."


# -- the network ---------------------------------------------------------------------------------------------------


def device_of(text: str) -> torch.device:
    """A device that is there."""
    try:
        device = torch.device(text)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ValueError) as error:
        raise InvalidValue(f"there is no device {text!r} here: {short(error)}") from error
    return device


def network(factory: str, weights: Path | None, device: torch.device) -> nn.Module:
    """The factory's network with the weights of a checkpoint, on a device, in eval mode."""
    made = named(factory, "a network")
    model = made if isinstance(made, nn.Module) else attempted(made, f"{factory}()")
    if not isinstance(model, nn.Module):
        raise InvalidValue(f"{factory} returns {type(model).__name__}; a factory returns a torch.nn.Module")
    if weights is not None:
        try:
            model.load_state_dict(_state_dict(weights))
        except RuntimeError as error:
            raise InvalidValue(f"{weights} is not a checkpoint of {factory}: {short(error)}") from error
    return model.to(device).eval()


def _state_dict(path: Path) -> Mapping[str, Any]:
    check_file(path)
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of pickle and zip files, whose texts ask to trust the file or are a byte of it
        told = isinstance(error, (OSError, safetensors.SafetensorError))
        why = short(error) if told else "it holds other things than tensors, or torch did not write it whole"
        raise InvalidValue(
            f"cannot read the checkpoint {path}: {why}; save model.state_dict() by torch.save, or as .safetensors"
        ) from error
    if not isinstance(found, Mapping) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        holds = f"a mapping with {list(found)[:5]}" if isinstance(found, Mapping) else f"a {type(found).__name__}"
        raise InvalidValue(f"{path} holds {holds}, not weights by name; save model.state_dict() alone")
    return found


def check_file(path: Path) -> None:
    """Raise where there is no file."""
    if not path.is_file():
        raise InvalidValue(f"{path} is a folder; give a file" if path.is_dir() else f"there is no file {path}")
