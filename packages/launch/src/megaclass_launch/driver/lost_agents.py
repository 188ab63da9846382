"""Agents that ended, fell silent or broke the protocol before they said that they are done. Standard library only.

The ranks of a lost agent end by themselves, because its orphan killers watch it. They may have died with it, so the driver
also starts an orphan killer of its own on the host, through a new connection.
"""

import contextlib
import subprocess
import time
from dataclasses import dataclass

from megaclass_launch.driver.agent_pipe import AgentPipe, AgentPipes, PipeState
from megaclass_launch.driver.job_end import LEAVE_S, JobEnd
from megaclass_launch.driver.job_start import JobStart
from megaclass_launch.driver.outcome import Outcome
from megaclass_launch.driver.output import DriverMessages
from megaclass_launch.driver.ssh import SshSettings, agent_command, is_connection_lost, why_not_started
from megaclass_launch.errors import EXIT_TRY_AGAIN
from megaclass_launch.exit_codes import EXIT_HOST_LOST, how_it_ended
from megaclass_launch.hosts import Host
from megaclass_launch.options import RunOptions
from megaclass_launch.wire.protocol import silence_limits

_STDERR_READS = 16
"""Reads of an agent's stderr after its end; an ssh that keeps writing there must not keep the driver."""
_EXIT_CODE_S = 0.5
"""Time for ssh or the local agent to end after it has closed stdout."""
SUSPECT_SHARE = 0.3
"""If a rank fails while a host has been silent for this share of the limit, the host is the likely cause."""
_MAX_ORPHAN_KILLERS = 64
"""If more hosts are lost at once, the network is gone; the agents then end their ranks themselves."""
_CONNECT_AND_KILL_S = 5.0
"""Time beyond the grace for ssh to connect and for the processes to vanish. A dead host delays the end of a run by it."""


class LostAgents:
    """Excludes agents from the job, ends the job because of them, and kills what they left behind."""

    def __init__(
        self,
        pipes: AgentPipes,
        start: JobStart,
        end: JobEnd,
        ssh: SshSettings,
        messages: DriverMessages,
        options: RunOptions,
    ) -> None:
        self._pipes = pipes
        self._start = start
        self._end = end
        self._ssh = ssh
        self._messages = messages
        self._silence_s, self._silence_grace_s = silence_limits(options.heartbeat_s, options.fault_grace_s)
        self._orphan_killers = OrphanKillers(ssh, options.fault_grace_s)

    def note_end_of_stream(self, agent: AgentPipe) -> None:
        """Handles the end of ssh or the local agent before it said that all is done."""
        why = why_ended(agent, self._ssh)
        if agent.state is PipeState.STARTING:
            self._start.problems.append((agent.name, why))
            self._pipes.finish(agent, PipeState.LOST)
        else:
            self._lose(agent, why, code=code_of_lost(agent))

    def note_silence(self, agent: AgentPipe, silent_s: float) -> None:
        """Gives up a host that has not answered for too long."""
        # An orphan killer could not reach it, either.
        self._lose(agent, why_silent(silent_s), code=EXIT_TRY_AGAIN, is_reachable=False, grace_s=self._silence_grace_s)

    def end_because_of_silence(self, rank: str, code: int) -> bool:
        """Ends the job because of the hosts that do not answer, if there are any; returns whether there are.

        To be called when a rank has failed. Ranks notice a dead connection about when the driver does, and often end first.
        rank: its name for the message.
        """
        now = time.monotonic()
        silent = [
            (agent, now - agent.heard_at)
            for agent in self._pipes.unfinished()
            if agent.state is PipeState.RUNNING and now - agent.heard_at > SUSPECT_SHARE * self._silence_s
        ]
        if not silent or self._pipes.is_paused:
            return False
        names = ", ".join(f"{agent.name} ({agent.placement.ranks()})" for agent, _ in silent)
        text = f"{names} {why_silent(max(silent_s for _, silent_s in silent))}; {rank} then ended with {how_it_ended(code)}."
        self._messages.say(f"{text} All others are being stopped.")
        for agent, _ in silent:
            # Not waited for: no message reaches it. Its ranks end by themselves.
            self._pipes.drop(agent)
        # 74, as the ranks themselves end: a connection was lost, and the job may be started again.
        outcome = Outcome(exit_code=EXIT_TRY_AGAIN, failed_hosts=tuple(agent.name for agent, _ in silent))
        self._end.end(outcome, report=f"the run ended because {text}", grace_s=self._silence_grace_s)
        return True

    def distrust(self, agent: AgentPipe, why: str) -> None:
        """Excludes a host that breaks the protocol: it is faulty, or controlled by an attacker."""
        if agent.state is PipeState.STARTING:
            self._start.problems.append((agent.name, f"{agent.name} {why}."))
            self._pipes.drop(agent)
        else:
            self._lose(agent, why)

    def abandon_unfinished(self) -> None:
        """Leaves the agents that were told to end their ranks and do not report that they have."""
        for agent in self._pipes.unfinished():
            if agent.state is PipeState.RUNNING:
                self._kill_orphans_of(agent)
            self._pipes.finish(agent, PipeState.LOST)
            self._messages.say(
                f"{agent.name} does not report that its {agent.placement.ranks()} ended; closing the connection."
            )

    def wait_for_orphan_killers(self) -> None:
        """Waits until every orphan killer is done or its time is up."""
        self._orphan_killers.wait()

    def _lose(
        self,
        agent: AgentPipe,
        why: str,
        *,
        code: int = EXIT_HOST_LOST,
        is_reachable: bool = True,
        grace_s: float | None = None,
    ) -> None:
        # Only an agent that was told to start ranks can have left some behind.
        if agent.state is PipeState.RUNNING and is_reachable:
            self._kill_orphans_of(agent)
        self._pipes.drop(agent)
        # While the job ends, ssh connections end in any order; only the first fault is worth a message.
        if self._end.is_ending:
            self._messages.detail(f"{agent.name} {why}")
            return
        # The last words of ssh or the agent are often the cause; earlier ones were shown with --verbose.
        last = "".join(f"\n    {line}" for line in agent.stderr_text.splitlines()[-3:])
        lost = f"{agent.name} ({agent.placement.ranks()}) {why}."
        self._messages.say(f"{lost} Its ranks end by themselves; all others are being stopped.{last}")
        outcome = Outcome(exit_code=code, failed_hosts=(agent.name,))
        self._end.end(outcome, report=f"the run ended because {lost}", grace_s=grace_s)

    def _kill_orphans_of(self, agent: AgentPipe) -> None:
        self._orphan_killers.start(agent, self._start.run_id_of(self._pipes.all.index(agent)))


