"""The driver of an elastic job: it starts and replaces workers, and publishes generations. Standard library only.

            all started          every member waits at the rendezvous,
            workers are ready    and there are at least --min-np of them
    START ------------------> GENERATION n --------------------------------> GENERATION n + 1
      |                          |     ^                                          |
      |                          |     +--- a member failed, or members left -----+
      |                          |          because hosts have changed
      |                          | a member ends with exit code 0
      v                          v
     END <------------------- FINISHING
          signals, exit code 2, all members failed, too few ranks for --elastic-timeout, --reset-limit

Everything happens in one thread, in `ElasticRun.run`, so no field needs a lock. Messages and times change the tables; after
them `_decide` does what follows from the tables, whatever has changed them. The parts and the state that each one owns:

    part               job                                                    state, and what changes it
    HostTable          hosts that may be used, hosts that failed              answers of the discovery, failures
    ElasticAgents      one agent per host in use                              hellos, losses
    WorkerTable        all workers: rank, ready or not, leaving or not        messages of the agents, publications
    JobEnd             why the job ends, and until when it waits              decision, deadlines; see job_end.py
    HostUpdates        answers of the discovery, for table and terminal       none
    WorkerEvents       what messages mean                                     is_aware, is_finishing, hung_s, first_failure, …
    NewWorkers         opens agents, starts workers in free slots             none
    Leavers            dismisses workers, kills those that stay               is_leaving and since of their records
    RankMinimum        the wait for enough ranks                              since when there are too few
    Generations        forms and publishes generations                        current
    RunningGeneration  tells members of changes and failures                  what they were told; new with each generation
    ElasticRun         the loop, lost agents, the order of the end            _is_closing: the last worker has ended
"""

import random
import selectors
import time

from megaclass_launch.driver.agent_pipe import AgentPipe, AgentPipes, Heartbeats
from megaclass_launch.driver.job_end import JobEnd
from megaclass_launch.driver.lost_agents import code_of_lost, why_silent
from megaclass_launch.driver.outcome import Outcome, Reason
from megaclass_launch.driver.output import DriverIo
from megaclass_launch.driver.ssh import SshSettings
from megaclass_launch.elastic.agents import ElasticAgents
from megaclass_launch.elastic.decisions import Generations, HostUpdates, Leavers, NewWorkers, RankMinimum
from megaclass_launch.elastic.discovery import Discovery, HostTable, Source
from megaclass_launch.elastic.job import ElasticJob, WorkerTable, named
from megaclass_launch.elastic.worker_events import WorkerEvents
from megaclass_launch.errors import EXIT_TRY_AGAIN
from megaclass_launch.exit_codes import EXIT_HOST_LOST
from megaclass_launch.options import RunOptions
from megaclass_launch.wire.protocol import ProtocolError

_TICK_S = 0.25
"""Interval at which deadlines are checked while a generation is being formed."""


