"""The restart loop, shared by the ssh driver and Ray, and its limit. Standard library only.

start -> exit 0, or an outcome that must not be repeated -------------> return
  ^         otherwise: exclude failed hosts; give up after 3 starts without progress
  +-- pause (longer after each short start) <--+
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from megaclass_launch.driver.outcome import Outcome
from megaclass_launch.driver.output import DriverIo
from megaclass_launch.exit_codes import exit_status
from megaclass_launch.operating_system import readable
from megaclass_launch.options import RunOptions
from megaclass_launch.signals import DRIVER_SIGNALS, ENDING_SIGNALS, SignalQueue

MAX_STARTS_WITHOUT_PROGRESS = 3
SHORT_START_S = 60.0
_LONGEST_PAUSE_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StartResult:
    outcome: Outcome
    has_started: bool = True
    """False if no rank ran."""
    checkpoint_step: int | None = None
    """Step of the last checkpoint that this start reported."""


class RestartableJob(Protocol):
    """A job that can be started several times."""

    def start(self, restart: int) -> StartResult:
        """Runs the job once, from its start to its end."""
        ...

    def exclude_failed_hosts(self, outcome: Outcome) -> bool:
        """Prepares the next start; returns whether it uses other hosts. Raises NoRestartError if too few are left."""
        ...

    def describe(self) -> str:
        """Returns the ranks and hosts of the next start, for a message."""
        ...


class NoRestartError(Exception):
    """Raised by `exclude_failed_hosts` with the reason why the job cannot be started again."""


@dataclass(slots=True)
class RestartLimit:
    """Counts starts without progress.

    Progress is a checkpoint of a later step than any earlier start has published. A program that reports no checkpoints
    makes progress by running for a minute. A start in which no rank ran, because a host could not be reached, does not
    count: the host may be booting.
    """

    num_without_progress: int = 0
    num_short: int = 0
    """Number of starts in a row that ended within a minute without a new checkpoint: the pause grows with it."""
    best_step: int | None = None

    def note(self, result: StartResult, seconds: float) -> None:
        """Counts one start, which lasted so many seconds."""
        step = result.checkpoint_step
        has_advanced = step is not None and (self.best_step is None or step > self.best_step)
        # Apart from progress: a start that wrote a checkpoint within seconds may be repeated at once.
        self.num_short = self.num_short + 1 if seconds < SHORT_START_S and not has_advanced else 0
        # No rank ran: the hosts may be booting, and only the pause grows.
        if not result.has_started:
            return
        # A program that has ever reported a checkpoint is judged by checkpoints alone.
        reports_checkpoints = step is not None or self.best_step is not None
        if has_advanced:
            self.best_step = step
        has_progress = has_advanced if reports_checkpoints else seconds >= SHORT_START_S
        self.num_without_progress = 0 if has_progress else self.num_without_progress + 1

    def forget(self) -> None:
        """Starts to count again: the next start has other hosts, on which the job may succeed."""
        self.num_without_progress = 0

    def pause_s(self) -> float:
        """Returns the pause before the next start: 0, 0, 1, 3, 7 … 60 s, so that a booting host does not use all of them up."""
        # No pause after the first short start: most failures are single ones, and the ranks of a large job wait for it.
        return min(_LONGEST_PAUSE_S, 2.0 ** (self.num_short - 1) - 1) if self.num_short else 0.0

    def why_not_again(self) -> str | None:
        """Returns why the job should not be started again, or None."""
        if self.num_without_progress < MAX_STARTS_WITHOUT_PROGRESS:
            return None
        what = f"no checkpoint after step {self.best_step}"
        if self.best_step is None:
            what = f"no checkpoint, and none ran for {SHORT_START_S:g} s"
        return (
            f"no restart: the last {self.num_without_progress} starts made no progress ({what}), so the same failure is to "
            f"be expected again. Fix its cause, which is shown above, then start again."
        )


def run_job(open_job: Callable[[DriverIo], RestartableJob], options: RunOptions, num_ranks: int) -> int:
    """Runs a job with its restarts and returns its exit code."""
    with SignalQueue(DRIVER_SIGNALS) as signals:
        io = DriverIo.open(options, num_ranks, signals)
        # Also closed after a LaunchError: what was printed before it must reach the screen.
        outcome = Outcome(exit_code=0)
        try:
            outcome = _run_with_restarts(open_job(io), options.restarts, io)
        finally:
            io.close(is_patient=outcome.may_restart)
    return outcome.exit_code


def _run_with_restarts(job: RestartableJob, num_restarts: int, io: DriverIo) -> Outcome:
    limit = RestartLimit()
    restart = 0
    while True:
        begun = time.monotonic()
        result = job.start(restart)
        outcome = result.outcome
        limit.note(result, time.monotonic() - begun)
        # Order of the reasons to stop: success, an outcome that repeats itself, no restart left, too few hosts, no progress.
        if outcome.exit_code == 0 or not outcome.may_restart or restart == num_restarts:
            return outcome
        # The hosts first: with other hosts the count of starts without progress begins again.
        try:
            if job.exclude_failed_hosts(outcome):
                limit.forget()
        except NoRestartError as reason:
            io.messages.say(f"no restart: {reason}")
            return outcome
        if (why := limit.why_not_again()) is not None:
            io.messages.say(why)
            return outcome
        if (number := _pause(limit, io)) is not None:
            return Outcome(exit_code=exit_status(-number), may_restart=False)
        # The ranks read this number in MEGACLASS_RESTART; `megaclass train` then continues its run instead of starting as told.
        restart += 1
        io.messages.say(f"restart {restart} of {num_restarts}: {job.describe()}.")


def _pause(limit: RestartLimit, io: DriverIo) -> int | None:
    """Waits before a restart; returns the signal by which the user ended the job meanwhile, or None."""
    pause_s = limit.pause_s()
    ends_at = time.monotonic() + pause_s
    if pause_s > 1:
        io.messages.say(f"{limit.num_short} starts ended within {SHORT_START_S:g} s: the next one in {pause_s:.0f} s.")
    while (left_s := ends_at - time.monotonic()) > 0:
        # Not a plain sleep: Ctrl-C must end the pause, and with it the job.
        readable([io.signals], left_s)
        # Other signals are for ranks, and none runs now.
        for number in io.signals.taken():
            if number in ENDING_SIGNALS:
                return number
    return None
