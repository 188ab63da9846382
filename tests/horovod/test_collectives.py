"""Every collective on 1 to 4 ranks: values, dtypes, odd shapes, gradients, process sets."""

import mmap
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tests.horovod.jobs import error_of, in_job

import horovod.torch as hvd

SIZES = [1, 2, 3, 4]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def _of(rank: int, dtype: torch.dtype, rows: int = 2) -> torch.Tensor:
    return (torch.arange(rows * 3).view(rows, 3) % 5 + rank).to(dtype)


def _all_collectives(rank: int, size: int) -> None:
    for dtype in INTEGERS + FLOATS:
        mine = _of(rank, dtype)
        everybody = torch.stack([_of(r, dtype).double() for r in range(size)])
        for op, expected in (
            (hvd.Sum, everybody.sum(0)),
            (hvd.Min, everybody.amin(0)),
            (hvd.Max, everybody.amax(0)),
            (hvd.Product, everybody.prod(0)),
        ):
            reduced = hvd.allreduce(mine, op=op)
            assert reduced.dtype is dtype
            # Whole numbers wrap around as the dtype does.
            assert torch.equal(reduced, expected.long().to(dtype)), (dtype, op)
        mean = everybody.mean(0)
        mean = mean if dtype.is_floating_point else mean.trunc()
        torch.testing.assert_close(hvd.allreduce(mine), mean.to(dtype))
        assert torch.equal(mine, _of(rank, dtype))  # the input is left alone
        in_place = mine.clone()
        assert hvd.allreduce_(in_place, op=hvd.Sum) is in_place
        assert torch.equal(in_place, everybody.sum(0).to(dtype))
        scattered = hvd.reducescatter(_of(rank, dtype, rows=size + 1), op=hvd.Sum)
        whole = sum(_of(r, dtype, rows=size + 1).double() for r in range(size))
        first = rank + 1 if rank else 0
        assert torch.equal(scattered, whole[first : rank + 2].to(dtype))
    for dtype in [*INTEGERS, *FLOATS, torch.bool]:
        _moving(rank, size, dtype)


def _moving(rank: int, size: int, dtype: torch.dtype) -> None:
    mine = _of(rank, dtype)
    assert torch.equal(hvd.allgather(mine), torch.cat([_of(r, dtype) for r in range(size)]))
    uneven = hvd.allgather(_of(rank, dtype, rows=rank))
    assert torch.equal(uneven, torch.cat([_of(r, dtype, rows=r) for r in range(size)]))
    root = size - 1
    assert torch.equal(hvd.broadcast(mine, root), _of(root, dtype))
    in_place = mine.clone()
    assert hvd.broadcast_(in_place, root) is in_place
    assert torch.equal(in_place, _of(root, dtype))
    rows = torch.arange(size).repeat_interleave(2)[:, None].to(dtype)
    assert torch.equal(hvd.alltoall(rows), torch.full((2 * size, 1), rank).to(dtype))
    # Rank r sends d + r rows to rank d.
    splits = [destination + rank for destination in range(size)]
    sent = torch.full((sum(splits), 2), rank).to(dtype)
    received, counts = hvd.alltoall(sent, splits=torch.tensor(splits, dtype=torch.int32))
    assert counts.tolist() == [rank + source for source in range(size)]
    assert counts.dtype is torch.int32
    assert torch.equal(received[:, 0], torch.arange(size).repeat_interleave(counts.long()).to(dtype))


@pytest.mark.parametrize("size", SIZES)
def test_every_collective_gives_the_right_numbers_in_every_dtype(run_ranks, size):
    run_ranks(size, in_job, _all_collectives)


def _odd_shapes(rank: int, size: int) -> None:
    assert hvd.allreduce(torch.tensor(float(rank)), op=hvd.Sum).shape == ()
    assert hvd.broadcast(torch.tensor(rank), 0).item() == 0
    assert hvd.allreduce(torch.zeros(0, 3)).shape == (0, 3)
    assert hvd.allgather(torch.zeros(0, 3)).shape == (0, 3)
    assert hvd.alltoall(torch.zeros(0, 3)).shape == (0, 3)
    assert hvd.reducescatter(torch.zeros(0, 3)).shape == (0, 3)
    assert hvd.broadcast(torch.zeros(0), 0).shape == (0,)
    only_last = hvd.allgather(torch.ones(5 if rank == size - 1 else 0, 2))
    assert only_last.shape == (5, 2)
    large = torch.full((3_000_000,), float(rank + 1))
    assert hvd.allreduce(large, op=hvd.Sum).unique().tolist() == [size * (size + 1) / 2]
    assert hvd.allreduce(large, name="large", prescale_factor=2.0).unique().tolist() == [size + 1]


