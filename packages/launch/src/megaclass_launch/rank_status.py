"""The current place of a rank, on a page of memory that it shares with its agent. Standard library only.

The agent (or the parent of ranks on one machine) creates one file in memory per rank and passes its descriptor. The rank
writes its step, its phase and how long it may stay there; the agent reads them without the rank's help, over no network, also
while the rank is stopped. Behind the page, in the same file, Python's faulthandler writes the stacks of all threads when the
agent sends STACKS_SIGNAL; it does so from C, without the interpreter lock. A rank that was started in another way has a page
of its own, which no other process reads.

    bytes       field
    0 …         a counter that is odd while the rank writes, then the numbers of RankStatus
    128 …       texts of fixed length, see _TEXTS
    4096 …      stacks

The training loop writes it, the thread that saves checkpoints, or the threads that wait for operations, one at a time under
a lock.
"""

import contextlib
import faulthandler
import mmap
import os
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

FD_NAME = "MEGACLASS_STATUS_FD"
HANG_TIMEOUT = "MEGACLASS_HANG_TIMEOUT"
"""Tells the ranks the --hang-timeout of their job, in seconds."""
# Real-time signals exist on Linux, as do the agents that send this one.
STACKS_SIGNAL = getattr(signal, "SIGRTMIN", 0) + 11
"""No other software is known to use it; it is sent only to a process whose page says that it handles it."""
PAGE_BYTES = 4096
_FILE_NAME = "megaclass-status"
_COUNTER = struct.Struct("<Q")
_NUMBERS = struct.Struct("<QQ?qQddq")
_NUMBER_NAMES = (
    *("pid", "main_thread", "gives_stacks", "step", "num_done", "progress_at", "allowed_s", "checkpoint_step"),
)
_TEXTS = {
    "phase": (128, 64),
    "detail": (192, 768),
    "missing": (960, 32),
    "setting": (992, 32),
    "folder": (1024, 2048),
    "package": (3072, 1024),
}
_READS = 5
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStatus:
    """One reading of a rank's page."""

    pid: int
    """0 if the rank has written nothing: another kind of program, or one that has not got there yet."""
    main_thread: int
    """Identifier of the main thread, as it appears in the stacks."""
    gives_stacks: bool
    step: int
    """Steps of training done; -1 if the rank does not train."""
    num_done: int
    """Number of times that the rank made progress: steps, or operations."""
    progress_at: float
    """Time of the last progress; time.monotonic() of this host, which all its processes share."""
    allowed_s: float
    """How long the rank may take for its next progress; 0 for any time."""
    checkpoint_step: int
    """Step of the last checkpoint that the rank has published; -1 if there is none."""
    phase: str
    """The kind of work, if it is not the usual one."""
    detail: str
    missing: str
    """Words for a message about the rank if it is late: "no step has finished"."""
    setting: str
    """Name of the setting that limits the time."""
    folder: str
    """The run folder, where stacks are kept; empty if there is none."""
    package: str
    """The folder of the package that the rank runs: its files are shown shortly in a verdict."""

    def late_s(self, now: float, *, since: float = 0.0) -> float:
        """Returns for how long the rank has been without progress beyond what it may; 0 or less if it is on time.

        since: time before which nothing counts.
        """
        return now - max(self.progress_at, since) - self.allowed_s if self.allowed_s else 0.0


class StatusPage:
    """The page as its reader, the agent, has it; leaving it to the garbage collector closes it."""

    def __init__(self) -> None:
        self._handle = os.memfd_create(_FILE_NAME, os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._handle, PAGE_BYTES)
            self._memory = mmap.mmap(self._handle, PAGE_BYTES)
        except OSError:
            # A limit on the size of files (ulimit -f) also holds for files in memory. The rank then finds no page.
            self._memory = mmap.mmap(-1, PAGE_BYTES)

    def fileno(self) -> int:
        return self._handle

    def read(self) -> RankStatus:
        """Returns the rank's status; after several attempts also one that is half written, of a rank stopped in the middle."""
        for _ in range(_READS):
            before = _COUNTER.unpack_from(self._memory)[0]
            status = _unpacked(self._memory)
            if before % 2 == 0 and before == _COUNTER.unpack_from(self._memory)[0]:
                break
        return status

    def forget_stacks(self) -> None:
        """Prepares the file for new stacks: the rank writes at the offset that this descriptor shares with it."""
        os.ftruncate(self._handle, PAGE_BYTES)
        os.lseek(self._handle, PAGE_BYTES, os.SEEK_SET)

    def stacks(self, max_bytes: int) -> bytes:
        """Returns what the rank has written since forget_stacks."""
        return os.pread(self._handle, max_bytes, PAGE_BYTES)

    def close(self) -> None:
        self._memory.close()
        os.close(self._handle)


