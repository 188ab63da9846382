"""Collectives that move rows without arithmetic: allgather, broadcast and alltoall; and the allreduce of sparse tensors.

The allreduce of a sparse tensor is two allgathers.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from horovod.collectives.allreduce import allreduce, grouped_allreduce
from horovod.collectives.handles import enqueue, group_of, synchronize, waited
from horovod.common.basics import _basics
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.engine.job import current
from horovod.engine.kinds import Average, Sum
from horovod.transport.arithmetic import empty_result

__all__ = [
    "allgather",
    "allgather_async",
    "alltoall",
    "alltoall_async",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "sparse_allreduce_async",
]


# ---- allgather ----


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Starts an allgather and returns its handle."""
    return enqueue("allgather", [tensor], None, name, process_set)


class HorovodAllgather(torch.autograd.Function):
    """allgather with a gradient: each rank takes its own rows of the gradient averaged over ranks."""

    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, is_grouped: bool, *tensors: Tensor) -> Any:
        ctx.process_set = process_set
        outputs, ctx.sizes = waited(
            lambda: enqueue("allgather", tensors, None, name, process_set, is_grouped=is_grouped),
            lambda operation: (tuple(operation.outputs), operation.sizes),
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> Any:
        rank = ctx.process_set.rank()
        reduced = grouped_allreduce(
            [gradient.contiguous() for gradient in grad_output], op=Average, process_set=ctx.process_set
        )
        own = [
            gradient.narrow(0, sum(rows[:rank]), rows[rank]) for gradient, rows in zip(reduced, ctx.sizes, strict=True)
        ]
        return (None, None, None, *own)


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Returns the ranks' tensors concatenated along dimension 0, which may differ between ranks; differentiable."""
    result: Tensor = HorovodAllgather.apply(name, process_set, False, tensor)[0]  # type: ignore[no-untyped-call]
    return result


def grouped_allgather_async(
    tensors: Iterable[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts an allgather of each tensor of the list; returns one handle for all."""
    tensors = group_of(tensors)
    return enqueue("allgather", tensors, None, name, process_set, is_grouped=True)


def grouped_allgather(
    tensors: Iterable[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[Tensor, ...]:
    """Returns the allgather of each tensor of the list; differentiable."""
    tensors = group_of(tensors)
    result: tuple[Tensor, ...] = HorovodAllgather.apply(name, process_set, True, *tensors)  # type: ignore[no-untyped-call]
    return result


def sparse_allreduce_async(
    tensor: Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Starts the sum or average of a sparse tensor by gathering indices and values; the function it returns waits for it."""
    if op not in (Average, Sum):
        raise ValueError(f"sparse_allreduce_async supports op=Average and op=Sum only, not op={op!r}.")
    # allgather concatenates along dimension 0, so the indices are sent as one row per value.
    indices = tensor._indices().transpose(0, 1).contiguous()
    indices_handle = allgather_async(indices, name=f"{name}.indices", process_set=process_set)
    values_handle = allgather_async(tensor._values().contiguous(), name=f"{name}.values", process_set=process_set)

    def result() -> Tensor:
        values = synchronize(values_handle)
        gathered = synchronize(indices_handle)
        if op == Average:
            values = values / process_set.size()
        return torch.sparse_coo_tensor(gathered.transpose(0, 1), values, tensor.size())

    return result


# ---- broadcast ----


def _enqueue_broadcast(
    tensor: Tensor, output: Tensor, root_rank: int, name: str | None, process_set: ProcessSet
) -> int:
    job = current.running()
    members = job.members(process_set.process_set_id)
    # For an unknown process set, or one without this rank, enqueue() raises the error about membership instead.
    if members and job.meeting.rank in members and root_rank not in members:
        raise ValueError(
            f"broadcast received invalid root rank {root_rank} for provided process set: its ranks are {list(members)}."
        )
    tensors = [tensor]
    outputs = tensors if output is tensor else [output]
    return enqueue("broadcast", tensors, outputs, name, process_set, root=root_rank)


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts a broadcast into a new tensor and returns its handle. `root_rank` is the global rank."""
    output = empty_result(tensor)
    return _enqueue_broadcast(tensor, output, root_rank, name, process_set)


class HorovodBroadcast(torch.autograd.Function):
    """broadcast with a gradient: the average over ranks on the root, zeros elsewhere."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Tensor:
        ctx.root_rank = root_rank
        ctx.process_set = process_set
        result: Tensor = waited(lambda: broadcast_async(tensor, root_rank, name, process_set))
        return result

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        reduced = allreduce(grad_output.contiguous(), op=Average, process_set=ctx.process_set)
        return (reduced if _basics.rank() == ctx.root_rank else reduced * 0), None, None, None


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Returns the root's tensor; differentiable. `root_rank` is the global rank, also in a process set."""
    result: Tensor = HorovodBroadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-untyped-call]
    return result


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts a broadcast in place and returns its handle. `root_rank` is the global rank."""
    return _enqueue_broadcast(tensor, tensor, root_rank, name, process_set)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Overwrites the tensor with the root's and returns it. `root_rank` is the global rank."""
    result: Tensor = waited(lambda: broadcast_async_(tensor, root_rank, name, process_set))
    return result


# ---- alltoall: its gradient sends every row back to where it came from ----


def alltoall_async(
    tensor: Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts an alltoall and returns its handle; synchronize() gives the received rows and their number per rank."""
    job = current.running()
    num_members = len(job.members(process_set.process_set_id)) or 1
    if isinstance(splits, Tensor):
        if splits.dim() > 1:
            raise ValueError("alltoall expects a 1D splits tensor")
        if splits.dtype is not torch.int32:
            raise ValueError("alltoall expects splits to contain 32-bit integer elements.")
    # An empty list means the same as None, as in Horovod.
    given = tuple(int(rows) for rows in splits) if splits is not None else ()
    num_rows = tensor.shape[0] if tensor.dim() else 0
    if not given:
        if num_rows % num_members:
            raise ValueError(
                f"splits not provided, but first dimension of tensor is not an even multiple of the number of workers "
                f"({num_rows} rows, {num_members} workers)."
            )
        given = (num_rows // num_members,) * num_members
    if len(given) != num_members:
        raise ValueError(
            f"Number of entries in splits does not equal number of workers ({len(given)} entries, {num_members} workers)."
        )
    if sum(given) > num_rows or min(given) < 0:
        raise ValueError(
            f"Sum of splits entries is greater than the first dimension of tensor, or one is negative "
            f"(splits {list(given)}, {num_rows} rows)."
        )
    return enqueue("alltoall", [tensor], None, name, process_set, splits=given)


class HorovodAlltoall(torch.autograd.Function):
    """alltoall with a gradient: rows of the gradient go back to the rank that sent them."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> Any:
        output, received = waited(lambda: alltoall_async(tensor, splits, name, process_set))
        ctx.process_set = process_set
        ctx.received = received
        ctx.shape = tensor.shape
        if isinstance(splits, Tensor):
            received = received.to(splits.device)
        ctx.mark_non_differentiable(received)
        return output, received

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, *dead_gradients: Any) -> Any:
        gradient, _ = alltoall(grad_output.contiguous(), splits=ctx.received, process_set=ctx.process_set)
        # Rows at the end that no split covers were not sent; their gradient is zero.
        missing = ctx.shape[0] - gradient.shape[0]
        if missing:
            gradient = torch.cat([gradient, gradient.new_zeros((missing, *ctx.shape[1:]))])
        return gradient, None, None, None


def alltoall(
    tensor: Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Sends rows to every rank and returns the received ones; differentiable.

    splits: number of rows for each rank, a list or an int32 tensor; the number received from each rank is then returned
    too. None sends the same number of rows to each.
    """
    output, received = HorovodAlltoall.apply(tensor, splits, name, process_set)  # type: ignore[no-untyped-call]
    return output if splits is None else (output, received)
