"""Functions that differ between Linux, macOS and Windows.

Training in one process on a CPU, evaluation, export and search work on all three as far as code can tell. Starting
several processes, loader processes and staging are for Linux.
"""

import errno
import os
import select
import signal
import sys
import threading
from collections.abc import Iterable
from typing import Protocol

_seek_lock = threading.Lock()


def is_linux() -> bool:
    """Tells whether several processes can be started and watched here."""
    return sys.platform.startswith("linux")


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # absent on macOS and Windows
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def lock_at_once(handle: int) -> None:
    """Locks an open file, or raises BlockingIOError if another process has it; the kernel unlocks it when this one ends."""
    try:
        import fcntl
    except ImportError:
        _lock_at_once_on_windows(handle)
        return
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _lock_at_once_on_windows(handle: int) -> None:
    try:
        import msvcrt
    except ImportError:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)) from None
    try:
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined, unused-ignore]
    except PermissionError as error:
        raise BlockingIOError(error.errno, error.strerror) from error


def signals_named(*names: str) -> tuple[signal.Signals, ...]:
    """Returns those of the signals that this operating system has."""
    return tuple(signal.Signals[name] for name in names if name in signal.Signals.__members__)


def open_flags(*names: str) -> int:
    """Returns flags for os.open, without those that this operating system lacks."""
    flags = 0
    for name in names:
        flags |= int(getattr(os, name, 0))
    return flags


class HasFileno(Protocol):
    def fileno(self) -> int: ...


def readable(files: Iterable[int | HasFileno], timeout_s: float) -> list[int]:
    """Returns the descriptors of the files that have something to read or have ended; waits `timeout_s` for the first.

    With poll(), because select() refuses descriptors above 1,023, which a job with many files has. Not for Windows.
    """
    events = select.poll()
    for file in files:
        events.register(file, select.POLLIN)
    return [handle for handle, _ in events.poll(1000 * timeout_s)]


def read_at(handle: int, num_bytes: int, offset: int) -> bytes:
    """Returns `num_bytes` from `offset` of an open file, or fewer at its end. Safe between threads.

    One read may return less than was asked for: network file systems do, and Linux beyond 2 GiB.
    """
    content = _read_once(handle, num_bytes, offset)
    if len(content) == num_bytes or not content:
        return content
    parts, num_read = [content], len(content)
    while num_read < num_bytes and (content := _read_once(handle, num_bytes - num_read, offset + num_read)):
        parts.append(content)
        num_read += len(content)
    return b"".join(parts)


def _read_once(handle: int, num_bytes: int, offset: int) -> bytes:
    if hasattr(os, "pread"):
        return os.pread(handle, num_bytes, offset)
    with _seek_lock:  # Windows has no pread
        os.lseek(handle, offset, os.SEEK_SET)
        return os.read(handle, num_bytes)
