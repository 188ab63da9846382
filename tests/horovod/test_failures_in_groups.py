"""Groups with one member that is wrong, compressed and sparse tensors at their edges, and joins with work under way."""

import pytest
import torch
from tests.horovod.jobs import error_of, in_job

import horovod.torch as hvd

COMPRESSIONS = ["fp16", "bf16", "fp8", "int8"]


def _one_wrong_member(rank: int, size: int) -> list[tuple[str, str]]:
    good = torch.ones(3)
    refused = [
        lambda: hvd.grouped_allreduce([good, torch.ones(2, dtype=torch.bool)]),
        lambda: hvd.grouped_allreduce_([good, torch.ones(2, 3).t()]),
        lambda: hvd.grouped_allgather([good, torch.ones(2, dtype=torch.complex64)]),
        lambda: hvd.grouped_reducescatter([good, torch.eye(2).to_sparse()]),
        lambda: hvd.grouped_allreduce([good, torch.ones(2, dtype=torch.int32)], op=hvd.Adasum),
    ]
    # This rank alone can see what is wrong: nothing was sent, so the other ranks need not call it.
    for call in refused[rank::size]:
        name, text = error_of(call)
        assert name == "ValueError" and ("is not supported" in text or "contiguous" in text), text
    assert good.tolist() == [1, 1, 1]
    compared = [
        lambda: hvd.grouped_allreduce([good, torch.ones(2 + rank)], name="shape"),
        lambda: hvd.grouped_allgather([good, torch.ones(2, 2 + rank)], name="columns"),
        lambda: hvd.grouped_allgather([good, torch.tensor(1.0)], name="no dimensions"),
        lambda: hvd.grouped_reducescatter([good, torch.ones(2 + rank)], name="rows"),
        lambda: hvd.grouped_allreduce([good, [good, good.int()][rank]], name="dtype"),
        lambda: (hvd.grouped_allreduce if rank else hvd.grouped_allgather)([good, good], name="kind"),
        lambda: hvd.grouped_allreduce([good] * (rank + 1), name="number"),
    ]
    found = []
    for number, call in enumerate(compared):
        # Another group is under way: it is not affected.
        other = hvd.grouped_allreduce_async([good, good.int()], op=hvd.Sum, name=f"other.{number}")
        found.append(error_of(call))
        assert [t.tolist() for t in hvd.synchronize(other)] == [[size] * 3] * 2
    return found


def test_one_wrong_member_fails_its_group_on_all_ranks_and_no_other_group(run_ranks):
    one, two = run_ranks(2, in_job, _one_wrong_member)
    assert one == two
    assert [name for name, _ in one] == ["HorovodInternalError"] * 7
    said = ["[[3], [2]]", "[2, 2]", "no dimensions", "[[3], [3]]", "int32", "allgather", "numbers of tensors"]
    for (_, text), part in zip(one, said, strict=True):
        assert part in text, text


