"""Rank 0's table of announced operations. No torch, no sockets; the caller passes the time.

Ranks announce operations in any order. An operation is ready when every member of its process set has announced it or has
joined. The coordinator then compares the requests of the ranks, and makes a response of them, or an error that names both
sides. Small allreduces that are ready together become one response.

A cycle (the requests of one message) takes one of two ways:

    held     while nothing else is open, as its hash: once all ranks have sent the same hash, the previous answer is reused
    opened   otherwise, into the table: each operation waits for its other members

Only rank 0's driver calls the coordinator, so that it needs no lock.
"""

import itertools
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from megaclass.hvd.engine.messages import Agreement, Answer, Key, Request, Response, Terms, distinct_terms
from megaclass.hvd.settings import Settings

# Two ranks that use one name for different operations, one for an allreduce and one for an allgather, have this long to submit
# the other operation as well, as different threads may do. After that it is an error.
CROSSED_S = 0.5

# A larger tensor gains nothing by fusion: copying it into and out of the buffer takes longer than one latency.
FUSED_TENSOR_BYTES = 1024 * 1024

_REDUCTIONS = ("Average", "Sum", "Adasum", "Min", "Max", "Product")
_NOT_WITH_JOIN = ("allgather", "broadcast", "alltoall", "reducescatter")


