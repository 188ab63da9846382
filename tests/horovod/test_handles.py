"""From a call to a handle and back: what is refused before anything is sent, and what a handle gives."""

import threading

import pytest
import torch
from tests.horovod.jobs import error_of, in_job

import horovod.torch as hvd
from horovod.collectives.handles import check_tensor, checked_op, group_of

REDUCING = ["allreduce", "reducescatter"]
MOVING = ["allgather", "broadcast", "alltoall"]


@pytest.mark.parametrize("kind", REDUCING + MOVING)
def test_dense_contiguous_tensors_of_known_types_are_taken(kind):
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16):
        check_tensor(kind, torch.ones(2, 3).to(dtype))
    check_tensor(kind, torch.tensor(1.0))
    check_tensor(kind, torch.zeros(0, 3))
    check_tensor(kind, torch.ones(4, 3)[1:3])


@pytest.mark.parametrize("kind", REDUCING + MOVING)
@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.ones(3, 2).t(), "Tensor is required to be contiguous."),
        (torch.ones(2, 6)[:, ::2], "Tensor is required to be contiguous."),
        (
            torch.eye(2).to_sparse(),
            "Tensor type torch.sparse.FloatTensor is not supported by {kind}: it is sparse. Pass it to "
            "sparse_allreduce_async(), or convert it with to_dense().",
        ),
        (torch.ones(2, dtype=torch.complex64), "Tensor type torch.ComplexFloatTensor is not supported."),
    ],
    ids=["transposed", "strided", "sparse", "complex"],
)
def test_other_tensors_are_refused_in_horovods_words(kind, tensor, text):
    assert error_of(lambda: check_tensor(kind, tensor)) == ("ValueError", text.format(kind=kind))


def test_bools_are_moved_but_not_reduced():
    flags = torch.ones(2, dtype=torch.bool)
    for kind in MOVING:
        check_tensor(kind, flags)
    for kind in REDUCING:
        assert error_of(lambda kind=kind: check_tensor(kind, flags)) == (
            "ValueError",
            "Tensor type torch.BoolTensor is not supported.",
        )


def test_an_op_is_one_of_six_numbers():
    ops = [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product]
    assert ops == [checked_op(number) for number in range(6)]
    name, text = error_of(lambda: checked_op(6))
    assert name == "ValueError" and text == "op=6: expected Average, Sum, Adasum, Min, Max or Product."


def test_a_group_is_a_list_of_at_least_one_tensor():
    tensors = [torch.ones(1), torch.ones(2)]
    assert group_of(iter(tensors)) == tensors
    with pytest.raises(IndexError, match="at least one tensor"):
        group_of([])
    with pytest.raises(ValueError, match="at least one tensor"):
        group_of(iter(()), if_empty=ValueError)
    with pytest.raises(hvd.HorovodInternalError, match="Tensors in list must be on same device"):
        group_of([torch.ones(1), torch.ones(1, device="meta")])


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (hvd.grouped_allreduce, ValueError),
        (hvd.grouped_allreduce_, IndexError),
        (hvd.grouped_allreduce_async, IndexError),
        (hvd.grouped_allreduce_async_, IndexError),
        (hvd.grouped_allgather, IndexError),
        (hvd.grouped_allgather_async, IndexError),
        (hvd.grouped_reducescatter, ValueError),
        (hvd.grouped_reducescatter_async, IndexError),
    ],
    ids=lambda value: value.__name__,
)
def test_an_empty_group_raises_the_type_of_error_that_horovod_raises(call, error):
    # Where tensors are compressed Horovod unpacks an empty list, elsewhere it takes its first element.
    with pytest.raises(error):
        call([])


def _handles(rank: int, size: int) -> None:
    tensor = torch.full((3,), float(rank))
    handle = hvd.allreduce_async(tensor, op=hvd.Sum, name="once")
    assert isinstance(handle, int)
    result = hvd.synchronize(handle)
    assert result.tolist() == [size * (size - 1) / 2] * 3 and tensor.tolist() == [rank] * 3
    # A handle is forgotten once it was waited for.
    assert hvd.synchronize(handle) is None
    assert error_of(lambda: hvd.poll(handle)) == ("ValueError", f"Handle {handle} was not created or has been cleared.")
    in_place = hvd.allreduce_async_(tensor, op=hvd.Max)
    assert hvd.synchronize(in_place) is tensor and tensor.tolist() == [size - 1] * 3
    # poll() turns true without a thread that waits.
    handle = hvd.broadcast_async(torch.full((2,), rank), 0)
    while not hvd.poll(handle):
        pass
    assert hvd.synchronize(handle).tolist() == [0, 0]
    # The same name may be used again as soon as the operation is done, not before.
    handle = hvd.allreduce_async(torch.ones(1), name="twice")
    if size > 1:
        name, text = error_of(lambda: hvd.allreduce_async(torch.ones(1), name="twice"))
        assert (name, "with the same name as another tensor" in text) in (("ValueError", True), ("", False))
    hvd.synchronize(handle)


