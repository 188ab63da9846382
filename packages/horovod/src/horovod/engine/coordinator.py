"""Rank 0's answers to what the ranks announce. No torch, no sockets; the caller passes the time.

Ranks announce operations in any order. An operation is ready when every member of its process set has announced it or has
joined. The coordinator then compares the requests of the ranks, and makes a response of them, or an error that names both
sides. Small allreduces that are ready together become one response.

A cycle (the requests of one message) takes one of two ways:

    held     while nothing else is open: once all ranks have sent the same hash, the list is answered as a whole
    opened   otherwise, into the table: each operation waits for its other members

    _open()     announced   ---->  pending: in the table
    _settle()   pending     ---->  ready: every member has announced it or has joined; it leaves the table as a response
    _fail()     pending     ---->  ready: it can never be complete; it leaves the table as an error

An operation that waits too long is

    crossed    if ranks use one name for different operations, so each waits for the others: an error after CROSSED_S
    stalled    if some ranks have not announced it: a warning per interval, in the end a reason to stop the job

Only rank 0's engine thread calls the coordinator, so it needs no lock.
"""

import itertools
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from horovod.common.settings import Settings
from horovod.engine.comparison import rank_name, respond
from horovod.engine.kinds import Adasum
from horovod.engine.messages import (
    JOIN,
    Key,
    Request,
    Response,
    distinct_terms,
    is_for_some,
    packed_responses,
    unpacked,
)

# Two ranks that use one name for different operations, one for an allreduce and one for an allgather, have this long to submit
# the other operation as well, as different threads may do. After that it is an error.
CROSSED_S = 0.5
# A larger tensor gains nothing by fusion: copying it into and out of the buffer takes longer than one latency.
FUSED_TENSOR_BYTES = 1024 * 1024


@dataclass(slots=True)
class Cycle:
    """The announcement of a rank in one message."""

    digest: bytes
    content: bytes
    """The packed requests."""
    since: float
    payload: bytes = b""
    """The tensors themselves, if they are small; else empty."""

    def requests(self) -> list[Request]:
        return unpacked(self.content)


class Answer(NamedTuple):
    """Responses that are sent together."""

    responses: Sequence[Response]
    message: bytes
    """The responses, packed."""
    cycles: Sequence[Cycle] = ()
    """The cycles of all ranks, if they announced one list and this is the answer to it; else empty."""


@dataclass(slots=True)
class _Pending:
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


