"""One start of all ranks on all hosts, from the first connection to the last process gone. Standard library only.

    connecting --all hosts said hello--> running --every agent is done or lost--> over
         |                                  |                                      ^
         | a host cannot take part,         | a rank fails, a host is lost,        |
         | or a signal                      | a signal, a hang, stdout closed      |
         +--------------------------------> ending --agents are done, or give up --+

Everything happens in one thread, in `JobRun._loop`, so no field needs a lock. Only the Screen has a thread of its own.

    field               changed by                            read by
    _start.problems     messages and ends before "go"         run: decides whether the job may go
    _pipes[i].state     JobStart.go, messages, losses         everything; see agent_pipe.py for its states
    _table              "started", "output" and "exit"        reports, Ctrl-C, the check for hangs
    _decision           _end, _on_signals, _note_exit         run: the outcome; everything: whether the job is ending
    _give_up_at         _order_end                            _loop: hangs up on agents that do not report the end
    _resume_deadline    _note_exit, at the first exit code 75 _beat: ends the ranks that have not saved by then
    _printed_at         "output", and "go"                    _end_if_hung
    _checkpoint_step    "progress"                            the restart loop, after the end
"""

import contextlib
import selectors
import signal
import time
from collections.abc import Callable, Sequence

from megaclass.launch.driver.agent_pipe import AgentPipe, AgentPipes, PipeState
from megaclass.launch.driver.failure_report import stopped_message
from megaclass.launch.driver.job_start import JobStart
from megaclass.launch.driver.outcome import RESUME_ME, Outcome, OutcomeDecision, Reason
from megaclass.launch.driver.output import DriverIo
from megaclass.launch.driver.rank_table import RankTable
from megaclass.launch.driver.remote_orphan_killer import RemoteOrphanKiller, start_orphan_killer
from megaclass.launch.driver.ssh import SshSettings
from megaclass.launch.exit_codes import (
    EXIT_HOST_LOST,
    EXIT_RESUME_ME,
    EXIT_USER_ERROR,
    exit_status,
    how_it_ended,
    is_worth_restarting,
    signal_name,
)
from megaclass.launch.options import RunOptions
from megaclass.launch.plan import Placement
from megaclass.launch.signals import ENDING_SIGNALS, InterruptLadder
from megaclass.launch.wire.heartbeat import beat_interval, silence_limits
from megaclass.launch.wire.protocol import Message, ProtocolError

