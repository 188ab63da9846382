"""The meaning of the agents' messages for the job. Standard library only.

Every message has been checked before it arrives here (wire/agent_messages.py): its fields have the right types, and it is about
ranks of the agent that sent it.
"""

import time

from megaclass_launch.driver.agent_pipe import AgentPipe, AgentPipes, PipeState
from megaclass_launch.driver.failure_report import stopped_message
from megaclass_launch.driver.hang_watch import HangWatch
from megaclass_launch.driver.job_end import JobEnd
from megaclass_launch.driver.job_start import JobStart
from megaclass_launch.driver.lost_agents import LostAgents
from megaclass_launch.driver.outcome import Outcome
from megaclass_launch.driver.output import DriverIo
from megaclass_launch.driver.rank_table import RankTable
from megaclass_launch.exit_codes import EXIT_RESUME_ME, EXIT_USER_ERROR, exit_status, is_worth_restarting
from megaclass_launch.wire.agent_messages import RESULT_STREAM
from megaclass_launch.wire.protocol import Message


class MessageHandler:
    """Follows the ranks by the agents' messages: shows their output, fills the table, ends the job after a failure."""

    def __init__(
        self,
        pipes: AgentPipes,
        table: RankTable,
        start: JobStart,
        end: JobEnd,
        lost: LostAgents,
        hang_watch: HangWatch,
        io: DriverIo,
        *,
        is_last_start: bool,
    ) -> None:
        self.checkpoint_step: int | None = None
        """Step of the last checkpoint that a rank of this start has reported; read by the restart loop."""
        self._pipes = pipes
        self._table = table
        self._start, self._end, self._lost, self._hang_watch = start, end, lost, hang_watch
        self._output, self._messages = io.output, io.messages
        self._is_last_start = is_last_start

    def handle(self, agent: AgentPipe, message: Message, payload: bytes) -> None:
        """Handles one message of one agent."""
        match message["say"]:
            case "output" if message["stream"] == RESULT_STREAM:
                self._output.put_result(message["rank"], payload)
            case "output":
                rank = message["rank"]
                self._table.printed_at = time.monotonic()
                # The last lines of a rank are kept from here on: if it fails, the report quotes them.
                self._table.note_lines(rank, self._output.put(rank, message["stream"], payload))
            case "hello":
                agent.hello = message
                agent.state = PipeState.READY
                self._messages.detail(f"{agent.name}: agent {message['pid']} is ready")
            case "refuse":
                self._refuse(agent, message["why"])
            case "started":
                self._table.pids |= message["pids"]
                self._messages.detail(f"{agent.name}: started {message['pids']}")
            case "exit":
                self._note_exit(message["rank"], message["pid"], message["code"])
            case "stopped":
                self._messages.say(stopped_message(message["rank"], agent.name, message["pid"]))
            case "note":
                self._messages.say(f"{agent.name}: {message['text']}")
            case "progress":
                # Agents report on their own, so that an older step may come later.
                self.checkpoint_step = max(self.checkpoint_step or 0, message["step"])
            case "status" | "stacks" | "kept":
                self._hang_watch.note(agent, message, payload)
            case "done":
                self._note_done(agent)

    def _refuse(self, agent: AgentPipe, why: str) -> None:
        if agent.state is PipeState.STARTING:
            # It has answered, so that the start does not wait for it any longer.
            agent.state = PipeState.READY
            self._start.problems.append((agent.name, f"{agent.name}: {why}"))
        else:
            self._messages.say(f"{agent.name}: {why}")
            self._end.end(Outcome(exit_code=EXIT_USER_ERROR, failed_hosts=(agent.name,)))

    def _note_exit(self, rank: int, pid: int, code: int) -> None:
        # The rest of its last line first, so that the report about its end contains it.
        self._table.note_lines(rank, self._output.finish(rank))
        self._table.note_exit(rank, pid, code)
        # Once the ranks were told to end, their exit codes say nothing about the cause.
        if code == 0 or self._end.is_ending:
            return
        if code == EXIT_RESUME_ME:
            self._end.resume(f"rank {rank} on {self._table.hosts[rank]}")
            return
        if self._lost.end_because_of_silence(f"rank {rank} on {self._table.hosts[rank]}", code):
            return
        # At once, before the other ranks print their own errors about the one that is gone.
        self._messages.say(self._table.headline_of(rank))
        # Exit code 2 is a mistake of the user's, which a restart would repeat.
        may_restart = is_worth_restarting(code)
        if not self._is_last_start and not may_restart:
            self._messages.say(f"exit code {code} means that something has to be fixed first: no restart.")
        self._end.end(
            Outcome(exit_code=exit_status(code), failed_hosts=(self._table.hosts[rank],), may_restart=may_restart),
            report=self._table.failure_report_of(rank) + self._output.where(rank),
        )

    def _note_done(self, agent: AgentPipe) -> None:
        # A host that leaves without having reported its ranks' ends must not turn a failure into a success.
        unreported = [world.rank for world in agent.placement.worlds if world.rank not in self._table.codes]
        if agent.state is PipeState.RUNNING and unreported and not self._end.is_ending:
            self._lost.distrust(agent, f"says that it is done, but not how rank {unreported[0]} ended")
        else:
            self._pipes.finish(agent, PipeState.DONE)
