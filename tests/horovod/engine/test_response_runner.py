"""Which operations a list of responses finishes, and how failures are told."""

import threading

import pytest

from horovod.engine.in_flight import InFlight
from horovod.engine.messages import Request, Response
from horovod.engine.negotiation import Agreed
from horovod.engine.operation import Operation
from horovod.engine.response_runner import ResponseRunner
from horovod.engine.timeline import Timeline


class _Rank:
    """Rank 2 on host c, and an OperationRunner that takes notes."""

    def __init__(self) -> None:
        self.in_flight = InFlight(threading.Lock())
        self.failures: list[str] = []
        self.ran: list[object] = []
        self.responses = ResponseRunner("rank 2 (c)", self.in_flight, self, Timeline(), self._on_failure)

    def _on_failure(self, error: str) -> None:
        self.failures.append(error)
        self.in_flight.close(error)

    def submit(self, *names: str) -> list[Operation]:
        operations = [Operation(_request(name)) for name in names]
        for operation in operations:
            self.in_flight.add(operation)
        return operations

    def perform(self, response: Response, operations: list[Operation | None]) -> None:
        if any(request.name == "fails" for request in response.requests):
            raise RuntimeError("the network is on fire")
        self.ran.append(operations)

    def deliver_payload(self, operations: list[Operation | None], payload: bytes) -> None:
        self.ran.append((operations, payload))


@pytest.fixture
def rank() -> _Rank:
    return _Rank()


def _request(name: str) -> Request:
    return Request("allreduce", name, 0, ("float32",), ((4,),), 1)


def _response(*names: str, error: str = "") -> Response:
    return Response(tuple(map(_request, names)), error=error)


def test_operations_are_found_by_name_in_the_order_of_the_response(rank):
    x, y = rank.submit("x", "y")
    rank.responses.run(Agreed([_response("y", "x")]))
    assert rank.ran == [[y, x]]
    assert x.is_done and y.is_done and len(rank.in_flight) == 0


def test_a_rank_that_has_joined_takes_part_without_an_operation(rank):
    rank.responses.run(Agreed([_response("x")]))
    assert rank.ran == [[None]]


def test_a_payload_is_delivered_instead_of_performing_the_operation(rank):
    (x,) = rank.submit("x")
    rank.responses.run(Agreed([_response("x")], b"sum"))
    assert rank.ran == [([x], b"sum")]
    assert x.is_done and x.error == ""


def test_a_disagreement_fails_its_operation_only(rank):
    x, y = rank.submit("x", "y")
    rank.responses.run(Agreed([_response("x", error="Mismatched"), _response("y")]))
    assert (x.error, y.error) == ("Mismatched", "")
    assert rank.ran == [[y]] and rank.failures == []


def test_a_failure_names_operation_and_rank_and_reaches_the_waiting_thread_first(rank):
    (x,) = rank.submit("fails")
    rank.responses.run(Agreed([_response("fails")]))
    assert x.error == "allreduce.fails on rank 2 (c) failed: the network is on fire"
    assert rank.failures == [f"{x.error}."]


def test_after_a_failure_has_closed_the_controller_nothing_more_runs(rank):
    x, y = rank.submit("fails", "y")
    rank.responses.run(Agreed([_response("fails"), _response("y")]))
    assert rank.ran == []
    assert x.is_done and not y.is_done


def test_the_end_of_a_join_finishes_this_ranks_join(rank):
    join = Operation(Request("join", "join"))
    rank.in_flight.add_join(join)
    rank.responses.run(Agreed([Response((), last_joined=1)]))
    assert (join.is_done, join.result) == (True, 1)
