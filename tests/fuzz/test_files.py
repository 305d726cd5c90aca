"""A damaged or forged file is refused, or is a sound fit: a hundred mutations; `make soak` runs thousands."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"fuzz_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_hundred_mutated_files_are_refused_or_sound() -> None:
    found = script("files").run(range(100))
    assert found["failures"] == []
    assert found["by way"]["raw refused"] > 30  # it does mutate
    assert found["by way"]["forged refused"] > 30
