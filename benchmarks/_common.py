"""What every benchmark needs: honest timing, peak memory, bars that are met or not, and one JSON file a run.

A time is the least of `repeat` runs after a warm-up: on a shared machine noise only ever adds. Bars are ratios of times
taken in the same run, so a slow machine, or a busy one, slows both sides.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

RESULTS = pathlib.Path(__file__).parent / "results"


@dataclass(frozen=True)
class Bar:
    """A figure that must stay below (or above) a limit."""

    what: str
    value: float
    limit: float
    above: bool = False  # the value must be at least the limit

    @property
    def met(self) -> bool:
        return self.value >= self.limit if self.above else self.value <= self.limit

    def __str__(self) -> str:
        sign = ">=" if self.above else "<="
        return f"{'met   ' if self.met else 'MISSED'}  {self.what}: {self.value:.4g} ({sign} {self.limit:g})"


def clock(function: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of one call, and what it returned."""
    start = time.perf_counter()
    out = function()
    return time.perf_counter() - start, out


def clocks(function: Callable[[], Any]) -> tuple[dict[str, float], Any]:
    """Seconds by the wall and of this process's CPUs, and what the call returned. CPU seconds say how much was
    computed when other work shares the machine; with several threads they run faster than the wall."""
    wall, cpu = time.perf_counter(), time.process_time()
    out = function()
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}, out


def least(times: list[dict[str, float]]) -> dict[str, float]:
    """The least of each clock over several runs."""
    return {clock: min(t[clock] for t in times) for clock in times[0]}


def best(function: Callable[[], Any], repeat: int) -> float:
    """The least seconds of `repeat` calls."""
    return min(clock(function)[0] for _ in range(repeat))


def peak_memory() -> int:
    """The most bytes of RAM that this process has held (Linux: VmHWM)."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise OSError("no VmHWM in /proc/self/status")


def machine() -> dict[str, Any]:
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    names = [
        line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
    ]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": [round(v, 2) for v in os.getloadavg()],
        "system": platform.system(),
    }


def versions(*packages: str) -> dict[str, str]:
    out = {"python": platform.python_version()}
    for package in packages:
        try:
            out[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            out[package] = "not installed"
    return out


def table(rows: list[tuple[str, ...]]) -> str:
    """Rows of text as aligned columns, the first to the left and the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True)))
        for r in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def write(name: str, body: dict[str, Any], bars: list[Bar], packages: tuple[str, ...]) -> pathlib.Path:
    """Write results/<name>.json, whole or not at all."""
    record = {
        "benchmark": name,
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": versions(*packages),
        **body,
        "bars": [{**asdict(bar), "met": bar.met} for bar in bars],
    }
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=1) + "\n")
    partial.replace(path)
    return path
