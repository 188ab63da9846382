"""Decisions that follow from the state of an elastic job: hosts, workers, generations. Standard library only.

HostUpdates        answers of the discovery, for the table of hosts and the terminal
Leavers            dismisses workers, kills those that stay
RankMinimum        the wait for enough ranks, and its end
NewWorkers         opens agents, starts workers in free slots
RunningGeneration  tells the members of the current generation of changes and failures
Generations        forms and publishes one generation after another
"""

import time
from collections.abc import Callable, Sequence

from megaclass_launch.driver.agent_pipe import PipeState
from megaclass_launch.driver.outcome import Outcome
from megaclass_launch.elastic.discovery import Discovery
from megaclass_launch.elastic.generation import Generation, WorkerRecord, chosen, in_rank_order, listed, worlds_of
from megaclass_launch.elastic.job import ElasticJob, named
from megaclass_launch.elastic.worker import Why
from megaclass_launch.elastic.worker_events import WorkerEvents
from megaclass_launch.exit_codes import EXIT_USER_ERROR
from megaclass_launch.hosts import Host


class HostUpdates:
    """Writes the answers of the discovery into the table of hosts, and tells the user what has changed."""

    def __init__(self, discovery: Discovery, job: ElasticJob) -> None:
        self._discovery = discovery
        self._hosts, self._end, self._messages = job.hosts, job.end, job.io.messages

    def take(self) -> None:
        """Takes over the answers that have come."""
        for answer in self._discovery.news():
            if answer.problem:
                self._note_problem(answer.problem)
            else:
                self._update(answer.hosts)

    def _note_problem(self, problem: str) -> None:
        name = self._discovery.name
        if self._hosts.listed:
            # A script may fail for a moment, because a server does not answer, say; the ranks that run need no answer.
            self._messages.say(f"WARNING {name}: {problem}; its last good answer stands.")
        else:
            self._messages.say(f"{name}: {problem}. The job needs hosts to start with.")
            self._end.end(Outcome(exit_code=EXIT_USER_ERROR, may_restart=False))

    def _update(self, hosts: Sequence[Host]) -> None:
        is_first = not self._hosts.listed
        added, removed = self._hosts.update(hosts)
        # In the first answer every host is new; the message about the first generation names them.
        if is_first:
            return
        for host in added:
            self._messages.say(f"{host.name}:{host.slots} was added; new ranks there join at the next commit.")
        for host in removed:
            left = self._hosts.slots(host.name)
            what = f"has {left} slot(s) now" if left else "was removed"
            self._messages.say(f"{host.name} {what}; its ranks that are not needed leave at the next commit.")


# ---- leavers ----
# Workers that an elastic job does not need any more.

_LEAVE_S = 10.0
"""Time for a dismissed worker to end by itself."""


class Leavers:
    """Dismisses workers, and kills those that do not end by themselves. They are the ones with `is_leaving`."""

    def __init__(self, job: ElasticJob) -> None:
        self._agents, self._table = job.agents, job.table

    def dismiss(self, workers: Sequence[WorkerRecord], why: str) -> None:
        """Tells workers that the job continues without them, which they learn at the rendezvous."""
        if workers:
            self._agents.order("dismiss", workers, why=why)
        for worker in workers:
            # From here on the worker counts neither as a member nor, when it ends, as a failure of its host.
            worker.is_leaving, worker.since = True, time.monotonic()

    def kill_late(self, now: float) -> None:
        """Kills dismissed workers that have not ended in time."""
        # Of `alive`, because `staying` leaves them out: until it has ended, a worker holds its slot and its GPU.
        late = [worker for worker in self._table.alive.values() if worker.is_leaving and now - worker.since > _LEAVE_S]
        if late:
            self._agents.order("kill", late)
            for worker in late:
                # The agent's report of the end takes a moment; without a new time every pass would send the order again.
                worker.since = now


# ---- rank minimum ----
# The wait for enough ranks, and its end after --elastic-timeout.


