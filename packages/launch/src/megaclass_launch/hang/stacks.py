"""Collects the stacks of the ranks of one host, also of ranks that cannot answer.

    the rank registered (give_stacks)  its page says so: STACKS_SIGNAL, upon which faulthandler writes into the page's file
    any other Python program           SIGABRT: with PYTHONFAULTHANDLER=1 it prints its stacks on stderr, and ends
    stopped (T), in the kernel (D)     cannot answer; the kernel's own view of it is reported instead
    loader processes of a rank         asked with it; their stacks follow its own, see AskedLoader

SIGABRT is sent only after all else is known, because it ends the process: the job is about to be ended anyway.
"""

import contextlib
import os
import platform
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megaclass_launch.rank_status import LOADER_FILE_NAME, STACKS_SIGNAL, RankStatus, StatusPage

# ---- process state ----
# The kernel's view of a process that may hang: whether it is stopped, and what its threads wait
# for.

# Numbers of the system calls in which programs wait, by machine; the first argument of those in _OF_FILES is a descriptor.
_CALLS = {
    "x86_64": {
        0: "read", 1: "write", 2: "open", 4: "stat", 5: "fstat", 6: "lstat", 7: "poll", 16: "ioctl", 17: "pread", 18: "pwrite",
        19: "readv", 20: "writev", 23: "select", 34: "pause", 35: "nanosleep", 42: "connect", 43: "accept", 44: "sendto",
        45: "recvfrom", 46: "sendmsg", 47: "recvmsg", 61: "wait4", 72: "fcntl", 73: "flock", 74: "fsync", 75: "fdatasync",
        202: "futex", 217: "getdents", 230: "clock_nanosleep", 232: "epoll_wait", 247: "waitid", 257: "openat",
        262: "newfstatat", 270: "pselect6", 271: "ppoll", 281: "epoll_pwait", 295: "preadv", 332: "statx",
    },
    "aarch64": {
        22: "epoll_pwait", 25: "fcntl", 29: "ioctl", 32: "flock", 56: "openat", 61: "getdents", 63: "read", 64: "write",
        65: "readv", 66: "writev", 67: "pread", 68: "pwrite", 72: "pselect6", 73: "ppoll", 79: "newfstatat", 80: "fstat",
        82: "fsync", 83: "fdatasync", 95: "waitid", 98: "futex", 101: "nanosleep", 115: "clock_nanosleep", 203: "connect",
        206: "sendto", 207: "recvfrom", 211: "sendmsg", 212: "recvmsg", 260: "wait4", 291: "statx",
    },
}  # fmt: skip
_OF_FILES = {
    *("read", "write", "pread", "pwrite", "readv", "writev", "preadv", "fstat", "flock", "fsync", "fdatasync"),
    *("getdents", "fcntl", "ioctl", "recvfrom", "recvmsg", "sendto", "sendmsg", "connect", "accept"),
}
ASLEEP = ("nanosleep", "clock_nanosleep", "pause")
_WAITS_FOR_FILE = ("read", "pread", "readv", "preadv", "open", "openat", "stat", "lstat", "fstat", "newfstatat", "statx",
                   "getdents", "flock", "fcntl", "fsync", "fdatasync", "write", "pwrite", "writev")  # fmt: skip


def state_of(pid: int) -> str:
    """Returns the state letter of a process (T: stopped, D: waits in the kernel, Z: ended), or an empty text if it is gone."""
    try:
        # The name in parentheses before the state may itself contain spaces and parentheses.
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return ""