@pytest.mark.parametrize("size", [1, 2])
def test_a_handle_gives_its_result_once(run_ranks, size):
    run_ranks(size, in_job, _handles)


def _from_threads(rank: int, size: int) -> None:
    """Each thread submits and waits for its own operations; ranks start the threads in different orders."""
    results: dict[int, float] = {}

    def work(number: int) -> None:
        for again in range(5):
            reduced = hvd.allreduce(torch.full((50,), float(rank + number)), op=hvd.Sum, name=f"{number}.{again}")
        results[number] = float(reduced[0])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads[:: 1 if rank % 2 else -1]:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {number: size * number + size * (size - 1) / 2 for number in range(4)}


def test_operations_may_be_submitted_from_several_threads(run_ranks):
    run_ranks(2, in_job, _from_threads)


def _wrong_calls(rank: int, size: int) -> None:
    strangers = hvd.ProcessSet([0])
    wrong = [
        (lambda: hvd.allreduce(torch.ones(2), op=9), "ValueError", "op=9: expected Average"),
        (lambda: hvd.allreduce(torch.ones(2), average=True, op=hvd.Sum), "ValueError", "supersedes average"),
        (
            lambda: hvd.allreduce(torch.ones(2, dtype=torch.int32), op=hvd.Adasum),
            "ValueError",
            "not supported by Adasum",
        ),
        (lambda: hvd.reducescatter(torch.ones(2), op=hvd.Max), "HorovodInternalError", "only supports SUM and AVERAGE"),
        (lambda: hvd.reducescatter(torch.tensor(1.0)), "HorovodInternalError", "no dimensions"),
        (lambda: hvd.allgather(torch.tensor(1.0)), "HorovodInternalError", "no dimensions"),
        (lambda: hvd.broadcast(torch.ones(1), size), "ValueError", f"invalid root rank {size}"),
        (lambda: hvd.broadcast(torch.ones(1), -1), "ValueError", "invalid root rank -1"),
        (lambda: hvd.alltoall(torch.ones(size + 1)), "ValueError", "not an even multiple of the number of workers"),
        (
            lambda: hvd.alltoall(torch.ones(4), splits=[1] * (size + 1)),
            "ValueError",
            "does not equal number of workers",
        ),
        (lambda: hvd.alltoall(torch.ones(1), splits=[1] * size), "ValueError", "greater than the first dimension"),
        (lambda: hvd.alltoall(torch.ones(4), splits=[-1, *[1] * (size - 1)]), "ValueError", "or one is negative"),
        (lambda: hvd.alltoall(torch.ones(4), splits=torch.ones(size)), "ValueError", "32-bit integer elements"),
        (
            lambda: hvd.alltoall(torch.ones(4), splits=torch.ones(1, size, dtype=torch.int32)),
            "ValueError",
            "expects a 1D splits tensor",
        ),
        (lambda: hvd.allreduce(torch.ones(1), process_set=strangers), "ValueError", "has not been registered"),
        (
            lambda: hvd.reducescatter(torch.ones(2), compression=hvd.Compression.int8),
            "ValueError",
            "8-bit compression is for allreduce with op=Sum and op=Average only",
        ),
        (
            lambda: hvd.allreduce(torch.ones(2), compression=hvd.Compression.int8, op=hvd.Max),
            "ValueError",
            "8-bit compression is for allreduce with op=Sum and op=Average only",
        ),
        (
            lambda: hvd.grouped_allreduce(
                [torch.ones(2), torch.ones(2).half()[:1].int()], compression=hvd.Compression.fp8
            ),
            "ValueError",
            "groups in which all tensors are of floating point",
        ),
    ]
    for call, error, text in wrong:
        name, said = error_of(call)
        assert name == error and text in said, (name, said)
    # The job continues, and the numbers of operations without a name still agree.
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [size, size]


def test_wrong_calls_are_refused_and_the_job_continues(run_ranks):
    run_ranks(2, in_job, _wrong_calls)
