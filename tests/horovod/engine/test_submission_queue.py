"""When submitted operations are announced. Time is an argument."""

import math

from horovod.engine.messages import Request
from horovod.engine.operation import Operation
from horovod.engine.submission_queue import SubmissionQueue

CYCLE_S = 0.001
HELD_S = 5 * CYCLE_S


def _queue(count: int, cycle_time_s: float = CYCLE_S) -> SubmissionQueue:
    queue = SubmissionQueue(cycle_time_s)
    for _ in range(count):
        _submit(queue)
    return queue


def _submit(queue: SubmissionQueue) -> None:
    request = Request.of("allreduce", f"x{len(queue.operations)}", 0, ("float32",), ((4,),), 1)
    queue.operations.append(Operation(request))


def test_operations_are_announced_a_moment_after_the_engine_has_seen_the_first():
    queue = _queue(1)
    assert queue.due_at(10.0) == 10.0 + HELD_S
    _submit(queue)
    assert queue.take_if_due(10.0 + HELD_S / 2) == []
    assert queue.due_at(10.0 + HELD_S / 2) == 10.0 + HELD_S
    both = queue.operations
    assert len(both) == 2 and queue.take_if_due(10.0 + HELD_S) == both
    assert queue.due_at(11.0) == math.inf and queue.take_if_due(11.0) == []
    _submit(queue)
    assert queue.due_at(12.0) == 12.0 + HELD_S


def test_operations_are_announced_at_once_if_a_thread_waits_or_there_is_no_cycle_time():
    queue = _queue(2)
    assert queue.hurry() and not queue.hurry()
    assert queue.due_at(10.0) == 0.0
    assert len(queue.take_if_due(10.0)) == 2
    assert not queue.hurry()
    assert queue.due_at(10.0) == math.inf
    assert len(_queue(1, cycle_time_s=0.0).take_if_due(10.0)) == 1
