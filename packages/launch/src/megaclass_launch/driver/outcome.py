"""The outcome of one start of a job, and the one place that decides it. Standard library only.

Several things can happen while a job ends: a rank fails, its peers fail because of it, the user presses Ctrl-C, a host is
lost. `OutcomeDecision.decide` is called for each of them, and the reasons have a rank order:

    NONE < RESUME < FAULT < SIGNAL

A stronger reason replaces a weaker one. Of several faults the first counts, because the later ones are its consequences;
of several signals the last counts, because the user has insisted.
"""

from dataclasses import dataclass
from enum import IntEnum

from megaclass_launch.exit_codes import EXIT_RESUME_ME


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
    """False after a signal, exit codes 2 and 75, and where stdout was closed."""


class OutcomeDecision:
    """Holds the reason for which the job ends, its outcome and the report to show last."""

    def __init__(self) -> None:
        self.reason = Reason.NONE
        self.report = ""
        """Names the rank or host that failed first; shown when no rank prints any more."""
        self._outcome = Outcome(exit_code=0)

    @property
    def is_ending(self) -> bool:
        """True once the ranks have been told to end, so that their exit codes say nothing about the cause."""
        return self.reason >= Reason.FAULT

    def decide(self, reason: Reason, outcome: Outcome, report: str = "") -> bool:
        """Records the outcome if its reason counts; returns whether it does."""
        # A signal also replaces a signal: SIGTERM after Ctrl-C gives the exit code of SIGTERM.
        counts = reason > self.reason or reason is Reason.SIGNAL
        if counts:
            self.reason, self._outcome = reason, outcome
            # A signal keeps the report about an earlier fault: the user still wants to know the cause.
            self.report = report or self.report
        return counts

    def explain(self, outcome: Outcome, report: str) -> None:
        """Completes a fault that was decided before its cause was known; a signal that came since still counts."""
        if self.reason is Reason.FAULT:
            self._outcome = outcome
        self.report = report

    def final(self) -> Outcome:
        """Returns the outcome when nothing of the job is left."""
        return self._outcome


RESUME_ME = Outcome(exit_code=EXIT_RESUME_ME, may_restart=False)