_SAVE_S = 60.0
"""Time for the other ranks to save and leave after the first one has left with exit code 75."""
_SETTLE_S = 3.0
"""After one host could not be reached, others may fail for the same reason; after this time all are named at once."""
_LEAVE_S = 4.0
"""Time beyond the grace for processes to vanish and for the agents to report it."""
_STDERR_READS = 16
"""Reads of an agent's stderr after its end; an ssh that goes on writing there must not keep the driver."""
_EXIT_CODE_S = 0.5
"""Time for ssh or the local agent to end after it has closed stdout."""
_PAUSED_TICK_S = 0.02
"""How often a full screen is looked at."""
_MAX_ORPHAN_KILLERS = 64
"""If more hosts are lost at once, the network is gone; the agents then end their ranks themselves."""


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
        self._ssh = ssh
        self._is_last_start = restart == options.restarts
        self._screen, self._output = io.screen, io.output
        self._messages, self._signals = io.messages, io.signals
        self._start = JobStart(placements, options, ssh, io.messages, restart=restart)
        self._pipes = AgentPipes(self._on_message, self._on_stderr, self._start.token)
        self._table = RankTable(placements)
        self._decision = OutcomeDecision()
        self._ladder = InterruptLadder()
        self._orphan_killers: list[RemoteOrphanKiller] = []
        self._give_up_at = float("inf")
        self._resume_deadline = float("inf")
        self._checkpoint_step: int | None = None
        self._beat_at = 0.0
        self._printed_at = time.monotonic()

    @property
    def has_started(self) -> bool:
        """Returns whether any rank ran."""
        return bool(self._table.pids)

    @property
    def checkpoint_step(self) -> int | None:
        """Returns the step of the last checkpoint that a rank of this start has reported."""
        return self._checkpoint_step

    def run(self) -> Outcome:
        """Starts all ranks, waits until nothing of them is left, and returns the outcome."""
        self._pipes.selector.register(self._signals, selectors.EVENT_READ, self._on_signals)
        try:
            # All hosts are connected to at the same time: a slow one costs its own time, not the sum.
            self._start.connect(self._pipes)
            self._loop(until=self._have_all_hosts_answered, is_start=True)
            if not self._decision.is_ending and not self._start.problems:
                self._start.compare_versions(self._pipes)
            if self._decision.is_ending:
                # A signal came during the start. Agents that are ready were told to end; the others know nothing yet.
                self._pipes.drop_starting()
            elif self._start.problems:
                failure = self._start.failure(len(self._pipes.all))
                self._pipes.drop_starting()
                self._end(failure, grace_s=0.0)
            else:
                self._printed_at = time.monotonic()
                self._start.go(self._pipes)
            self._loop(until=lambda: not self._pipes.unfinished())
        finally:
            self._close()
        return self._decision.final()

    def _have_all_hosts_answered(self) -> bool:
        return self._decision.is_ending or all(agent.state is not PipeState.STARTING for agent in self._pipes.all)

    # ---- the loop ----

    def _loop(self, until: Callable[[], bool], is_start: bool = False) -> None:
        start_deadline = time.monotonic() + self._options.start_timeout_s if is_start else float("inf")
        while not until():
            now = time.monotonic()
            if is_start and self._start.problems:
                start_deadline = min(start_deadline, now + _SETTLE_S)
            if now >= start_deadline:
                # Where other hosts have problems, the silent ones have not had the whole time: they are not blamed.
                if not self._start.problems:
                    self._start.note_silent_hosts(self._pipes)
                return
            # Agents that do not report the end in time are abandoned, so that the driver always ends.
            if now >= self._give_up_at:
                self._give_up()
                return
            self._beat(now)
            self._pipes.pause(self._screen.is_full)
            self._pipes.watch_unsent()
            next_event = min(self._beat_at, start_deadline, self._give_up_at)
            wait_s = _PAUSED_TICK_S if self._pipes.is_paused else max(0.0, next_event - now)
            for key, _ in self._pipes.selector.select(wait_s):
                # An earlier event of this batch may have closed the pipe of a later one, or filled the screen.
                if self._pipes.selector.get_map().get(key.fd) is key:
                    key.data()
                    self._pipes.pause(self._screen.is_full)

    def _beat(self, now: float) -> None:
        if now < self._beat_at:
            return
        # At least once per second, because the deadlines below are checked here, too.
        self._beat_at = now + min(1.0, beat_interval(self._options.heartbeat_s))
        silence_s, _ = silence_limits(self._options.heartbeat_s, self._options.grace_s)
        for agent in self._pipes.unfinished():
            if not agent.has_unsent:
                # Unsent messages prove that the driver lives, and an agent that does not read cannot make the queue grow.
                agent.send({"do": "beat"})
            # While the driver does not read, it cannot tell which agents are silent.
            silent_s = now - agent.heard_at
            if agent.state is PipeState.RUNNING and not self._pipes.is_paused and silent_s > silence_s:
                why = f"has not answered for {silent_s:.1f} s: its cable, its network or itself is gone"
                self._lose(agent, why, is_silent=True)
        if not self._decision.is_ending and (sentence := self._table.name_early_leaver()) is not None:
            self._messages.say(sentence)
        self._end_if_hung(now)
        if now >= self._resume_deadline:
            self._resume_deadline = float("inf")
            self._end(RESUME_ME)
        if self._screen.fault is not None and not self._decision.is_ending:
            self._messages.say(f"stdout cannot be written ({self._screen.fault.strerror}); ending the ranks.")
            self._end(Outcome(exit_code=exit_status(-signal.SIGPIPE), may_restart=False))

    def _end_if_hung(self, now: float) -> None:
        limit_s = self._options.hang_timeout_s
        if not limit_s or not self.has_started or self._decision.is_ending or self._pipes.is_paused:
            return
        if now - self._printed_at > limit_s:
            self._messages.say(
                f"no rank has printed anything for {limit_s:g} s (--hang-timeout). Running: {self._table.name_running()}. "
                f"SIGABRT makes them print their stacks; then they are ended."
            )
            self._end(Outcome(exit_code=exit_status(-signal.SIGABRT)), first=signal.SIGABRT)

    # ---- messages of the agents ----

    def _on_message(self, agent: AgentPipe) -> None:
        try:
            messages = agent.read()
            if messages is None:
                self._on_end_of_stream(agent)
                return
            for message, payload in messages:
                self._handle(agent, message, payload)
        except ProtocolError as error:
            self._distrust(agent, f"sent something that no agent of this version sends: {error}")

    def _handle(self, agent: AgentPipe, message: Message, payload: bytes) -> None:
        match message["say"]:
            case "output":
                rank = message["rank"]
                self._printed_at = time.monotonic()
                self._table.note_lines(rank, self._output.put(rank, message["stream"], payload))
            case "hello":
                agent.hello = message
                agent.state = PipeState.READY
                self._messages.detail(f"{agent.name}: agent {message['pid']} is ready")
            case "refuse":
                self._refuse(agent, message["why"])
            case "started":
                # The checker has made sure that these are pids of the agent's own ranks.
                self._table.pids |= message["pids"]
                self._messages.detail(f"{agent.name}: started {message['pids']}")
            case "exit":
                self._note_exit(message["rank"], message["pid"], message["code"])
            case "stopped":
                self._messages.say(stopped_message(message["rank"], agent.name, message["pid"]))
            case "note":
                self._messages.say(f"{agent.name}: {message['text']}")
            case "progress":
                self._checkpoint_step = max(self._checkpoint_step or 0, message["step"])
            case "done":
                self._note_done(agent)

    def _note_done(self, agent: AgentPipe) -> None:
        # A host that leaves without having reported its ranks' ends must not turn a failure into a success.
        unreported = [world.rank for world in agent.placement.worlds if world.rank not in self._table.codes]
        if agent.state is PipeState.RUNNING and unreported and not self._decision.is_ending:
            self._distrust(agent, f"says that it is done, but not how rank {unreported[0]} ended")
        else:
            self._pipes.finish(agent, PipeState.DONE)

    def _refuse(self, agent: AgentPipe, why: str) -> None:
        if agent.state is PipeState.STARTING:
            # It has answered, so that the start does not wait for it any longer.
            agent.state = PipeState.READY
            self._start.problems.append((agent.name, f"{agent.name}: {why}"))
        else:
            self._messages.say(f"{agent.name}: {why}")
            self._end(Outcome(exit_code=EXIT_USER_ERROR, failed_hosts=(agent.name,)))

    def _note_exit(self, rank: int, pid: int, code: int) -> None:
        # The rest of its last line first, so that the report about its end contains it.
        self._table.note_lines(rank, self._output.finish(rank))
        self._table.note_exit(rank, pid, code)
        # Once the ranks were told to end, their exit codes say nothing about the cause.
        if code == 0 or self._decision.is_ending:
            return
        host = self._table.hosts[rank]
        if code == EXIT_RESUME_ME:
            # It was asked to stop and has saved; the other ranks are about to.
            if self._decision.decide(Reason.RESUME, RESUME_ME):
                self._resume_deadline = time.monotonic() + _SAVE_S
                self._messages.say(f"rank {rank} on {host} stopped as requested and can be resumed.")
            return
        self._messages.say(self._table.headline_of(rank))
        may_restart = is_worth_restarting(code)
        if not self._is_last_start and not may_restart:
            self._messages.say(f"exit code {code} means that something has to be fixed first: no restart.")
        self._end(
            Outcome(exit_code=exit_status(code), failed_hosts=(host,), may_restart=may_restart),
            report=self._table.failure_report_of(rank) + self._output.where(rank),
        )

    def _on_stderr(self, agent: AgentPipe) -> None:
        data = agent.read_stderr()
        if data is None:
            self._pipes.stop_stderr(agent)
        elif agent.state is not PipeState.STARTING:
            for line in data.decode(errors="replace").splitlines():
                self._messages.detail(f"{agent.name}: {line}")

    # ---- lost agents ----

    def _on_end_of_stream(self, agent: AgentPipe) -> None:
        """Handles the end of ssh or the local agent before it said that all is done."""
        for _ in range(_STDERR_READS):
            if not agent.read_stderr():
                break
        # ssh's exit code tells a failed login (255) from an agent that ended.
        code = agent.wait(_EXIT_CODE_S)
        if agent.state is PipeState.STARTING:
            self._start.note_end_of(agent, code)
            self._pipes.finish(agent, PipeState.LOST)
        else:
            who = "its agent" if agent.placement.host.is_local else "its agent, or the ssh connection to it,"
            self._lose(agent, f"was lost: {who} ended" + (f" with {how_it_ended(code)}" if code is not None else ""))

    def _distrust(self, agent: AgentPipe, why: str) -> None:
        """Excludes a host that breaks the protocol: it is faulty, or controlled by an attacker."""
        if agent.state is PipeState.STARTING:
            self._start.problems.append((agent.name, f"{agent.name} {why}."))
            self._pipes.drop(agent)
        else:
            self._lose(agent, why)

    def _lose(self, agent: AgentPipe, why: str, *, is_silent: bool = False) -> None:
        # A host that is silent could not be reached by an orphan killer, either.
        if agent.state is PipeState.RUNNING and not is_silent:
            self._kill_orphans_of(agent)
        self._pipes.drop(agent)
        if self._decision.is_ending:
            self._messages.detail(f"{agent.name} {why}")
            return
        last = "".join(f"\n    {line}" for line in agent.stderr_text.splitlines()[-3:])
        lost = f"{agent.name} ({agent.placement.ranks()}) {why}."
        self._messages.say(f"{lost} Its ranks end by themselves; all others are being stopped.{last}")
        outcome = Outcome(exit_code=EXIT_HOST_LOST, failed_hosts=(agent.name,))
        self._end(outcome, report=f"the run ended because {lost}")

    def _kill_orphans_of(self, agent: AgentPipe) -> None:
        """Starts to kill the ranks of a lost agent, in case its own orphan killers died with it."""
        if len(self._orphan_killers) == _MAX_ORPHAN_KILLERS:
            return
        run_id, grace_s = self._start.run_id_of(self._pipes.all.index(agent)), min(self._options.grace_s, _LEAVE_S)
        with contextlib.suppress(OSError):
            self._orphan_killers.append(
                start_orphan_killer(
                    agent.placement.host, self._ssh, run_id, agent_pid=agent.hello["pid"], grace_s=grace_s
                )
            )

    # ---- the end ----

    def _end(
        self, outcome: Outcome, *, report: str = "", grace_s: float | None = None, first: int = signal.SIGTERM
    ) -> None:
        """Ends all ranks because of a fault; the outcome is recorded if it is the first one."""
        self._decision.decide(Reason.FAULT, outcome, report)
        self._order_end(grace_s, first)

    def _order_end(self, grace_s: float | None = None, first: int = signal.SIGTERM) -> None:
        self._pipes.send({"do": "end", "grace_s": grace_s, "first": int(first)})
        # A second order may come earlier than the first one would end, never later.
        until_killed_s = self._options.grace_s if grace_s is None else grace_s
        self._give_up_at = min(self._give_up_at, time.monotonic() + until_killed_s + _LEAVE_S)

    def _on_signals(self) -> None:
        for number in self._signals.taken():
            if number not in ENDING_SIGNALS:
                self._pass_on(number)
                continue
            self._decision.decide(Reason.SIGNAL, Outcome(exit_code=exit_status(-number), may_restart=False))
            if number == signal.SIGINT:
                self._interrupt()
            else:
                self._messages.say(f"{signal_name(number)}: ending the ranks.")
                self._order_end()

    def _interrupt(self) -> None:
        sent = self._ladder.climb()
        self._messages.say(self._ladder.message(sent, self._table.num_left))
        # SIGKILL goes to all processes of the run, not only to the ranks; without ranks there is nothing to ask.
        if sent is signal.SIGKILL or not self.has_started:
            self._order_end(grace_s=0.0)
        else:
            self._pass_on(sent)

    def _pass_on(self, number: int) -> None:
        self._pipes.send({"do": "signal", "number": int(number)})

    def _give_up(self) -> None:
        for agent in self._pipes.unfinished():
            if agent.state is PipeState.RUNNING:
                self._kill_orphans_of(agent)
            self._pipes.finish(agent, PipeState.LOST)
            self._messages.say(
                f"{agent.name} does not report that its {agent.placement.ranks()} ended; closing the connection."
            )

    def _close(self) -> None:
        self._pipes.close()
        for orphan_killer in self._orphan_killers:
            orphan_killer.wait()
        for rank in self._table.hosts:
            self._output.finish(rank)
        # Last, below what the other ranks printed while they were being stopped.
        if self._decision.report:
            self._messages.say(self._decision.report)
