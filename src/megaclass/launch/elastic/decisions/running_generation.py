"""The generation that runs now: its members learn of changes and of failures, and leave it. Standard library only.

    no member has left            announce_change     once per change of the hosts: "leave at your next commit"
    is_broken: one is gone,       note_break          once, after a failure or a hang: "do not wait for the others"
    waits for the next, or hangs  kill_late           members that do not come to the rendezvous in time

A generation that is broken never runs again: its members wait at the rendezvous until the next one is published, for which
there is a new object of this class.
"""

from collections.abc import Sequence

from megaclass.launch.elastic.generation import Generation, WorkerRecord
from megaclass.launch.elastic.job import ElasticJob
from megaclass.launch.elastic.worker import Why
from megaclass.launch.elastic.worker_table import named

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
