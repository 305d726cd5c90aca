"""Locks between processes. A lock belongs to an open file, so it is free as soon as its process ends, however it ends.

Without `fcntl` (Windows), and on file systems that have no locks, there are none: `locked` says so with None.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from lapwing.errors import InvalidValue, warn

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}  # what file systems say

_open: set[int] = set()  # descriptors of the locks that this process holds


def locked(descriptor: int, wait: bool = False) -> bool | None:
    """Lock an open file: whether that worked, or None where there are no locks."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return None
    return True


@contextlib.contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """A file that is open, and with it its lock. A forked child (a loader's worker) does not keep it."""
    descriptor = os.open(path, flags | getattr(os, "O_CLOEXEC", 0), 0o666)
    _open.add(descriptor)
    try:
        yield descriptor
    finally:
        if descriptor in _open:  # not in a child, which has closed it
            _open.discard(descriptor)
            if fcntl is not None:
                with contextlib.suppress(OSError):  # there was no lock to give back
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def _forget() -> None:
    """In a forked child: its copies of descriptors would hold the locks after its parent has died."""
    for descriptor in _open:
        os.close(descriptor)
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is still that of this name."""
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    mine = os.fstat(descriptor)
    return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)


@contextlib.contextmanager
def alone(path: Path, what: str) -> Iterator[None]:
    """Only one process at a time has `what`; a second is told at once who has it. The lock is a file beside it."""
    place = path.with_name(f".{path.name}.lock")
    while True:
        with opened(place, os.O_RDWR | os.O_CREAT) as descriptor:
            got = locked(descriptor)
            if got is False:
                holder = os.pread(descriptor, 200, 0).decode(errors="replace") or "another process"
                raise InvalidValue(
                    f"{what} {path} is in use by {holder}; wait until that is done, or give another path"
                )
            if got is None:
                warn(
                    f"there are no file locks here: take care that no other process uses {what} {path}",
                )
            elif not is_at(descriptor, place):
                continue  # its last holder has removed it since
            try:
                if got:
                    os.ftruncate(descriptor, 0)
                    os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
                yield
            finally:
                if descriptor in _open:
                    place.unlink(missing_ok=True)
            return
