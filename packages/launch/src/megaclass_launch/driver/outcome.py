"""The outcome of one start of a job, the one place that decides it, and the reports on what failed. Standard library only.

Several things can happen while a job ends: a rank fails, its peers fail because of it, the user presses Ctrl-C, a host is
lost. `OutcomeDecision.decide` is called for each of them, and the reasons have a rank order:

    NONE < RESUME < FAULT < SIGNAL

A stronger reason replaces a weaker one. Of several faults the first counts, because the later ones are its consequences;
of several signals the last counts, because the user has insisted.
"""

import re
import signal
from collections import deque
from dataclasses import dataclass
from enum import IntEnum

from megaclass_launch.exit_codes import EXIT_RESUME_ME, how_it_ended
from megaclass_launch.wire.checks import plain_text


class Reason(IntEnum):
    """Why a job ends, from the weakest reason to the strongest."""

    NONE = 0
    """Nothing happened yet; a job that ends like this has succeeded."""
    RESUME = 1
    """A rank was asked to stop, saved and left with exit code 75. The other ranks may still fail."""
    FAULT = 2
    """A rank failed, a host was lost, the job hung, or it could not be started."""
    SIGNAL = 3
    """The user or the batch system sent the driver a signal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    exit_code: int
    failed_hosts: tuple[str, ...] = ()
    """Hosts that could not be reached, were lost, or had the first rank that failed."""
    may_restart: bool = True
    """False after a signal, exit codes 2 and 75, and if stdout was closed."""


class OutcomeDecision:
    """Holds the reason for which the job ends, its outcome and the report to show last."""

    def __init__(self) -> None:
        self.reason = Reason.NONE
        self.report = ""
        """Names the rank or host that failed first; shown when no rank prints any more."""
        self.outcome = Outcome(exit_code=0)
        """It counts when nothing of the job is left."""

    @property
    def is_ending(self) -> bool:
        """True once the ranks have been told to end, so their exit codes say nothing about the cause."""
        return self.reason >= Reason.FAULT

    def decide(self, reason: Reason, outcome: Outcome, report: str = "") -> bool:
        """Records the outcome if its reason counts; returns whether it does."""
        # A signal also replaces a signal: SIGTERM after Ctrl-C gives the exit code of SIGTERM.
        counts = reason > self.reason or reason is Reason.SIGNAL
        if counts:
            self.reason, self.outcome = reason, outcome
            # A signal keeps the report about an earlier fault: the user still wants to know the cause.
            self.report = report or self.report
        return counts

    def explain(self, outcome: Outcome, report: str) -> None:
        """Completes a fault that was decided before its cause was known; a signal that came since still counts."""
        if self.reason is Reason.FAULT:
            self.outcome = outcome
        self.report = report


RESUME_ME = Outcome(exit_code=EXIT_RESUME_ME, may_restart=False)


# ---- reports ----
# Messages about ranks that failed or were stopped.

_KEPT_LINES = 200
_KEPT_LINE_BYTES = 2000
_SHOWN_LINES = 16
_SHOWN_WIDTH = 320
_TRACEBACK = "Traceback (most recent call last):"

_HINTS = {
    signal.SIGKILL: "often the kernel, out of memory: look for 'Killed process' in `dmesg` there",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGABRT: "native code gave up",
    signal.SIGBUS: "often a full /dev/shm or a truncated file",
}


class LastLines:
    """Keeps the end of a rank's output, stdout and stderr in the order of arrival."""

    def __init__(self) -> None:
        self._lines: deque[bytes] = deque(maxlen=_KEPT_LINES)

    def add(self, lines: list[bytes]) -> None:
        self._lines.extend(line[:_KEPT_LINE_BYTES] for line in lines[-_KEPT_LINES:])

    def shown(self) -> list[str]:
        """Returns the last traceback, shortened in the middle, or else the last lines, without control characters."""
        lines = [_plain(line) for line in self._lines]
        # The last traceback: earlier ones are often causes that were handled, "during handling of which" it occurred.
        starts = [i for i, line in enumerate(lines) if _TRACEBACK in line]
        if starts and len(lines) - starts[-1] > _SHOWN_LINES:
            kept = lines[starts[-1] :]
            num_left_out = len(kept) - _SHOWN_LINES
            return [*kept[:3], f"… {num_left_out} lines left out …", *kept[3 + num_left_out :]]
        return lines[starts[-1] if starts else -_SHOWN_LINES :]


def headline(rank: int, host: str, pid: int, code: int, num_others: int) -> str:
    """Returns the message for the moment at which a rank ends."""
    others = f"; the other {num_others} are being stopped" if num_others else ""
    return f"rank {rank} on {host} (pid {pid}) ended with {how_it_ended(code)}{others}."


def stopped_message(rank: int, host: str, pid: int) -> str:
    """Returns the message about a rank that was stopped, for which all others wait."""
    return f"rank {rank} on {host} (pid {pid}) is stopped: it received SIGSTOP; SIGCONT lets it continue."


def failure_report(name: str, pid: int, code: int, last_lines: list[str]) -> str:
    """Returns the last message of a job: which rank failed first, where and how, with its last lines."""
    hint = f" ({_HINTS[signal.Signals(-code)]})" if code < 0 and -code in _HINTS else ""
    text = f"the first to fail was {name} (pid {pid}), with {how_it_ended(code)}{hint}."
    if last_lines:
        text += " Its last lines:\n" + "\n".join(f"    {line}" for line in last_lines)
    return text + _hint_about_horovod("\n".join(last_lines))


def _hint_about_horovod(text: str) -> str:
    missing = re.findall(r"No module named '(horovod[\w.]*)'", text)
    if not missing:
        return ""
    # The first part of the name is missing only if no package has it.
    if missing[-1] == "horovod":
        return "\nNothing that provides `import horovod` is installed there: pip install megaclass-horovod"
    return f"\nMegaclass has no {missing[-1]}: docs/horovod.md lists the modules of Horovod that it has."


def _plain(line: bytes) -> str:
    return plain_text(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line.decode(errors="replace")), _SHOWN_WIDTH)


# ---- the limit of restarts ----


MAX_STARTS_WITHOUT_PROGRESS = 3
SHORT_START_S = 60.0
_LONGEST_PAUSE_S = 60.0


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

    def note(self, seconds: float, *, has_started: bool, step: int | None) -> None:
        """Counts one start, which lasted so many seconds. step: of the last checkpoint that the job has reported."""
        has_advanced = step is not None and (self.best_step is None or step > self.best_step)
        # Apart from progress: a start that wrote a checkpoint within seconds may be repeated at once.
        self.num_short = self.num_short + 1 if seconds < SHORT_START_S and not has_advanced else 0
        # No rank ran: the hosts may be booting, and only the pause grows.
        if not has_started:
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
        """Returns the pause before the next start: 0, 0, 1, 3, 7 … 60 s, so a booting host does not use all of them up."""
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