@pytest.mark.parametrize("size", SIZES)
def test_scalars_empty_tensors_and_large_ones_travel_too(run_ranks, size):
    run_ranks(size, in_job, _odd_shapes)


def _scaling(rank: int, size: int) -> None:
    whole = torch.tensor([7, -7, 10])
    cut = (whole.double() * 0.3).to(torch.int64)
    assert torch.equal(hvd.allreduce(whole, op=hvd.Sum, prescale_factor=0.3), cut * size)
    assert torch.equal(
        hvd.allreduce(whole, op=hvd.Sum, postscale_factor=0.3), (whole.double() * size * 0.3).to(torch.int64)
    )
    assert torch.equal(
        hvd.allreduce(torch.tensor([-3]) * (rank == 0)), torch.tensor([-3]).div(size, rounding_mode="trunc")
    )
    half = torch.tensor([1.5, 3.0], dtype=torch.float16)
    scaled = hvd.allreduce(half, op=hvd.Sum, prescale_factor=0.1)
    torch.testing.assert_close(scaled, (half.float() * 0.1).half() * size)


def test_whole_numbers_are_scaled_in_float64_and_cut_off(run_ranks):
    run_ranks(3, in_job, _scaling)


def _handles(rank: int, size: int) -> None:
    handles = [hvd.allreduce_async(torch.ones(17, 17), op=hvd.Sum) for _ in range(20)]
    assert not all(hvd.poll(handle) for handle in handles)
    assert all(torch.equal(hvd.synchronize(handle), torch.full((17, 17), float(size))) for handle in handles)
    assert hvd.synchronize(handles[0]) is None
    tensors = [torch.full((3,), float(rank)), torch.full((2, 2), rank), torch.ones(4, dtype=torch.float64)]
    total = size * (size - 1) // 2
    expected = [torch.full((3,), float(total)), torch.full((2, 2), total), torch.full((4,), float(size)).double()]
    grouped = hvd.synchronize(hvd.grouped_allreduce_async(tensors, op=hvd.Sum))
    assert isinstance(grouped, tuple) and all(map(torch.equal, grouped, expected))
    assert all(map(torch.equal, hvd.grouped_allreduce(tensors, op=hvd.Sum), expected))
    gathered = hvd.grouped_allgather([torch.full((rank,), rank), torch.ones(1)])
    assert gathered[0].tolist() == [r for r in range(size) for _ in range(r)] and gathered[1].shape == (size,)
    assert all(hvd.grouped_reducescatter([torch.ones(size), torch.ones(2 * size)], op=hvd.Sum)[0] == size)
    copies = [tensor.clone() for tensor in tensors]
    hvd.grouped_allreduce_(copies, op=hvd.Sum)
    assert all(map(torch.equal, copies, expected))
    output, splits = hvd.synchronize(hvd.alltoall_async(torch.ones(size)))
    assert output.shape == (size,) and splits.tolist() == [1] * size
    hvd.barrier()


def test_asynchronous_and_grouped_forms_agree_with_the_plain_ones(run_ranks):
    run_ranks(3, in_job, _handles)


