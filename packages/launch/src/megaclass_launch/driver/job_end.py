"""The end of a job, and of agents: why it ends, what they are told, and until when the driver waits. Standard library only.

    a fault          end             SIGTERM to the ranks, SIGKILL after the short grace
    a signal         on_signals      Ctrl-C climbs a ladder (SIGINT, SIGTERM, SIGKILL); after SIGTERM and SIGHUP the
                                     ranks have the long grace, in which they can save; a second SIGTERM shortens it
    exit code 75     resume          the other ranks have 60 s to save, then they are also ended
    too few ranks    end_after_failure   of an elastic job: the first failure since the last commit decides

The functions may be called repeatedly; later calls can only shorten the time that is left.

Also agents that ended, fell silent or broke the protocol before they said that they are done. The ranks of a lost agent end by
themselves, because its orphan killers watch it. They may have died with it, so the driver also starts an orphan killer of its
own on the host, through a new connection.
"""

import contextlib
import signal
import subprocess
import time
from collections.abc import Sequence

from megaclass_launch.driver.agent_pipe import AgentPipe, PipeState
from megaclass_launch.driver.job import JobState
from megaclass_launch.driver.outcome import RESUME_ME, Outcome, Reason
from megaclass_launch.driver.ssh import agent_command, is_connection_lost, why_not_started
from megaclass_launch.errors import EXIT_TRY_AGAIN
from megaclass_launch.exit_codes import EXIT_HOST_LOST, exit_status, how_it_ended, signal_name
from megaclass_launch.options import RunOptions
from megaclass_launch.signals import ENDING_SIGNALS

_LEAVE_S = 4.0
"""Time beyond the grace for processes to vanish and for the agents to report it."""
_SAVE_S = 60.0
"""Time for the other ranks to save and leave after the first one has left with exit code 75."""
_STDERR_READS = 16
"""Reads of an agent's stderr after its end; an ssh that keeps writing there must not keep the driver."""
_EXIT_CODE_S = 0.5
"""Time for ssh or the local agent to end after it has closed stdout."""
_SUSPECT_SHARE = 0.3
"""If a rank fails while a host has been silent for this share of the limit, the host is the likely cause."""
_MAX_ORPHAN_KILLERS = 64
"""If more hosts are lost at once, the network is gone; the agents then end their ranks themselves."""
_CONNECT_AND_KILL_S = 5.0
"""Time beyond the grace for ssh to connect and for the processes to vanish. A dead host delays the end of a run by it."""


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
    job.give_up_at = min(job.give_up_at, time.monotonic() + grace_s + _LEAVE_S)


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


# ---- lost agents ----


def lose(
    job: JobState, agent: AgentPipe, why: str, *, code: int = EXIT_HOST_LOST, is_reachable: bool = True, cause: str = ""
) -> None:
    """Excludes an agent that ended, fell silent or broke the protocol.

    why: follows the host's name. code: of the job, if it ends because of that. cause: last words of ssh or the agent.
    """
    if agent.state is PipeState.STARTING and not job.is_elastic:
        job.problems.append((agent.name, f"{agent.name} {why}."))
        job.drop(agent)
        return
    # Asked before the agent is forgotten. One that was told to leave is not in use any more, and its host may have a new one
    # by now: neither that one nor the workers there are lost.
    is_in_use = job.agents.get(agent.name) is agent
    # Only an agent that was told to start ranks can have left some behind. If its host does not answer, an orphan killer
    # could not reach it, either.
    job.drop(agent, kills_orphans=agent.state is PipeState.RUNNING and is_reachable)
    if job.is_elastic:
        if is_in_use:
            lose_host(job, agent.name, f"{agent.name} {why}", code)
        return
    # While the job ends, ssh connections end in any order; only the first fault is worth a message.
    if job.is_ending:
        job.messages.detail(f"{agent.name} {why}")
        return
    lost = f"{agent.name} ({job.ranks.ranks_of(agent.name)}) {why}."
    job.messages.say(f"{lost} Its ranks end by themselves; all others are being stopped.{cause}")
    outcome = Outcome(exit_code=code, failed_hosts=(agent.name,))
    end(job, outcome, report=f"the run ended because {lost}", grace_s=None if is_reachable else job.silence_grace_s)


def lose_host(job: JobState, name: str, why: str, code: int = EXIT_HOST_LOST) -> None:
    """Notes that a host of an elastic job has no agent any more, and that all its workers are gone. why: a sentence."""
    lost = job.ranks.on_host(name)
    for worker in lost:
        job.show_rest(worker)
        # As if by SIGKILL: what still runs there is ended by the orphan killers of its host.
        job.ranks.note_exit(worker, worker.pid, -signal.SIGKILL)
    if job.is_ending:
        return
    # Ranks that were leaving anyway do not count as lost.
    num_members = sum(worker.rank is not None and not worker.is_leaving for worker in lost)
    with_it = f" with {num_members} rank(s)" if num_members else ""
    job.messages.say(f"{why.rstrip('.')}{with_it}. {ban(job, name)}")
    note_failure(job, Outcome(exit_code=code, may_restart=False), f"{why.rstrip('.')}.")