def children_of(pid: int) -> list[int]:
    """Returns the processes that a process has started and that still run; none if the kernel does not list them."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            # A thread may end meanwhile.
            with contextlib.suppress(OSError):
                found += map(int, (task / "children").read_text().split())
    return sorted(found)


def system_call(pid: int, thread: int) -> str:
    """Returns what a thread waits for, such as "read of /data/train.rec" or "futex"; empty if it runs or cannot be asked."""
    try:
        fields = Path(f"/proc/{pid}/task/{thread}/syscall").read_text().split()
    except OSError:
        return ""
    # "running", or -1 for a thread that is in no system call.
    if len(fields) < 2 or not fields[0].isdecimal():
        return ""
    name = _CALLS.get(platform.machine(), {}).get(int(fields[0]), f"system call {fields[0]}")
    if name not in _OF_FILES:
        return name
    with contextlib.suppress(OSError, ValueError):
        return f"{name} of {Path(f'/proc/{pid}/fd/{int(fields[1], 16)}').readlink()}"
    return name


def main_thread_waits_for(pid: int) -> str:
    """Describes what the main thread does: the system call in which it waits, or that it computes."""
    call = system_call(pid, pid)
    return call or ("running on the CPU" if state_of(pid) == "R" else "")


def file_wait(pid: int) -> str:
    """Returns the file operation in which some other thread waits, a reader thread for example; empty if there is none."""
    try:
        threads = [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return ""
    for thread in sorted(threads):
        call = system_call(pid, thread) if thread != pid else ""
        name, _, target = call.partition(" of ")
        # Libraries keep threads that wait for events in sockets, pipes and the like; those are idle.
        if name in _WAITS_FOR_FILE and not target.startswith(("socket:", "anon_inode:", "pipe:")):
            return call
    return ""


# ---- look clock ----
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


# ---- loaders ----
# Collects the stacks of a rank's loader processes, for which its main thread may wait.
#
# A loader process writes them into a file in memory of its own, which is found among its open
# files. They follow the rank's own stacks in the same text, each process under a heading that
# frames.py reads:
#
#     loader process 4711: answered; read of /data/000123.jpg
#     Thread 0x… (most recent call first):

_MAX_BYTES = 1 << 13
"""Per loader process. Its innermost frames come first."""
_MAX_LOADERS = 4
"""Further processes of a rank read the same data; their stacks would crowd out the rank's own."""


@dataclass(frozen=True, slots=True)
class AskedLoader:
    """A loader process that was asked for its stacks."""

    pid: int
    call: str
    """File operation in which one of its threads waits."""
    file: Path
    begins_at: int
    """Size of the file before it was asked: an earlier answer stays in it."""

    @property
    def is_stopped(self) -> bool:
        """Asked for when it is needed: SIGSTOP takes a moment to reach the threads of a process on a busy machine."""
        return state_of(self.pid) in ("T", "t")

    def answer(self) -> str:
        """Returns what it has written since it was asked; empty if that is nothing."""
        with contextlib.suppress(OSError), self.file.open("rb") as file:
            file.seek(self.begins_at)
            return file.read(_MAX_BYTES).decode(errors="replace")
        return ""


def ask_loaders(rank_pid: int) -> list[AskedLoader]:
    """Asks the loader processes of a rank for their stacks; waits for nothing."""
    asked = []
    children = children_of(rank_pid)
    # A rank starts its loader processes through a server, which then is their parent.
    for pid in (*children, *(one for child in children for one in children_of(child))):
        if (file := _stacks_file(pid)) is None:
            continue
        with contextlib.suppress(OSError):
            loader = AskedLoader(pid, file_wait(pid), file, file.stat().st_size)
            # A process that is stopped answers when it continues, into a file that is not read any more.
            os.kill(pid, STACKS_SIGNAL)
            asked.append(loader)
        if len(asked) == _MAX_LOADERS:
            break
    return asked


def have_answered(loaders: list[AskedLoader]) -> bool:
    """Tells whether every loader process that can answer has begun to."""
    return all(loader.is_stopped or loader.answer() for loader in loaders)


def loader_stacks(loaders: list[AskedLoader]) -> str:
    """Returns the answers under their headings; empty if there are no loader processes."""
    parts = []
    for loader in loaders:
        text = loader.answer()
        state = "stopped" if loader.is_stopped else "answered" if text else "silent"
        parts.append(f"loader process {loader.pid}: {state}" + (f"; {loader.call}" if loader.call else ""))
        parts.append(text)
    return "\n".join(parts)


