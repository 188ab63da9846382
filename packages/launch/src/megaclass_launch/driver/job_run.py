"""The loop of the driver: it receives what the agents send, decides, and carries out the orders. Standard library only.

    connecting --all hosts said hello--> running --every agent is done or lost--> over
         |                                  |                                      ^
         | a host cannot take part,         | a rank fails, a host is lost,        |
         | or a signal                      | a signal, a hang, stdout closed      |
         +--------------------------------> ending --agents are done, or give up --+

An elastic job forms one generation after the other while it runs (generations.py); other jobs have one. Everything happens in
one thread, in `JobRun.run`; only the Screen and the Discovery have threads of their own.

    event                              decision                                       orders
    a message of an agent              messages.py:on_message                         Tell, Open, Close, StopListening:
    an agent ended, fell silent, lied  lost_agents.py                                 `_carry_out`
    a signal, time                     job_end.py, hang_watch.py
    after every event                  start.py:start_together, generations.py:advance
"""

import selectors
import time
from collections.abc import Sequence

from megaclass_launch.driver import generations, job_end, lost_agents, start
from megaclass_launch.driver.agent_pipe import AgentPipe, AgentPipes, PipeState
from megaclass_launch.driver.discovery import Discovery
from megaclass_launch.driver.hang_watch import HangWatch
from megaclass_launch.driver.job import Close, JobState, Open, Order, StopListening, Tell
from megaclass_launch.driver.lost_agents import OrphanKillers
from megaclass_launch.driver.messages import on_message
from megaclass_launch.driver.outcome import Outcome
from megaclass_launch.driver.ssh import agent_command
from megaclass_launch.exit_codes import EXIT_USER_ERROR
from megaclass_launch.wire.protocol import ProtocolError, beat_interval

_TICK_S = 0.25
"""Interval at which the deadlines of an elastic job are checked."""
_LONGEST_BEAT_S = 0.5
"""The checks that depend on the time are made with the heartbeats, and a user may have chosen a limit of minutes for these."""


