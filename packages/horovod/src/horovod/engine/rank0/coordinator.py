"""Rank 0's answers to what the ranks announce. No torch, no sockets; the caller passes the time.

Ranks announce operations in any order. An operation is ready when every member of its process set has announced it or has
joined. The coordinator then compares the requests of the ranks, and makes a response of them, or an error that names both
sides. Small allreduces that are ready together become one response.

A cycle (the requests of one message) takes one of two ways:

    held     while nothing else is open, as its hash: once all ranks have sent the same hash, the previous answer is reused
    opened   otherwise, into the table: each operation waits for its other members

pending_table.py is the table and compares, fusion.py joins, stall_check.py looks for operations that wait too long.
Only rank 0's engine thread calls the coordinator, so it needs no lock.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from horovod.common.settings import Settings
from horovod.engine.messages import JOIN, Answer, Request, Response, distinct_terms
from horovod.engine.rank0.fusion import fuse
from horovod.engine.rank0.pending_table import PendingTable, respond
from horovod.engine.rank0.stall_check import CROSSED_S, StallCheck


@dataclass(frozen=True, slots=True)
class _Cycle:
    """The requests that a rank announced in one message."""

    digest: bytes
    requests: list[Request]
    since: float
    payload: bytes
    """The tensors themselves, if they are small; else empty."""


class Coordinator:
    """Receives announcements and returns responses."""

    def __init__(self, hosts: list[str], settings: Settings, process_sets: Mapping[int, tuple[int, ...]]) -> None:
        self._hosts = hosts
        self._settings = settings
        self._table = PendingTable(hosts, process_sets)
        self._stalls = StallCheck(self._table, hosts, settings)
        # Held cycles by rank, and the answer to each hash that all ranks have sent before.
        self._held: list[deque[_Cycle]] = [deque() for _ in hosts]
        self._answers: dict[bytes, Answer] = {}

    def announce(
        self, rank: int, digest: bytes, requests: list[Request], now: float, payload: bytes = b""
    ) -> Answer | None:
        """Receives one cycle of one rank, possibly with its tensors; returns the responses that became ready.

        While nothing else is open, a cycle is held until all ranks have sent theirs. If the hashes are equal and were answered
        before, the same answer is returned without a look at the single operations.
        """
        opens = any(terms.process_set or terms.kind == JOIN.kind for terms in distinct_terms(requests))
        if opens or self._table.pending or self._table.joined:
            self._open_held()
            self._table.open(rank, requests, now)
            return self._take()
        self._held[rank].append(_Cycle(digest, requests, now, payload))
        if not all(self._held):
            return None
        # A rank may be several cycles ahead; the first held cycles of all ranks belong together.
        # This rank's first held cycle may be an older one than the one that came now; it counts, and is compared as well.
        if any(cycles[0].digest != digest for cycles in self._held):
            self._open_held()
            return self._take()
        firsts = [cycles.popleft() for cycles in self._held]
        answer = self._answers.get(digest)
        if answer is None:
            answer = self._agree(requests)
            if answer.repeats:
                self._remember(digest, answer)
        payloads = [cycle.payload for cycle in firsts]
        is_one = len(answer.responses) == 1 and not answer.responses[0].error
        # An answer is reused, so the payloads of this cycle replace those of the last one.
        # The lists are equal, so either all ranks have sent their tensors or none has.
        answer.payloads = payloads if is_one and all(payloads) else []
        return answer

    def _agree(self, requests: list[Request]) -> Answer:
        """Answers a list that all ranks have announced: there is nothing to wait for and nothing to compare."""
        # An allreduce of which all ranks know the same has neither errors nor sizes. No rank has joined: a cycle is opened at
        # once after a join.
        members = self._table.members(0)
        ready = [
            Response((request,))
            if request.kind == "allreduce"
            else respond(dict.fromkeys(members, request), self._hosts, has_joined=False)
            for request in requests
        ]
        return Answer(fuse(ready, self._settings))

    def _remember(self, digest: bytes, answer: Answer) -> None:
        # All at once: the lists of a job that still repeat come back within one step.
        if len(self._answers) >= self._settings.cache_capacity:
            self._answers.clear()
        if self._settings.cache_capacity:
            self._answers[digest] = answer

    def _open_held(self) -> None:
        """Moves the operations of all held cycles into the table."""
        for rank, cycles in enumerate(self._held):
            while cycles:
                cycle = cycles.popleft()
                # With the time of its announcement: the cycle has waited since then.
                self._table.open(rank, cycle.requests, cycle.since)

    def _take(self) -> Answer | None:
        """Returns and forgets the responses that are ready."""
        ready = self._table.take_ready()
        return Answer(fuse(ready, self._settings)) if ready else None

    def next_check(self) -> float | None:
        """Returns the time at which check() must be called next; None while no operation is open."""
        # The usual case, asked in every step of the engine thread.
        if not self._table.pending and not any(self._held):
            return None
        times = self._stalls.times()
        # A held cycle whose hash other ranks never send must get into the table, where the reason is found.
        times += [cycles[0].since + CROSSED_S for cycles in self._held if cycles]
        return min(times)

    def check(self, now: float) -> tuple[Answer | None, str, str]:
        """Returns errors of operations that can never become ready, a warning, and a reason to end the job; mostly empty."""
        self._open_held()
        # First: an operation that has just failed waits for no rank, and is not worth a warning.
        self._stalls.fail_crossed(now)
        warning, reason = self._stalls.overdue(now)
        return self._take(), warning, reason