class RankMinimum:
    """Decides whether there are enough ranks for a generation; if there are too few for too long, the job is given up.

    give_up: ends the job.
    """

    def __init__(self, job: ElasticJob, give_up: Callable[[], None]) -> None:
        self._hosts, self._agents, self._messages = job.hosts, job.agents, job.io.messages
        self._limit_s = job.options.elastic_timeout_s
        self._give_up = give_up
        self._short_since: float | None = None
        """Time since which there are too few ranks."""
        self._has_told_user = False

    def is_met(self, num_ranks: int, num_needed: int, now: float) -> bool:
        """Returns whether there are enough ranks; to be called again and again while there are not."""
        if num_ranks >= num_needed:
            # The next shortage has the whole time again, and a message of its own.
            self._short_since, self._has_told_user = None, False
            return True
        # The time counts from the first moment, although the user is told later: a host that never connects uses it up, too.
        self._short_since = self._short_since or now
        # No message while hosts are still being found or connected to: at every start there are too few for a moment.
        if not self._hosts.listed or self._agents.is_any_starting():
            return False
        if not self._has_told_user:
            self._has_told_user = True
            self._messages.say(
                f"{num_ranks} rank(s) can run, but {num_needed} are needed (--min-np): waiting for hosts for up to "
                f"{self._limit_s:g} s (--elastic-timeout)."
            )
        if now - self._short_since > self._limit_s:
            self._messages.say(
                f"no new generation: {num_ranks} rank(s) can run, {num_needed} are needed (--min-np), and no host was "
                f"added within {self._limit_s:g} s (--elastic-timeout)."
            )
            self._give_up()
        return False


# ---- new workers ----
# Agents on the hosts of an elastic job, and new workers in the free slots there.


class NewWorkers:
    """Opens agents on usable hosts and starts workers there. It has no state of its own: it acts on the shared tables."""

    def __init__(self, job: ElasticJob, minimum: RankMinimum) -> None:
        self._job = job
        self._hosts, self._agents, self._table = job.hosts, job.agents, job.table
        self._minimum = minimum

    def open_agents(self, now: float) -> None:
        """Opens agents until their hosts have enough slots, and lets those leave whose hosts were removed."""
        # Those of banned hosts count, too: their agents stay, and so do the ranks that run there.
        num_slots = sum(self._hosts.slots(name) for name in self._agents.by_host)
        for name, host in list(self._hosts.listed.items()):
            if num_slots >= self._job.options.max_ranks:
                break
            if name not in self._agents.by_host and self._hosts.is_usable(name, now):
                self._agents.open(host)
                num_slots += host.slots
        for name, agent in list(self._agents.by_host.items()):
            # The last worker there leaves at a commit, possibly long after the host was removed.
            if name not in self._hosts.listed and not self._table.on_host(name):
                self._agents.end(agent)

    def start(self, now: float, generation: Generation | None, *, is_running: bool) -> None:
        """Starts workers in the free slots of usable hosts.

        generation: the current one; None before the first. is_running: the program has made progress already.
        """
        is_first = generation is None
        # The first workers start together, once every host has answered: they form one generation, not one per host.
        if is_first and (self._table.alive or self._agents.is_any_starting()):
            return
        free = self._free_slots(now)
        num_wanted = self._job.options.num_processes or self._job.options.min_ranks
        if is_first and not self._minimum.is_met(len(free), num_wanted, now):
            return
        if not free:
            return
        new = [self._table.add(host, slot, now) for host, slot in free]
        order = list(self._hosts.listed)
        # A guess, as if the next generation had exactly these members. The worker needs values before its rendezvous, for
        # its output and for programs that read the environment when they are imported; the rendezvous replaces them.
        worlds = worlds_of(in_rank_order([*self._table.members(), *new], order))
        for worker in new:
            worker.shown_rank = worlds[worker.number].rank
        generation = generation or self._agents.new_generation(1, in_rank_order(new, order))
        assert generation is not None, "an agent that has said hello has named its ports"
        self._agents.start(new, worlds, generation, is_running=is_running)
        if is_first:
            self._job.io.messages.detail(f"started {len(new)} workers on {listed(new)}")

    def _free_slots(self, now: float) -> list[tuple[str, int]]:
        """Returns hosts and slots for new workers, no more than --max-np allows."""
        # Workers that are leaving count in the slots, which they still hold, but not in the number of ranks.
        room = self._job.options.max_ranks - len(self._table.staying())
        free = [
            (name, slot)
            for name in self._hosts.listed
            if self._hosts.is_usable(name, now)
            and name in self._agents.by_host
            and self._agents.by_host[name].state is not PipeState.STARTING
            for slot in self._table.free_slots(name, self._hosts.slots(name))
        ]
        return free[: max(0, room)]


