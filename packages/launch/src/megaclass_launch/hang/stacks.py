"""Collects the stacks of the ranks of one host, also of ranks that cannot answer.

    the rank registered (give_stacks)  its page says so: STACKS_SIGNAL, upon which faulthandler writes into the page's file
    any other Python program           SIGABRT: with PYTHONFAULTHANDLER=1 it prints its stacks on stderr, and ends
    stopped (T), in the kernel (D)     cannot answer; the kernel's own view of it is reported instead
    processes that a rank has started  not asked: the kernel tells for which file they wait, or that they are stopped

SIGABRT is sent only after all else is known, because it ends the process: the job is about to be ended anyway.
"""

import contextlib
import os
import platform
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megaclass_launch.rank_status import STACKS_SIGNAL, StatusPage

# ---- process state ----
# The kernel's view of a process that may hang: whether it is stopped, and for which file its threads
# wait.

# Numbers of the system calls that may wait for a file, by machine.
_FILE_CALLS = {
    "x86_64": {
        0: "read", 1: "write", 2: "open", 4: "stat", 5: "fstat", 6: "lstat", 17: "pread", 18: "pwrite", 19: "readv",
        20: "writev", 72: "fcntl", 73: "flock", 74: "fsync", 75: "fdatasync", 217: "getdents", 257: "openat",
        262: "newfstatat", 295: "preadv", 332: "statx",
    },
    "aarch64": {
        25: "fcntl", 32: "flock", 56: "openat", 61: "getdents", 63: "read", 64: "write", 65: "readv", 66: "writev",
        67: "pread", 68: "pwrite", 69: "preadv", 79: "newfstatat", 80: "fstat", 82: "fsync", 83: "fdatasync", 291: "statx",
    },
}  # fmt: skip
_WITHOUT_DESCRIPTOR = ("open", "openat", "stat", "lstat", "newfstatat", "statx")
"""Their first argument is not the descriptor of the file."""


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


def file_call(pid: int, thread: int) -> str:
    """Returns the file operation in which a thread waits, such as "read of /data/train.rec"; empty if it waits in none."""
    try:
        fields = Path(f"/proc/{pid}/task/{thread}/syscall").read_text().split()
    except OSError:
        return ""
    # "running", or -1 for a thread that is in no system call.
    if len(fields) < 2 or not fields[0].isdecimal():
        return ""
    name = _FILE_CALLS.get(platform.machine(), {}).get(int(fields[0]), "")
    if not name or name in _WITHOUT_DESCRIPTOR:
        return name
    try:
        target = str(Path(f"/proc/{pid}/fd/{int(fields[1], 16)}").readlink())
    except (OSError, ValueError):
        return ""  # it does not wait any more
    # Threads that wait for events in sockets, pipes and the like wait for no file.
    return "" if target.startswith(("socket:", "anon_inode:", "pipe:", "/dev/nvidia")) else f"{name} of {target}"


def file_wait(pid: int) -> str:
    """Returns for what a process waits outside of its main thread; empty if there is nothing of the kind.

    That is a file operation of another thread, such as one that reads images, or of a process that it has started, such as
    a loader; or such a process that is stopped: "process 4711, stopped by SIGSTOP".
    """
    if call := _file_call_of(thread for thread in _threads_of(pid) if thread[1] != pid):
        return call
    children = children_of(pid)
    # Python starts loader processes through a server, which then is their parent.
    for child in (*children, *(one for server in children for one in children_of(server))):
        if state_of(child) in ("T", "t"):
            return f"process {child}, stopped by SIGSTOP; SIGCONT continues it"
        if call := _file_call_of(_threads_of(child)):
            return f"{call} in process {child}"
    return ""


def _file_call_of(threads: Iterable[tuple[int, int]]) -> str:
    return next((call for pid, thread in threads if (call := file_call(pid, thread))), "")


def _threads_of(pid: int) -> list[tuple[int, int]]:
    try:
        return [(pid, thread) for thread in sorted(int(task.name) for task in Path(f"/proc/{pid}/task").iterdir())]
    except OSError:
        return []


