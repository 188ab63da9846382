"""The end of a job: why it ends, what the agents are told, and until when the driver waits. Standard library only.

    a fault          end             SIGTERM to the ranks, SIGKILL after the short grace
    a signal         on_signals      Ctrl-C climbs a ladder (SIGINT, SIGTERM, SIGKILL); after SIGTERM and SIGHUP the
                                     ranks have the long grace, in which they can save; a second SIGTERM shortens it
    exit code 75     resume          the other ranks have 60 s to save, then they are also ended
    too few ranks    end_after_failure   of an elastic job: the first failure since the last commit decides

The functions may be called repeatedly; later calls can only shorten the time that is left.
"""

import signal
import time
from collections.abc import Sequence

from megaclass_launch.driver.job import JobState
from megaclass_launch.driver.outcome import RESUME_ME, Outcome, Reason
from megaclass_launch.exit_codes import EXIT_HOST_LOST, exit_status, signal_name
from megaclass_launch.signals import ENDING_SIGNALS

LEAVE_S = 4.0
"""Time beyond the grace for processes to vanish and for the agents to report it."""
_SAVE_S = 60.0
"""Time for the other ranks to save and leave after the first one has left with exit code 75."""


def end(
    job: JobState, outcome: Outcome, *, report: str = "", grace_s: float | None = None, first: int = signal.SIGTERM
) -> None:
    """Ends all ranks because of a fault; the outcome is recorded if it is the first one."""
    # The order to end goes out even if the outcome does not count: a later fault may need a shorter grace.
    job.decision.decide(Reason.FAULT, outcome, report)
    order_end(job, grace_s, first)


def resume(job: JobState, who: str) -> None:
    """Notes that a rank was asked to stop, has saved and left; the other ranks are about to. who: "rank 3 on h2"."""
    if job.decision.decide(Reason.RESUME, RESUME_ME):
        job.resume_deadline = time.monotonic() + _SAVE_S
        job.messages.say(f"{who} stopped as requested and can be resumed.")


def end_if_late(job: JobState, now: float) -> None:
    """Ends the ranks that have not saved and left in time after the first one did."""
    if now >= job.resume_deadline:
        job.resume_deadline = float("inf")
        end(job, RESUME_ME)


def end_if_unread(job: JobState) -> None:
    """Ends the ranks if their output has no reader any more, as a shell's pipe would end one program."""
    fault = job.io.screen.fault
    if fault is not None and not job.is_ending:
        job.messages.say(f"stdout cannot be written ({fault.strerror}); ending the ranks.")
        end(job, Outcome(exit_code=exit_status(-signal.SIGPIPE), may_restart=False))


def order_end(job: JobState, grace_s: float | None = None, first: int = signal.SIGTERM) -> None:
    """Lets the agents end their ranks and leave."""
    grace_s = job.options.fault_grace_s if grace_s is None else grace_s
    job.tell_all({"do": "end", "grace_s": grace_s, "first": int(first)})
    # A second order may come earlier than the first one would end, never later.
    job.give_up_at = min(job.give_up_at, time.monotonic() + grace_s + LEAVE_S)


# ---- signals ----


def on_signals(job: JobState, numbers: Sequence[int]) -> None:
    """Handles signals that the driver has received."""
    for number in numbers:
        if number not in ENDING_SIGNALS:
            _pass_on(job, number)
            continue
        # Before the ranks are told: whatever they do from here on is a consequence.
        job.decision.decide(Reason.SIGNAL, Outcome(exit_code=exit_status(-number), may_restart=False))
        if number == signal.SIGINT:
            _interrupt(job)
        else:
            _terminate(job, number)


def _terminate(job: JobState, number: int) -> None:
    # A second SIGTERM means that the user is in a hurry. SIGHUP may come twice, from the kernel and from the shell.
    grace_s = job.options.fault_grace_s if job.has_passed_sigterm else job.options.signal_grace_s
    job.has_passed_sigterm = number == signal.SIGTERM
    more = f" SIGKILL follows in {grace_s:g} s (--grace)." if job.ranks.has_started else ""
    job.messages.say(f"{signal_name(number)}: ending the ranks.{more}")
    order_end(job, grace_s)


def _interrupt(job: JobState) -> None:
    sent = job.ladder.climb()
    job.messages.say(job.ladder.message(sent, len(job.ranks.alive)))
    # SIGKILL goes to all processes of the run, not only to the ranks; without ranks there is nothing to ask.
    if sent is signal.SIGKILL or not job.ranks.has_started:
        order_end(job, grace_s=0.0)
    else:
        _pass_on(job, sent)


def _pass_on(job: JobState, number: int) -> None:
    job.tell_all({"do": "signal", "number": int(number)})


# ---- failures after which an elastic job continues ----


def note_failure(job: JobState, outcome: Outcome, report: str) -> None:
    """Remembers a failure; the first one since the last commit decides the exit code if the job ends by it."""
    job.first_failure = job.first_failure or (outcome, report)
    job.disturbed_at = job.disturbed_at or time.monotonic()
    job.failed_generation = job.generation


def ban(job: JobState, name: str) -> str:
    """Uses a host that has failed no more, or not for some time; returns a sentence about it."""
    pause_s = job.hosts.ban(name, time.monotonic())
    if pause_s == float("inf"):
        return f"{name} gets no new ranks (no --blacklist-cooldown-range)."
    return f"{name} gets no new ranks for {pause_s:.0f} s."


def end_after_failure(job: JobState) -> None:
    """Ends an elastic job that cannot continue: its first failure decides the exit code."""
    # Without any failure it ran out of hosts, because the discovery has removed them.
    outcome, report = job.first_failure or (Outcome(exit_code=EXIT_HOST_LOST, may_restart=False), "")
    end(job, outcome, report=report)
