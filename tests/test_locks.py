"""Locks between processes: one at a time, free when its process ends, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import lapwing as lw
from lapwing import files, locks

HOLDER = """
import sys, time
from pathlib import Path
from lapwing import locks
if sys.argv[2] == "fork":
    import os
with locks.alone(Path(sys.argv[1]), "the checkpoint"):
    if sys.argv[2] == "fork" and os.fork() == 0:
        print(os.getpid(), flush=True)
        time.sleep(60)
    if sys.argv[2] != "fork":
        print("held", flush=True)
    time.sleep(60)
"""


def holder(path: Path, how: str = "") -> tuple[subprocess.Popen[str], str]:
    """A process that holds a lock, once it does, and what it said."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(path), how], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def fit(path: Path) -> lw.Laplace:
    x = torch.randn(6, 3)
    return lw.laplace(nn.Linear(3, 2), [(x[:3], x[:3, :2]), (x[3:], x[3:, :2])], "gaussian", checkpoint=path, every=1)


def test_a_second_process_is_told_who_has_the_checkpoint_at_once_and_gets_it_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "file"
    process, said = holder(path)
    assert said == "held"
    with pytest.raises(lw.errors.InvalidValue, match=rf"the checkpoint .*file is in use by process {process.pid} on "):
        fit(path)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert os.listdir(tmp_path) == [".file.lock"]  # a file that nobody holds
    fit(path)
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_worker_does_not_hold_its_dead_parents_lock(tmp_path: Path) -> None:
    process, worker = holder(tmp_path / "file", "fork")
    try:
        process.send_signal(signal.SIGKILL)
        process.wait()
        os.kill(int(worker), 0)  # it lives
        fit(tmp_path / "file")
    finally:
        os.kill(int(worker), signal.SIGKILL)
        process.communicate()


def test_one_process_does_not_get_it_twice_and_gives_it_back_after_an_error(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with locks.alone(path, "the checkpoint"), pytest.raises(lw.errors.InvalidValue, match=f"process {os.getpid()} on"):
        fit(path)
    assert os.listdir(tmp_path) == []
    path.write_text("no checkpoint")
    for _ in range(2):
        with pytest.raises(lw.errors.InvalidValue, match="not a whole safetensors file") as kept:  # noqa: F841
            fit(path)
        assert os.listdir(tmp_path) == ["file"]


def test_a_lock_that_was_removed_meanwhile_is_taken_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between opening the file and locking it, its last holder removes it: a lock on it would keep nobody out."""
    place, locked, times = tmp_path / ".file.lock", locks.locked, []

    def late(descriptor: int, wait: bool = False) -> bool | None:
        if not times:
            place.unlink()
        times.append(descriptor)
        return locked(descriptor, wait)

    monkeypatch.setattr(locks, "locked", late)
    with locks.alone(tmp_path / "file", "it"):
        assert place.exists()
    assert len(times) == 2
    assert os.listdir(tmp_path) == []


def test_without_locks_a_fit_warns_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "fcntl", None)
    with pytest.warns(lw.errors.LapwingWarning, match="no file locks here.*no other process"):
        fit(tmp_path / "file")
    assert os.listdir(tmp_path) == []


# -- unfinished files ------------------------------------------------------------------------------------------------


def test_a_save_removes_what_dead_savers_left_and_leaves_what_living_ones_write(tmp_path: Path) -> None:
    dead, alive, other = (tmp_path / f".{n}.{c * 32}.tmp" for n, c in [("file", "0"), ("file", "a"), ("files", "0")])
    for name in (dead, alive, other):
        name.write_bytes(b"half")
    la = lw.laplace(nn.Linear(3, 2), (torch.randn(6, 3), torch.randn(6, 2)), "gaussian")
    with locks.opened(alive, os.O_RDWR) as descriptor:
        assert locks.locked(descriptor)
        la.save(tmp_path / "file")
        assert sorted(os.listdir(tmp_path)) == sorted(["file", alive.name, other.name])
    la.save(tmp_path / "file")
    assert sorted(os.listdir(tmp_path)) == sorted(["file", other.name])


def test_a_saver_whose_name_was_taken_for_a_dead_ones_takes_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked, taken = locks.locked, []

    def late(descriptor: int, wait: bool = False) -> bool | None:
        if not taken:  # another saver comes by before the lock
            taken.extend(tmp_path.glob(".file.*.tmp"))
            files.remove_unfinished(tmp_path / "file")
        return locked(descriptor, wait)

    monkeypatch.setattr(locks, "locked", late)
    files.write(tmp_path / "file", {"x": torch.ones(3)}, {"schema": 1})
    assert len(taken) == 1
    assert os.listdir(tmp_path) == ["file"]
    assert torch.equal(files.read(tmp_path / "file", 1)[0]["x"], torch.ones(3))
