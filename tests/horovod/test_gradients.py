"""Gradients of the collectives beyond the plain case: uneven rows, process sets, second order, compression, odd gradients."""

import pytest
import torch
from tests.horovod.jobs import in_job
from torch import Tensor

import horovod.torch as hvd


def _leaf(rank: int, rows: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(rows, 2, generator=generator, dtype=torch.float64).requires_grad_()


def _weight(rank: int, rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(rows, 2, generator=generator, dtype=torch.float64)


def _same(one: Tensor | None, two: Tensor) -> None:
    assert one is not None
    torch.testing.assert_close(one, two)


def _uneven_rows(rank: int, size: int) -> None:
    rows = [r + 1 for r in range(size)]
    total = sum(rows)
    mean = torch.stack([_weight(r, total) for r in range(size)]).mean(0)
    leaf = _leaf(rank, rows[rank])
    (hvd.allgather(leaf) * _weight(rank, total)).sum().backward()
    first = sum(rows[:rank])
    _same(leaf.grad, mean[first : first + rows[rank]])
    # A rank without rows has an empty gradient.
    empty = _leaf(rank, 2 if rank == 0 else 0)
    (hvd.allgather(empty) * _weight(rank, 2)).sum().backward()
    assert empty.grad is not None and empty.grad.shape == empty.shape
    # In a group, each tensor has its own numbers of rows.
    pair = [_leaf(rank, rows[rank]), _leaf(rank + 50, 2)]
    gathered = hvd.grouped_allgather(pair)
    sum((tensor * _weight(rank, len(tensor))).sum() for tensor in gathered).backward()
    _same(pair[0].grad, mean[first : first + rows[rank]])
    mean = torch.stack([_weight(r, 2 * size) for r in range(size)]).mean(0)
    _same(pair[1].grad, mean[2 * rank : 2 * rank + 2])
    # reducescatter gives the first ranks one row more.
    leaf = _leaf(rank, size + 1)
    own = 2 if rank == 0 else 1
    (hvd.reducescatter(leaf, op=hvd.Sum) * _weight(rank, own)).sum().backward()
    _same(leaf.grad, size * torch.cat([_weight(r, 2 if r == 0 else 1) for r in range(size)]))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gradients_follow_rows_that_differ_between_ranks(run_ranks, size):
    run_ranks(size, in_job, _uneven_rows)


def _in_process_sets(rank: int, size: int) -> None:
    sets = [hvd.ProcessSet([0, 2]), hvd.ProcessSet([1])]
    hvd.shutdown()
    hvd.init(process_sets=sets)
    mine = sets[rank % 2]
    members = [0, 2] if rank % 2 == 0 else [1]
    mean = torch.stack([_weight(r, 3) for r in members]).mean(0)
    operations = {
        "allreduce": lambda x: hvd.allreduce(x, process_set=mine),
        "grouped": lambda x: hvd.grouped_allreduce([x], process_set=mine)[0],
        "broadcast": lambda x: hvd.broadcast(x, members[-1], process_set=mine),
    }
    for name, operation in operations.items():
        leaf = _leaf(rank)
        (operation(leaf) * _weight(rank, 3)).sum().backward()
        _same(leaf.grad, mean * (rank == members[-1] if name == "broadcast" else 1))
    leaf = _leaf(rank)
    rows = 3 * len(members)
    (hvd.allgather(leaf, process_set=mine) * _weight(rank, rows)).sum().backward()
    place = members.index(rank)
    _same(leaf.grad, torch.stack([_weight(r, rows) for r in members]).mean(0)[3 * place : 3 * place + 3])
    leaf = _leaf(rank, 2 * len(members))
    (hvd.alltoall(leaf, process_set=mine) * _weight(rank, 2 * len(members))).sum().backward()
    _same(leaf.grad, torch.cat([_weight(r, 2 * len(members))[2 * place : 2 * place + 2] for r in members]))
    # A rank that leaves the job ends it for all: wait for the ranks of the other set.
    hvd.barrier()


def test_gradients_within_a_process_set_are_those_of_its_ranks(run_ranks):
    run_ranks(3, in_job, _in_process_sets)


def _second_order(rank: int, size: int) -> None:
    """The gradient of a gradient penalty, as some GANs use it."""
    leaf = _leaf(rank)
    everyone = [_leaf(r) for r in range(size)]
    for reduce in (hvd.allreduce, lambda x: hvd.grouped_allreduce([x])[0]):
        (gradient,) = torch.autograd.grad(reduce(leaf).pow(3).sum(), leaf, create_graph=True)
        gradient.pow(2).sum().backward()
        # With the mean m over ranks: every rank's gradient is g = 3 m^2, averaged over equal ones.
        mean = torch.stack([other.detach() for other in everyone]).mean(0)
        _same(gradient.detach(), 3 * mean.pow(2))
        # d(g^2)/dm = 2 g * 6 m; two averages of equal numbers over ranks change nothing.
        _same(leaf.grad, 2 * 3 * mean.pow(2) * 6 * mean)
        leaf.grad = None


def test_allreduce_can_be_differentiated_twice(run_ranks):
    run_ranks(2, in_job, _second_order)


def _odd_gradients(rank: int, size: int) -> None:
    # Expanded, transposed and sliced gradients are no contiguous memory.
    leaf = _leaf(rank)
    hvd.allreduce(leaf, op=hvd.Sum).sum().backward()
    _same(leaf.grad, torch.full_like(leaf, size))
    leaf = _leaf(rank)
    (hvd.allreduce(leaf).t() * torch.arange(6.0, dtype=torch.float64).view(2, 3)).sum().backward()
    _same(leaf.grad, torch.arange(6.0, dtype=torch.float64).view(2, 3).t())
    leaf = _leaf(rank)
    hvd.allgather(leaf)[:, 0].sum().backward()
    _same(leaf.grad, torch.tensor([1.0, 0.0], dtype=torch.float64).expand(3, 2))
    # Nothing is recorded where no gradient is wanted.
    with torch.no_grad():
        assert not hvd.allreduce(_leaf(rank)).requires_grad
    assert not hvd.allreduce(torch.ones(2)).requires_grad
    # What alltoall received from each rank has no gradient.
    output, received = hvd.alltoall(_leaf(rank, size), splits=[1] * size)
    assert output.requires_grad and not received.requires_grad
    # In place, a tensor is written like memory, and no graph is kept, as in Horovod.
    tensor = torch.ones(2)
    assert hvd.allreduce_(tensor, op=hvd.Sum) is tensor and tensor.grad_fn is None


def test_gradients_of_any_memory_layout_are_reduced(run_ranks):
    run_ranks(2, in_job, _odd_gradients)


def _compressed(rank: int, size: int) -> None:
    for name in ("fp16", "bf16"):
        compression = getattr(hvd.Compression, name)
        leaf = _leaf(rank).detach().float().requires_grad_()
        weight = _weight(rank, 3).float()
        (hvd.allreduce(leaf, compression=compression, op=hvd.Sum) * weight).sum().backward()
        expected = sum(_weight(r, 3).float() for r in range(size))
        assert leaf.grad is not None and leaf.grad.dtype is torch.float32
        torch.testing.assert_close(leaf.grad, expected, rtol=2e-2, atol=2e-2)
        scattered = hvd.reducescatter(leaf, compression=compression, op=hvd.Sum)
        assert scattered.dtype is torch.float32 and scattered.requires_grad
    whole = torch.arange(2 * size)
    assert hvd.reducescatter(whole, compression=hvd.Compression.fp16, op=hvd.Sum).dtype is torch.int64


def test_gradients_of_compressed_reductions_keep_the_type_of_their_tensors(run_ranks):
    run_ranks(2, in_job, _compressed)