@pytest.mark.parametrize("name", ["none", "fp16", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_packing_keeps_shape_and_dtype_of_odd_tensors(name, dtype):
    compressor = getattr(hvd.Compression, name)
    for shape in ((), (1,), (0,), (0, 3), (129,), (2, 64, 2)):
        given = torch.full(shape, 1.5, dtype=dtype)
        found = compressor.decompress(*compressor.compress(given))
        assert found.shape == given.shape and found.dtype is dtype and torch.equal(found, given)
    columns = torch.arange(12.0).view(3, 4).t().to(dtype)
    torch.testing.assert_close(compressor.decompress(*compressor.compress(columns)), columns, rtol=0.1, atol=0.1)
    whole = torch.arange(5)
    assert torch.equal(compressor.decompress(*compressor.compress(whole)), whole)


def test_a_compressor_must_have_both_methods():
    from horovod.torch.compression import Compressor

    for call in (lambda: Compressor.compress(torch.ones(1)), lambda: Compressor.decompress(torch.ones(1), None)):
        with pytest.raises(NotImplementedError):
            call()


def _compressed(rank: int, size: int) -> None:
    total = float(sum(range(1, size + 1)))
    for name in COMPRESSIONS:
        options = {"compression": getattr(hvd.Compression, name), "op": hvd.Sum}
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            for shape in ((), (0,), (3, 0), (1,), (200,)):
                found = hvd.allreduce(torch.full(shape, rank + 1.0, dtype=dtype), **options)
                assert found.dtype is dtype and found.shape == shape and (found == total).all()
        scaled = hvd.allreduce(torch.full((5,), rank + 1.0), prescale_factor=2.0, postscale_factor=0.25, **options)
        assert scaled.tolist() == [total / 2] * 5
        # A group with several dtypes and an empty member.
        group = [torch.full((4,), rank + 1.0), torch.zeros(0), torch.full((2,), rank + 1.0).double()]
        assert [t.tolist() for t in hvd.grouped_allreduce(group, **options)] == [[total] * 4, [], [total] * 2]
    for name in ("fp16", "bf16"):
        rows = hvd.reducescatter(torch.full((size + 1, 2), rank + 1.0), compression=getattr(hvd.Compression, name))
        assert rows.shape == (2 if rank == 0 else 1, 2) and (rows == total / size).all() and rows.dtype is torch.float32


def test_compressed_reductions_of_odd_tensors_are_exact_where_the_numbers_are(run_ranks):
    run_ranks(2, in_job, _compressed)


def _sparse(rank: int, size: int) -> None:
    # Rank r has r entries; all of them share one.
    indices = torch.tensor([[0, r + 1] for r in range(rank)]).reshape(-1, 2).t()
    given = torch.sparse_coo_tensor(indices, torch.full((rank,), 6.0), (2, 5))
    dense = sum(
        torch.sparse_coo_tensor(
            torch.tensor([[0, k + 1] for k in range(r)]).reshape(-1, 2).t(), torch.full((r,), 6.0), (2, 5)
        ).to_dense()
        for r in range(size)
    )
    for op, divisor in ((hvd.Sum, 1), (hvd.Average, size)):
        fetch = hvd.sparse_allreduce_async(given, f"sparse.{op}", op)
        found = fetch()
        assert found.is_sparse and found.shape == (2, 5)
        assert torch.equal(found.to_dense(), dense / divisor)
    # Rows of a table, which have a dense dimension, and no rows at all.
    rows = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.full((1, 3), rank + 1.0), (4, 3))
    total = size * (size + 1) / 2
    assert hvd.sparse_allreduce_async(rows, "rows", hvd.Sum)().to_dense()[1].tolist() == [total] * 3
    # Without a name, several may be in flight.
    fetches = [hvd.sparse_allreduce_async(rows * factor, None, hvd.Sum) for factor in (1, 2)]
    assert [fetch().to_dense()[1, 0].item() for fetch in fetches] == [total, 2 * total]
    nothing = torch.zeros(4, 3).to_sparse()
    assert hvd.sparse_allreduce_async(nothing, "nothing", hvd.Average)()._nnz() == 0
    for op in (hvd.Max, hvd.Adasum, 9):
        name, text = error_of(lambda op=op: hvd.sparse_allreduce_async(rows, "x", op))
        assert (name, text) == (
            "ValueError",
            f"sparse_allreduce_async supports op=Average and op=Sum only, not op={op}.",
        )


def test_sparse_tensors_with_different_numbers_of_entries_are_added(run_ranks):
    run_ranks(3, in_job, _sparse)


def _joins(rank: int, size: int) -> None:
    """Rank 0 has the least data. What it has submitted itself is done before its join is."""
    early = [hvd.allreduce_async(torch.full((i + 1,), 1.0), op=hvd.Sum, name=f"early.{i}") for i in range(5)]
    if rank == 0:
        assert hvd.join() == size - 1
        # Results of operations before the join are still there.
        assert [hvd.synchronize(handle).tolist() for handle in early] == [[size] * (i + 1) for i in range(5)]
    else:
        assert [hvd.synchronize(handle).tolist() for handle in early] == [[size] * (i + 1) for i in range(5)]
        others = size - 1
        scaled = hvd.allreduce(torch.full((3,), 2.0), op=hvd.Sum, prescale_factor=3.0, postscale_factor=0.5, name="s")
        assert scaled.tolist() == [3.0 * others] * 3
        large = hvd.allreduce(torch.full((40_000,), 4.0, dtype=torch.float64), name="large")
        assert large.unique().tolist() == [4.0 * others / size]
        group = hvd.grouped_allreduce([torch.ones(2), torch.ones(3).int()], op=hvd.Sum, name="group")
        assert [t.tolist() for t in group] == [[others] * 2, [others] * 3]
        packed = hvd.allreduce(torch.ones(300), op=hvd.Sum, compression=hvd.Compression.int8, name="packed")
        torch.testing.assert_close(packed, torch.full((300,), float(others)))
        adasum = hvd.allreduce(torch.ones(3), op=hvd.Adasum, name="adasum")
        torch.testing.assert_close(adasum, torch.ones(3))
        if rank == size - 1:
            # All ranks but this one may have joined by now.
            hvd.allreduce(torch.ones(1), name="last")
        hvd.join()
    # The next epoch.
    assert hvd.allgather(torch.tensor([rank])).tolist() == list(range(size))


def test_reductions_of_every_kind_continue_after_a_join(run_ranks):
    run_ranks(3, in_job, _joins)
