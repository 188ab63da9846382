"""Workers that an elastic job does not need any more. Standard library only."""

import time
from collections.abc import Sequence

from megaclass.launch.elastic.generation import WorkerRecord
from megaclass.launch.elastic.job import ElasticJob

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
