"""What each side of the negotiation sends and runs: two ranks without threads, sockets or tensors."""

from collections import deque

import pytest

from horovod.common.settings import Settings
from horovod.engine.control_connection import MessageKind
from horovod.engine.messages import JOIN, Request
from horovod.engine.negotiation import (
    NOTHING,
    Agreed,
    Negotiation,
    OtherRankNegotiation,
    Rank0Negotiation,
)
from horovod.engine.operation import Operation
from horovod.engine.timeline import Timeline

Message = tuple[MessageKind, bytes, bytes]


class _Wire:
    """One end of a connection: sending appends to a list."""

    def __init__(self) -> None:
        self.sent: deque[Message] = deque()

    def send(self, kind: MessageKind, content: bytes = b"", payload: bytes = b"") -> None:
        self.sent.append((kind, content, payload))


class _Payloads:
    """The part of OperationRunner that a negotiation uses: the payload of a rank is given."""

    def __init__(self, payload: bytes) -> None:
        self._payload = payload

    def small_payload(self, operations: list[Operation]) -> bytes:
        return self._payload

    def add_payloads(self, request: Request, payloads: list[bytes]) -> bytes:
        return b"+".join(payloads)


class _Job:
    """Ranks 0 and 1; process set 1 consists of rank 1 alone."""

    def __init__(self, payloads: tuple[bytes, bytes] = (b"", b""), **settings) -> None:
        self.wires = _Wire(), _Wire()
        self.is_closed = False
        sets = {0: (0, 1), 1: (1,)}
        of_rank_0 = Rank0Negotiation(
            ["a", "b"],
            Settings(**settings),
            sets,
            {1: self.wires[0]},
            Timeline(),
            _Payloads(payloads[0]),
            is_closed=lambda: self.is_closed,
        )
        capacity = Settings(**settings).cache_capacity
        self.ranks: list[Negotiation] = [
            of_rank_0,
            OtherRankNegotiation(self.wires[1], capacity, _Payloads(payloads[1])),
        ]

    def deliver(self, sender: int) -> tuple[MessageKind, Agreed]:
        """Delivers the next message of a rank to the other one; returns its kind and what that rank runs then."""
        kind, content, payload = self.wires[sender].sent.popleft()
        return kind, self.ranks[1 - sender].receive(sender, kind, content, payload)

    def agree(self, names: list[str], *, repeats: bool = True) -> tuple[MessageKind, Agreed, Agreed]:
        """Both ranks announce the operations; returns the kind of the answer, and what rank 0 and rank 1 run."""
        assert self.ranks[1].announce(_operations(names, repeats=repeats)) is NOTHING
        assert self.ranks[0].announce(_operations(names, repeats=repeats)) is NOTHING
        kind, of_rank_0 = self.deliver(sender=1)
        assert kind is MessageKind.REQUESTS
        kind, of_rank_1 = self.deliver(sender=0)
        assert not self.wires[0].sent and not self.wires[1].sent
        return kind, of_rank_0, of_rank_1


def _operations(names: list[str], process_set: int = 0, count: int = 4, *, repeats: bool = True) -> list[Operation]:
    terms = ("float32",), ((count,),), 1
    return [Operation(Request.of("allreduce", name, process_set, *terms, repeats=repeats)) for name in names]


def _names(agreed: Agreed) -> list[list[str]]:
    return [[request.name for request in response.requests] for response in agreed.responses]


@pytest.mark.parametrize("repeats", [True, False])
def test_both_ranks_run_what_both_have_announced(repeats):
    job = _Job()
    answered, of_rank_0, of_rank_1 = job.agree(["x", "y"], repeats=repeats)
    assert answered is MessageKind.RESPONSES
    assert _names(of_rank_0) == _names(of_rank_1) == [["x", "y"]]
    assert of_rank_0.payload == of_rank_1.payload == b""


def test_a_cycle_that_repeats_costs_nine_bytes_in_each_direction():
    job = _Job()
    job.agree(["x", "y"])
    job.ranks[1].announce(_operations(["x", "y"]))
    job.ranks[0].announce(_operations(["x", "y"]))
    assert len(job.wires[1].sent[0][1]) == 9
    job.deliver(sender=1)
    assert len(job.wires[0].sent[0][1]) == 9


def test_payloads_come_back_combined_and_are_what_both_ranks_run():
    job = _Job(payloads=(b"zero", b"one"))
    _, of_rank_0, of_rank_1 = job.agree(["x"])
    assert of_rank_0.payload == of_rank_1.payload == b"zero+one"


def test_a_mismatch_is_an_error_that_both_ranks_get():
    job = _Job()
    job.ranks[1].announce(_operations(["x"], count=5))
    job.ranks[0].announce(_operations(["x"]))
    of_rank_0, of_rank_1 = job.deliver(sender=1)[1], job.deliver(sender=0)[1]
    assert of_rank_0.responses[0].error == of_rank_1.responses[0].error
    assert of_rank_0.responses[0].error.startswith("Mismatched allreduce tensor shapes for 'allreduce.x'")


def test_when_all_ranks_have_joined_both_learn_which_was_the_last():
    job = _Job()
    assert job.ranks[0].announce([Operation(JOIN)]) is NOTHING
    assert job.ranks[1].announce([Operation(JOIN)]) is NOTHING
    of_rank_0, of_rank_1 = job.deliver(sender=1)[1], job.deliver(sender=0)[1]
    assert [agreed.responses[0].last_joined for agreed in (of_rank_0, of_rank_1)] == [1, 1]


def test_once_rank_0_is_closed_no_rank_is_told_to_run_anything():
    job = _Job()
    job.ranks[0].announce(_operations(["x"]))
    job.ranks[1].announce(_operations(["x"]))
    job.is_closed = True
    assert job.deliver(sender=1)[1] is NOTHING
    assert not job.wires[0].sent


def test_only_rank_0_warns_of_missing_ranks():
    job = _Job(stall_warning_s=60.0)
    job.ranks[0].announce(_operations(["x"]))
    job.ranks[1].announce(_operations(["y"]))
    due = job.ranks[0].next_check()
    assert due is not None and job.ranks[1].next_check() is None
    agreed, warning, reason = job.ranks[0].check(due + 100.0)
    assert _names(agreed) == [] and reason == ""
    assert warning.endswith("Missing ranks:\n1 (b): [allreduce.x]")