def _stacks_file(pid: int) -> Path | None:
    """Returns the file into which a process writes its stacks; None if it is not a loader process."""
    with contextlib.suppress(OSError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            # A file that is closed meanwhile is passed over.
            with contextlib.suppress(OSError):
                if str(file.readlink()).startswith(f"/memfd:{LOADER_FILE_NAME}"):
                    return file
    return None


MAX_STACK_BYTES = 1 << 16
ANSWER_S = 2.5
"""How long a rank may take for its stacks. The handler runs at once unless the process gets no CPU."""
_POLL_S = 0.05
_STATES = {"T": "stopped", "t": "stopped", "D": "kernel", "Z": "ended", "X": "ended", "": "ended"}


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReport:
    """Everything known about one rank when the job hangs."""

    rank: int
    host: str
    pid: int
    state: str
    """answered, stopped (by SIGSTOP), kernel (waits there and cannot be interrupted), silent, ended, or lost (its host)."""
    step: int = -1
    phase: str = ""
    detail: str = ""
    main_thread: int = 0
    waits_for: str = ""
    """System call in which the main thread waits."""
    file_wait: str = ""
    """File operation in which another thread waits."""
    stacks: str = ""
    """Text of Python's faulthandler, of the rank and then of its loader processes."""
    package: str = ""
    """The folder of megaclass in the rank's process; empty if the rank does not use it."""


@dataclass(frozen=True, slots=True)
class WatchedRank:
    """A rank of this host: its number, the process that the agent started, and its page."""

    rank: int
    pid: int
    page: StatusPage


def collect(
    ranks: Sequence[WatchedRank],
    host: str,
    *,
    abort: Callable[[WatchedRank], None] | None = None,
    aborted_output: Callable[[int], bytes] = lambda rank: b"",
    tick: Callable[[], None] = lambda: None,
    answer_s: float = ANSWER_S,
) -> list[RankReport]:
    """Returns a report per rank; takes at most a little more than `answer_s`, whatever the ranks do.

    abort: called for ranks that are alive but did not register; sends SIGABRT. aborted_output: what such a rank has printed
    since, read by the caller's own means. tick: called several times per second meanwhile.
    """
    # All are asked before any answer is awaited: they answer at the same time, and the states are of one moment.
    found = {watched.rank: _asked(watched) for watched in ranks}
    deadline = time.monotonic() + answer_s
    waiting = [watched for watched in ranks if found[watched.rank].state == "silent"]
    if abort is not None:
        for watched in waiting:
            if not watched.page.read().gives_stacks:
                abort(watched)
    texts: dict[int, bytes] = {}
    settled: dict[int, int] = {}
    # A rank has answered when its text has stopped growing.
    while waiting and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        tick()
        for watched in list(waiting):
            is_own = watched.page.read().gives_stacks
            text = watched.page.stacks(MAX_STACK_BYTES) if is_own else aborted_output(watched.rank)
            is_same = bool(text) and text == texts.get(watched.rank)
            settled[watched.rank] = settled.get(watched.rank, 0) + 1 if is_same else 0
            texts[watched.rank] = text
            # Two more looks: faulthandler writes thread after thread, and a busy host may pause it in between.
            if settled[watched.rank] >= 2 and have_answered(found[watched.rank].loaders):
                waiting.remove(watched)
    return [_report(watched, found[watched.rank], host, texts.get(watched.rank, b"")) for watched in ranks]


@dataclass(frozen=True, slots=True)
class _Asked:
    status: RankStatus
    pid: int
    state: str
    waits_for: str
    file_wait: str
    loaders: list[AskedLoader]


def _asked(watched: WatchedRank) -> _Asked:
    """Reads the rank's page and the kernel's view of it, then asks it for its stacks."""
    status = watched.page.read()
    # The process that was started may be a shell; the rank itself has written its own pid into the page.
    pid = status.pid or watched.pid
    state = _STATES.get(state_of(pid), "silent")
    asked = _Asked(status, pid, state, main_thread_waits_for(pid), file_wait(pid), ask_loaders(pid))
    if state == "silent" and status.gives_stacks:
        # A page is used again, and an older answer must not be taken for the new one.
        watched.page.forget_stacks()
        with contextlib.suppress(OSError):
            os.kill(pid, STACKS_SIGNAL)
    return asked


def _report(watched: WatchedRank, asked: _Asked, host: str, text: bytes) -> RankReport:
    stacks = text.decode(errors="replace")
    has_stacks = "most recent call first" in stacks
    return RankReport(
        rank=watched.rank,
        host=host,
        pid=asked.pid,
        state="answered" if asked.state == "silent" and has_stacks else asked.state,
        step=asked.status.step,
        phase=asked.status.phase,
        detail=asked.status.detail,
        main_thread=asked.status.main_thread,
        waits_for=asked.waits_for,
        file_wait=asked.file_wait,
        package=asked.status.package,
        stacks=stacks + loader_stacks(asked.loaders) if has_stacks else "",
    )


def abort_group(watched: WatchedRank) -> None:
    """Sends SIGABRT to the rank and its children in the same process group: a shell may stand between."""
    with contextlib.suppress(OSError):
        os.killpg(watched.pid, signal.SIGABRT)


def latest_late_s(pages: Mapping[int, StatusPage], now: float, *, since: float) -> tuple[int, float]:
    """Returns the rank that is late the most, and by how many seconds; (-1, 0) if none is late. since: see RankStatus."""
    late = [(page.read().late_s(now, since=since), rank) for rank, page in pages.items()]
    late_s, rank = max(late, default=(0.0, -1))
    return (rank, late_s) if late_s > 0 else (-1, 0.0)
