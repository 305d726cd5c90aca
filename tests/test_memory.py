"""The memory of the machine, on systems that tell it in another way, or not at all."""

from __future__ import annotations

import ctypes
import os
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lapwing as lw
from lapwing.curvature.memory import ASSUMED, physical_memory
from lapwing.doctor.plan import free_memory

GB = 2**30


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    physical_memory.cache_clear()
    yield
    physical_memory.cache_clear()


def no_sysconf(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sysconf")


def windows(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """A kernel32 that fills in MEMORYSTATUSEX, as Windows lays it out: 64 bytes, the physical size from byte 8 on."""

    def status(pointer: Any) -> int:
        raw = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_uint64))
        assert ctypes.cast(pointer, ctypes.POINTER(ctypes.c_uint32))[0] == 64
        raw[1] = size
        return int(size > 0)

    kernel = types.SimpleNamespace(GlobalMemoryStatusEx=status)
    monkeypatch.setattr(ctypes, "windll", types.SimpleNamespace(kernel32=kernel), raising=False)


def fit() -> lw.Laplace:
    net = nn.Linear(3, 2).double()
    return lw.laplace(net, (torch.randn(5, 3).double(), torch.randn(5, 2).double()), "gaussian", structure="full")


def test_it_is_the_machines() -> None:
    assert physical_memory() == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_windows_tells_it(monkeypatch: pytest.MonkeyPatch) -> None:
    no_sysconf(monkeypatch)
    windows(monkeypatch, 3 * GB)
    assert physical_memory() == 3 * GB
    assert torch.isfinite(fit().log_evidence())


@pytest.mark.parametrize("kind", ["no sysconf", "unknown name", "minus one", "windows fails"])
def test_an_assumption_is_said_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == "unknown name":
        monkeypatch.setattr(os, "sysconf", lambda name: int("unrecognized configuration name"))
    elif kind == "minus one":
        monkeypatch.setattr(os, "sysconf", lambda name: -1)
    else:
        no_sysconf(monkeypatch)
    if kind == "windows fails":
        windows(monkeypatch, 0)
    with pytest.warns(lw.errors.LapwingWarning, match="8 GB are assumed"):
        la = fit()
    assert physical_memory() == ASSUMED
    assert torch.isfinite(la.predict(torch.randn(2, 3).double(), joint=True).covariance).all()  # and no other warning


def test_what_is_free_is_no_more_than_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda self: (_ for _ in ()).throw(OSError()))
    assert free_memory(torch.device("cpu")) == physical_memory()
    physical_memory.cache_clear()
    no_sysconf(monkeypatch)
    windows(monkeypatch, 5 * GB)
    assert free_memory(torch.device("cpu")) == 5 * GB
