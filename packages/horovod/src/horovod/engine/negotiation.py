"""The two sides of the negotiation: rank 0, which knows what every rank has announced, and every other rank.

    rank 1, 2, …                                       rank 0
    announce()                                         announce(): a call of its own coordinator
      REQUESTS: a hash, or the list --------------->   receive(): coordinator.announce()
                                                         all members have announced it:
    receive()  <------- RESPONSES: a hash, or the list   answer all ranks

Each method sends what is due and returns what this rank has to run because of it, mostly nothing. No method waits, and none
knows how operations are run. Only the engine thread calls them, so no field here needs a lock:

    field                  of            written by             read by
    _sender                both sides    whatever sends a list  (the same)
    _receiver(s)           both sides    receive()              receive()
    _coordinator           rank 0        all methods            all methods
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from horovod.common.settings import Settings
from horovod.engine.control_connection import ControlConnection, MessageKind
from horovod.engine.messages import Answer, Receiver, Request, Response, Sender, digest_of_all, distinct_terms
from horovod.engine.operation import Operation, OperationRunner
from horovod.engine.rank0.coordinator import Coordinator
from horovod.engine.timeline import Timeline


class Agreed(NamedTuple):
    """Responses that this rank runs now, in their order."""

    responses: Sequence[Response]
    payload: bytes = b""
    """The result of the one response, where the tensors were small enough to travel with the negotiation; else empty."""


# Most calls return this one object: an announcement is answered by a later message.
NOTHING = Agreed(())


class OtherRankNegotiation:
    """The side of all ranks but rank 0: it asks rank 0, and runs what that answers."""

    def __init__(self, to_rank_0: ControlConnection, cache_capacity: int, runner: OperationRunner) -> None:
        self._to_rank_0 = to_rank_0
        self._runner = runner
        self._sender = Sender(cache_capacity)
        self._receiver = Receiver()

    def announce(self, operations: list[Operation]) -> Agreed:
        """Announces one cycle of operations of this rank."""
        requests = [operation.request for operation in operations]
        digest = digest_of_all(requests)
        repeats = all(terms.repeats for terms in distinct_terms(requests))
        message = self._sender.pack(requests, digest, repeats=repeats)
        # This rank does not know what the others announce. If the lists differ, the payload is not used, which is cheap.
        self._to_rank_0.send(MessageKind.REQUESTS, message, self._runner.small_payload(operations))
        return NOTHING

    def receive(self, peer: int, kind: int, content: bytes, payload: bytes) -> Agreed:
        """Handles a message of another rank."""
        # REQUESTS go to rank 0 only.
        return Agreed(self._receiver.unpack(content)[1], payload) if kind == MessageKind.RESPONSES else NOTHING

    # Only rank 0 knows which operations other ranks have not announced, so this side has nothing to check.

    def next_check(self) -> None:
        return None

    def check(self, now: float) -> tuple[Agreed, str, str]:
        return NOTHING, "", ""


class Rank0Negotiation:
    """The side of rank 0: it collects the announcements of all ranks, its own included, and answers them."""

    def __init__(
        self,
        hosts: list[str],
        settings: Settings,
        process_sets: Mapping[int, tuple[int, ...]],
        connections: Mapping[int, ControlConnection],
        timeline: Timeline,
        runner: OperationRunner,
        is_closed: Callable[[], bool],
    ) -> None:
        """`connections`: to all other ranks. `is_closed`: whether operations are no longer possible on this rank."""
        self._connections = connections
        self._timeline = timeline
        self._runner = runner
        self._is_closed = is_closed
        self._coordinator = Coordinator(hosts, settings, process_sets)
        # All other ranks get the same messages.
        self._sender = Sender(settings.cache_capacity)
        self._receivers = {peer: Receiver() for peer in connections}

    def announce(self, operations: list[Operation]) -> Agreed:
        requests = [operation.request for operation in operations]
        # Without other ranks there is nothing to add up.
        payload = self._runner.small_payload(operations) if self._connections else b""
        return self._announced(0, digest_of_all(requests), requests, payload)

    def receive(self, peer: int, kind: int, content: bytes, payload: bytes) -> Agreed:
        if kind != MessageKind.REQUESTS:
            return NOTHING
        digest, requests = self._receivers[peer].unpack(content)
        return self._announced(peer, digest, requests, payload)

    def next_check(self) -> float | None:
        """Returns the time at which check() must be called next; None while no operation is open."""
        return self._coordinator.next_check()

    def check(self, now: float) -> tuple[Agreed, str, str]:
        """Returns what to run, a warning about missing ranks, and a reason to end the job; mostly empty."""
        answer, warning, reason = self._coordinator.check(now)
        return self._answer(answer), warning, reason

    def _announced(self, rank: int, digest: bytes, requests: list[Request], payload: bytes) -> Agreed:
        """A rank has announced one cycle of requests."""
        # Once for a thousand requests, although rank_ready() also asks it.
        if self._timeline.is_active:
            for request in requests:
                self._timeline.rank_ready(request.full_name, request.kind, rank)
        return self._answer(self._coordinator.announce(rank, digest, requests, time.monotonic(), payload))

    def _answer(self, answer: Answer | None) -> Agreed:
        """Sends all other ranks the responses, and returns them for rank 0 itself."""
        # Once this rank is closed it cannot take part, so the others must not start.
        if answer is None or self._is_closed():
            return NOTHING
        payload = b""
        if answer.payloads:
            payload = self._runner.add_payloads(answer.responses[0].requests[0], answer.payloads)
        message = self._sender.pack(answer.responses, answer.digest, repeats=answer.repeats)
        # The others start before rank 0, which has just as much to do itself.
        for connection in self._connections.values():
            connection.send(MessageKind.RESPONSES, message, payload)
        return Agreed(answer.responses, payload)


Negotiation = Rank0Negotiation | OtherRankNegotiation
