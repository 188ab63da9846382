"""One start of all ranks on all hosts, from the first connection to the last process gone. Standard library only.

    connecting --all hosts said hello--> running --every agent is done or lost--> over
         |                                  |                                      ^
         | a host cannot take part,         | a rank fails, a host is lost,        |
         | or a signal                      | a signal, a hang, stdout closed      |
         +--------------------------------> ending --agents are done, or give up --+

Everything happens in one thread, in `JobRun._loop`, so no field needs a lock; only the Screen has a thread of its own. The
parts of a run and the state that each one owns:

    part              job                                             state, and who changes it
    JobStart          connects, compares versions, says "go"          problems: messages and ends before "go"
    AgentPipes        bytes from and to the agents, and the selector  state of each pipe, see agent_pipe.py
    MessageHandler    what a message of an agent means                checkpoint_step: "progress"
    RankTable         pid, last lines and exit code of each rank      "started", "output" and "exit"
    LostAgents        agents that left before they were done          the orphan killers that it has started
    HangWatch         decides that the job hangs, and which rank it is  stacks of all ranks, see hang_watch.py
    JobEnd            why the job ends, and until when it waits       decision, deadlines; see job_end.py
"""

import selectors
import time
from collections.abc import Callable, Sequence

from megaclass_launch.driver.agent_pipe import AgentPipe, AgentPipes, Heartbeats, PipeState
from megaclass_launch.driver.hang_watch import HangWatch
from megaclass_launch.driver.job_end import JobEnd
from megaclass_launch.driver.job_start import JobStart
from megaclass_launch.driver.lost_agents import LostAgents
from megaclass_launch.driver.message_handler import MessageHandler
from megaclass_launch.driver.outcome import Outcome
from megaclass_launch.driver.output import DriverIo
from megaclass_launch.driver.rank_table import RankTable
from megaclass_launch.driver.ssh import SshSettings
from megaclass_launch.exit_codes import EXIT_USER_ERROR
from megaclass_launch.options import RunOptions
from megaclass_launch.placement import Placement
from megaclass_launch.wire.protocol import ProtocolError

_SETTLE_S = 3.0
"""After one host could not be reached, others may fail for the same reason; after this time all are named at once."""


class JobRun:
    """All ranks of one start. They begin together and end together."""

    def __init__(
        self,
        placements: Sequence[Placement],
        options: RunOptions,
        ssh: SshSettings,
        io: DriverIo,
        *,
        restart: int,
    ) -> None:
        self._options = options
        self._messages, self._signals, self._output = io.messages, io.signals, io.output
        self._call = io.call
        self._start = JobStart(placements, options, ssh, io, restart=restart)
        # In this order, because each part is given those before it that it uses.
        self._pipes = AgentPipes(self._on_message, io, self._start.token)
        self._heartbeats = Heartbeats(self._pipes, options)
        self._table = RankTable(placements)
        self._end = JobEnd(self._pipes, self._table, io, options)
        self._lost = LostAgents(self._pipes, self._start, self._end, ssh, io.messages, options)
        self._hang_watch = HangWatch(placements, self._pipes, self._table, self._end, io, options.hang_timeout_s)
        self._handler = MessageHandler(
            self._pipes,
            self._table,
            self._start,
            self._end,
            self._lost,
            self._hang_watch,
            io,
            is_last_start=restart == options.restarts,
        )

    @property
    def has_started(self) -> bool:
        """Returns whether any rank ran."""
        return self._table.has_started

    @property
    def checkpoint_step(self) -> int | None:
        """Returns the step of the last checkpoint that a rank of this start has reported."""
        return self._handler.checkpoint_step

    def run(self) -> Outcome:
        """Starts all ranks, waits until nothing of them is left, and returns the outcome."""
        self._pipes.selector.register(self._signals, selectors.EVENT_READ, self._end.on_signals)
        if self._call is not None:
            self._pipes.selector.register(self._call.caller_fd, selectors.EVENT_READ, self._on_caller_gone)
        try:
            # All hosts are connected to at the same time: a slow one costs its own time, not the sum.
            self._start.connect(self._pipes)
            self._loop(until=self._have_all_hosts_answered, is_start=True)
            if not self._end.is_ending and not self._start.problems:
                self._start.compare_versions(self._pipes)
            if self._end.is_ending:
                # A signal came during the start. Agents that are ready were told to end; the others know nothing yet.
                self._pipes.drop_starting()
            elif self._start.problems:
                failure = self._start.failure(len(self._pipes.all))
                self._pipes.drop_starting()
                self._end.end(failure, grace_s=0.0)
            else:
                # The time without progress counts from the start of the ranks, not from that of the driver.
                self._table.printed_at = time.monotonic()
                self._start.go(self._pipes)
            # Whatever the start has led to: agents that were told to end or to go report until nothing of their ranks is left.
            self._loop(until=lambda: not self._pipes.unfinished())
            self._hang_watch.finish()
        finally:
            self._close()
        return self._end.decision.final()

    def _on_caller_gone(self) -> None:
        assert self._call is not None
        self._pipes.selector.unregister(self._call.caller_fd)
        self._messages.say("the process that called hvd.run() has ended; ending the ranks.")
        self._end.end(Outcome(exit_code=EXIT_USER_ERROR, may_restart=False))

    def _have_all_hosts_answered(self) -> bool:
        return self._end.is_ending or all(agent.state is not PipeState.STARTING for agent in self._pipes.all)

    def _loop(self, until: Callable[[], bool], is_start: bool = False) -> None:
        start_deadline = time.monotonic() + self._options.start_timeout_s if is_start else float("inf")
        while not until():
            now = time.monotonic()
            if is_start and self._start.problems:
                # The first problem sets this moment, and later passes do not move it.
                start_deadline = min(start_deadline, now + _SETTLE_S)
            if now >= start_deadline:
                # Where other hosts have problems, the silent ones have not had the whole time: they are not blamed.
                if not self._start.problems:
                    self._start.note_silent_hosts(self._pipes)
                return
            # Agents that do not report the end in time are abandoned, so that the driver always ends.
            if now >= self._end.give_up_at:
                self._lost.abandon_unfinished()
                return
            if now >= self._heartbeats.due_at:
                self._beat(now)
            self._pipes.handle_events(min(self._heartbeats.due_at, start_deadline, self._end.give_up_at))

    def _on_message(self, agent: AgentPipe) -> None:
        try:
            messages = agent.read()
            if messages is None:
                self._lost.note_end_of_stream(agent)
                return
            for message, payload in messages:
                self._handler.handle(agent, message, payload)
        except ProtocolError as error:
            self._lost.distrust(agent, f"sent something that no agent of this version sends: {error}")

    def _beat(self, now: float) -> None:
        """Sends the heartbeats and checks everything that depends on the time, at least once per second."""
        for agent, silent_s in self._heartbeats.send(now):
            self._lost.note_silence(agent, silent_s)
        self._end.end_if_late(now)
        self._hang_watch.check(now)
        # While the job ends, ranks leave at different times for a good reason.
        if not self._end.is_ending and (sentence := self._table.name_early_leaver()) is not None:
            self._messages.say(sentence)
        self._end.end_if_unread()

    def _close(self) -> None:
        self._pipes.close()
        self._lost.wait_for_orphan_killers()
        for rank in self._table.hosts:
            self._output.finish(rank)
        # Last, below what the other ranks printed while they were being stopped.
        if self._end.decision.report:
            self._messages.say(self._end.decision.report)