def why_ended(agent: AgentPipe, ssh: SshSettings) -> str:
    """Returns why ssh or the local agent has ended before it said that all is done.

    Before the agent's hello this is a whole sentence about the host; later, it follows the host's name.
    """
    for _ in range(_STDERR_READS):
        if not agent.read_stderr():
            break
    # ssh's exit code tells a failed login (255) from an agent that ended.
    code = agent.wait(_EXIT_CODE_S)
    if agent.state is PipeState.STARTING:
        return why_not_started(agent.placement.host, ssh, code, agent.stderr_text)
    who = "its agent" if agent.placement.host.is_local else "its agent, or the ssh connection to it,"
    return f"was lost: {who} ended" + (f" with {how_it_ended(code)}" if code is not None else "")


def code_of_lost(agent: AgentPipe) -> int:
    """Returns the exit code of a job that ends because ssh or the local agent has ended: 74 if the network is the cause."""
    return EXIT_TRY_AGAIN if is_connection_lost(agent.stderr_text) else EXIT_HOST_LOST


def why_silent(silent_s: float) -> str:
    """Returns what is said after the name of a host that has not answered for too long."""
    return f"has not answered for {silent_s:.1f} s: the host is unreachable"


class OrphanKillers:
    """The orphan killers that the driver has started on the hosts of lost agents."""

    def __init__(self, ssh: SshSettings, grace_s: float) -> None:
        self._ssh = ssh
        # The driver waits for them at its end, so they get no more time than the agents do.
        self._grace_s = min(grace_s, LEAVE_S)
        self._running: list[OrphanKiller] = []

    def start(self, agent: AgentPipe, run_id: str) -> None:
        """Starts to kill all processes of the agent's run on its host."""
        if len(self._running) < _MAX_ORPHAN_KILLERS:
            with contextlib.suppress(OSError):
                pid = agent.hello["pid"]
                self._running.append(
                    start_orphan_killer(agent.placement.host, self._ssh, run_id, agent_pid=pid, grace_s=self._grace_s)
                )

    def wait(self) -> None:
        for killer in self._running:
            killer.wait()


@dataclass(frozen=True, slots=True)
class OrphanKiller:
    """A running orphan killer on one host."""

    process: subprocess.Popen[bytes]
    deadline: float

    def wait(self) -> None:
        """Waits until it is done or its time is up: the host may be down, which is why its agent was lost."""
        try:
            self.process.wait(max(0.0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def start_orphan_killer(host: Host, ssh: SshSettings, run_id: str, *, agent_pid: int, grace_s: float) -> OrphanKiller:
    """Starts to kill all processes of the run on the host, and does not wait. agent_pid: the lost agent's pid there."""
    process = subprocess.Popen(
        agent_command(host, ssh, "megaclass_launch.agent.orphan_killer"),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        start_new_session=True,
    )
    assert process.stdin is not None
    # The line is shorter than a pipe's buffer, so this never blocks.
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(f"{run_id} {agent_pid} {grace_s}\n".encode("ascii"))
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    return OrphanKiller(process, time.monotonic() + grace_s + _CONNECT_AND_KILL_S)