class OwnStatus:
    """The page as the rank itself has it."""

    def __init__(self, handle: int | None) -> None:
        """handle: the descriptor of the page; None makes a page that only this process sees."""
        self._handle = handle
        self._memory = mmap.mmap(-1 if handle is None else handle, PAGE_BYTES)
        self._counter = 0
        self._step, self._num_done, self._progress_at, self._allowed_s = -1, 0, 0.0, 0.0
        self._checkpoint_step = -1
        self._gives_stacks = False
        # Threads of a script may wait for different operations at the same time.
        self._lock = threading.Lock()

    def give_stacks(self, package: str = "", missing: str = "", setting: str = "") -> None:
        """Lets the reader ask for the stacks of this process at any time. Main thread only. The texts: see RankStatus."""
        if self._handle is not None:
            faulthandler.register(STACKS_SIGNAL, file=self._handle, all_threads=True)
            self._gives_stacks = True
        self._write({"package": package, "missing": missing, "setting": setting})

    def progress(self, *, allowed_s: float, step: int | None = None, phase: str = "", detail: str = "") -> None:
        """Notes that this rank has made progress and may take `allowed_s` for the next one; 0 allows any time."""
        self._step = self._step if step is None else step
        self._num_done += 1
        self._progress_at, self._allowed_s = time.monotonic(), allowed_s
        self._write({"phase": phase, "detail": detail})

    @contextmanager
    def long_work(self, phase: str, *, allowed_s: float = 0.0) -> Iterator[None]:
        """Allows `allowed_s`, or any time, while the block runs, and starts the time of the next step after it."""
        usual_s, before = self._allowed_s, self.read().phase
        self.progress(allowed_s=allowed_s, phase=phase)
        try:
            yield
        finally:
            self.progress(allowed_s=usual_s, phase=before)

    def checkpoint(self, step: int) -> None:
        """Tells the reader that the checkpoint of this step is published, so restarts stop when a job makes no progress."""
        self._checkpoint_step = step
        self._write({})

    def name_folder(self, folder: Path) -> None:
        """Tells the reader where stacks and verdicts of this run are kept."""
        self._write({"folder": str(folder)})

    def read(self) -> RankStatus:
        return _unpacked(self._memory)

    def _write(self, texts: dict[str, str]) -> None:
        own = (os.getpid(), threading.main_thread().ident or 0, self._gives_stacks)
        with self._lock:
            progress = (self._step, self._num_done, self._progress_at, self._allowed_s, self._checkpoint_step)
            _COUNTER.pack_into(self._memory, 0, self._counter + 1)
            _NUMBERS.pack_into(self._memory, _COUNTER.size, *own, *progress)
            for name, text in texts.items():
                start, size = _TEXTS[name]
                encoded = text.encode(errors="replace")[: size - 1]
                self._memory[start : start + len(encoded) + 1] = encoded + b"\0"
            self._counter += 2
            _COUNTER.pack_into(self._memory, 0, self._counter)


# ---- looking at pages ----
#
# Tells a watcher that was paused from ranks that hang.
#
# A stopped job (Ctrl-Z, scontrol suspend, docker pause) or virtual machine makes no progress, while
# the clock goes on. Its watcher, which looks once per second, is stopped with it and sees the pause
# as a gap between two looks.

PAUSE_S = 5.0
"""A gap between two looks that is at least this long means that the watcher was paused; overload delays less."""


class LookClock:
    """Remembers when one watcher has looked."""

    def __init__(self, now: float) -> None:
        self._looked_at, self._since = now, 0.0

    def since(self, now: float) -> float:
        """To be called at every look; returns the time of the first look after the last pause, before which nothing counts."""
        if now - self._looked_at >= PAUSE_S:
            self._since = now
        self._looked_at = now
        return self._since

    def restart(self, now: float) -> None:
        """Lets everything count from now on, after work of the watcher itself that took long."""
        self._looked_at = self._since = now


# ---- what a thread waits for ----
#
# The frames of these functions in a stack say what the thread waits for; the code that looks for hangs (launch/hang) knows
# nothing of the programs that call them. They cost a call each.


def wait_for_ranks(call: Callable[[], _T]) -> _T:
    """Returns call(), which waits for other ranks; the page's `detail` may say in which operation."""
    return call()


def wait_for_gpu(call: Callable[[], _T]) -> _T:
    """Returns call(), which waits for queued work of a GPU, in which a collective may be."""
    return call()


def wait_for_helper(call: Callable[[], _T]) -> _T:
    """Returns call(), which waits for a helper process of this rank, such as a loader."""
    return call()


@cache
def own_status() -> OwnStatus:
    """Returns the page of this process; the same object on every call."""
    number = os.environ.get(FD_NAME, "")
    if number.isdecimal():
        with contextlib.suppress(OSError, ValueError):
            # A program between the agent and this process may have closed the file; its number may now be another file.
            if str(Path(f"/proc/self/fd/{number}").readlink()).startswith(f"/memfd:{_FILE_NAME}"):
                return OwnStatus(int(number))
    return OwnStatus(None)


def _unpacked(memory: mmap.mmap) -> RankStatus:
    status = dict(zip(_NUMBER_NAMES, _NUMBERS.unpack_from(memory, _COUNTER.size), strict=True))
    if not status["pid"]:
        status |= {"step": -1, "checkpoint_step": -1}
    for name, (start, size) in _TEXTS.items():
        status[name] = memory[start : start + size].partition(b"\0")[0].decode(errors="replace")
    return RankStatus(**status)