@dataclass
class _Pending:
    """An operation that some ranks have announced."""

    since: float
    """Time of the first announcement."""
    requests: dict[int, Request] = field(default_factory=dict)
    changed: float = 0.0
    """Time of the latest announcement."""
    was_compared: bool = False
    """True once it was compared with other operations of its name, since the latest announcement."""
    num_warnings: int = 0


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
        # Shared with the executor, which adds and removes sets while the job runs.
        self.process_sets = process_sets
        self._table: dict[Key, _Pending] = {}
        self._ready: list[Response] = []
        self._joined: list[int] = []
        # Held cycles by rank, and the answer to each hash that all ranks have sent before.
        self._held: list[deque[_Cycle]] = [deque() for _ in hosts]
        self._answers: dict[bytes, Answer] = {}

    @property
    def size(self) -> int:
        return len(self._hosts)

    def announce(
        self, rank: int, digest: bytes, requests: list[Request], now: float, payload: bytes = b""
    ) -> Answer | None:
        """Receives one cycle of one rank, possibly with its tensors; returns the responses that became ready.

        While nothing else is open, a cycle is held until all ranks have sent theirs. If the hashes are equal and were answered
        before, the same answer is returned without a look at the single operations.
        """
        if self._table or self._joined or any(terms.process_set for terms in distinct_terms(requests)):
            self.open_held()
            self._open(rank, requests, now)
            return self._take()
        self._held[rank].append(_Cycle(digest, requests, now, payload))
        if not all(self._held):
            return None
        # A rank may be several cycles ahead; the first held cycles of all ranks belong together.
        # This rank's first held cycle may be an older one than the one that came now; it counts, and is compared as well.
        if any(cycles[0].digest != digest for cycles in self._held):
            self.open_held()
            return self._take()
        firsts = [cycles.popleft() for cycles in self._held]
        answer = self._answers.get(digest)
        if answer is None:
            answer = self._agree(digest, requests)
            if answer.repeats:
                self._remember(digest, answer)
        payloads = [cycle.payload for cycle in firsts]
        is_one = len(answer.responses) == 1 and not answer.responses[0].error
        # An answer is reused, so that the payloads of this cycle replace those of the last one.
        # The lists are equal, so that either all ranks have sent their tensors or none has.
        answer.payloads = payloads if is_one and all(payloads) else []
        return answer

    def _agree(self, digest: bytes, requests: list[Request]) -> Answer:
        """Answers a list that all ranks have announced: there is nothing to wait for and nothing to compare."""
        if any(terms.kind != "allreduce" for terms in distinct_terms(requests)):
            ready = [self._respond(dict.fromkeys(self._members(0), request)) for request in requests]
            return Answer(fuse(ready, self._settings))
        # An allreduce of which all ranks know the same has neither errors nor sizes, so that it needs no response of its own.
        parts = _fused_positions([request.terms for request in requests], self._settings)
        responses = [Response(tuple([requests[i] for i in part])) for part in parts]
        return Answer(responses, Agreement(digest, parts))

    def _remember(self, digest: bytes, answer: Answer) -> None:
        # All at once: the lists of a job that still repeat come back within one step.
        if len(self._answers) >= self._settings.cache_capacity:
            self._answers.clear()
        if self._settings.cache_capacity:
            self._answers[digest] = answer

    def join(self, rank: int) -> Answer | None:
        """Receives the message that a rank has no more data; returns the responses that became ready."""
        self.open_held()
        self._joined.append(rank)
        # Operations that waited only for this rank are ready now: it contributes zeros.
        for key in list(self._table):
            self._settle(key)
        if len(self._joined) == self.size:
            self._ready.append(Response((), last_joined=rank))
            self._joined.clear()
        return self._take()

    def open_held(self) -> None:
        """Moves the operations of all held cycles into the table."""
        for rank, cycles in enumerate(self._held):
            while cycles:
                cycle = cycles.popleft()
                self._open(rank, cycle.requests, cycle.since)

    def _open(self, rank: int, requests: Iterable[Request], now: float) -> None:
        for request in requests:
            pending = self._table.get(request.key)
            if pending is None:
                pending = self._table[request.key] = _Pending(now)
            # A rank has one operation per key in flight (its controller sees to that), so nothing is overwritten.
            pending.requests[rank] = request
            pending.changed, pending.was_compared = now, False
            self._settle(request.key)

    def _settle(self, key: Key) -> None:
        """Takes the operation out of the table if it is ready."""
        pending = self._table[key]
        members = self._members(key[0])
        # The count of requests suffices as long as no rank has joined, which is the usual case and the quick one.
        if self._joined:
            if any(rank not in pending.requests and rank not in self._joined for rank in members):
                return
        elif len(pending.requests) < len(members):
            return
        del self._table[key]
        # None, if all members have joined meanwhile: then no rank waits for it.
        if pending.requests:
            self._ready.append(self._respond(pending.requests))

    def _members(self, process_set: int) -> tuple[int, ...]:
        return self.process_sets.get(process_set, ())

    def _take(self) -> Answer | None:
        """Returns and forgets the responses that are ready."""
        ready, self._ready = self._ready, []
        return Answer(fuse(ready, self._settings)) if ready else None

    # -- comparing ------------------------------------------------------------------------------------------------

    def _respond(self, by_rank: dict[int, Request]) -> Response:
        ranks = sorted(by_rank)
        requests = [by_rank[rank] for rank in ranks]
        first = requests[0]
        error = self._disagreement(ranks, requests) or self._impossible(first)
        if error:
            return Response((first,), error=error)
        sizes: tuple[tuple[int, ...], ...] = ()
        if first.kind == "allgather":
            sizes = tuple(zip(*([shape[0] for shape in request.shapes] for request in requests), strict=True))
        elif first.kind == "alltoall":
            sizes = tuple(request.splits for request in requests)
        return Response((first,), sizes=sizes)

    def _disagreement(self, ranks: list[int], requests: list[Request]) -> str:
        """Describes a difference between the first rank and another one; empty if there is none."""
        first = requests[0]
        for rank, other in zip(ranks[1:], requests[1:], strict=True):
            if other is first or other == first:
                continue
            for what, one, two in _differences(first, other):
                return (
                    f"Mismatched {what} for {first.full_name!r}: {self._name(ranks[0])} sent {one}, "
                    f"but {self._name(rank)} sent {two}."
                )
        return ""

    def _impossible(self, first: Request) -> str:
        """Explains why the operation cannot run although all ranks agree; empty if it can."""
        if first.kind == "allreduce":
            return ""
        if first.kind in _NOT_WITH_JOIN and any(rank in self._joined for rank in self._members(first.process_set)):
            hint = " Specify sparse_as_dense=True if using DistributedOptimizer." if first.kind == "allgather" else ""
            return f"{first.kind.capitalize()} is not supported with Join at this time.{hint}"
        if first.kind in ("allgather", "alltoall", "reducescatter") and any(not shape for shape in first.shapes):
            return f"Tried to {first.kind} a tensor of no dimensions under the name {first.full_name!r}."
        return ""

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({self._hosts[rank]})"

    # -- waiting --------------------------------------------------------------------------------------------------

    def next_check(self) -> float | None:
        """Returns the time at which check() must be called next; None while no operation is open."""
        times = [self._next_look(pending) for pending in self._table.values()]
        # A held cycle whose hash other ranks never send must get into the table, where the reason is found.
        times += [cycles[0].since + CROSSED_S for cycles in self._held if cycles]
        return min(times, default=None)

    def _next_look(self, pending: _Pending) -> float:
        if not pending.was_compared:
            return pending.changed + CROSSED_S
        warn_s, end_s = self._settings.stall_warning_s, self._settings.stall_shutdown_s
        if not warn_s:
            return float("inf")
        # Each further interval warns again: whoever looks at the log late still finds it near the end.
        warning = pending.since + warn_s * (pending.num_warnings + 1)
        return min(warning, pending.since + end_s) if end_s >= warn_s else warning

    def check(self, now: float) -> tuple[Answer | None, str, str]:
        """Returns errors of operations that can never become ready, a warning, and a reason to end the job; mostly empty."""
        self.open_held()
        for keys in self._crossed(now):
            error = self._crossed_text(keys)
            for key in keys:
                pending = self._table.pop(key)
                self._ready.append(Response((next(iter(pending.requests.values())),), error=error))
        warn_s, end_s = self._settings.stall_warning_s, self._settings.stall_shutdown_s
        stalled, ended = {}, {}
        for key, pending in self._table.items():
            lag = now - pending.since
            if warn_s and lag >= warn_s * (pending.num_warnings + 1):
                # Not + 1: after a pause of the driver, the intervals that passed meanwhile count as warned.
                pending.num_warnings = int(lag / warn_s)
                stalled[key] = pending
            if warn_s and end_s >= warn_s and lag >= end_s:
                ended[key] = pending
        warning = self._stall_text(stalled, warn_s) if stalled else ""
        reason = f"{self._stall_text(ended, end_s)}\nWill shutdown." if ended else ""
        return self._take(), warning, reason

    def _crossed(self, now: float) -> list[list[Key]]:
        """Returns groups of operations of one name that block each other: they differ in kind or in process set."""
        by_name: dict[str, list[Key]] = {}
        for key, pending in self._table.items():
            pending.was_compared |= now - pending.changed >= CROSSED_S
            if pending.was_compared:
                by_name.setdefault(key[2], []).append(key)
        return [keys for keys in by_name.values() if len(keys) > 1 and self._is_crossed(keys)]

    def _is_crossed(self, keys: list[Key]) -> bool:
        # A rank that has announced none of them yet may still complete one.
        present = set(self._joined).union(*(self._table[key].requests for key in keys))
        if any(rank not in present for key in keys for rank in self._members(key[0])):
            return False
        # Two operations block each other if of the ranks that belong to both, some wait in the first and others in the second.
        for one, two in itertools.combinations(keys, 2):
            both = set(self._members(one[0])) & set(self._members(two[0]))
            in_one, in_two = set(self._table[one].requests) & both, set(self._table[two].requests) & both
            if in_one - in_two and in_two - in_one:
                return True
        return False

    def _crossed_text(self, keys: list[Key]) -> str:
        in_sets = len({key[0] for key in keys}) > 1
        sides = []
        for key in keys:
            where = f" on process set {key[0]} {list(self._members(key[0]))}" if in_sets else ""
            sides.append(f"{self._name(min(self._table[key].requests))} did an {key[1]}{where}")
        what = "operations" if len({key[1] for key in keys}) > 1 else "process sets"
        return f"Mismatched {what} for the name {keys[0][2]!r}: {', but '.join(sides)}."

    def _stall_text(self, stalled: Mapping[Key, _Pending], limit_s: float) -> str:
        missing: dict[int, list[str]] = {}
        for key, pending in stalled.items():
            for rank in self._members(key[0]):
                if rank not in pending.requests and rank not in self._joined:
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