class JobRun:
    """Runs a job from the first connection to the last process gone. discovery: of the hosts of an elastic job."""

    def __init__(self, job: JobState, discovery: Discovery | None = None) -> None:
        self._job = job
        self._discovery = discovery
        self._pipes = AgentPipes(job.opened, self._on_message, job.io)
        self._hang_watch = HangWatch(job)
        self._orphan_killers = OrphanKillers(job.ssh, job.options.fault_grace_s)
        self._beat_due_at = 0.0
        self._beat_interval_s = min(_LONGEST_BEAT_S, beat_interval(job.options.heartbeat_s))

    def run(self) -> Outcome:
        """Starts the ranks, waits until nothing of them is left, and returns the outcome."""
        job, selector = self._job, self._pipes.selector
        selector.register(job.io.signals, selectors.EVENT_READ, self._on_signals)
        if self._discovery is not None:
            selector.register(self._discovery, selectors.EVENT_READ, self._on_hosts)
        if job.io.call is not None:
            selector.register(job.io.call.caller_fd, selectors.EVENT_READ, self._on_caller_gone)
        try:
            if not job.is_elastic:
                start.connect(job)
            self._carry_out(job.take_orders())
            while not self._is_over():
                now = time.monotonic()
                # Agents that do not report the end in time are abandoned, so the driver always ends.
                if now >= job.give_up_at:
                    lost_agents.abandon_unfinished(job)
                    self._carry_out(job.take_orders())
                    break
                if now >= self._beat_due_at:
                    self._beat(now)
                self._decide(now)
                self._carry_out(job.take_orders())
                # Not again at once: the orders may have ended the job.
                if not self._is_over():
                    self._pipes.handle_events(self._next_event_at(now))
            self._hang_watch.finish()
        finally:
            self._close()
        return job.decision.final()

    def _is_over(self) -> bool:
        # Not by the agents alone: before the first host of an elastic job is known, and while all are lost, there are none.
        job = self._job
        may_end = job.is_closing or job.is_ending if job.is_elastic else not job.is_starting
        return may_end and not job.unfinished()

    def _next_event_at(self, now: float) -> float:
        job = self._job
        until = min(self._beat_due_at, job.give_up_at, job.start_deadline)
        return min(until, job.hosts.next_return(now), now + _TICK_S) if job.is_elastic else until

    def _decide(self, now: float) -> None:
        """Does what follows from the state of the job, whatever has changed it."""
        job = self._job
        if job.is_elastic:
            generations.advance(job, now)
        elif job.is_starting:
            start.start_together(job, now)

    # ---- orders ----

    def _carry_out(self, orders: Sequence[Order]) -> None:
        for order in orders:
            match order:
                case Tell(agent, message):
                    if not agent.is_over:
                        agent.send(message)
                case Open():
                    self._open(order)
                case Close(agent, kills_orphans):
                    if kills_orphans:
                        self._orphan_killers.start(agent)
                    self._pipes.stop_listening(agent)
                    agent.close()
                case StopListening(agent):
                    self._pipes.stop_listening(agent)

    def _open(self, order: Open) -> None:
        """Starts an agent and sends it the job."""
        job, host = self._job, order.host
        command = agent_command(host, job.ssh)
        job.messages.detail(f"{host.name}: {command}")
        # Two host names may be one machine, where no agent may end another's ranks.
        run_id = f"{job.run_id}-{len(job.opened) + 1}"
        agent = AgentPipe(host, command, token=job.token, run_id=run_id, checker=start.checker_for(job, host))
        self._pipes.add(agent)
        job.agents[host.name] = agent
        agent.send(start.agent_job(job, host, run_id))

    # ---- events ----

    def _on_message(self, agent: AgentPipe) -> None:
        job = self._job
        try:
            messages = agent.read()
            if messages is None:
                lost_agents.note_end_of_stream(job, agent, lost_agents.why_ended(agent, job.ssh))
            for message, payload in messages or ():
                self._carry_out(on_message(job, self._hang_watch, agent, message, payload))
                if agent.is_over:
                    break
        except ProtocolError as error:
            lost_agents.lose(job, agent, f"sent something that no agent of this version sends: {error}")
        self._carry_out(job.take_orders())

    def _on_signals(self) -> None:
        job_end.on_signals(self._job, self._job.io.signals.taken())
        self._carry_out(self._job.take_orders())

    def _on_hosts(self) -> None:
        assert self._discovery is not None
        generations.update_hosts(self._job, self._discovery.name, self._discovery.news())

    def _on_caller_gone(self) -> None:
        job = self._job
        assert job.io.call is not None
        self._pipes.selector.unregister(job.io.call.caller_fd)
        job.messages.say("the process that called horovod.run() has ended; ending the ranks.")
        job_end.end(job, Outcome(exit_code=EXIT_USER_ERROR, may_restart=False))

    def _beat(self, now: float) -> None:
        """Sends the heartbeats and checks everything that depends on the time, at least once per second."""
        job = self._job
        job.is_paused = self._pipes.is_paused
        self._beat_due_at = now + self._beat_interval_s
        for agent in job.unfinished():
            # Unsent messages prove that the driver lives, and an agent that does not read cannot make the queue grow.
            if not agent.has_unsent:
                agent.send({"do": "beat"})
            # While the driver does not read, it cannot tell which agents are silent.
            silent_s = now - agent.heard_at
            if agent.state is PipeState.RUNNING and silent_s > job.silence_s and not job.is_paused:
                lost_agents.note_silence(job, agent, silent_s)
        lost_agents.lose_late(job, now)
        if job.is_elastic:
            generations.kill_stopped(job, now, job.silence_s)
        job_end.end_if_late(job, now)
        self._hang_watch.check(now)
        # While the job ends, ranks leave at different times for a good reason; in an elastic job they are dismissed.
        if not job.is_elastic and not job.is_ending and (sentence := job.ranks.name_early_leaver()) is not None:
            job.messages.say(sentence)
        job_end.end_if_unread(job)

    def _close(self) -> None:
        job = self._job
        if self._discovery is not None:
            # First, because the selector is closed together with the pipes.
            self._discovery.close()
            self._pipes.selector.unregister(self._discovery)
        self._pipes.close()
        self._orphan_killers.wait()
        for worker in job.ranks.rows:
            if worker.code is None or not job.is_elastic:
                job.output.finish(worker.shown_rank)
        # Last, below what the other ranks printed while they were being stopped.
        if job.decision.report:
            job.messages.say(job.decision.report)
