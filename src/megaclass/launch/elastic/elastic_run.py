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

Everything happens in one thread, in `run`. Messages and times change the state below; `_decide` then does what follows from it.

    part or field        job                                                 changed by
    HostTable            hosts that may be used, hosts that failed           answers of the discovery, failures
    ElasticAgents        one agent per host in use                           hellos, losses
    WorkerTable          all workers: rank, ready or not, leaving or not     messages of the agents
    _generation, _size   the generation that was published last              _publish
    _announced           the change that its members were told of            _announce_change, _publish
    _has_announced_break its members were told that one of them is gone      _form_generation, _publish
    _short_since         since when there are too few ranks                  _is_enough
    _has_told_short      the user was told so                                _is_enough
    _is_closing          the last worker has ended, the agents are leaving   _decide
    WorkerEvents         what messages mean; is_aware, is_finishing, …       messages of the agents, losses
"""

import random
import selectors
import time
from collections.abc import Sequence

from megaclass.launch.driver.agents.agent_pipe import AgentPipe, AgentPipes, Heartbeats, PipeState
from megaclass.launch.driver.agents.ssh import SshSettings
from megaclass.launch.driver.job_end import JobEnd
from megaclass.launch.driver.lost_agents import why_silent
from megaclass.launch.driver.outcome import Outcome, Reason
from megaclass.launch.driver.output import DriverIo
from megaclass.launch.elastic.agents import ElasticAgents
from megaclass.launch.elastic.discovery import Discovery, HostTable, Source
from megaclass.launch.elastic.generation import Generation, WorkerRecord, chosen, in_rank_order, listed, worlds_of
from megaclass.launch.elastic.worker import Why
from megaclass.launch.elastic.worker_events import WorkerEvents
from megaclass.launch.elastic.worker_table import WorkerTable, named
from megaclass.launch.exit_codes import EXIT_HOST_LOST, EXIT_USER_ERROR
from megaclass.launch.options import RunOptions
from megaclass.launch.wire.protocol import ProtocolError

_TICK_S = 0.25
"""Interval at which deadlines are checked while a generation is being formed."""
_JOIN_TOGETHER_S = 30.0
"""Workers that were started within this time are waited for, so that they join in one generation."""
_LEAVE_HUNG_S = 20.0
"""Time for the members of a generation that hangs to leave it: those that only wait for another one do so at once."""
_LEAVE_S = 10.0
"""Time for a dismissed worker to end by itself."""


class ElasticRun:
    """One elastic job, from its first host to its last process."""

    def __init__(self, options: RunOptions, source: Source, ssh: SshSettings, io: DriverIo, token: str) -> None:
        self._options = options
        self._io, self._messages = io, io.messages
        self._pipes = AgentPipes(self._on_message, io, token)
        self._heartbeats = Heartbeats(self._pipes, options)
        self._table = WorkerTable()
        self._end = JobEnd(self._pipes, self._table, io, options.grace_s)
        self._hosts = HostTable(options.cooldown_s, random.random)
        self._discovery = Discovery(source)
        self._agents = ElasticAgents(self._pipes, options, ssh)
        self._events = WorkerEvents(self._table, self._agents, self._hosts, self._end, io)
        self._generation: Generation | None = None
        self._size = 0
        self._announced: tuple[frozenset[int], frozenset[int]] | None = None
        self._has_announced_break = False
        self._short_since: float | None = None
        self._has_told_short = False
        self._is_closing = False

    def run(self) -> Outcome:
        """Runs the job, waits until nothing of it is left, and returns the outcome."""
        selector = self._pipes.selector
        selector.register(self._io.signals, selectors.EVENT_READ, self._end.on_signals)
        selector.register(self._discovery, selectors.EVENT_READ, self._on_discovery)
        try:
            while not self._is_over():
                now = time.monotonic()
                if now >= self._end.give_up_at:
                    self._abandon()
                    break
                if now >= self._heartbeats.due_at:
                    self._beat(now)
                if self._end.decision.reason is not Reason.NONE:
                    self._close_if_empty()
                elif not self._is_closing:
                    self._decide(now)
                self._pipes.handle_events(self._next_event_at(now))
        finally:
            self._close()
        return self._end.decision.final()

    def _is_over(self) -> bool:
        return (self._is_closing or self._end.is_ending) and not self._pipes.unfinished()

    def _next_event_at(self, now: float) -> float:
        return min(self._heartbeats.due_at, self._end.give_up_at, self._hosts.next_return(now), now + _TICK_S)

    # ---- events ----

    def _on_discovery(self) -> None:
        for answer in self._discovery.news():
            name = self._discovery.name
            if answer.problem and not self._hosts.listed:
                self._messages.say(f"{name}: {answer.problem}. The job needs hosts to start with.")
                self._end.end(Outcome(exit_code=EXIT_USER_ERROR, may_restart=False))
            elif answer.problem:
                self._messages.say(f"WARNING {name}: {answer.problem}; its last good answer stands.")
            else:
                is_first = not self._hosts.listed
                added, removed = self._hosts.update(answer.hosts)
                if is_first:
                    continue
                for host in added:
                    self._messages.say(f"{host.name}:{host.slots} was added; new ranks there join at the next commit.")
                for host in removed:
                    left = self._hosts.slots(host.name)
                    what = f"has {left} slot(s) now" if left else "was removed"
                    self._messages.say(f"{host.name} {what}; its ranks that are not needed leave at the next commit.")

    def _on_message(self, agent: AgentPipe) -> None:
        try:
            messages = agent.read()
            if messages is None:
                self._lose(agent, self._agents.why_ended(agent))
                return
            for message, payload in messages:
                token = self._generation.token if self._generation is not None else ""
                self._events.handle(agent, message, payload, token)
        except ProtocolError as error:
            self._lose(agent, f"{agent.name} sent something that no agent of this version sends: {error}")

    def _lose(self, agent: AgentPipe, why: str, *, is_reachable: bool = True) -> None:
        is_in_use = self._agents.by_host.get(agent.name) is agent
        self._agents.lose(agent, is_reachable=is_reachable)
        if is_in_use:
            self._events.note_lost_host(agent.name, why)

    def _beat(self, now: float) -> None:
        for agent, silent_s in self._heartbeats.send(now):
            self._lose(agent, f"{agent.name} {why_silent(silent_s)}", is_reachable=False)
        for agent in self._agents.late(now):
            timeout = f"(--start-timeout {self._options.start_timeout_s:g} s)"
            self._lose(agent, f"{agent.name} did not report in time {timeout}")
        for worker in self._table.staying():
            if worker.stopped_at is not None and now - worker.stopped_at > self._heartbeats.silence_s:
                worker.stopped_at = now
                self._agents.order("kill", [worker], if_stopped=True)
        self._end.end_if_late(now)
        self._end.end_if_unread()

    # ---- decisions ----

    def _decide(self, now: float) -> None:
        """Does what follows from the state: opens agents, starts workers, forms generations, ends the job."""
        self._remove_leavers(now)
        if self._events.is_finishing:
            waiting = [worker for worker in self._table.staying() if worker.is_ready or worker.rank is None]
            if unfinished := [worker for worker in waiting if worker.rank is not None]:
                self._messages.say(
                    f"WARNING {named(unfinished)} had not finished when another rank ended with exit code 0, which finishes "
                    f"the job: what was computed since the last checkpoint is lost."
                )
            self._dismiss(waiting, "the job is finished")
            self._close_if_empty()
            return
        self._open_agents(now)
        if self._generation is None or self._events.is_aware:
            self._start_workers(now)
        self._form_generation(now)

    def _open_agents(self, now: float) -> None:
        num_slots = sum(self._hosts.slots(name) for name in self._agents.by_host)
        for name, host in list(self._hosts.listed.items()):
            if num_slots >= self._options.max_ranks:
                break
            if name not in self._agents.by_host and self._hosts.is_usable(name, now):
                self._agents.open(host)
                num_slots += host.slots
        for name, agent in list(self._agents.by_host.items()):
            # A host that was removed and has no worker left.
            if name not in self._hosts.listed and not self._table.on_host(name):
                self._agents.end(agent)

    def _start_workers(self, now: float) -> None:
        """Starts workers in the free slots of usable hosts."""
        is_first = self._generation is None
        if is_first and (self._table.alive or self._agents.is_any_starting()):
            return
        room = self._options.max_ranks - len(self._table.staying())
        free = [
            (name, slot)
            for name in self._hosts.listed
            if self._hosts.is_usable(name, now)
            and name in self._agents.by_host
            and self._agents.by_host[name].state is not PipeState.STARTING
            for slot in self._table.free_slots(name, self._hosts.slots(name))
        ][: max(0, room)]
        if is_first and not self._is_enough(len(free), self._options.num_processes or self._options.min_ranks, now):
            return
        if not free:
            return
        new = [self._table.add(host, slot, now) for host, slot in free]
        order = list(self._hosts.listed)
        worlds = worlds_of(in_rank_order([*self._table.members(), *new], order))
        for worker in new:
            worker.shown_rank = worlds[worker.number].rank
        generation = self._generation or self._agents.new_generation(1, in_rank_order(new, order))
        assert generation is not None, "an agent that has said hello has named its ports"
        self._agents.start(new, worlds, generation, is_running=self._events.has_progressed)
        if is_first:
            self._messages.detail(f"started {len(new)} workers on {listed(new)}")

    def _form_generation(self, now: float) -> None:
        if self._generation is None:
            workers = self._table.staying()
            if workers and all(worker.is_ready for worker in workers):
                self._publish(workers, now)
            elif not workers and self._events.first_failure is not None:
                self._end_after_failure()
            return
        members = self._table.members()
        is_hung = self._events.hung_s is not None
        is_broken = is_hung or len(members) < self._size or any(worker.is_ready for worker in members)
        if not is_broken:
            self._events.broken_at = None
            self._announce_change(now)
            return
        if self._events.broken_at is None:
            self._events.broken_at = now
        has_failed = len(members) < self._size or any(w.is_ready and w.why is not Why.CHANGED for w in members)
        if (has_failed or is_hung) and not self._has_announced_break:
            self._has_announced_break = True
            if is_hung and not has_failed:
                self._messages.say(
                    f"no step has finished for {self._events.hung_s:.0f} s (train.hang_after_s): the ranks leave generation "
                    f"{self._generation.number}, and one that has not left within {_LEAVE_HUNG_S:g} s is killed."
                )
            self._agents.announce_break(self._generation.token)
        if not members:
            self._end_after_failure()
        elif all(worker.is_ready for worker in members):
            self._form_next(members, now)
        elif now - self._events.broken_at > (_LEAVE_HUNG_S if is_hung else self._options.elastic_timeout_s):
            late = [worker for worker in members if not worker.is_ready]
            limit = f"{_LEAVE_HUNG_S:g} s" if is_hung else f"{self._options.elastic_timeout_s:g} s (--elastic-timeout)"
            self._messages.say(
                f"{named(late)} did not leave generation {self._generation.number} within {limit} and is killed."
            )
            self._agents.order("kill", late)
            self._events.broken_at = now

    def _form_next(self, members: Sequence[WorkerRecord], now: float) -> None:
        """Publishes the next generation, once enough workers are ready. All members of the last one wait for it."""
        wanted = [worker for worker in members if self._is_wanted(worker)]
        new = [w for w in self._table.staying() if w.rank is None and w.is_ready and self._is_wanted(w)]
        if not wanted:
            # All hosts were replaced: the old ranks stay for one more generation, so that the new ones get the state.
            candidates = [*members, *new]
            num_needed = len(members) + min(1, len(new))
        else:
            self._dismiss([worker for worker in members if worker not in wanted], "its host has left the job")
            candidates = chosen([*wanted, *new], self._options.max_ranks, list(self._hosts.listed))
            num_needed = self._options.min_ranks
        if self._is_enough(len(candidates), num_needed, now):
            self._publish(in_rank_order(candidates, list(self._hosts.listed)), now)

    def _announce_change(self, now: float) -> None:
        """Tells the members that they should leave the generation at their next commit, because hosts have changed."""
        assert self._generation is not None
        staying = self._table.staying()
        new = [worker for worker in staying if worker.rank is None]
        if any(not worker.is_ready and now - worker.since < _JOIN_TOGETHER_S for worker in new):
            return
        room = self._options.max_ranks - self._size
        unwanted = frozenset(worker.number for worker in self._table.members() if not self._is_wanted(worker))
        ready = [worker.number for worker in new if worker.is_ready and self._is_wanted(worker)]
        joining = frozenset(ready[: max(0, room + len(unwanted))])
        # If all hosts were replaced, the old ranks train until new ones can take over their state.
        is_useful = bool(joining) or 0 < len(unwanted) < self._size
        if is_useful and (joining, unwanted) != self._announced:
            self._announced = (joining, unwanted)
            self._agents.announce_change(self._generation.token, only_removals=not joining, has_removals=bool(unwanted))

    def _is_wanted(self, worker: WorkerRecord) -> bool:
        return worker.slot < self._hosts.slots(worker.host)

    def _is_enough(self, num_ranks: int, num_needed: int, now: float) -> bool:
        """Returns whether there are enough ranks; ends the job if there were too few for --elastic-timeout."""
        if num_ranks >= num_needed:
            self._short_since, self._has_told_short = None, False
            return True
        limit_s = self._options.elastic_timeout_s
        self._short_since = self._short_since or now
        # No message while hosts are still being found or connected to: at every start there are too few for a moment.
        if not self._hosts.listed or self._agents.is_any_starting():
            return False
        if not self._has_told_short:
            self._has_told_short = True
            self._messages.say(
                f"{num_ranks} rank(s) can run, but {num_needed} are needed (--min-np): waiting for hosts for up to "
                f"{limit_s:g} s (--elastic-timeout)."
            )
        if now - self._short_since > limit_s:
            self._messages.say(
                f"no new generation: {num_ranks} rank(s) can run, {num_needed} are needed (--min-np), and no host was "
                f"added within {limit_s:g} s (--elastic-timeout)."
            )
            self._end_after_failure()
        return False

    def _publish(self, members: Sequence[WorkerRecord], now: float) -> None:
        number = self._generation.number + 1 if self._generation is not None else 1
        limit = self._options.reset_limit
        if limit is not None and number - 1 > limit:
            self._messages.say(f"no new generation: the ranks have changed {limit} times (--reset-limit).")
            self._end_after_failure()
            return
        members = in_rank_order(members, list(self._hosts.listed))
        generation = self._agents.new_generation(number, members)
        if generation is None:
            return
        worlds = self._agents.publish(generation, members, self._size)
        self._generation = generation
        self._events.note_generation(generation.number, members, worlds, self._size)
        self._size = len(members)
        self._announced = None
        self._has_announced_break = False

    # ---- ends ----

    def _dismiss(self, workers: Sequence[WorkerRecord], why: str) -> None:
        if workers:
            self._agents.order("dismiss", workers, why=why)
        for worker in workers:
            worker.is_leaving, worker.since = True, time.monotonic()

    def _remove_leavers(self, now: float) -> None:
        """Kills dismissed workers that have not ended by themselves."""
        late = [w for w in self._table.alive.values() if w.is_leaving and now - w.since > _LEAVE_S]
        if late:
            self._agents.order("kill", late)
            for worker in late:
                worker.since = now

    def _end_after_failure(self) -> None:
        """Ends the job: its first failure decides the exit code."""
        outcome, report = self._events.first_failure or (Outcome(exit_code=EXIT_HOST_LOST, may_restart=False), "")
        self._end.end(outcome, report=report)

    def _close_if_empty(self) -> None:
        """Lets the agents leave when the last worker has ended: they do not leave by themselves, as those of other jobs do."""
        self._pipes.drop_starting()
        if not self._table.alive and not self._is_closing:
            self._is_closing = True
            self._end.finish()

    def _abandon(self) -> None:
        for agent in self._pipes.unfinished():
            self._messages.say(f"{agent.name} does not report that its ranks ended; closing the connection.")
            self._agents.lose(agent, is_reachable=True)

    def _close(self) -> None:
        self._discovery.close()
        self._pipes.selector.unregister(self._discovery)
        self._pipes.close()
        self._agents.wait_for_orphan_killers()
        self._events.flush()
        if self._end.decision.report:
            self._messages.say(self._end.decision.report)
