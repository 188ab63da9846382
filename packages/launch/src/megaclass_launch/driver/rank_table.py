"""Table of the processes of all ranks: where each runs, what it printed last, how it ended. Standard library only."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from megaclass_launch.driver.outcome import LastLines, failure_report, headline
from megaclass_launch.elastic.worker import Why

_LEFT_EARLY_S = 60.0
"""A rank that left with 0 is named if others still run after this time: they may be waiting for it."""


@dataclass(slots=True)
class WorkerRecord:
    """One process that the job has started, as the driver knows it; in a job that is not elastic there is one per rank."""

    number: int
    """Unique in the whole job; messages use it in place of a rank. In a job that is not elastic it is the rank."""
    host: str
    slot: int
    """Place on its host. It stays the same as long as the process lives, so the process keeps its GPU."""
    rank: int | None = None
    """Rank in the current generation; None for a process that is not a member of it."""
    is_ready: bool = False
    """Waits at the rendezvous."""
    why: Why = Why.START
    is_leaving: bool = False
    """Was dismissed by the driver: its end is not a failure."""
    since: float = 0.0
    """Time at which it was started, or told to leave."""
    stopped_at: float | None = None
    """Time at which its agent reported that it was stopped by SIGSTOP."""
    shown_rank: int = 0
    """Rank in front of its output: that of the current generation, or before the first one that of the plan."""
    pid: int = 0
    code: int | None = None
    """Exit code, or minus the signal that ended it; None while it runs."""
    ended_at: float = 0.0
    last_lines: LastLines = field(default_factory=LastLines)

    @property
    def name(self) -> str:
        return f"rank {self.shown_rank} on {self.host}"


class RankTable:
    """One row per process that was ever started; `alive` has those that run, keyed by number."""

    def __init__(self) -> None:
        self.rows: list[WorkerRecord] = []
        self.alive: dict[int, WorkerRecord] = {}
        self.has_started = False
        """True once any rank ran."""
        self._has_named_early = False

    def add(self, host: str, slot: int, now: float, rank: int | None = None) -> WorkerRecord:
        """Adds a worker that is about to be started."""
        # Rows are never removed, so no number is given twice.
        worker = WorkerRecord(len(self.rows), host, slot, rank=rank, since=now, shown_rank=rank or 0)
        self.rows.append(worker)
        self.alive[worker.number] = worker
        return worker

    def note_pids(self, pids: dict[int, int]) -> None:
        """Notes that workers have started."""
        self.has_started = self.has_started or bool(pids)
        for number, pid in pids.items():
            self.rows[number].pid = pid

    def note_exit(self, worker: WorkerRecord, pid: int, code: int) -> None:
        worker.pid, worker.code, worker.ended_at = pid, code, time.monotonic()
        self.has_started = True
        self.alive.pop(worker.number, None)

    def staying(self) -> list[WorkerRecord]:
        """Returns the workers that run and were not told to leave."""
        return [worker for worker in self.alive.values() if not worker.is_leaving]

    def members(self) -> list[WorkerRecord]:
        """Returns the members of the current generation that run and were not told to leave, in the order of their ranks."""
        found = [worker for worker in self.staying() if worker.rank is not None]
        return sorted(found, key=lambda worker: worker.rank or 0)

    def free_slots(self, host: str, num_slots: int) -> list[int]:
        """Returns the slots of a host that no running worker has, the lowest first."""
        # Workers that are leaving included: until it has ended, a process holds the GPU of its slot.
        taken = {worker.slot for worker in self.alive.values() if worker.host == host}
        return [slot for slot in range(num_slots) if slot not in taken]

    def on_host(self, host: str) -> list[WorkerRecord]:
        return [worker for worker in self.alive.values() if worker.host == host]

    def ranks_of(self, host: str) -> str:
        """Returns the ranks of a host in a job that is not elastic, whether they run or not: "ranks 0-3"."""
        ranks = [worker.shown_rank for worker in self.rows if worker.host == host]
        return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"

    def headline_of(self, worker: WorkerRecord) -> str:
        assert worker.code is not None
        return headline(worker.shown_rank, worker.host, worker.pid, worker.code, len(self.alive))

    def failure_report_of(self, worker: WorkerRecord) -> str:
        """Returns the report about the rank that failed first, and names the ranks that had left before it."""
        assert worker.code is not None
        last_lines = worker.last_lines.shown()
        text = failure_report(worker.shown_rank, worker.host, worker.pid, worker.code, last_lines)
        early = [other for other in self.rows if other.code == 0 and not other.is_leaving]
        if early:
            # A rank that left early with exit code 0 often is the cause: the others then fail for want of it.
            now = time.monotonic()
            times = ", ".join(f"{other.shown_rank} ({now - other.ended_at:.1f} s before)" for other in early)
            text += f"\nAlready ended with exit code 0: rank {times}. If that was too early, look there for the cause."
        return text

    def name_early_leaver(self) -> str | None:
        """Returns a sentence, once per start, about a rank that has left while others may be waiting for it."""
        now = time.monotonic()
        # Only exits with 0 get this old: after any other code, 75 included, the job is being ended by then.
        ended = (worker for worker in self.rows if worker.code is not None and now - worker.ended_at > _LEFT_EARLY_S)
        if self._has_named_early or not self.alive or (early := next(ended, None)) is None:
            return None
        self._has_named_early = True
        running = ", ".join(f"{w.shown_rank} on {w.host} (pid {w.pid or '?'})" for w in self.alive.values())
        return f"{early.name} ended with exit code 0 {_LEFT_EARLY_S:g} s ago; still running: {running}."


def named(workers: Iterable[WorkerRecord]) -> str:
    """Returns the workers by rank: "rank 1 on h2, rank 3 on h4"."""
    return ", ".join(worker.name for worker in workers)