def _gradients(rank: int, size: int) -> None:
    """Each gradient against the mean over ranks of what the plain computation on one machine gives."""
    generator = torch.Generator().manual_seed(1)
    data = torch.randn(size, 2 * size, 3, generator=generator, dtype=torch.float64)
    weight = torch.randn(size, 2 * size * size, 3, generator=generator, dtype=torch.float64)

    def own(function, rows):
        leaf = data[rank].clone().requires_grad_()
        (function(leaf) * weight[rank, :rows]).sum().backward()
        return leaf.grad

    rows, average = 2 * size, weight[:, : 2 * size].mean(0)
    torch.testing.assert_close(own(hvd.allreduce, rows), average)
    torch.testing.assert_close(
        own(lambda x: hvd.allreduce(x, op=hvd.Sum, postscale_factor=3.0), rows), average * size * 3
    )
    torch.testing.assert_close(
        own(lambda x: hvd.grouped_allreduce([x], op=hvd.Sum, prescale_factor=0.5)[0], rows), average * size * 0.5
    )
    torch.testing.assert_close(own(lambda x: hvd.broadcast(x, 0), rows), average * (rank == 0))
    gathered = weight.mean(0)[rank * rows : (rank + 1) * rows]
    torch.testing.assert_close(own(hvd.allgather, rows * size), gathered)
    torch.testing.assert_close(own(lambda x: hvd.grouped_allgather([x])[0], rows * size), gathered)
    scattered = torch.cat([weight[r, :2] for r in range(size)])
    torch.testing.assert_close(own(hvd.reducescatter, 2), scattered)
    torch.testing.assert_close(
        own(lambda x: hvd.reducescatter(x, op=hvd.Sum, prescale_factor=2.0), 2), scattered * size * 2
    )
    torch.testing.assert_close(own(lambda x: hvd.grouped_reducescatter([x], op=hvd.Sum)[0], 2), scattered * size)
    back = torch.cat([weight[r, 2 * rank : 2 * rank + 2] for r in range(size)])
    torch.testing.assert_close(own(hvd.alltoall, rows), back)
    # With splits: one row to each rank, the rest stays at home and has no gradient.
    leaf = data[rank].clone().requires_grad_()
    sent, _ = hvd.alltoall(leaf, splits=[1] * size)
    (sent * weight[rank, :size]).sum().backward()
    expected = torch.zeros_like(leaf)
    expected[:size] = torch.stack([weight[r, rank] for r in range(size)])
    torch.testing.assert_close(leaf.grad, expected)
    hvd.allreduce(leaf).sum().backward()  # a gradient that is an expanded scalar


@pytest.mark.parametrize("size", SIZES)
def test_the_gradient_of_each_collective_is_the_documented_one(run_ranks, size):
    run_ranks(size, in_job, _gradients)


def _process_sets(rank: int, size: int) -> None:
    hvd.shutdown()
    even, odd = hvd.ProcessSet(range(0, size, 2)), hvd.ProcessSet(range(1, size, 2))
    assert even.size() is None and even.rank() is None
    hvd.init(process_sets=[even, odd])
    mine, other = (odd, even) if rank % 2 else (even, odd)
    assert mine.included() and not other.included() and mine.rank() == rank // 2
    members = [r for r in range(size) if r % 2 == rank % 2]
    assert mine.size() == len(members) and mine.ranks == members
    assert hvd.allreduce(torch.tensor(rank), op=hvd.Sum, process_set=mine).item() == sum(members)
    assert hvd.allgather(torch.tensor([rank]), process_set=mine).tolist() == members
    assert hvd.broadcast(torch.tensor(rank), members[-1], process_set=mine).item() == members[-1]
    assert hvd.broadcast_object(rank, members[-1], process_set=mine) == members[-1]
    assert hvd.reducescatter(torch.ones(len(members)), op=hvd.Sum, process_set=mine).tolist() == [len(members)]
    hvd.barrier(process_set=mine)
    assert error_of(lambda: hvd.allreduce(torch.ones(1), process_set=other))[0] == "ValueError"
    name, text = error_of(lambda: hvd.broadcast(torch.ones(1), 1 - rank % 2, process_set=mine))
    assert name == "ValueError" and "invalid root rank" in text
    assert error_of(lambda: hvd.add_process_set([0]))[1].startswith("Set HOROVOD_DYNAMIC_PROCESS_SETS=1")
    # The same name on two sets at once.
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="x").item() == size
    hvd.shutdown()
    hvd.init(process_sets="dynamic")
    first = hvd.add_process_set([0, size - 1])
    name, text = error_of(lambda: hvd.add_process_set([size - 1, 0]))
    assert name == "ValueError" and "duplicate" in text
    if first.included():
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=first).item() == 2
    assert hvd.remove_process_set(first) and not hvd.remove_process_set(first)
    assert first.process_set_id is None
    assert not hvd.remove_process_set(hvd.global_process_set)
    again = hvd.add_process_set([0, size - 1])
    assert again.process_set_id == 2
    name, text = error_of(lambda: hvd.add_process_set([rank]))
    assert name == "HorovodInternalError" and "rank 0" in text and "ranks [0]" in text


