"""A killed saver, fit or writer leaves nothing that is torn: ten kills; `make soak` makes hundreds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_ten_kills_leave_whole_files_and_fits_that_go_on(tmp_path: Path) -> None:
    """In a process of its own: a fork of one with threads could hang."""
    script = Path(__file__).with_name("kills.py")
    command = [sys.executable, str(script), "--cases", "10", "--out", str(tmp_path / "out")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out").read_text())
    assert found["cases"] == sum(found["outcomes"].values()) == 10
    assert {told.split(",")[0] for told in found["outcomes"]} == {"save", "fit", "read", "lock"}
