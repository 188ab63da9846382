"""A lock between processes, held by a file."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout


@contextmanager
def locked(path: Path, *, timeout_s: float = -1.0) -> Iterator[bool]:
    """Holds a lock between processes while the block runs; the kernel releases it when the holder dies.

    timeout_s: how long to wait for another holder; negative waits without limit, 0 does not wait. Yields whether the lock
    was obtained. The lock file itself stays: removing it would let two processes hold "the same" lock.
    """
    lock = FileLock(path, timeout=timeout_s)
    try:
        lock.acquire()
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()