class ElasticRun:
    """One elastic job, from its first host to its last process."""

    def __init__(self, options: RunOptions, source: Source, ssh: SshSettings, io: DriverIo, token: str) -> None:
        self._options = options
        self._io, self._messages = io, io.messages
        self._pipes = AgentPipes(self._on_message, io, token)
        self._heartbeats = Heartbeats(self._pipes, options)
        self._agents = ElasticAgents(self._pipes, options, ssh)
        self._table = WorkerTable()
        self._end = JobEnd(self._pipes, self._table, io, options)
        self._hosts = HostTable(options.cooldown_s, random.random)
        job = ElasticJob(
            options=options, hosts=self._hosts, agents=self._agents, table=self._table, end=self._end, io=io
        )
        self._events = WorkerEvents(job)
        minimum = RankMinimum(job, give_up=self._events.end_after_failure)
        self._leavers = Leavers(job)
        self._new_workers = NewWorkers(job, minimum)
        self._generations = Generations(job, self._events, minimum, self._leavers)
        self._discovery = Discovery(source)
        self._host_updates = HostUpdates(self._discovery, job)
        self._is_closing = False

    def run(self) -> Outcome:
        """Runs the job, waits until nothing of it is left, and returns the outcome."""
        selector = self._pipes.selector
        selector.register(self._io.signals, selectors.EVENT_READ, self._end.on_signals)
        selector.register(self._discovery, selectors.EVENT_READ, self._host_updates.take)
        try:
            while not self._is_over():
                now = time.monotonic()
                # Agents that do not report the end in time are abandoned, so the driver always ends.
                if now >= self._end.give_up_at:
                    self._abandon()
                    break
                if now >= self._heartbeats.due_at:
                    self._beat(now)
                # Once there is a reason to end, nothing new is started. That includes exit code 75 (Reason.RESUME), after
                # which the other ranks save and leave by themselves.
                if self._end.decision.reason is not Reason.NONE:
                    self._close_if_empty()
                elif not self._is_closing:
                    self._decide(now)
                self._pipes.handle_events(self._next_event_at(now))
        finally:
            self._close()
        return self._end.decision.final()

    def _is_over(self) -> bool:
        # Not by the pipes alone: before the first agent is opened, and while all hosts are lost, there are none, either.
        return (self._is_closing or self._end.is_ending) and not self._pipes.unfinished()

    def _next_event_at(self, now: float) -> float:
        return min(self._heartbeats.due_at, self._end.give_up_at, self._hosts.next_return(now), now + _TICK_S)

    # ---- events ----

    def _on_message(self, agent: AgentPipe) -> None:
        try:
            messages = agent.read()
            if messages is None:
                why = self._agents.why_ended(agent)
                self._lose(agent, why, code=code_of_lost(agent))
                return
            for message, payload in messages:
                self._events.handle(agent, message, payload, self._generations.token)
        except ProtocolError as error:
            self._lose(agent, f"{agent.name} sent something that no agent of this version sends: {error}")

    def _lose(self, agent: AgentPipe, why: str, *, code: int = EXIT_HOST_LOST, is_reachable: bool = True) -> None:
        # Asked before the agent is forgotten. An agent that was told to leave is not in use any more, and its host may have a
        # new one by now: neither that one nor the workers there are lost.
        is_in_use = self._agents.by_host.get(agent.name) is agent
        self._agents.lose(agent, is_reachable=is_reachable)
        if is_in_use:
            self._events.note_lost_host(agent.name, why, code)

    def _beat(self, now: float) -> None:
        """Sends the heartbeats and checks everything that depends on the time, at least once per second."""
        for agent, silent_s in self._heartbeats.send(now):
            # Without an orphan killer, which could not reach the host, either.
            why = f"{agent.name} {why_silent(silent_s)}"
            self._lose(agent, why, code=EXIT_TRY_AGAIN, is_reachable=False)
        for agent in self._agents.late(now):
            timeout = f"(--start-timeout {self._options.start_timeout_s:g} s)"
            self._lose(agent, f"{agent.name} did not report in time {timeout}")
        for worker in self._table.staying():
            # A stopped worker keeps its connections open, so the other ranks wait for it until it is killed.
            if worker.stopped_at is not None and now - worker.stopped_at > self._heartbeats.silence_s:
                worker.stopped_at = now
                # Only its agent knows whether it still is stopped: no message tells of a SIGCONT.
                self._agents.order("kill", [worker], if_stopped=True)
        self._end.end_if_late(now)
        self._end.end_if_unread()

    # ---- decisions ----

    def _decide(self, now: float) -> None:
        """Does what follows from the state: opens agents, starts workers, forms generations, ends the job."""
        self._leavers.kill_late(now)
        if self._events.is_finishing:
            self._finish()
            return
        self._new_workers.open_agents(now)
        current = self._generations.current
        # Also while a generation trains: new workers import their modules meanwhile and join when they are ready.
        self._new_workers.start(
            now, current.facts if current is not None else None, is_running=self._events.has_progressed
        )
        self._generations.advance(now)

    def _finish(self) -> None:
        """Ends the job after a member has ended with exit code 0: members that train have time to end likewise."""
        # A worker at the rendezvous would wait forever, because no generation follows. A new one is on its way there.
        waiting = [worker for worker in self._table.staying() if worker.is_ready or worker.rank is None]
        if unfinished := [worker for worker in waiting if worker.rank is not None]:
            self._messages.say(
                f"WARNING {named(unfinished)} had not finished when another rank ended with exit code 0, which finishes "
                f"the job: what was computed since the last checkpoint is lost."
            )
        self._leavers.dismiss(waiting, "the job is finished")
        self._close_if_empty()

    def _close_if_empty(self) -> None:
        """Lets the agents leave when the last worker has ended: they do not leave by themselves, as those of other jobs do."""
        # No worker runs there, and their hellos would not be used any more.
        self._pipes.drop_starting()
        if not self._table.alive and not self._is_closing:
            self._is_closing = True
            self._end.finish()

    def _abandon(self) -> None:
        for agent in self._pipes.unfinished():
            self._messages.say(f"{agent.name} does not report that its ranks ended; closing the connection.")
            self._agents.lose(agent, is_reachable=True)

    def _close(self) -> None:
        # First, because the selector is closed together with the pipes.
        self._discovery.close()
        self._pipes.selector.unregister(self._discovery)
        self._pipes.close()
        self._agents.wait_for_orphan_killers()
        self._events.flush()
        # Last, below what the other ranks printed while they were being stopped.
        if self._end.decision.report:
            self._messages.say(self._end.decision.report)
