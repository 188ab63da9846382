"""The agent's watch over its ranks: heartbeats, checkpoints, stopped ranks, and the stacks of ranks that hang.

    every beat        "beat"; "status": how long ago a rank of this host made progress, and whether one is late; "progress":
                      the step of a new checkpoint; "stopped": a rank that received SIGSTOP
    "stacks" arrives  "kept" if they were written into the run folder, then one "stacks" message per rank
    "verdict" arrives the verdict is written next to them, and the event into events.jsonl

Used by the agent's one thread. Standard library only.

    field              changed by            read by
    _due_at            check                 next_at, for the loop of the agent
    _look_at, _is_late _look, report_stacks  _look: between two beats only a rank that has become late is reported
    _step              report_progress       report_progress: only news are sent
    _stopped           check                 check: each stopped rank is reported once
    _pages             new_page, forget      everything; one page per worker
    _aborted           report_stacks         take_output: stacks are not shown as output
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

from megaclass_launch.agent.supervisor import Supervisor, Worker
from megaclass_launch.hang.record import keep_stacks, keep_verdict
from megaclass_launch.hang.stacks import MAX_STACK_BYTES, WatchedRank, abort_group, collect
from megaclass_launch.rank_status import FD_NAME, HANG_TIMEOUT, LookClock, StatusPage
from megaclass_launch.wire.protocol import Message

_LOOK_S = 1.0
"""How often the pages are looked at."""

Say = Callable[[Message, bytes], None]


class RankWatch:
    """Watches the ranks of this host, and tells the driver about them. interval_s: between two heartbeats."""

    def __init__(
        self, supervisor: Supervisor, say: Say, *, host: str, interval_s: float, hang_timeout_s: float = 0.0
    ) -> None:
        self._supervisor, self._say = supervisor, say
        self._host = host
        self._interval_s, self._hang_timeout_s = interval_s, hang_timeout_s
        self._due_at = 0.0
        self._step = -1
        self._stopped: set[int] = set()
        self._pages: dict[int, StatusPage] = {}
        self._aborted: dict[int, bytearray] = {}
        """Text that ranks have printed on stderr since SIGABRT made them print their stacks."""
        self._is_late = False
        self._look_at = 0.0
        self._clock = LookClock(time.monotonic())

    def new_page(self, rank: int) -> StatusPage:
        """Returns the page that a rank inherits."""
        page = self._pages[rank] = StatusPage()
        return page

    def forget(self, rank: int) -> None:
        """Closes the page of a worker that has ended, in an elastic job, which may start many."""
        if (page := self._pages.pop(rank, None)) is not None:
            page.close()

    def environment(self, rank: int) -> dict[str, str]:
        """Returns the variables by which a rank finds its page."""
        limit = {HANG_TIMEOUT: f"{self._hang_timeout_s:g}"} if self._hang_timeout_s else {}
        return {FD_NAME: str(self._pages[rank].fileno()), **limit}

    def next_at(self, now: float) -> float:
        """Returns the time of the next `check`."""
        return min(self._due_at, now + _LOOK_S)

    def check(self, now: float) -> None:
        """Looks for ranks that are late; sends everything else if the interval is over."""
        is_due = now >= self._due_at
        # Also between two beats: --heartbeat may be minutes, and a rank that is late should be reported at once.
        if is_due or now >= self._look_at:
            self._look(is_beat=is_due)
        if not is_due:
            return
        self._due_at = now + self._interval_s
        # The orphan killers count a silent agent as dead, just as the driver does.
        self._supervisor.keep_watch()
        self._say({"say": "beat"}, b"")
        self.report_progress()
        for worker in self._supervisor.running():
            if self._supervisor.is_stopped(worker) and worker.pid not in self._stopped:
                self._stopped.add(worker.pid)
                self._say({"say": "stopped", "rank": worker.rank, "pid": worker.pid}, b"")

    def report_progress(self) -> None:
        """Reports the last checkpoint if it is a new one."""
        # Whichever rank of the host has published it: what counts is that the job got that far.
        step = max((page.read().checkpoint_step for page in self._pages.values()), default=-1)
        if step > self._step:
            self._step = step
            self._say({"say": "progress", "step": step}, b"")

    def _look(self, *, is_beat: bool) -> None:
        now = time.monotonic()
        self._look_at = now + _LOOK_S
        since = self._clock.since(now)
        found = [self._pages[worker.rank].read() for worker in self._supervisor.running()]
        # A program that does not use the page, or has not finished a step yet, cannot be called late.
        active = [status for status in found if status.num_done]
        if not active:
            return
        # One is enough: the driver asks all agents for their stacks, and compares all ranks.
        late = max(active, key=lambda status: status.late_s(now, since=since))
        is_late = late.late_s(now, since=since) > 0
        if is_beat or (is_late and not self._is_late):
            message: Message = {"say": "status", "idle_s": now - max(status.progress_at for status in active)}
            if is_late:
                message |= {"silent_s": now - late.progress_at, "missing": late.missing, "setting": late.setting}
            self._say(message, b"")
        self._is_late = is_late

    def take_output(self, rank: int, stream: str, data: bytes) -> bool:
        """Keeps what an aborted rank prints on stderr, its stacks; returns False for all other output."""
        if stream != "stderr" or rank not in self._aborted:
            return False
        # Bounded: a rank that catches SIGABRT may print without end.
        self._aborted[rank] += data[: MAX_STACK_BYTES - len(self._aborted[rank])]
        return True

    def report_stacks(
        self,
        name: str,
        running: Sequence[Worker],
        ranks: Mapping[int, int],
        read_stderr: Callable[[int], None],
        *,
        may_abort: bool,
    ) -> None:
        """Collects and sends the stacks. read_stderr: moves what a rank has printed since into `take_output`.

        ranks: the rank of each worker, for the names of the files. may_abort: ranks that cannot be asked get SIGABRT, which
        ends them, because the job ends in any case.
        """
        watched = [WatchedRank(worker.rank, worker.pid, self._pages[worker.rank]) for worker in running]

        def abort(rank: WatchedRank) -> None:
            # What it printed before the signal is ordinary output, and goes to the driver first.
            read_stderr(rank.rank)
            self._aborted[rank.rank] = bytearray()
            abort_group(rank)

        def printed(rank: int) -> bytes:
            read_stderr(rank)
            return bytes(self._aborted.get(rank, b""))

        since = self._clock.since(time.monotonic())
        reports = collect(watched, self._host, abort=abort if may_abort else None, aborted_output=printed, since=since)
        # If the job continues, a rank is reported again when it has been late as long once more.
        self._clock.restart(time.monotonic())
        self._is_late = False
        # On this host, because the machine of the driver may not have the run folder.
        folder = self._run_folder()
        by_rank = [replace(report, rank=ranks[report.rank]) for report in reports]
        if folder is not None and (kept := keep_stacks(folder, name, by_rank)) is not None:
            self._say({"say": "kept", "folder": str(kept)}, b"")
        for report in reports:
            # The driver knows the host, and the stacks follow the message as bytes.
            sent = {one.name: getattr(report, one.name) for one in fields(report) if one.name not in ("host", "stacks")}
            self._say({"say": "stacks", **sent}, report.stacks.encode(errors="replace")[:MAX_STACK_BYTES])
            # What a program printed that is not a Python stack is output like any other.
            if not report.stacks and (printed_instead := bytes(self._aborted.pop(report.rank, b""))):
                self._say({"say": "output", "rank": report.rank, "stream": "stderr"}, printed_instead)

    def keep_verdict(self, order: Message) -> None:
        """Writes the driver's verdict into the run folder, if the ranks of this host have one."""
        folder = self._run_folder()
        if folder is not None:
            keep_verdict(folder, order["name"], order["text"], order["groups"], order["ranks"], order["step"])

    def _run_folder(self) -> Path | None:
        # The ranks of a job share it, but one that hangs early may not have written it into its page yet.
        folders = (page.read().folder for page in self._pages.values())
        return next((Path(folder) for folder in folders if folder), None)
