"""Operations between their submission and their end: one per name, each finished once."""

import threading

import pytest

from horovod.common.exceptions import DUPLICATE_NAME, HorovodInternalError
from horovod.engine.messages import JOIN, Request
from horovod.engine.operation import InFlight, Operation


@pytest.fixture
def in_flight() -> InFlight:
    return InFlight(threading.Lock())


def _operation(name: str = "x", kind: str = "allreduce", process_set: int = 0) -> Operation:
    return Operation(Request.of(kind, name, process_set))


def test_a_name_is_in_use_once_per_kind_and_process_set(in_flight):
    operations = [_operation(), _operation(kind="allgather"), _operation(process_set=1), _operation("y")]
    for operation in operations:
        in_flight.add(operation)
    assert len(in_flight._operations) == 4
    with pytest.raises(ValueError) as caught:
        in_flight.add(_operation())
    assert str(caught.value) == DUPLICATE_NAME
    assert in_flight.get(operations[0].request.key) is operations[0]
    in_flight.finish(operations[:1], "")
    assert in_flight.get(operations[0].request.key) is None
    in_flight.add(_operation())
    assert len(in_flight._operations) == 4


def test_the_first_end_decides_and_the_call_is_made_once(in_flight):
    operation, calls = _operation(), []
    in_flight.add(operation)
    in_flight.call_when_done(operation, lambda: calls.append(operation.error))
    assert calls == []
    in_flight.finish([None, operation], "first")
    in_flight.finish([operation], "second")
    assert (operation.error, operation.is_done, calls) == ("first", True, ["first"])
    # Of an operation that is done, the call is made now.
    in_flight.call_when_done(operation, lambda: calls.append("late"))
    assert calls == ["first", "late"]


def test_a_call_at_the_end_may_submit_the_next_operation_of_that_name(in_flight):
    first, second = _operation(), _operation()
    in_flight.add(first)
    in_flight.call_when_done(first, lambda: in_flight.add(second))
    in_flight.finish([first], "")
    assert in_flight.get(first.request.key) is second and len(in_flight._operations) == 1


def test_threads_that_wait_are_let_through_whatever_the_end(in_flight):
    waited, unwaited = _operation(), _operation("y")
    for operation in (waited, unwaited):
        in_flight.add(operation)
    lock = in_flight.waiter(waited)
    assert in_flight.waiter(waited) is lock and lock.locked() and unwaited.waiter is None
    in_flight.close("the job is over")
    in_flight.fail_all()
    assert not lock.locked() and len(in_flight._operations) == 0
    assert [operation.error for operation in (waited, unwaited)] == ["the job is over"] * 2


def test_a_join_ends_with_the_last_rank_or_fails_with_the_others(in_flight):
    join = Operation(JOIN)
    in_flight.add(join)
    in_flight.finish_join(3)
    assert (join.result, join.is_done, join.error) == (3, True, "")
    # A rank that has not joined hears of the end of a join, too.
    in_flight.finish_join(2)
    assert join.result == 3
    again = Operation(JOIN)
    in_flight.add(again)
    in_flight.close("rank 1 is gone")
    in_flight.fail_all()
    assert (again.is_done, again.error, again.result) == (True, "rank 1 is gone", None)
    in_flight.finish_join(0)
    assert again.result is None


def test_after_closing_operations_and_joins_are_refused_with_the_first_reason(in_flight):
    in_flight.close("the cause")
    in_flight.close("a consequence")
    for operation in (_operation(), Operation(JOIN)):
        with pytest.raises(HorovodInternalError, match=r"^the cause$"):
            in_flight.add(operation)
    assert len(in_flight._operations) == 0
