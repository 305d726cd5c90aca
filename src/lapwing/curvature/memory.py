"""How much memory the machine has: asked once, and assumed, with a warning, where nothing tells it."""

from __future__ import annotations

import ctypes
import functools
import os

from lapwing.errors import warn

ASSUMED = 8 * 2**30  # bytes


@functools.cache
def physical_memory() -> int:
    """Bytes of the machine's memory."""
    found = _posix() or _windows()
    if not found:
        warn(
            f"this system does not tell how much memory it has; {ASSUMED / 2**30:.0f} GB are assumed, and what needs "
            "more is refused",
        )
    return found or ASSUMED


def _posix() -> int:
    """By os.sysconf; 0 where there is none, or where it does not know."""
    try:
        return max(0, os.sysconf("SC_PAGE_SIZE")) * max(0, os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, ValueError, OSError):
        return 0


class _MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX."""

    _fields_ = (
        ("length", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        *((name, ctypes.c_uint64) for name in ("physical", "free", "pages", "free_pages", "virtual", "free_virtual")),
        ("extended", ctypes.c_uint64),
    )


def _windows() -> int:
    """By GlobalMemoryStatusEx; 0 on other systems, or where it fails."""
    library = getattr(ctypes, "windll", None)
    if library is None:
        return 0
    status = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
    return int(status.physical) if library.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)) else 0
