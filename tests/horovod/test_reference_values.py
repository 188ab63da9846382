"""Every form of every collective against float64 on 1 to 4 ranks: dtypes, scale factors, uneven rows, all transports."""

import itertools

import pytest
import torch
from tests.horovod.jobs import in_job
from torch import Tensor

import horovod.torch as hvd

SIZES = [1, 2, 3, 4]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SHAPES = [(), (7,), (3, 5)]
LARGE = (30_000,)
FACTORS = [(1.0, 1.0), (0.5, 1.5)]
COMBINED = {
    hvd.Average: lambda stacked: stacked.sum(0),
    hvd.Sum: lambda stacked: stacked.sum(0),
    hvd.Min: lambda stacked: stacked.amin(0),
    hvd.Max: lambda stacked: stacked.amax(0),
    hvd.Product: lambda stacked: stacked.prod(0),
}


def _numbers(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Numbers from 1 to 3, whose product over four ranks fits into int8."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(1, 4, shape, generator=generator).to(dtype)


def _truth(by_rank: list[Tensor], op: int, factors: tuple[float, float]) -> Tensor:
    """In float64, with Horovod's roundings: integers are truncated after each factor and after the division."""
    dtype = by_rank[0].dtype
    cut = (lambda value: value) if dtype.is_floating_point else torch.trunc
    total = COMBINED[op](cut(torch.stack(by_rank).double() * factors[0]))
    total = cut(total * factors[1])
    return cut(total / len(by_rank) if op == hvd.Average else total).to(dtype)


FORMS = {
    "allreduce": lambda given, **options: [hvd.allreduce(tensor, **options) for tensor in given],
    "allreduce_": lambda given, **options: [hvd.allreduce_(tensor.clone(), **options) for tensor in given],
    "allreduce_async": lambda given, **options: _fetched([hvd.allreduce_async(t, **options) for t in given]),
    "allreduce_async_": lambda given, **options: _fetched([hvd.allreduce_async_(t.clone(), **options) for t in given]),
    "grouped_allreduce": lambda given, **options: hvd.grouped_allreduce(given, **options),
    "grouped_allreduce_": lambda given, **options: hvd.grouped_allreduce_([t.clone() for t in given], **options),
    "grouped_allreduce_async": lambda given, **options: hvd.synchronize(hvd.grouped_allreduce_async(given, **options)),
}


def _fetched(handles: list[int]) -> list[Tensor]:
    return [hvd.synchronize(handle) for handle in handles]


def _reductions(rank: int, size: int) -> None:
    # Every op with every dtype and factor, and the forms in turn: 7 and 90 have no common divisor.
    forms = itertools.cycle(FORMS.items())
    for op, dtype, factors in itertools.product(COMBINED, INTEGERS + FLOATS, FACTORS):
        form, call = next(forms)
        # One size that travels with the negotiation, one that a transport of its own carries.
        shapes = SHAPES if form.startswith("grouped") or factors == FACTORS[0] else [*SHAPES, LARGE]
        by_rank = [[_numbers(r, shape, dtype) for shape in shapes] for r in range(size)]
        given = by_rank[rank]
        kept = [tensor.clone() for tensor in given]
        found = call(given, op=op, prescale_factor=factors[0], postscale_factor=factors[1])
        for tensor, versions in zip(found, zip(*by_rank, strict=True), strict=True):
            truth = _truth(list(versions), op, factors)
            assert tensor.dtype is dtype and tensor.shape == truth.shape, form
            torch.testing.assert_close(tensor, truth)
        assert all(map(torch.equal, given, kept)), f"{form} has changed its inputs"


@pytest.mark.parametrize("size", SIZES)
def test_every_form_of_allreduce_agrees_with_float64_for_every_op_dtype_and_factor(run_ranks, size):
    run_ranks(size, in_job, _reductions)


def _rows_of(num_rows: int, rank: int, size: int) -> slice:
    """The rows of a rank where the first ranks have one more."""
    base, more = divmod(num_rows, size)
    begin = rank * base + min(rank, more)
    return slice(begin, begin + base + (rank < more))


def _scattered(rank: int, size: int) -> None:
    for dtype, op, factors in itertools.product(INTEGERS + FLOATS, [hvd.Average, hvd.Sum], FACTORS):
        # Fewer rows than ranks, as many, and more; rows without elements.
        shapes = [(size - 1, 2), (size, 3), (2 * size + 1,), (3, 0)]
        given = [_numbers(rank, shape, dtype) for shape in shapes]
        options = {"op": op, "prescale_factor": factors[0], "postscale_factor": factors[1]}
        if factors == FACTORS[0]:
            forms = [hvd.grouped_reducescatter(given, **options)]
            forms.append(_fetched([hvd.reducescatter_async(tensor, **options) for tensor in given]))
        else:
            forms = [[hvd.reducescatter(tensor, **options) for tensor in given]]
            forms.append(hvd.synchronize(hvd.grouped_reducescatter_async(given, **options)))
        for place, shape in enumerate(shapes):
            whole = _truth([_numbers(r, shape, dtype) for r in range(size)], op, factors)
            for found in forms:
                torch.testing.assert_close(found[place], whole[_rows_of(shape[0], rank, size)])


@pytest.mark.parametrize("size", SIZES)
def test_every_form_of_reducescatter_gives_each_rank_its_rows(run_ranks, size):
    run_ranks(size, in_job, _scattered)


def _moved(rank: int, size: int) -> None:
    for seed, dtype in enumerate([*INTEGERS, *FLOATS, torch.bool]):
        draw = torch.Generator().manual_seed(seed)
        # The same on all ranks: rows that each rank has, and rows that each rank sends to each other one.
        rows = torch.randint(0, 4, (size,), generator=draw).tolist()
        splits = torch.randint(0, 3, (size, size), generator=draw, dtype=torch.int32)
        by_rank = [_numbers(r, (rows[r], 2), dtype, seed) for r in range(size)]
        others = [_numbers(r, (rows[-1 - r],), torch.int32, seed) for r in range(size)]
        assert torch.equal(hvd.synchronize(hvd.allgather_async(by_rank[rank])), torch.cat(by_rank))
        pair = hvd.synchronize(hvd.grouped_allgather_async([by_rank[rank], others[rank]]))
        assert torch.equal(pair[0], torch.cat(by_rank)) and torch.equal(pair[1], torch.cat(others))
        # Two rows at the end that no split covers stay where they are.
        sent = [_numbers(r, (int(splits[r].sum()) + 2, 3), dtype, seed) for r in range(size)]
        received, counts = hvd.alltoall(sent[rank], splits=splits[rank])
        parts = [sent[r][: splits[r].sum()].split(splits[r].tolist())[rank] for r in range(size)]
        assert torch.equal(received, torch.cat(parts)) and torch.equal(counts, splits[:, rank])
        again, _ = hvd.synchronize(hvd.alltoall_async(sent[rank], splits=splits[rank].tolist()))
        assert torch.equal(again, received)
        for root in range(size):
            of_root = _numbers(root, (2, 2), dtype, seed)
            mine = _numbers(rank, (2, 2), dtype, seed)
            assert torch.equal(hvd.synchronize(hvd.broadcast_async(mine, root)), of_root)
            assert hvd.synchronize(hvd.broadcast_async_(mine, root)) is mine and torch.equal(mine, of_root)


@pytest.mark.parametrize("size", SIZES)
def test_every_form_of_allgather_alltoall_and_broadcast_moves_uneven_rows(run_ranks, size):
    run_ranks(size, in_job, _moved)


def _special_values(rank: int, size: int) -> None:
    inf, nan = float("inf"), float("nan")
    for dtype in FLOATS:
        mine = torch.tensor([inf if rank == 0 else 1.0, -inf if rank else inf, nan if rank else 0.0, -0.0], dtype=dtype)
        total = hvd.allreduce(mine, op=hvd.Sum)
        assert total[0] == inf and total[1].isnan() and total[2].isnan() and total[3] == 0
        most = hvd.allreduce(mine[:2].clone(), op=hvd.Max)
        assert most.tolist() == [inf, inf]
        assert hvd.allreduce(mine[:2].clone(), op=hvd.Min).tolist() == [1.0, -inf]
        assert hvd.allreduce(torch.zeros(2, dtype=dtype), prescale_factor=inf).isnan().all()
    # Sums of integers wrap around, averages are those of the wrapped sums, as in Horovod.
    assert hvd.allreduce(torch.full((3,), 200, dtype=torch.uint8), op=hvd.Sum).tolist() == [(200 * size) % 256] * 3
    highest = torch.iinfo(torch.int64).max
    assert hvd.allreduce(torch.tensor([highest]), op=hvd.Max).item() == highest
    assert hvd.allreduce(torch.tensor([highest if rank == 0 else 0]), op=hvd.Sum).item() == highest
    # The sum of half-precision numbers is not rounded after each rank: 2048 + 1 + 1 would stay 2048.
    small = torch.tensor([2048.0 if rank == 0 else 1.0], dtype=torch.float16)
    assert hvd.allreduce(small, op=hvd.Sum).item() == (2050.0 if size == 3 else 2048.0)


def test_infinities_nans_and_overflows_come_out_as_ieee_and_twos_complement_say(run_ranks):
    run_ranks(3, in_job, _special_values)


def _same_tensor_twice(rank: int, size: int) -> None:
    shared = torch.full((3,), rank + 1.0)
    total = float(sum(range(1, size + 1)))
    assert [t.tolist() for t in hvd.grouped_allreduce([shared, shared], op=hvd.Sum)] == [[total] * 3] * 2
    # A view of a larger tensor is reduced alone; its neighbours keep their values.
    table = torch.arange(12.0).view(4, 3)
    hvd.allreduce_(table[1:3], op=hvd.Sum)
    assert table.tolist()[0] == [0, 1, 2] and table.tolist()[3] == [9, 10, 11]
    assert table[1:3].tolist() == [[3.0 * size, 4.0 * size, 5.0 * size], [6.0 * size, 7.0 * size, 8.0 * size]]
    # A result belongs to the caller: the next operation does not write into it.
    first = hvd.allreduce(shared, op=hvd.Sum)
    kept = first.clone()
    for _ in range(3):
        hvd.allreduce(shared * 2, op=hvd.Sum)
    assert torch.equal(first, kept)
    leaf = torch.full((2,), float(rank), requires_grad=True)
    hvd.broadcast_(leaf, 1)
    assert leaf.tolist() == [1, 1] and leaf.grad is None and leaf.requires_grad


def test_tensors_that_share_memory_keep_their_neighbours_and_results_stay(run_ranks):
    run_ranks(2, in_job, _same_tensor_twice)
