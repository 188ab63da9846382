"""Controllers of several ranks in one process: real connections and threads, and a runner that only takes notes."""

import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from horovod.common.exceptions import DUPLICATE_NAME, SHUT_DOWN, HorovodInternalError
from horovod.common.settings import Settings
from horovod.engine.control_connection import ControlConnection
from horovod.engine.controller import Controller
from horovod.engine.messages import JOIN, Request, Response
from horovod.engine.operation import Operation
from horovod.engine.timeline import Timeline
from megaclass_launch.rendezvous.connection_watch import ConnectionWatch

HOSTS = ["a", "b", "c"]


class Notes:
    """Implements OperationRunner without tensors: the payload of a rank is its number."""

    def __init__(self, rank: int, *, sends_payloads: bool = False) -> None:
        self._rank = rank
        self._sends_payloads = sends_payloads
        self.performed: list[list[str]] = []
        self.delivered: list[bytes] = []
        self.fails_at = ""

    def perform(self, response: Response, operations: list[Operation | None]) -> None:
        names = [request.name for request in response.requests]
        if self.fails_at in names:
            raise RuntimeError("the network is on fire")
        self.performed.append(names)
        for operation in operations:
            if operation is not None:
                operation.result = names

    def small_payload(self, operations: list[Operation], num_ranks: int) -> bytes:
        return bytes([self._rank]) if self._sends_payloads else b""

    def add_payloads(self, request: Request, payloads: list[bytes]) -> bytes:
        return b"".join(payloads)

    def deliver_payload(self, operations: list[Operation | None], payload: bytes) -> None:
        self.delivered.append(payload)


def _connection() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        return one, listener.accept()[0]


class Job:
    """Three controllers."""

    def __init__(self, *, sends_payloads: bool = False, **settings) -> None:
        pairs = {rank: _connection() for rank in (1, 2)}
        self.sockets = {rank: theirs for rank, (_, theirs) in pairs.items()}
        of_rank_0 = {rank: ControlConnection(ours) for rank, (ours, _) in pairs.items()}
        connections = [of_rank_0, *({0: ControlConnection(self.sockets[rank])} for rank in (1, 2))]
        self.notes = [Notes(rank, sends_payloads=sends_payloads) for rank in range(3)]
        self.controllers = [
            Controller(
                rank,
                HOSTS,
                Settings(**settings),
                Timeline(),
                {0: (0, 1, 2), 1: (1, 2)},
                self.notes[rank],
                connections[rank],
                ConnectionWatch(f"rank {rank}", 0.0),
            )
            for rank in range(3)
        ]
        self._pool = ThreadPoolExecutor(3)

    def run(self, rank: int, request: Request) -> Operation:
        """Submits and waits, as a blocking call does."""
        operation = Operation(request)
        self.controllers[rank].submit(operation)
        self.controllers[rank].wait(operation)
        return operation

    def on_all(self, call: Callable[[int], object]) -> list[object]:
        """Calls it for every rank at the same time; returns results or exceptions."""

        def caught(rank: int) -> object:
            try:
                return call(rank)
            except Exception as error:
                return error

        return [future.result(30.0) for future in [self._pool.submit(caught, rank) for rank in range(3)]]

    def stop(self) -> None:
        self.on_all(lambda rank: self.controllers[rank].stop())
        self._pool.shutdown()


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    yield made
    made.stop()


def _allreduce(name: str, process_set: int = 0, count: int = 4) -> Request:
    return Request.of("allreduce", name, process_set, ("float32",), ((count,),), 1)


def test_a_blocking_operation_runs_on_all_ranks(job):
    results = job.on_all(lambda rank: job.run(rank, _allreduce("x")).result)
    assert results == [["x"]] * 3
    assert [notes.performed for notes in job.notes] == [[["x"]]] * 3


def test_operations_submitted_in_different_orders_run_in_one_order(job):
    def submit(rank: int) -> None:
        names = ["x", "y", "z"]
        operations = [Operation(_allreduce(name, count=10**6)) for name in names[rank:] + names[:rank]]
        for operation in operations:
            job.controllers[rank].submit(operation)
        for operation in operations:
            job.controllers[rank].wait(operation)

    assert job.on_all(submit) == [None] * 3
    orders = [[name for names in notes.performed for name in names] for notes in job.notes]
    assert orders[0] == orders[1] == orders[2]
    assert sorted(orders[0]) == ["x", "y", "z"]


def test_what_is_submitted_together_is_announced_together():
    job = Job(cycle_time_s=60.0)

    def submit(rank: int) -> None:
        operations = [Operation(_allreduce(name)) for name in "xyz"]
        with job.controllers[rank].together():
            for operation in operations:
                job.controllers[rank].submit(operation)
        for operation in operations:
            job.controllers[rank].wait(operation)

    assert job.on_all(submit) == [None] * 3
    assert [notes.performed for notes in job.notes] == [[["x", "y", "z"]]] * 3
    job.stop()