class Coordinator:
    """Receives announcements and returns responses."""

    def __init__(self, hosts: Sequence[str], settings: Settings, process_sets: Mapping[int, tuple[int, ...]]) -> None:
        self._hosts = hosts
        self._settings = settings
        # Shared with the executor, which adds and removes sets while the job runs.
        self._process_sets = process_sets
        # Held cycles by rank, and the answer to each hash that all ranks have sent before.
        self._held: list[deque[Cycle]] = [deque() for _ in hosts]
        self._answers: dict[bytes, Answer] = {}
        self._pending: dict[Key, _Pending] = {}
        # In the order in which they joined.
        self._joined: list[int] = []
        self._ready: list[Response] = []

    def announce(self, rank: int, cycle: Cycle) -> Answer | None:
        """Receives one cycle of one rank; returns the responses that became ready.

        While nothing else is open, a cycle is held until all ranks have sent theirs. If the hashes are equal and were answered
        before, the same answer is returned without a look at the single operations.
        """
        self._held[rank].append(cycle)
        if is_for_some(cycle.content) or self._pending or self._joined:
            self._open_held()
            return self._take()
        if not all(self._held):
            return None
        # A rank may be several cycles ahead; the first held cycles of all ranks belong together. This rank's first one may be
        # older than the one that came now.
        if any(cycles[0].digest != cycle.digest for cycles in self._held):
            self._open_held()
            return self._take()
        firsts = [cycles.popleft() for cycles in self._held]
        answer = self._answers.get(cycle.digest) or self._agree(firsts[0])
        return answer._replace(cycles=firsts)

    def _agree(self, cycle: Cycle) -> Answer:
        """Answers a list that all ranks have announced: there is nothing to wait for and nothing to compare."""
        # No rank has joined: a cycle is opened at once after a join.
        members = self._members(0)
        requests = cycle.requests()
        ready = [respond(dict.fromkeys(members, request), self._hosts, has_joined=False) for request in requests]
        responses = fuse(ready, self._settings)
        answer = Answer(responses, packed_responses(responses, requests, cycle.digest))
        capacity = self._settings.cache_capacity
        if capacity and all(terms.repeats for terms in distinct_terms(requests)):
            # All at once: the lists of a job that still repeat come back within one step.
            if len(self._answers) >= capacity:
                self._answers.clear()
            self._answers[cycle.digest] = answer
        return answer

    def _take(self) -> Answer | None:
        """Returns and forgets the responses that are ready."""
        if not self._ready:
            return None
        responses = fuse(self._ready, self._settings)
        self._ready = []
        return Answer(responses, packed_responses(responses, [r for each in responses for r in each.requests]))

    # -- the table of pending operations ----------------------------------------------------------------------------

    def _members(self, process_set: int) -> tuple[int, ...]:
        # None of an unknown set: its removal may overtake an operation that a rank announced before it.
        return self._process_sets.get(process_set, ())

    def _open_held(self) -> None:
        """Moves the operations of all held cycles into the table."""
        for rank, cycles in enumerate(self._held):
            while cycles:
                cycle = cycles.popleft()
                # With the time of its announcement: the cycle has waited since then.
                self._open(rank, cycle.requests(), cycle.since)

    def _open(self, rank: int, requests: Iterable[Request], since: float) -> None:
        for request in requests:
            if request.terms.kind == JOIN.terms.kind:
                self._join(rank)
                continue
            pending = self._pending.setdefault(request.key, _Pending(since))
            # A rank has one operation per key in flight (its controller sees to that), so nothing is overwritten.
            pending.requests[rank] = request
            pending.changed, pending.was_compared = since, False
            self._settle(request.key)

    def _join(self, rank: int) -> None:
        """Enters that a rank has no more data."""
        self._joined.append(rank)
        # Operations that waited only for this rank are ready now: it contributes zeros.
        for key in list(self._pending):
            self._settle(key)
        if len(self._joined) == len(self._hosts):
            self._ready.append(Response((), last_joined=rank))
            # All ranks start the next epoch with all ranks present.
            self._joined.clear()

    def _missing(self, key: Key) -> list[int]:
        """Returns the members that the operation waits for."""
        requests = self._pending[key].requests
        return [rank for rank in self._members(key[0]) if rank not in requests and rank not in self._joined]

    def _settle(self, key: Key) -> None:
        """Takes the operation out of the table if it is ready."""
        pending = self._pending[key]
        members = self._members(key[0])
        # The count of requests suffices as long as no rank has joined, which is the usual case and the quick one.
        if self._missing(key) if self._joined else len(pending.requests) < len(members):
            return
        del self._pending[key]
        # None, if all members have joined meanwhile: then no rank waits for it.
        if pending.requests:
            has_joined = bool(self._joined) and any(rank in self._joined for rank in members)
            self._ready.append(respond(pending.requests, self._hosts, has_joined=has_joined))

    def _fail(self, key: Key, error: str) -> None:
        """Takes the operation out of the table with an error for all its members."""
        pending = self._pending.pop(key)
        self._ready.append(Response((next(iter(pending.requests.values())),), error=error))

    # -- operations that wait too long --------------------------------------------------------------------------------

    def next_check(self) -> float:
        """Returns the time at which check() must be called next; infinite while no operation is open."""
        times = [self._next_look(pending) for pending in self._pending.values()]
        # A held cycle whose hash other ranks never send must get into the table, where the reason is found.
        return min(times + [cycles[0].since + CROSSED_S for cycles in self._held if cycles], default=math.inf)

    def _next_look(self, pending: _Pending) -> float:
        warn_s, end_s = self._settings.stall_warning_s, self._settings.stall_shutdown_s
        if not pending.was_compared:
            return pending.changed + CROSSED_S
        if not warn_s:
            return math.inf
        # Each further interval warns again: whoever looks at the log late still finds it near the end.
        warning = pending.since + warn_s * (pending.num_warnings + 1)
        return min(warning, pending.since + end_s) if end_s >= warn_s else warning

    def check(self, now: float) -> tuple[Answer | None, str, str]:
        """Returns errors of operations that can never become ready, a warning, and a reason to end the job; mostly empty."""
        self._open_held()
        # First: an operation that has just failed waits for no rank, and is not worth a warning.
        for keys in self._crossed(now):
            # Before the first one leaves the table: the text names all of them.
            error = self._crossed_text(keys)
            for key in keys:
                self._fail(key, error)
        warning, reason = self._overdue(now)
        return self._take(), warning, reason

    def _overdue(self, now: float) -> tuple[str, str]:
        """Returns a warning about operations that wait for long, and a reason to end the job; mostly empty."""
        warn_s, end_s = self._settings.stall_warning_s, self._settings.stall_shutdown_s
        stalled, ended = [], []
        for key, pending in self._pending.items():
            lag = now - pending.since
            if warn_s and lag >= warn_s * (pending.num_warnings + 1):
                # Not + 1: after a pause of the engine thread, the intervals that passed meanwhile count as warned.
                pending.num_warnings = int(lag / warn_s)
                stalled.append(key)
            if warn_s and end_s >= warn_s and lag >= end_s:
                ended.append(key)
        warning = self._stall_text(stalled, warn_s) if stalled else ""
        reason = f"{self._stall_text(ended, end_s)}\nWill shutdown." if ended else ""
        return warning, reason

    def _crossed(self, now: float) -> list[list[Key]]:
        """Returns groups of operations of one name that block each other: they differ in kind or in process set."""
        by_name: dict[str, list[Key]] = {}
        for key, pending in self._pending.items():
            pending.was_compared |= now - pending.changed >= CROSSED_S
            if pending.was_compared:
                by_name.setdefault(key[2], []).append(key)
        return [keys for keys in by_name.values() if len(keys) > 1 and self._is_crossed(keys)]

    def _is_crossed(self, keys: list[Key]) -> bool:
        # A rank that has announced none of them yet may still complete one.
        present = set(self._joined).union(*(self._pending[key].requests for key in keys))
        if any(rank not in present for key in keys for rank in self._members(key[0])):
            return False
        # Two operations block each other if of the ranks that belong to both, some wait in the first and others in the second.
        for one, two in itertools.combinations(keys, 2):
            both = set(self._members(one[0])) & set(self._members(two[0]))
            in_one, in_two = (set(self._pending[key].requests) & both for key in (one, two))
            if in_one - in_two and in_two - in_one:
                return True
        return False

    def _crossed_text(self, keys: list[Key]) -> str:
        in_sets = len({key[0] for key in keys}) > 1
        sides = []
        for key in keys:
            where = f" on process set {key[0]} {list(self._members(key[0]))}" if in_sets else ""
            sides.append(f"{rank_name(min(self._pending[key].requests), self._hosts)} called {key[1]}{where}")
        what = "operations" if len({key[1] for key in keys}) > 1 else "process sets"
        return f"Mismatched {what} for the name {keys[0][2]!r}: {', but '.join(sides)}."

    def _stall_text(self, stalled: list[Key], limit_s: float) -> str:
        # By rank: the reader looks for the rank that is stuck, not for the operations that wait.
        missing: dict[int, list[str]] = {}
        for key in stalled:
            for rank in self._missing(key):
                missing.setdefault(rank, []).append(f"{key[1]}.{key[2]}")
        lines = [
            f"One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks and are "
            f"waiting for remainder of ranks for more than {limit_s:g} seconds. This may indicate that different ranks "
            f"are trying to submit different tensors or that only subset of ranks is submitting tensors, which will "
            f"cause deadlock. ",
            "Missing ranks:",
        ]
        for rank, names in sorted(missing.items()):
            shown = ", ".join(names[:6]) + (" ..." if len(names) > 6 else "")
            lines.append(f"{rank} ({self._hosts[rank]}): [{shown}]")
        return "\n".join(lines)