def test_process_sets_run_operations_of_their_own_and_come_and_go(run_ranks):
    run_ranks(4, in_job, _process_sets)


def _adasum(rank: int, size: int) -> None:
    vectors = [torch.randn(50, generator=torch.Generator().manual_seed(r), dtype=torch.float64) for r in range(size)]

    def combined(a, b):
        dot, aa, bb = torch.dot(a, b), torch.dot(a, a), torch.dot(b, b)
        return (1 - dot / (2 * aa)) * a + (1 - dot / (2 * bb)) * b

    level = list(vectors)
    while len(level) > 1:
        level = [combined(*level[i : i + 2]) if i + 1 < len(level) else level[i] for i in range(0, len(level), 2)]
    torch.testing.assert_close(hvd.allreduce(vectors[rank], op=hvd.Adasum), level[0])
    single = hvd.allreduce(vectors[rank].float(), op=hvd.Adasum)
    torch.testing.assert_close(single, level[0].float(), atol=1e-5, rtol=1e-5)
    parallel = hvd.allreduce(torch.full((4,), 3.0), op=hvd.Adasum)
    torch.testing.assert_close(parallel, torch.full((4,), 3.0))
    orthogonal = hvd.allreduce(torch.eye(size)[rank].contiguous(), op=hvd.Adasum)
    torch.testing.assert_close(orthogonal, torch.ones(size))


@pytest.mark.parametrize("size", SIZES)
def test_adasum_averages_parallel_gradients_and_adds_orthogonal_ones_on_any_number_of_ranks(run_ranks, size):
    run_ranks(size, in_job, _adasum)


def _generators_and_bools(rank: int, size: int) -> None:
    def tensors():
        return (torch.full((2, 3), float(rank + 1 + i)) for i in range(3))

    sums = [sum(r + 1.0 + i for r in range(size)) for i in range(3)]
    assert [float(t[0, 0]) for t in hvd.grouped_allreduce(tensors(), op=hvd.Sum)] == sums
    assert [float(t[0, 0]) for t in hvd.grouped_allreduce_(tensors(), op=hvd.Sum)] == sums
    for submit in (hvd.grouped_allreduce_async, hvd.grouped_allreduce_async_):
        assert [float(t[0, 0]) for t in hvd.synchronize(submit(tensors(), op=hvd.Sum))] == sums
    assert [t.shape[0] for t in hvd.grouped_allgather(tensors())] == [2 * size] * 3
    assert len(hvd.grouped_reducescatter(tensors(), op=hvd.Sum)) == 3
    flags = torch.tensor([True, False, rank == 0][: rank + 1])
    expected = [flag for r in range(size) for flag in [True, False, r == 0][: r + 1]]
    for gathered in (
        hvd.allgather(flags),
        hvd.grouped_allgather([flags])[0],
        hvd.synchronize(hvd.allgather_async(flags)),
    ):
        assert gathered.dtype is torch.bool and gathered.tolist() == expected
    assert hvd.allgather(torch.tensor([rank == 0])).tolist() == [r == 0 for r in range(size)]


def test_groups_may_come_from_a_generator_and_bools_are_gathered(run_ranks):
    run_ranks(2, in_job, _generators_and_bools)


def _barriers_by_a_counter_in_shared_memory(rank: int, size: int, path: str) -> int:
    """How often a barrier returned here before all ranks had entered it: no clock, which each rank would read elsewhere."""
    with Path(path).open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        entered = memoryview(memory).cast("Q")
        num_early = 0
        for number in range(1, 101):
            if number % size == rank:
                time.sleep(0.002)
            entered[rank] = number
            hvd.barrier()
            num_early += min(entered[r] for r in range(size)) < number
        hvd.barrier()
        entered.release()
    return num_early


def _enter_a_barrier(rank: int, size: int) -> None:
    hvd.barrier()


@pytest.mark.parametrize("size", [2, 4])
def test_no_barrier_returns_before_all_ranks_have_entered_it_however_busy_the_machine_is(run_ranks, tmp_path, size):
    shared = tmp_path / "entered"
    shared.write_bytes(bytes(4096))
    # The ranks start before the machine gets busy.
    run_ranks(size, in_job, _enter_a_barrier)
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        assert run_ranks(size, in_job, _barriers_by_a_counter_in_shared_memory, str(shared)) == [0] * size
    finally:
        for process in busy:
            process.kill()
            process.wait()