def test_lists_that_do_not_repeat_run_also_where_ranks_cut_them_at_different_places():
    job = Job(cycle_time_s=60.0)

    def submit(rank: int) -> None:
        for first in range(0, 60, 6):
            # Equal lists, and lists that rank 1 announces in two messages, in turn.
            names = [f"noname.{number}" for number in range(first, first + 6)]
            cuts = [names[:2], names[2:]] if rank == 1 and first % 12 == 0 else [names]
            operations = []
            for cut in cuts:
                requests = [Request.of("allreduce", name, 0, ("float32",), ((4,),), 1, repeats=False) for name in cut]
                operations += [Operation(request) for request in requests]
                with job.controllers[rank].together():
                    for operation in operations[-len(cut) :]:
                        job.controllers[rank].submit(operation)
            for operation in operations:
                job.controllers[rank].wait(operation)

    assert job.on_all(submit) == [None] * 3
    orders = [[name for names in notes.performed for name in names] for notes in job.notes]
    assert orders[0] == orders[1] == orders[2]
    assert sorted(orders[0]) == sorted(f"noname.{number}" for number in range(60))
    job.stop()


def test_operations_that_no_thread_waits_for_are_run_by_the_controllers_own_thread(job):
    operations = [Operation(_allreduce("x")) for _ in range(3)]
    for rank, operation in enumerate(operations):
        job.controllers[rank].submit(operation)
    is_done = threading.Event()
    for _ in range(1000):
        if all(operation.is_done for operation in operations):
            break
        is_done.wait(0.01)
    assert [operation.result for operation in operations] == [["x"]] * 3


def test_several_threads_of_one_rank_may_wait_for_one_operation(job):
    operation = Operation(_allreduce("x"))
    job.controllers[0].submit(operation)
    with ThreadPoolExecutor(5) as pool:
        waits = [pool.submit(job.controllers[0].wait, operation) for _ in range(3)]
        others = [pool.submit(job.run, rank, _allreduce("x")) for rank in (1, 2)]
        for future in (*others, *waits):
            future.result(30.0)


def test_a_process_set_does_not_need_rank_0_to_take_part(job):
    def in_set(rank: int) -> object:
        return job.run(rank, _allreduce("x", process_set=1)).result if rank else None

    assert job.on_all(in_set) == [None, ["x"], ["x"]]
    assert job.notes[0].performed == []


def test_small_payloads_travel_with_the_negotiation():
    job = Job(sends_payloads=True)
    job.on_all(lambda rank: job.run(rank, _allreduce("x")))
    assert [notes.delivered for notes in job.notes] == [[b"\x00\x01\x02"]] * 3
    assert [notes.performed for notes in job.notes] == [[]] * 3
    job.stop()


def test_a_name_that_is_in_flight_is_refused_and_a_name_that_is_done_is_not(job):
    job.controllers[0].submit(Operation(_allreduce("x")))
    with pytest.raises(ValueError, match=DUPLICATE_NAME[:40]):
        job.controllers[0].submit(Operation(_allreduce("x")))
    job.controllers[0].submit(Operation(_allreduce("y")))
    job.on_all(lambda rank: job.run(rank, _allreduce("z")))
    assert job.on_all(lambda rank: job.run(rank, _allreduce("z")).result) == [["z"]] * 3