# ---- fusion: small allreduces that are ready together and are reduced alike run as one ----


def fuse(ready: Sequence[Response], settings: Settings) -> list[Response]:
    """Joins allreduces with equal labels into one response each, up to the fusion threshold, in the order of their firsts."""
    parts: list[list[Request] | Response] = []
    # Parts of different labels are open at the same time, so alternating dtypes still fuse.
    open_parts: dict[tuple[object, ...], tuple[int, list[Request]]] = {}
    for response in ready:
        label = _fusion_label(response, settings)
        if label is None:
            parts.append(response)
            continue
        request = response.requests[0]
        used, part = open_parts.get(label, (settings.fusion_threshold, []))
        if not part or used + request.terms.num_bytes > settings.fusion_threshold:
            used, part = 0, []
            parts.append(part)
        part.append(request)
        open_parts[label] = (used + request.terms.num_bytes, part)
    return [part if isinstance(part, Response) else Response(tuple(part)) for part in parts]


def _fusion_label(response: Response, settings: Settings) -> tuple[object, ...] | None:
    """Returns a label; operations with equal labels may be fused. None: this one is not fused."""
    if response.error or not response.requests or not settings.fusion_threshold:
        return None
    terms = response.requests[0].terms
    if terms.kind != "allreduce" or terms.op == Adasum or len(set(terms.dtypes)) != 1:
        return None
    if terms.is_grouped and not settings.fuse_groups:
        return None
    # Compressed tensors are copied anyway, in order to be encoded.
    if terms.num_bytes > FUSED_TENSOR_BYTES and not terms.wire:
        return None
    return (terms.dtypes[0], terms.reduction)
