"""`import lapwing` is quick: rooms that a first fit does not need come when they are named, or a file needs them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import lapwing as lw

FRESH = """
import sys
import torch
import lapwing as lw

late = {f"lapwing.{name}" for name in lw.LATER}
assert not late & set(sys.modules), late & set(sys.modules)
assert set(lw.__all__) <= set(dir(lw))
torch.manual_seed(0)
found = lw.load(sys.argv[1], torch.nn.Linear(3, 2))
assert type(found).__name__ == "Ella", found
"""


def test_a_fresh_process_has_no_late_room_and_loads_a_file_of_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, path = torch.nn.Linear(3, 2), tmp_path / "ella.safetensors"
    lw.gp.ella(model, (torch.randn(9, 3), torch.randn(9, 2)), "gaussian", rank=2).save(path)
    done = subprocess.run([sys.executable, "-c", FRESH, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_there() -> None:
    assert [name for name in lw.__all__ if getattr(lw, name, None) is None or name not in dir(lw)] == []


def test_a_name_that_is_none_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        lw.nothing  # noqa: B018