def note_end_of_stream(job: JobState, agent: AgentPipe, why: str) -> None:
    """Handles the end of ssh or the local agent before it said that all is done. why: see why_ended."""
    # 74 if the network is the cause.
    code = EXIT_TRY_AGAIN if is_connection_lost(agent.stderr_text) else EXIT_HOST_LOST
    if agent.state is not PipeState.STARTING:
        # The last words of ssh or the agent are often the cause; earlier ones were shown with --verbose.
        cause = "".join(f"\n    {line}" for line in agent.stderr_text.splitlines()[-3:])
        lose(job, agent, why, code=code, cause=cause)
        return
    is_in_use = job.agents.get(agent.name) is agent
    job.drop(agent)
    if not job.is_elastic:
        job.problems.append((agent.name, why))
    elif is_in_use:
        lose_host(job, agent.name, why, code)


def lose_late(job: JobState, now: float) -> None:
    """Gives up hosts of an elastic job that have not said hello within the start timeout."""
    limit_s = job.options.start_timeout_s
    for agent in list(job.agents.values()):
        if job.is_elastic and agent.state is PipeState.STARTING and now - agent.opened_at > limit_s:
            lose(job, agent, f"did not report in time (--start-timeout {limit_s:g} s)")


def end_because_of_silence(job: JobState, rank: str, code: int) -> bool:
    """Ends the job because of the hosts that do not answer, if there are any; returns whether there are.

    To be called when a rank has failed. Ranks notice a dead connection about when the driver does, and often end first.
    rank: its name for the message.
    """
    now = time.monotonic()
    silent = [
        (agent, now - agent.heard_at)
        for agent in job.unfinished()
        if agent.state is PipeState.RUNNING and now - agent.heard_at > _SUSPECT_SHARE * job.silence_s
    ]
    if not silent or job.is_paused:
        return False
    names = ", ".join(f"{agent.name} ({job.ranks.ranks_of(agent.name)})" for agent, _ in silent)
    text = (
        f"{names} {why_silent(max(silent_s for _, silent_s in silent))}; {rank} then ended with {how_it_ended(code)}."
    )
    job.messages.say(f"{text} All others are being stopped.")
    for agent, _ in silent:
        # Not waited for: no message reaches it. Its ranks end by themselves.
        job.drop(agent)
    # 74, as the ranks themselves end: a connection was lost, and the job may be started again.
    outcome = Outcome(exit_code=EXIT_TRY_AGAIN, failed_hosts=tuple(agent.name for agent, _ in silent))
    end(job, outcome, report=f"the run ended because {text}", grace_s=job.silence_grace_s)
    return True


def abandon_unfinished(job: JobState) -> None:
    """Leaves the agents that were told to end their ranks and do not report that they have."""
    for agent in job.unfinished():
        ranks = "ranks" if job.is_elastic else job.ranks.ranks_of(agent.name)
        job.messages.say(f"{agent.name} does not report that its {ranks} ended; closing the connection.")
        job.drop(agent, kills_orphans=agent.state is PipeState.RUNNING)


def why_ended(agent: AgentPipe, options: RunOptions) -> str:
    """Returns why ssh or the local agent has ended before it said that all is done.

    Before the agent's hello this is a whole sentence about the host; later, it follows the host's name.
    """
    for _ in range(_STDERR_READS):
        if not agent.read_stderr():
            break
    # ssh's exit code tells a failed login (255) from an agent that ended.
    code = agent.wait(_EXIT_CODE_S)
    if agent.state is PipeState.STARTING:
        return why_not_started(agent.host, options, code, agent.stderr_text)
    way = "Ray's actor with it" if options.launcher == "ray" else "the ssh connection to it"
    who = "its agent" if agent.host.is_local else f"its agent, or {way},"
    return f"was lost: {who} ended" + (f" with {how_it_ended(code)}" if code is not None else "")


def why_silent(silent_s: float) -> str:
    """Returns what is said after the name of a host that has not answered for too long."""
    return f"has not answered for {silent_s:.1f} s: the host is unreachable"


class OrphanKillers:
    """The orphan killers that the driver has started on the hosts of lost agents."""

    def __init__(self, options: RunOptions) -> None:
        self._options = options
        # The driver waits for them at its end, so they get no more time than the agents do.
        self._grace_s = min(options.fault_grace_s, _LEAVE_S)
        self._running: list[tuple[subprocess.Popen[bytes], float]] = []
        """Each with the time at which it is given up."""

    def start(self, agent: AgentPipe) -> None:
        """Starts to kill all processes of the agent's run on its host, and does not wait."""
        # Reaped: an elastic job may lose any number of hosts, one by one.
        self._running = [running for running in self._running if running[0].poll() is None]
        # On a node of Ray only the agent can start a process; its own orphan killers remain.
        if len(self._running) == _MAX_ORPHAN_KILLERS or self._options.launcher == "ray":
            return
        with contextlib.suppress(OSError):
            process = subprocess.Popen(
                agent_command(agent.host, self._options, "megaclass_launch.agent.orphan_killer"),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,
            )
            self._running.append((process, time.monotonic() + self._grace_s + _CONNECT_AND_KILL_S))
            assert process.stdin is not None
            # The line is shorter than a pipe's buffer, so this never blocks.
            with process.stdin:
                process.stdin.write(f"{agent.run_id} {agent.hello['pid']} {self._grace_s}\n".encode("ascii"))

    def wait(self) -> None:
        """Waits until each is done or its time is up: the host may be down, which is why its agent was lost."""
        for process, deadline in self._running:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