# ---- running generation ----
# The generation that runs now: its members learn of changes and of failures, and leave it.
#
#     no member has left            announce_change     once per change of the hosts: "leave at your next commit"
#     is_broken: one is gone,       note_break          once, after a failure or a hang: "do not wait for the others"
#     waits for the next, or hangs  kill_late           members that do not come to the rendezvous in time
#
# A generation that is broken never runs again: its members wait at the rendezvous until the next
# one is published, for which there is a new object of this class.

_JOIN_TOGETHER_S = 30.0
"""Workers that were started within this time are waited for, so that they join in one generation."""
_LEAVE_HUNG_S = 20.0
"""Time for the members of a generation that hangs to leave it: those that only wait for another one do so at once."""


class RunningGeneration:
    """The generation that was published last. size: the number of its members when it was published."""

    def __init__(self, job: ElasticJob, facts: Generation, size: int) -> None:
        self.facts = facts
        self.size = size
        self._job = job
        self._agents, self._table = job.agents, job.table
        self._announced: tuple[frozenset[int], frozenset[int]] | None = None
        """Workers that join and workers that leave in the change that the members were told of."""
        self._has_announced_break = False
        self._broken_since: float | None = None
        """Time at which it was first found broken, or at which late members were last killed."""

    def is_broken(self, members: Sequence[WorkerRecord], hung_s: float | None) -> bool:
        """Returns whether the next generation has to follow. members: those that are left; hung_s: see WorkerEvents."""
        return hung_s is not None or len(members) < self.size or any(worker.is_ready for worker in members)

    def announce_change(self, now: float) -> None:
        """Tells the members that they should leave at their next commit, if hosts have changed."""
        new = [worker for worker in self._table.staying() if worker.rank is None]
        # A change costs every member a restart of its connections. Workers of hosts that came together, which import their
        # modules at different speeds, should therefore cause one change, not several.
        if any(not worker.is_ready and now - worker.since < _JOIN_TOGETHER_S for worker in new):
            return
        room = self._job.options.max_ranks - self.size
        unwanted = frozenset(worker.number for worker in self._table.members() if not self._job.is_wanted(worker))
        ready = [worker.number for worker in new if worker.is_ready and self._job.is_wanted(worker)]
        # A member that leaves makes room for a new worker, also where --max-np is reached.
        joining = frozenset(ready[: max(0, room + len(unwanted))])
        # If all hosts were replaced, the old ranks train until new ones can take over their state.
        is_useful = bool(joining) or 0 < len(unwanted) < self.size
        # This is called many times per second, while members may train for minutes before their next commit.
        if is_useful and (joining, unwanted) != self._announced:
            self._announced = (joining, unwanted)
            self._agents.announce_change(self.facts.token, only_removals=not joining, has_removals=bool(unwanted))

    def note_break(self, members: Sequence[WorkerRecord], hung_s: float | None, now: float) -> None:
        """Notes that the generation is broken; tells the members if one of them failed or hangs."""
        if self._broken_since is None:
            self._broken_since = now
        # Members that leave because of an announced change have agreed on the step: nothing waits for them in a collective,
        # and news of a failure would make the others go back to their last commit.
        has_failed = len(members) < self.size or any(w.is_ready and w.why is not Why.CHANGED for w in members)
        if self._has_announced_break or not (has_failed or hung_s is not None):
            return
        self._has_announced_break = True
        if hung_s is not None and not has_failed:
            self._job.io.messages.say(
                f"no step has finished for {hung_s:.0f} s (train.hang_after_s): the ranks leave generation "
                f"{self.facts.number}, and one that has not left within {_LEAVE_HUNG_S:g} s is killed."
            )
        self._agents.announce_break(self.facts.token)

    def kill_late(self, members: Sequence[WorkerRecord], now: float, *, is_hung: bool) -> None:
        """Kills the members that have not come to the rendezvous in time after the break."""
        assert self._broken_since is not None, "note_break comes first"
        limit_s = _LEAVE_HUNG_S if is_hung else self._job.options.elastic_timeout_s
        if now - self._broken_since <= limit_s:
            return
        late = [worker for worker in members if not worker.is_ready]
        limit = f"{limit_s:g} s" if is_hung else f"{limit_s:g} s (--elastic-timeout)"
        self._job.io.messages.say(
            f"{named(late)} did not leave generation {self.facts.number} within {limit} and is killed."
        )
        self._agents.order("kill", late)
        # Not dismissed, unlike leavers: the end of a member that hangs is a failure, after which its host is avoided.
        # If its agent does not report the end, the order is repeated after the same time.
        self._broken_since = now