def _differences(one: Request, two: Request) -> Iterable[tuple[str, str, str]]:
    """Yields (what, value of one, value of two) for every term in which members must agree, the most telling first."""
    kind = one.kind
    if len(one.shapes) != len(two.shapes):
        yield f"{kind} numbers of tensors", str(len(one.shapes)), str(len(two.shapes))
    if one.dtypes != two.dtypes:
        yield "data types", _plain(one.dtypes), _plain(two.dtypes)
    if kind in ("allreduce", "broadcast", "reducescatter") and one.shapes != two.shapes:
        yield f"{kind} tensor shapes", f"shape {_plain(one.shapes)}", f"shape {_plain(two.shapes)}"
    if kind in ("allgather", "alltoall"):
        for left, right in zip(one.shapes, two.shapes, strict=True):
            if len(left) != len(right) or left[1:] != right[1:]:
                yield f"{kind} tensor shapes beyond dimension 0", f"shape {list(left)}", f"shape {list(right)}"
    if one.op != two.op:
        yield "reduction operations", _REDUCTIONS[one.op], _REDUCTIONS[two.op]
    if (one.prescale, one.postscale) != (two.prescale, two.postscale):
        yield (
            "prescale and/or postscale factors",
            f"factors ({one.prescale}, {one.postscale})",
            f"factors ({two.prescale}, {two.postscale})",
        )
    if one.root != two.root:
        yield f"{kind} root ranks", f"root rank {one.root}", f"root rank {two.root}"
    if kind == "alltoall" and len(one.splits) != len(two.splits):
        yield "numbers of splits", f"splits {list(one.splits)}", f"splits {list(two.splits)}"
    if kind in ("add_process_set", "remove_process_set") and one.splits != two.splits:
        yield "process sets", f"ranks {list(one.splits)}", f"ranks {list(two.splits)}"
    if one.device != two.device:
        yield f"{kind} CPU/GPU device selection", f"a tensor on {one.device}", f"a tensor on {two.device}"
    if (one.wire, one.keeps_error) != (two.wire, two.keeps_error):
        yield "compression", one.wire or "none", two.wire or "none"


