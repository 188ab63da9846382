"""Collects the stacks of the ranks of one host, also of ranks that cannot answer.

    the rank registered (train, hvd)   its page says so: STACKS_SIGNAL, upon which faulthandler writes into the page's file
    any other Python program           SIGABRT: with PYTHONFAULTHANDLER=1 it prints its stacks on stderr, and ends
    stopped (T), in the kernel (D)     cannot answer; the kernel's own view of it is reported instead
    loader processes of a rank         asked with it; their stacks follow its own, see loaders.py

SIGABRT is sent only after all else is known, because it ends the process: the job is about to be ended anyway.
"""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from megaclass.distributed.rank_status import STACKS_SIGNAL, RankStatus, StatusPage
from megaclass.launch.hang.loaders import AskedLoader, ask_loaders, have_answered, loader_stacks
from megaclass.launch.hang.process_state import file_wait, main_thread_waits_for, state_of

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
    error: str = ""
    """The error that its main thread is handling; known only if the rank reports itself."""


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
