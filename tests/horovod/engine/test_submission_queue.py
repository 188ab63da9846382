"""When submitted operations are announced. Time is an argument."""

from horovod.engine.messages import Request
from horovod.engine.operation import Operation
from horovod.engine.submission_queue import SubmissionQueue

CYCLE_S = 0.001


def _queue(*counts: int, cycle_time_s: float = CYCLE_S) -> SubmissionQueue:
    queue = SubmissionQueue(cycle_time_s)
    for count in counts:
        _submit(queue, count)
    return queue


def _submit(queue: SubmissionQueue, count: int = 4) -> None:
    operation = Operation(Request.of("allreduce", f"x{len(queue.operations)}", 0, ("float32",), ((count,),), 1))
    queue.operations.append(operation)
    queue.num_bytes += operation.request.terms.num_bytes


def test_operations_are_announced_when_the_submissions_pause():
    queue = _queue(4)
    assert queue.next_look(10.0) == 10.0
    assert queue.take_if_due(10.0) == []
    assert queue.next_look(10.0) == 10.0 + CYCLE_S
    _submit(queue)
    assert queue.take_if_due(10.0011) == []
    both = queue.operations
    assert queue.take_if_due(10.0022) == both
    assert queue.next_look(10.0022) is None
    assert queue.take_if_due(10.0044) == []


def test_a_late_look_does_not_count_as_a_pause():
    queue = _queue(4)
    queue.take_if_due(10.0)
    # The submitting thread held the interpreter for 5 ms and had no core meanwhile.
    assert queue.take_if_due(10.006) == []
    assert queue.next_look(10.006) == 10.006 + CYCLE_S
    assert len(queue.take_if_due(10.0071)) == 1


def test_operations_are_announced_at_once_if_a_thread_waits_or_there_is_no_cycle_time():
    queue = _queue(4, 4)
    queue.hurry()
    assert queue.next_look(10.0) == 10.0
    assert len(queue.take_if_due(10.0)) == 2
    queue.hurry()
    assert not queue.is_urgent
    assert len(_queue(4, cycle_time_s=0.0).take_if_due(10.0)) == 1


def test_a_stream_without_pauses_is_cut_soon_if_it_is_large_and_later_if_it_is_small():
    def announced_after(count: int) -> float:
        queue, now = SubmissionQueue(CYCLE_S), 10.0
        while True:
            _submit(queue, count)
            if queue.take_if_due(now):
                return now - 10.0
            now += CYCLE_S

    assert 0.0045 < announced_after(count=10**6) < 0.0065
    assert 0.0395 < announced_after(count=4) < 0.0415