def _plain(values: tuple[object, ...]) -> str:
    """Formats the values, without brackets if there is a single tensor."""
    listed = [list(value) if isinstance(value, tuple) else value for value in values]
    return str(listed[0] if len(listed) == 1 else listed)


# -- fusion -----------------------------------------------------------------------------------------------------------


def fuse(responses: list[Response], settings: Settings) -> list[Response]:
    """Joins allreduces with equal labels into one response each, up to the fusion threshold, in the order of their firsts."""
    terms = [response.requests[0].terms if response.requests and not response.error else None for response in responses]
    return [
        responses[part[0]]
        if len(part) == 1
        else Response(tuple([request for i in part for request in responses[i].requests]))
        for part in _fused_positions(terms, settings)
    ]


def _fused_positions(all_terms: Sequence[Terms | None], settings: Settings) -> list[list[int]]:
    """Returns the positions of the operations that run as one, for each of these. None: an operation that runs alone."""
    fused: list[list[int]] = []
    open_parts: dict[tuple[object, ...], tuple[int, list[int]]] = {}
    # A thousand operations in a row mostly share their terms, and thus the label.
    latest: Terms | None = None
    label: tuple[object, ...] | None = None
    for position, terms in enumerate(all_terms):
        if terms is None or terms is not latest:
            label, latest = _fusion_label(terms, settings), terms
        if terms is None or label is None:
            fused.append([position])
            continue
        # Parts of different labels are open at the same time, so that alternating dtypes still fuse.
        used, part = open_parts.get(label, (settings.fusion_threshold, None))
        if part is None or used + terms.num_bytes > settings.fusion_threshold:
            used, part = 0, []
            fused.append(part)
        part.append(position)
        open_parts[label] = (used + terms.num_bytes, part)
    return fused


def _fusion_label(terms: Terms | None, settings: Settings) -> tuple[object, ...] | None:
    """Returns a label; operations with equal labels may be fused. None: this one is not fused."""
    if terms is None or terms.kind != "allreduce" or not settings.fusion_threshold:
        return None
    if _REDUCTIONS[terms.op] == "Adasum" or len(set(terms.dtypes)) != 1:
        return None
    if terms.is_grouped and not settings.fuse_groups:
        return None
    # Compressed tensors are copied anyway, in order to be encoded.
    if terms.num_bytes > FUSED_TENSOR_BYTES and not terms.wire:
        return None
    return (terms.dtypes[0], terms.reduction)