def test_a_mismatch_fails_on_all_ranks_and_the_job_goes_on(job):
    errors = job.on_all(lambda rank: job.run(rank, _allreduce("x", count=4 + rank // 2)))
    assert all(isinstance(error, HorovodInternalError) for error in errors)
    assert len({str(error) for error in errors}) == 1
    assert str(errors[0]).startswith(
        "Mismatched allreduce tensor shapes for 'allreduce.x': rank 0 (a) sent shape [4], but rank 2"
    )
    assert job.on_all(lambda rank: job.run(rank, _allreduce("x")).result) == [["x"]] * 3


def test_all_ranks_learn_who_joined_last(job):
    def join(rank: int) -> object:
        operation = Operation(JOIN)
        job.controllers[rank].submit(operation)
        job.controllers[rank].wait(operation)
        return operation.result

    results = job.on_all(join)
    assert results in ([0, 0, 0], [1, 1, 1], [2, 2, 2])


def test_a_rank_that_joined_takes_part_without_an_operation(job):
    joined = Operation(JOIN)
    job.controllers[1].submit(joined)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(job.controllers[1].wait, joined)
        job.on_all(lambda rank: job.run(rank, _allreduce("x")) if rank != 1 else None)
        for rank in (0, 2):
            job.controllers[rank].submit(Operation(JOIN))
        job.on_all(
            lambda rank: job.controllers[rank].wait(job.controllers[rank]._operations[JOIN.key]) if rank != 1 else None
        )
        waiting.result(30.0)
    assert [notes.performed for notes in job.notes] == [[["x"]]] * 3


def test_a_failure_on_one_rank_ends_the_job_on_all_and_names_the_rank(job):
    job.notes[2].fails_at = "x"
    job.on_all(lambda rank: job.run(rank, _allreduce("x")))
    errors = job.on_all(lambda rank: job.run(rank, _allreduce("y")))
    assert all("allreduce.x on rank 2 (c) failed: the network is on fire" in str(error) for error in errors)


def test_after_a_failure_a_rank_runs_nothing_of_what_was_agreed_together_with_it():
    job = Job(cycle_time_s=60.0, fusion_threshold=0)
    job.notes[2].fails_at = "x"

    def submit(rank: int) -> None:
        operations = [Operation(_allreduce(name)) for name in "xy"]
        with job.controllers[rank].together():
            for operation in operations:
                job.controllers[rank].submit(operation)
        for operation in reversed(operations):
            job.controllers[rank].wait(operation)

    errors = job.on_all(submit)
    # The others are in x: if rank 2 went on to y, they would take its numbers for those of x.
    assert job.notes[2].performed == []
    assert "allreduce.x on rank 2 (c) failed: the network is on fire" in str(errors[2])
    job.stop()


@pytest.mark.parametrize(("lost", "text"), [(2, r"^Rank 2 \(c\) is gone\."), (1, r"^Rank 1 \(b\) is gone\.")])
def test_a_lost_connection_fails_open_operations_and_names_the_rank(job, lost, text):
    other = 3 - lost
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(job.run, rank, _allreduce("x")) for rank in (0, other)]
        job.sockets[lost].shutdown(socket.SHUT_RDWR)
        for run in runs:
            with pytest.raises(HorovodInternalError, match=text):
                run.result(30.0)
    with pytest.raises(HorovodInternalError, match=r"^Rank 0 \(a\) is gone\."):
        job.run(lost, _allreduce("y"))


def test_when_one_rank_stops_all_controllers_end_and_refuse_further_operations(job):
    job.on_all(lambda rank: job.run(rank, _allreduce("x")))
    job.controllers[1].stop()
    for controller in job.controllers:
        controller._thread.join(30.0)
        assert not controller._thread.is_alive()
        with pytest.raises(HorovodInternalError, match=SHUT_DOWN[:30]):
            controller.submit(Operation(_allreduce("y")))
        with pytest.raises(HorovodInternalError):
            controller.submit(Operation(JOIN))


@pytest.fixture
def restored_sigint() -> Iterator[None]:
    """Makes Ctrl-C raise KeyboardInterrupt, whatever the process that started the tests has set."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupted_wait_leaves_the_operation_in_flight_and_the_job_continues(job, restored_sigint):
    operation = Operation(_allreduce("x"))
    job.controllers[0].submit(operation)
    interrupt = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        interrupt.start()
        job.controllers[0].wait(operation)
    job.on_all(lambda rank: job.run(rank, _allreduce("x")) if rank else None)
    job.controllers[0].wait(operation)
    assert operation.result == ["x"]


def test_a_call_at_the_end_of_an_operation_may_submit_the_next_one_of_its_name(job):
    first, second = Operation(_allreduce("x")), Operation(_allreduce("x"))
    job.controllers[0].submit(first)
    job.controllers[0].call_when_done(first, lambda: job.controllers[0].submit(second))
    for _ in range(2):
        job.on_all(lambda rank: job.run(rank, _allreduce("x")) if rank else None)
    job.controllers[0].wait(second)
    calls: list[str] = []
    # Of an operation that is done, the call is made now.
    job.controllers[0].call_when_done(first, lambda: calls.append("late"))
    assert calls == ["late"] and first.result == second.result == ["x"]


def test_operations_of_one_name_differ_by_kind_and_process_set(job):
    kinds = [_allreduce("x"), _allreduce("x", process_set=1), Request.of("barrier", "x")]
    for request in kinds:
        job.controllers[1].submit(Operation(request))
    job.on_all(lambda rank: job.run(rank, _allreduce("x")) if rank != 1 else None)


def test_an_operation_that_was_closed_while_it_ran_is_finished_once():
    """The thread that closes the controller fails an operation while the engine thread still performs it."""
    job = Job()
    is_running, may_end = threading.Event(), threading.Event()
    performed = job.notes[1].perform

    def slow(response: Response, operations: list[Operation | None]) -> None:
        is_running.set()
        assert may_end.wait(10.0)
        performed(response, operations)

    job.notes[1].perform = slow
    operations = [Operation(_allreduce("x")) for _ in HOSTS]
    for controller, operation in zip(job.controllers, operations, strict=True):
        controller.submit(operation)
    assert is_running.wait(10.0)
    job.controllers[1]._close("interrupted")
    may_end.set()
    job.stop()
    assert operations[1].error == "interrupted"


def test_a_controller_that_has_ended_keeps_no_file_open():
    before = set(Path("/proc/self/fd").iterdir())
    job = Job()
    job.stop()
    for theirs in job.sockets.values():
        theirs.close()
    assert set(Path("/proc/self/fd").iterdir()) <= before
