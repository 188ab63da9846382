"""One generation after another: when the next one is formed, who belongs to it, and its publication. Standard library only.

    current is None        the first workers start        -> all of them are ready: publish generation 1
    current is not broken  its members train              -> tell them of changes of the hosts
    current is broken      its members leave it           -> all that are left are ready, and there are enough: publish the next

`advance` is called in every pass of the driver's loop and does nothing while none of these has changed. `current` is written by
`_publish` only.
"""

from collections.abc import Sequence

from megaclass.launch.elastic.decisions.leavers import Leavers
from megaclass.launch.elastic.decisions.rank_minimum import RankMinimum
from megaclass.launch.elastic.decisions.running_generation import RunningGeneration
from megaclass.launch.elastic.generation import WorkerRecord, chosen, in_rank_order
from megaclass.launch.elastic.job import ElasticJob
from megaclass.launch.elastic.worker_events import WorkerEvents


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
        worlds = self._job.agents.publish(generation, members, previous_size)
        # After the messages, which name the old ranks.
        self._events.note_generation(generation.number, members, worlds, previous_size)
        self.current = RunningGeneration(self._job, generation, len(members))
