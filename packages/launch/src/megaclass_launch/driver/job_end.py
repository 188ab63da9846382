"""The end of a job: why it ends, what the agents are told, and until when the driver waits. Standard library only.

    a fault          JobEnd.end          SIGTERM to the ranks, SIGKILL after the short grace
    a signal         JobEnd.on_signals   Ctrl-C climbs a ladder (SIGINT, SIGTERM, SIGKILL); after SIGTERM and SIGHUP the
                                         ranks have the long grace, in which they can save; a second SIGTERM shortens it
    exit code 75     JobEnd.resume       the other ranks have 60 s to save, then they are ended, too

Field and who changes it; all of it happens in the driver's one thread:

    decision           end, resume, on_signals; read by whatever depends on whether the job is ending
    give_up_at         _order_end; JobRun then abandons agents that do not report the end
    _resume_deadline   resume, at the first exit code 75, and end_if_late
"""

import signal
import time

from megaclass_launch.driver.agent_pipe import AgentPipes
from megaclass_launch.driver.outcome import RESUME_ME, Outcome, OutcomeDecision, Reason
from megaclass_launch.driver.output import DriverIo
from megaclass_launch.driver.rank_table import RankTable
from megaclass_launch.exit_codes import exit_status, signal_name
from megaclass_launch.options import RunOptions
from megaclass_launch.signals import ENDING_SIGNALS, InterruptLadder

LEAVE_S = 4.0
"""Time beyond the grace for processes to vanish and for the agents to report it."""
_SAVE_S = 60.0
"""Time for the other ranks to save and leave after the first one has left with exit code 75."""


class JobEnd:
    """Ends the ranks of one start, once or several times: each order may only shorten the time that is left."""

    def __init__(self, pipes: AgentPipes, table: RankTable, io: DriverIo, options: RunOptions) -> None:
        self.decision = OutcomeDecision()
        self.give_up_at = float("inf")
        self._pipes = pipes
        self._table = table
        self._screen, self._signals, self._messages = io.screen, io.signals, io.messages
        self._fault_grace_s, self._signal_grace_s = options.fault_grace_s, options.signal_grace_s
        self._ladder = InterruptLadder()
        self._has_passed_sigterm = False
        self._resume_deadline = float("inf")

    @property
    def is_ending(self) -> bool:
        """Returns True once the ranks have been told to end, so that their exit codes say nothing about the cause."""
        return self.decision.is_ending

    def end(
        self, outcome: Outcome, *, report: str = "", grace_s: float | None = None, first: int = signal.SIGTERM
    ) -> None:
        """Ends all ranks because of a fault; the outcome is recorded if it is the first one."""
        # The order to end goes out even if the outcome does not count: a later fault may need a shorter grace.
        self.decision.decide(Reason.FAULT, outcome, report)
        self._order_end(grace_s, first)

    def resume(self, who: str) -> None:
        """Notes that a rank was asked to stop, has saved and left; the other ranks are about to. who: "rank 3 on h2"."""
        if self.decision.decide(Reason.RESUME, RESUME_ME):
            self._resume_deadline = time.monotonic() + _SAVE_S
            self._messages.say(f"{who} stopped as requested and can be resumed.")

    def finish(self) -> None:
        """Lets the agents leave after the last rank of an elastic job has ended with exit code 0."""
        self._order_end()

    def end_if_late(self, now: float) -> None:
        """Ends the ranks that have not saved and left in time after the first one did."""
        if now >= self._resume_deadline:
            self._resume_deadline = float("inf")
            self.end(RESUME_ME)

    def end_if_unread(self) -> None:
        """Ends the ranks if their output has no reader any more, as a shell's pipe would end one program."""
        if self._screen.fault is not None and not self.is_ending:
            self._messages.say(f"stdout cannot be written ({self._screen.fault.strerror}); ending the ranks.")
            self.end(Outcome(exit_code=exit_status(-signal.SIGPIPE), may_restart=False))

    def on_signals(self) -> None:
        """Handles the signals that the driver has received."""
        for number in self._signals.taken():
            if number not in ENDING_SIGNALS:
                self._pass_on(number)
                continue
            # Before the ranks are told: whatever they do from here on is a consequence.
            self.decision.decide(Reason.SIGNAL, Outcome(exit_code=exit_status(-number), may_restart=False))
            if number == signal.SIGINT:
                self._interrupt()
            else:
                self._terminate(number)

    def _terminate(self, number: int) -> None:
        # A second SIGTERM means that the user is in a hurry. SIGHUP may come twice, from the kernel and from the shell.
        grace_s = self._fault_grace_s if self._has_passed_sigterm else self._signal_grace_s
        self._has_passed_sigterm = number == signal.SIGTERM
        more = f" SIGKILL follows in {grace_s:g} s (--grace)." if self._table.has_started else ""
        self._messages.say(f"{signal_name(number)}: ending the ranks.{more}")
        self._order_end(grace_s)

    def _interrupt(self) -> None:
        sent = self._ladder.climb()
        self._messages.say(self._ladder.message(sent, self._table.num_left))
        # SIGKILL goes to all processes of the run, not only to the ranks; without ranks there is nothing to ask.
        if sent is signal.SIGKILL or not self._table.has_started:
            self._order_end(grace_s=0.0)
        else:
            self._pass_on(sent)

    def _pass_on(self, number: int) -> None:
        self._pipes.send({"do": "signal", "number": int(number)})

    def _order_end(self, grace_s: float | None = None, first: int = signal.SIGTERM) -> None:
        grace_s = self._fault_grace_s if grace_s is None else grace_s
        self._pipes.send({"do": "end", "grace_s": grace_s, "first": int(first)})
        # A second order may come earlier than the first one would end, never later.
        self.give_up_at = min(self.give_up_at, time.monotonic() + grace_s + LEAVE_S)