# ---- generations ----
# One generation after another: when the next one is formed, who belongs to it, and its publication.
#
#     current is None        the first workers start        -> all of them are ready: publish generation 1
#     current is not broken  its members train              -> tell them of changes of the hosts
#     current is broken      its members leave it           -> all that are left are ready, and are enough: publish
#
# `advance` is called in every pass of the driver's loop and does nothing while none of these has
# changed. `current` is written by `_publish` only.


class Generations:
    """Forms the generations of an elastic job. events: tells which failures led to the end, and whether a rank hangs."""

    def __init__(self, job: ElasticJob, events: WorkerEvents, minimum: RankMinimum, leavers: Leavers) -> None:
        self.current: RunningGeneration | None = None
        """The generation that was published last; None before the first one."""
        self._job = job
        self._hosts, self._table = job.hosts, job.table
        self._events = events
        self._minimum = minimum
        self._leavers = leavers

    @property
    def token(self) -> str:
        """Returns the token of the current generation; an empty text before the first one."""
        return self.current.facts.token if self.current is not None else ""

    def advance(self, now: float) -> None:
        """Does what the state of the workers calls for: announces changes, ends the current generation, publishes the next."""
        if self.current is None:
            self._form_first()
            return
        members = self._table.members()
        hung_s = self._events.hung_s
        if not self.current.is_broken(members, hung_s):
            self.current.announce_change(now)
            return
        # Before anything else: collectives of the members may be waiting for one that is gone.
        self.current.note_break(members, hung_s, now)
        if not members:
            # The state was in their memory; without any of them no worker can continue.
            self._events.end_after_failure()
        elif all(worker.is_ready for worker in members):
            self._form_next(members, now)
        else:
            self.current.kill_late(members, now, is_hung=hung_s is not None)

    def _form_first(self) -> None:
        workers = self._table.staying()
        # All of them, so that the job does not begin with a change: a rank that is left out now could only join through the
        # next generation.
        if workers and all(worker.is_ready for worker in workers):
            self._publish(workers)
        elif not workers and self._events.first_failure is not None:
            self._events.end_after_failure()

    def _form_next(self, members: Sequence[WorkerRecord], now: float) -> None:
        """Publishes the next generation, once enough workers are ready. All members of the last one wait for it."""
        wanted = [worker for worker in members if self._job.is_wanted(worker)]
        new = [w for w in self._table.staying() if w.rank is None and w.is_ready and self._job.is_wanted(w)]
        if not wanted:
            # All hosts were replaced: the old ranks stay for one more generation, so that the new ones get the state.
            candidates = [*members, *new]
            num_needed = len(members) + min(1, len(new))
        else:
            # Before the count, so that they leave now, although the others may have to wait for further hosts.
            self._leavers.dismiss([worker for worker in members if worker not in wanted], "its host has left the job")
            candidates = chosen([*wanted, *new], self._job.options.max_ranks, list(self._hosts.listed))
            num_needed = self._job.options.min_ranks
        if self._minimum.is_met(len(candidates), num_needed, now):
            self._publish(candidates)

    def _publish(self, members: Sequence[WorkerRecord]) -> None:
        number, previous_size = (
            (self.current.facts.number + 1, self.current.size) if self.current is not None else (1, 0)
        )
        limit = self._job.options.reset_limit
        if limit is not None and number - 1 > limit:
            self._job.io.messages.say(f"no new generation: the ranks have changed {limit} times (--reset-limit).")
            self._events.end_after_failure()
            return
        members = in_rank_order(members, list(self._hosts.listed))
        generation = self._job.agents.new_generation(number, members)
        # The host of rank 0 has just given its ports to the last generation, and its message with new ones is on its way.
        if generation is None:
            return
        worlds = self._job.agents.publish(
            generation, members, previous_size, has_progressed=self._events.has_progressed
        )
        # After the messages, which name the old ranks.
        self._events.note_generation(generation.number, members, worlds, previous_size)
        self.current = RunningGeneration(self._job, generation, len(members))
