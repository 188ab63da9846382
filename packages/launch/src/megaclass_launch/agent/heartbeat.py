"""The agent's heartbeats, and what it finds out about its ranks between two of them. Standard library only.

field        changed by         read by
_due_at      check              next_at, for the loop of the agent
_step        report_progress    report_progress: only news are sent
_stopped     check              check: each stopped rank is reported once
"""

from collections.abc import Callable

from megaclass_launch.agent.hang_reporter import LOOK_S, HangReporter
from megaclass_launch.agent.supervisor import Supervisor
from megaclass_launch.restart_progress import ProgressFile
from megaclass_launch.wire.protocol import Message


class AgentHeartbeat:
    """Reports to the driver at regular intervals: that the agent lives, checkpoints, ranks that are stopped or late."""

    def __init__(
        self, supervisor: Supervisor, hangs: HangReporter, say: Callable[[Message], None], interval_s: float
    ) -> None:
        self._supervisor = supervisor
        self._hangs = hangs
        self._say = say
        self._interval_s = interval_s
        self._due_at = 0.0
        self._progress = ProgressFile()
        self._step: int | None = None
        self._stopped: set[int] = set()

    @property
    def progress_fd(self) -> int:
        """Returns the number of the file into which ranks write the step of their last checkpoint."""
        return self._progress.fileno()

    def next_at(self, now: float) -> float:
        """Returns the time of the next `check`."""
        return min(self._due_at, now + LOOK_S)

    def check(self, now: float) -> None:
        """Looks for ranks that are late; sends everything else if the interval is over."""
        is_due = now >= self._due_at
        # Also between two beats: --heartbeat may be minutes, and a rank that is late should be reported at once.
        self._hangs.look(self._supervisor.running(), is_beat=is_due)
        if not is_due:
            return
        self._due_at = now + self._interval_s
        # The orphan killers count a silent agent as dead, just as the driver does.
        self._supervisor.keep_watch()
        self._say({"say": "beat"})
        self.report_progress()
        for worker in self._supervisor.running():
            if self._supervisor.is_stopped(worker) and worker.pid not in self._stopped:
                self._stopped.add(worker.pid)
                self._say({"say": "stopped", "rank": worker.rank, "pid": worker.pid})

    def report_progress(self) -> None:
        """Reports the last checkpoint if it is a new one."""
        # All ranks of the host write to one file: what counts is that the job got that far.
        if (step := self._progress.step()) != self._step:
            self._step = step
            self._say({"say": "progress", "step": step})
