"""Rank 0's table of operations that some of their members have announced and others have not, and the ranks that have joined.

    open()     announced   ---->  pending: in the table, waiting for its other members
    settle()   pending     ---->  ready: every member has announced it or has joined; it leaves the table as a response
    fail()     pending     ---->  ready: it can never be complete; it leaves the table as an error

Only rank 0's engine thread uses it, so that it needs no lock.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from horovod.engine.messages import Key, Request, Response
from horovod.engine.rank0.comparison import respond


@dataclass
class Pending:
    """An operation that some ranks have announced."""

    since: float
    """Time of the first announcement."""
    requests: dict[int, Request] = field(default_factory=dict)
    """By rank."""
    changed: float = 0.0
    """Time of the latest announcement."""
    was_compared: bool = False
    """True once it was compared with other operations of its name, since the latest announcement."""
    num_warnings: int = 0
    """Number of intervals for which a stall was warned of."""


class PendingTable:
    """Pending operations by key, the joined ranks, and the responses that are ready."""

    def __init__(self, hosts: Sequence[str], process_sets: Mapping[int, tuple[int, ...]]) -> None:
        self._hosts = hosts
        # Shared with the executor, which adds and removes sets while the job runs.
        self._process_sets = process_sets
        self.pending: dict[Key, Pending] = {}
        self.joined: list[int] = []
        """In the order in which they joined."""
        self._ready: list[Response] = []

    def members(self, process_set: int) -> tuple[int, ...]:
        return self._process_sets.get(process_set, ())

    def open(self, rank: int, requests: Iterable[Request], now: float) -> None:
        """Enters the announcements of a rank."""
        for request in requests:
            pending = self.pending.get(request.key)
            if pending is None:
                pending = self.pending[request.key] = Pending(now)
            # A rank has one operation per key in flight (its controller sees to that), so nothing is overwritten.
            pending.requests[rank] = request
            pending.changed, pending.was_compared = now, False
            self._settle(request.key)

    def join(self, rank: int) -> None:
        """Enters that a rank has no more data."""
        self.joined.append(rank)
        # Operations that waited only for this rank are ready now: it contributes zeros.
        for key in list(self.pending):
            self._settle(key)
        if len(self.joined) == len(self._hosts):
            self._ready.append(Response((), last_joined=rank))
            # All ranks start the next epoch with all ranks present.
            self.joined.clear()

    def missing(self, key: Key) -> list[int]:
        """Returns the members that the operation waits for."""
        requests = self.pending[key].requests
        return [rank for rank in self.members(key[0]) if rank not in requests and rank not in self.joined]

    def fail(self, key: Key, error: str) -> None:
        """Takes the operation out of the table with an error for all its members."""
        pending = self.pending.pop(key)
        self._ready.append(Response((next(iter(pending.requests.values())),), error=error))

    def take_ready(self) -> list[Response]:
        """Returns and forgets the responses that are ready."""
        ready, self._ready = self._ready, []
        return ready

    def _settle(self, key: Key) -> None:
        """Takes the operation out of the table if it is ready."""
        pending = self.pending[key]
        members = self.members(key[0])
        # The count of requests suffices as long as no rank has joined, which is the usual case and the quick one.
        if self.joined:
            if self.missing(key):
                return
        elif len(pending.requests) < len(members):
            return
        del self.pending[key]
        # None, if all members have joined meanwhile: then no rank waits for it.
        if pending.requests:
            has_joined = bool(self.joined) and any(rank in self.joined for rank in members)
            self._ready.append(respond(pending.requests, self._hosts, has_joined=has_joined))
