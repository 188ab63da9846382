"""Rank 0's table of operations that some of their members have announced and others have not, and the ranks that have joined.

When all members have announced an operation, their requests are compared: it runs, or fails with an error that names both
sides.

    open()     announced   ---->  pending: in the table, waiting for its other members
    settle()   pending     ---->  ready: every member has announced it or has joined; it leaves the table as a response
    fail()     pending     ---->  ready: it can never be complete; it leaves the table as an error

Only rank 0's engine thread uses it, so it needs no lock.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from horovod.engine.kinds import KINDS, REDUCTIONS
from horovod.engine.messages import JOIN, Key, Request, Response


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
            if request.terms.kind == JOIN.terms.kind:
                self._join(rank)
                continue
            pending = self.pending.get(request.key)
            if pending is None:
                pending = self.pending[request.key] = Pending(now)
            # A rank has one operation per key in flight (its controller sees to that), so nothing is overwritten.
            pending.requests[rank] = request
            pending.changed, pending.was_compared = now, False
            self._settle(request.key)

    def _join(self, rank: int) -> None:
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


def rank_name(rank: int, hosts: Sequence[str]) -> str:
    return f"rank {rank} ({hosts[rank]})"


def respond(by_rank: dict[int, Request], hosts: Sequence[str], *, has_joined: bool) -> Response:
    """Returns the response to the requests of all members. `has_joined`: a member takes part with zeros instead."""
    ranks = sorted(by_rank)
    requests = [by_rank[rank] for rank in ranks]
    first = requests[0]
    error = _disagreement(ranks, requests, hosts) or _impossible(first, has_joined)
    if error:
        return Response((first,), error=error)
    # A rank knows its own rows only, and needs those of all others to make room for the result.
    sizes: tuple[tuple[int, ...], ...] = ()
    if KINDS[first.kind].sizes == "rows":
        sizes = tuple(zip(*([shape[0] for shape in request.shapes] for request in requests), strict=True))
    elif KINDS[first.kind].sizes == "splits":
        sizes = tuple(request.splits for request in requests)
    return Response((first,), sizes=sizes)


def _disagreement(ranks: list[int], requests: list[Request], hosts: Sequence[str]) -> str:
    """Describes a difference between the first rank and another one; empty if there is none."""
    first = requests[0]
    for rank, other in zip(ranks[1:], requests[1:], strict=True):
        # One request may stand for several ranks, which have then announced the same list: nothing to compare.
        if other is first or other == first:
            continue
        for what, one, two in _differences(first, other):
            return (
                f"Mismatched {what} for {first.full_name!r}: {rank_name(ranks[0], hosts)} sent {one}, "
                f"but {rank_name(rank, hosts)} sent {two}."
            )
    return ""


def _impossible(first: Request, has_joined: bool) -> str:
    """Explains why the operation cannot run although all ranks agree; empty if it can."""
    kind = KINDS[first.kind]
    if has_joined and not kind.may_join:
        hint = " Specify sparse_as_dense=True if using DistributedOptimizer." if first.kind == "allgather" else ""
        return f"{first.kind.capitalize()} is not supported with Join at this time.{hint}"
    if kind.needs_rows and any(not shape for shape in first.shapes):
        return f"Tried to {first.kind} a tensor of no dimensions under the name {first.full_name!r}."
    return ""


def _differences(one: Request, two: Request) -> Iterable[tuple[str, str, str]]:
    """Yields (what, value of one, value of two) for every term in which members must agree, the most telling first."""
    kind = one.kind
    if len(one.shapes) != len(two.shapes):
        yield f"{kind} numbers of tensors", str(len(one.shapes)), str(len(two.shapes))
    if one.dtypes != two.dtypes:
        yield "data types", _plain(one.dtypes), _plain(two.dtypes)
    if KINDS[kind].shapes_must_match and one.shapes != two.shapes:
        yield f"{kind} tensor shapes", f"shape {_plain(one.shapes)}", f"shape {_plain(two.shapes)}"
    # Members may bring different numbers of rows here: the response tells each of them the numbers of all.
    if not KINDS[kind].shapes_must_match:
        for left, right in zip(one.shapes, two.shapes, strict=True):
            if len(left) != len(right) or left[1:] != right[1:]:
                yield f"{kind} tensor shapes beyond dimension 0", f"shape {list(left)}", f"shape {list(right)}"
    if one.op != two.op:
        yield "reduction operations", REDUCTIONS[one.op], REDUCTIONS[two.op]
    if (one.prescale, one.postscale) != (two.prescale, two.postscale):
        yield (
            "prescale and/or postscale factors",
            f"factors ({one.prescale}, {one.postscale})",
            f"factors ({two.prescale}, {two.postscale})",
        )
    if one.root != two.root:
        yield f"{kind} root ranks", f"root rank {one.root}", f"root rank {two.root}"
    if KINDS[kind].sizes == "splits" and len(one.splits) != len(two.splits):
        yield "numbers of splits", f"splits {list(one.splits)}", f"splits {list(two.splits)}"
    if KINDS[kind].disagreement and one.splits != two.splits:
        yield KINDS[kind].disagreement, f"ranks {list(one.splits)}", f"ranks {list(two.splits)}"
    if one.device != two.device:
        yield f"{kind} CPU/GPU device selection", f"a tensor on {one.device}", f"a tensor on {two.device}"
    if (one.wire, one.keeps_error) != (two.wire, two.keeps_error):
        yield "compression", one.wire or "none", two.wire or "none"


def _plain(values: tuple[object, ...]) -> str:
    """Formats the values, without brackets if there is a single tensor."""
    listed = [list(value) if isinstance(value, tuple) else value for value in values]
    return str(listed[0] if len(listed) == 1 else listed)
