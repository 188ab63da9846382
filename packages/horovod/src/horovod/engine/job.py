"""The running job of this process: everything that exists between init() and shutdown()."""

import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from horovod.common.exceptions import NOT_INITIALIZED, HorovodInternalError
from horovod.common.settings import Settings
from horovod.engine.controller import Controller
from horovod.engine.operation import Operation
from horovod.engine.rendezvous import Meeting
from horovod.engine.timeline import Timeline
from megaclass_launch.rank_status import own_status, wait_for_ranks
from megaclass_launch.rendezvous.connection_watch import ConnectionWatch, OwnConnections

# Only the type: the transport is built on the engine, not the other way round.
if TYPE_CHECKING:
    from horovod.transport.process_set_table import ProcessSetTable

# One count for all jobs of a process: a handle that was kept over a shutdown() must not stand for an operation of the next job.
_HANDLE_NUMBERS = itertools.count(1)


@dataclass
class Job:
    """The parts of a job, and the counters from which names and handles are made."""

    meeting: Meeting
    settings: Settings
    timeline: Timeline
    sets: "ProcessSetTable"
    watch: ConnectionWatch
    controller: Controller
    connections: OwnConnections | None = None
    """The sockets of this generation, in an elastic job."""
    has_left: threading.Event = field(default_factory=threading.Event)
    """Set when this process leaves the job."""
    handles: dict[int, Operation] = field(default_factory=dict)
    """Operations whose results have not been fetched, by handle."""
    handle_numbers: Iterator[int] = _HANDLE_NUMBERS
    """Any thread takes the next one: a step of an iterator that is written in C needs no lock."""
    _num_joins: int = 0
    # Any thread takes the next number.
    _counts: dict[tuple[str, int | None], Iterator[int]] = field(default_factory=dict)

    @property
    def process_sets(self) -> dict[int, tuple[int, ...]]:
        """The ranks of every process set."""
        return self.sets.ranks

    def next_name(self, what: str, process_set: int | None) -> str:
        """Returns `what` with a running number, as a name for an operation that the caller has given none.

        The numbers count the operations of one process set: its ranks must call them in the same order, whatever they run in
        other sets.
        """
        counter = self._counts.get((what, process_set))
        number = next(counter or self._counts.setdefault((what, process_set), itertools.count(1)))
        return f"{what}.{self._num_joins}:{number}" if self._num_joins else f"{what}.{number}"

    def restart_names(self) -> None:
        """Restarts all numbers after a join, before which ranks with more data have run more operations."""
        self._num_joins += 1
        self._counts = {}

    def wait(self, operation: Operation) -> None:
        """Waits for the operation; with --hang-timeout the agent is told for what, and for how long it is worth waiting."""
        limit_s, request = self.settings.hang_timeout_s, operation.request
        status = own_status()
        if limit_s:
            status.progress(allowed_s=limit_s, phase="waiting", detail=f"{request.kind} of {request.name}")
        try:
            wait_for_ranks(lambda: self.controller.wait(operation))
        finally:
            if limit_s:
                status.progress(allowed_s=0.0)

    def close(self) -> None:
        """Leaves the job: operations of other ranks that need this one fail there."""
        # The watch first: connections that end from here on are not faults.
        self.watch.stop()
        # Then the controller, which uses the trace and the process groups until it has ended.
        self.controller.stop()
        self.timeline.stop()
        self.sets.close()


class JobHolder:
    """Holds the job of this process, if there is one."""

    def __init__(self) -> None:
        self.job: Job | None = None

    def running(self) -> Job:
        """Returns the job, for callers that run operations; HorovodInternalError without one."""
        if self.job is None:
            raise HorovodInternalError(NOT_INITIALIZED)
        return self.job

    def known(self) -> Job:
        """Returns the job, for callers that ask about it; ValueError without one."""
        if self.job is None:
            raise ValueError(NOT_INITIALIZED)
        return self.job


current = JobHolder()
"""Written by init() and shutdown() under their lock; read by all threads."""