# ---- all ranks of a host ----

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
    state: str = "silent"
    """answered, stopped (by SIGSTOP), kernel (waits there and cannot be interrupted), silent, ended, or lost (its host)."""
    step: int = -1
    phase: str = ""
    detail: str = ""
    main_thread: int = 0
    waits_for: str = ""
    """File operation in which the main thread waits."""
    file_wait: str = ""
    """File operation in which another thread, or a process that the rank has started, waits; see file_wait()."""
    is_late: bool = True
    """True if the rank was late when it was asked."""
    is_still_late: bool = True
    """True if it was late when its stacks had been collected."""
    stacks: str = ""
    """Text of Python's faulthandler."""
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
    since: float = 0.0,
    answer_s: float = ANSWER_S,
) -> list[RankReport]:
    """Returns a report per rank; takes at most a little more than `answer_s`, whatever the ranks do.

    abort: called for ranks that are alive but did not register; sends SIGABRT. aborted_output: what such a rank has printed
    since, read by the caller's own means. since: see RankStatus.late_s.
    """
    # All are asked before any answer is awaited: they answer at the same time, and the states are of one moment.
    found = {watched.rank: _asked(watched, host, since) for watched in ranks}
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
        for watched in list(waiting):
            is_own = watched.page.read().gives_stacks
            text = watched.page.stacks(MAX_STACK_BYTES) if is_own else aborted_output(watched.rank)
            is_same = bool(text) and text == texts.get(watched.rank)
            settled[watched.rank] = settled.get(watched.rank, 0) + 1 if is_same else 0
            texts[watched.rank] = text
            # Two more looks: faulthandler writes thread after thread, and a busy host may pause it in between.
            if settled[watched.rank] >= 2:
                waiting.remove(watched)
    return [_answered(watched, found[watched.rank], texts.get(watched.rank, b""), since) for watched in ranks]


def _asked(watched: WatchedRank, host: str, since: float) -> RankReport:
    """Reads the rank's page and the kernel's view of it, then asks it for its stacks."""
    status = watched.page.read()
    # The process that was started may be a shell; the rank itself has written its own pid into the page.
    pid = status.pid or watched.pid
    report = RankReport(
        rank=watched.rank,
        host=host,
        pid=pid,
        state=_STATES.get(state_of(pid), "silent"),
        step=status.step,
        phase=status.phase,
        detail=status.detail,
        main_thread=status.main_thread,
        waits_for=file_call(pid, pid),
        file_wait=file_wait(pid),
        package=status.package,
        is_late=status.late_s(time.monotonic(), since=since) > 0,
    )
    if report.state == "silent" and status.gives_stacks:
        # A page is used again, and an older answer must not be taken for the new one.
        watched.page.forget_stacks()
        with contextlib.suppress(OSError):
            os.kill(pid, STACKS_SIGNAL)
    return report


def _answered(watched: WatchedRank, report: RankReport, text: bytes, since: float) -> RankReport:
    stacks = text.decode(errors="replace")
    is_late = watched.page.read().late_s(time.monotonic(), since=since) > 0
    if "most recent call first" not in stacks:
        return replace(report, is_still_late=is_late)
    state = "answered" if report.state == "silent" else report.state
    return replace(report, is_still_late=is_late, state=state, stacks=stacks)


def has_passed(reports: Sequence[RankReport]) -> bool:
    """Returns whether a rank that was late has finished its step while the ranks were asked, or none is late any more.

    The stacks may then show all of them in the collective that ended it. A rank that could not be asked counts as late.
    """
    has_finished = any(report.is_late and not report.is_still_late for report in reports)
    return has_finished or not any(report.is_still_late for report in reports)


def abort_group(watched: WatchedRank) -> None:
    """Sends SIGABRT to the rank and its children in the same process group: a shell may stand between."""
    with contextlib.suppress(OSError):
        os.killpg(watched.pid, signal.SIGABRT)
