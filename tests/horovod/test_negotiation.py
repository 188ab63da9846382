"""What a thin wrapper over torch.distributed does not give: names, order, mismatches, join, stalls, fusion."""

import logging
import random
import threading
import time

import pytest
import torch
from tests.horovod.jobs import error_of, in_job, job

import horovod.torch as hvd
from horovod.common.settings import Settings
from horovod.engine.job import current


def _storm(rank: int, size: int) -> None:
    numbers = list(range(500))
    random.Random(rank).shuffle(numbers)
    failures = []

    def work(mine):
        try:
            started = []
            for number in mine:
                if number % 5 == 0:
                    handle = hvd.allgather_async(torch.full((rank + 1,), number), name=f"storm.{number}")
                elif number % 5 == 1:
                    handle = hvd.broadcast_async(
                        torch.full((3,), rank * 1000 + number), number % size, name=f"storm.{number}"
                    )
                else:
                    handle = hvd.allreduce_async(
                        torch.full((number % 7 + 1,), rank + number), op=hvd.Sum, name=f"storm.{number}"
                    )
                started.append((number, handle))
            for number, handle in started:
                result = hvd.synchronize(handle)
                if number % 5 == 0:
                    assert result.tolist() == [number] * (size * (size + 1) // 2)
                elif number % 5 == 1:
                    assert result.tolist() == [(number % size) * 1000 + number] * 3
                else:
                    assert result.tolist() == [size * number + size * (size - 1) // 2] * (number % 7 + 1)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(numbers[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


@pytest.mark.parametrize("size", [2, 3, 4])
def test_500_operations_in_each_ranks_own_order_from_4_threads_all_come_out_right(run_ranks, size):
    run_ranks(size, in_job, _storm)


def _blocking_in_other_orders(rank: int, size: int) -> None:
    """Two threads, each blocked in a call, in the opposite order on the two ranks."""
    results = {}

    def work(name):
        for step in range(20):
            results[name, step] = hvd.allreduce(torch.full((4,), float(step)), name=f"{name}.{step}", op=hvd.Sum)

    threads = [threading.Thread(target=work, args=(name,)) for name in ("ab" if rank else "ba")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(value.tolist() == [step * size] * 4 for (_, step), value in results.items())


def test_threads_that_block_under_different_names_do_not_wait_for_each_other(run_ranks):
    run_ranks(2, in_job, _blocking_in_other_orders)


def _mismatches(rank: int, size: int) -> list[tuple[str, str, float]]:
    last = rank == size - 1
    calls = [
        lambda: hvd.allreduce(torch.ones(3 if last else 2), name="shape"),
        lambda: hvd.allreduce(torch.ones(2, dtype=torch.float64 if last else torch.float32), name="dtype"),
        lambda: hvd.allreduce(torch.ones(2), op=hvd.Sum if last else hvd.Average, name="op"),
        lambda: hvd.allreduce(torch.ones(2), prescale_factor=2.0 if last else 1.0, name="scale"),
        lambda: hvd.broadcast(torch.ones(2), size - 1 if last else 0, name="root"),
        lambda: hvd.broadcast(torch.ones(3 if last else 2), 0, name="broadcast shape"),
        lambda: hvd.allgather(torch.ones(2, 3 if last else 2), name="columns"),
        lambda: hvd.allgather(torch.ones(2) if last else torch.ones(2, 2), name="dimensions"),
        lambda: hvd.alltoall(torch.ones(2 * size, 3 if last else 2), name="alltoall columns"),
        lambda: hvd.reducescatter(torch.ones(3 if last else 2, 2), name="scatter"),
        lambda: hvd.grouped_allreduce([torch.ones(2)] * (3 if last else 2), name="group"),
        lambda: (hvd.allgather if last else hvd.allreduce)(torch.ones(2), name="kind"),
        lambda: hvd.allgather(torch.tensor(1.0), name="no dimensions"),
        lambda: hvd.allreduce(
            torch.ones(2), compression=hvd.Compression.fp16 if last else hvd.Compression.none, name="wire"
        ),
    ]
    found = []
    for call in calls:
        begun = time.monotonic()
        found.append((*error_of(call), time.monotonic() - begun))
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size  # the job continues
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_a_mismatch_is_an_error_on_all_ranks_that_names_both_sides_at_once(run_ranks, size):
    by_rank = run_ranks(size, in_job, _mismatches)
    telling = [
        ("[2]", "[3]"),
        ("float32", "float64"),
        ("Average", "Sum"),
        ("(1.0, 1.0)", "(2.0, 1.0)"),
        ("root rank 0", f"root rank {size - 1}"),
        ("[2]", "[3]"),
        ("[2, 2]", "[2, 3]"),
        ("[2, 2]", "[2]"),
        (f"[{2 * size}, 2]", f"[{2 * size}, 3]"),
        ("[2, 2]", "[3, 2]"),
        ("2", "3"),
        ("allreduce", "allgather"),
        ("no dimensions", ""),
        ("none", "fp16"),
    ]
    for errors in zip(*by_rank, strict=True):
        assert len({text for _, text, _ in errors}) == 1, errors
        assert all(kind == "HorovodInternalError" for kind, _, _ in errors), errors
        assert max(seconds for _, _, seconds in errors) < Settings().stall_warning_s / 2, "told at once, not as a stall"
    for (_, text, _), (one, two) in zip(by_rank[0], telling, strict=True):
        assert one in text and two in text, text
        if one != "no dimensions":
            assert "rank 0" in text and f"rank {size - 1}" in text, text


def _crossed_sets(rank: int, size: int) -> tuple[str, str]:
    hvd.shutdown()
    pair = hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[pair])
    chosen = pair if rank == 1 else hvd.global_process_set
    return error_of(lambda: hvd.allreduce(torch.ones(2), name="x", process_set=chosen))


def test_ranks_that_name_different_process_sets_are_told(run_ranks):
    for kind, text in run_ranks(3, in_job, _crossed_sets):
        assert kind == "HorovodInternalError"
        assert "process set 0 [0, 1, 2]" in text and "process set 1 [0, 1]" in text


def _wrong_before_sending(rank: int, size: int) -> None:
    hvd.allreduce_async(torch.ones(17), name="twice")
    kind, text = error_of(lambda: [hvd.allreduce_async(torch.ones(17), name="twice") for _ in range(10)])
    assert kind == "ValueError" and "same name as another tensor" in text
    for call in (hvd.allreduce, hvd.allgather, hvd.reducescatter, lambda t: hvd.broadcast(t, 0), hvd.alltoall):
        kind, text = error_of(lambda call=call: call(torch.ones(2, dtype=torch.complex64)))
        assert kind == "ValueError" and "torch.ComplexFloatTensor is not supported" in text
        kind, text = error_of(lambda call=call: call(torch.ones(4, 4).t()[:, :2]))
        assert (kind, text) == ("ValueError", "Tensor is required to be contiguous.")
    assert error_of(lambda: hvd.allreduce(torch.ones(2, dtype=torch.bool)))[0] == "ValueError"
    assert error_of(lambda: hvd.allreduce(torch.ones(2), average=True, op=hvd.Sum))[0] == "ValueError"
    assert error_of(lambda: hvd.broadcast(torch.ones(2), size))[0] == "ValueError"
    rows = torch.ones(size + 1)
    assert "not an even multiple" in error_of(lambda: hvd.alltoall(rows))[1]
    assert "does not equal number of workers" in error_of(lambda: hvd.alltoall(rows, splits=[1] * (size + 1)))[1]
    assert "greater than the first dimension" in error_of(lambda: hvd.alltoall(rows, splits=[2] * size))[1]
    wide = torch.ones(size, dtype=torch.int64)
    assert "32-bit" in error_of(lambda: hvd.alltoall(rows, splits=wide))[1]
    assert "1D" in error_of(lambda: hvd.alltoall(rows, splits=torch.ones(1, size, dtype=torch.int32)))[1]
    assert error_of(lambda: hvd.reducescatter(rows, op=hvd.Adasum))[0] == "HorovodInternalError"
    assert error_of(lambda: hvd.allreduce(rows, op=99))[0] == "ValueError"
    with pytest.warns(DeprecationWarning):
        assert hvd.allreduce(torch.ones(1), average=False).item() == size


def test_what_one_rank_can_see_is_wrong_is_refused_before_anything_is_sent(run_ranks):
    run_ranks(2, in_job, _wrong_before_sending)


def _join(rank: int, size: int) -> list[int]:
    returned = []
    for round_ in range(2):
        for step in range(rank + 1):
            a = hvd.allreduce_async(torch.ones(3), name="a")
            b = hvd.allreduce_async(torch.full((2,), 7), op=hvd.Sum, name=f"b.{step}")
            active = size - step
            torch.testing.assert_close(hvd.synchronize(a), torch.full((3,), active / size))
            assert hvd.synchronize(b).tolist() == [7 * active] * 2
        if rank and rank == size - 1:
            kind, text = error_of(lambda: hvd.allgather(torch.ones(1)))
            assert kind == "HorovodInternalError" and "Allgather is not supported with Join" in text
            kind, text = error_of(lambda: hvd.broadcast(torch.ones(1), rank))
            assert "Broadcast is not supported with Join" in text
        returned.append(hvd.join())
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size, round_
    return returned


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_without_data_contribute_zeros_and_learn_who_joined_last(run_ranks, size):
    assert run_ranks(size, in_job, _join) == [[size - 1] * 2] * size


def _stall(size_unused: int = 0) -> tuple[list[str], tuple[str, str]]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megaclass.horovod").addHandler(handler)
    with job(STALL_CHECK_TIME_SECONDS="1", STALL_SHUTDOWN_TIME_SECONDS="2") as (rank, _):
        if rank == 1:
            # Busy elsewhere; hears of it at its next operation.
            time.sleep(2.5)
            outcome = error_of(lambda: hvd.allreduce(torch.ones(1), name="late"))
        else:
            outcome = error_of(lambda: hvd.allreduce(torch.ones(1), name="waited for"))
    logging.getLogger("megaclass.horovod").removeHandler(handler)
    return messages, outcome


def test_a_stalled_tensor_is_warned_about_with_the_missing_ranks_and_then_ends_the_job(run_ranks):
    (messages, outcome), (_, late), _ = run_ranks(3, _stall)
    warning = messages[0]
    assert "waiting for remainder of ranks for more than 1 seconds" in warning
    assert "1 (" in warning and "[allreduce.waited for]" in warning and "\n2 (" not in warning
    assert outcome[0] == late[0] == "HorovodInternalError"
    assert "more than 2 seconds" in outcome[1] and "allreduce.waited for" in outcome[1]


def _steady_state(rank: int, size: int) -> int:
    """Bytes this rank sends to rank 0 in one repeated step of 50 tensors."""
    sent = []
    controller = current.running().controller
    send = controller._send_to_rank0
    controller._send_to_rank0 = lambda about, content=b"", payload=b"": (
        sent.append(len(content)),
        send(about, content, payload),
    )
    for _ in range(3):
        sent.clear()
        hvd.grouped_allreduce([torch.ones(40_000)] * 2, name="group")
        handles = [hvd.allreduce_async_(torch.ones(9000), name=f"t.{i}") for i in range(50)]
        for handle in handles:
            hvd.synchronize(handle)
    return sum(sent)


def test_a_step_that_repeats_costs_one_hash_a_cycle(run_ranks):
    with_long_cycle = run_ranks(2, _in_long_cycle, _steady_state)
    # Two cycles, nine bytes each: a tag and a hash.
    assert with_long_cycle[1] == 2 * 9


def _in_long_cycle(function) -> object:
    with job(CYCLE_TIME="1000") as (rank, size):
        return function(rank, size)


def _many_without_names(rank: int, size: int) -> tuple[int, list[int]]:
    """How often this rank announces 1,000 small unnamed allreduces that are submitted in a row, and the bytes of it."""
    sent = []
    controller = current.running().controller
    send = controller._send_to_rank0
    controller._send_to_rank0 = lambda about, content=b"", payload=b"": (
        sent.append(len(content)),
        send(about, content, payload),
    )
    tensors = [torch.full((100,), float(rank + 1)) for _ in range(1000)]
    for step in range(2):
        sent.clear()
        for handle in [hvd.allreduce_async_(tensor, op=hvd.Sum) for tensor in tensors]:
            hvd.synchronize(handle)
        assert all(torch.equal(tensor, torch.full((100,), 3.0 * 2**step)) for tensor in tensors)
    return len(sent), sent


def test_many_small_operations_in_a_row_are_announced_together_and_by_little_more_than_their_names(run_ranks):
    # A rank that is off its core for longer than a cycle time would cut them: here that takes 0.2 s.
    _, (num_messages, sizes) = run_ranks(2, _in_cycles_of_200_ms, _many_without_names)
    # One; a rank that loses its core in between may send what it has first.
    assert num_messages <= 3
    # A name such as "noname.1234" in quotes, a number, and two commas.
    assert sizes[0] < 1000 * 18


def _in_cycles_of_200_ms(function) -> object:
    with job(CYCLE_TIME="200") as (rank, size):
        return function(rank, size)
