"""allgather, broadcast, alltoall, and the allreduce of sparse tensors, which is two allgathers.

Gradients: of allgather and broadcast an average over ranks, of alltoall an alltoall back.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from megaclass.hvd.basics import _basics
from megaclass.hvd.collectives.allreduce import allreduce, group_of, grouped_allreduce
from megaclass.hvd.collectives.handles import enqueue, fetch, synchronize
from megaclass.hvd.collectives.ops import Average
from megaclass.hvd.process_sets import ProcessSet, global_process_set
from megaclass.hvd.transport.result_memory import empty_result

# -- allgather --------------------------------------------------------------------------------------------------------


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Concatenates the ranks' tensors along dimension 0, which may differ between them."""
    return enqueue("allgather", [tensor], None, name, process_set)


class HorovodAllgather(torch.autograd.Function):
    """allgather with a gradient: the average over ranks, of which each takes its own rows."""

    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, is_grouped: bool, *tensors: Tensor) -> Any:
        ctx.process_set = process_set
        handle = enqueue("allgather", tensors, None, name, process_set, is_grouped=is_grouped, is_urgent=True)
        outputs, ctx.sizes = fetch(handle, lambda operation: (tuple(operation.outputs), operation.sizes))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grad_output: Tensor) -> Any:
        place = ctx.process_set.rank()
        reduced = grouped_allreduce(
            [gradient.contiguous() for gradient in grad_output], op=Average, process_set=ctx.process_set
        )
        own = [
            gradient.narrow(0, sum(rows[:place]), rows[place])
            for gradient, rows in zip(reduced, ctx.sizes, strict=True)
        ]
        return (None, None, None, *own)


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """The ranks' tensors, concatenated along dimension 0, which may differ between them; differentiable."""
    result: Tensor = HorovodAllgather.apply(name, process_set, False, tensor)[0]  # type: ignore[no-untyped-call]
    return result


def grouped_allgather_async(
    tensors: Iterable[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """allgather of each tensor of the list; one handle for all."""
    tensors = group_of(tensors)
    return enqueue("allgather", tensors, None, name, process_set, is_grouped=True)


def grouped_allgather(
    tensors: Iterable[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[Tensor, ...]:
    """allgather of each tensor of the list; differentiable."""
    tensors = group_of(tensors)
    result: tuple[Tensor, ...] = HorovodAllgather.apply(name, process_set, True, *tensors)  # type: ignore[no-untyped-call]
    return result


def sparse_allreduce_async(
    tensor: Tensor, name: str | None, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Combines a sparse tensor over ranks by gathering indices and values; call what it returns for the result."""
    # allgather concatenates along dimension 0: indices travel one a row.
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


# -- broadcast --------------------------------------------------------------------------------------------------------


def _enqueue_broadcast(
    tensor: Tensor,
    output: Tensor,
    root_rank: int,
    name: str | None,
    process_set: ProcessSet,
    *,
    is_urgent: bool = False,
) -> int:
    job = _basics.job()
    members = job.process_sets.get(process_set.process_set_id, ())
    # In a set that is not there, or not ours, the membership is what is wrong.
    if members and job.meeting.rank in members and root_rank not in members:
        raise ValueError(
            f"broadcast received invalid root rank {root_rank} for provided process set: its ranks are {list(members)}."
        )
    return enqueue("broadcast", [tensor], [output], name, process_set, root=root_rank, is_urgent=is_urgent)


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """The root's tensor on every rank; the input is not modified. `root_rank` is the global rank."""
    output = empty_result(tensor)
    return _enqueue_broadcast(tensor, output, root_rank, name, process_set)


class HorovodBroadcast(torch.autograd.Function):
    """broadcast with a gradient: the average over ranks on the root, zeros elsewhere."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Tensor:
        ctx.root_rank = root_rank
        ctx.process_set = process_set
        output = empty_result(tensor)
        result: Tensor = synchronize(_enqueue_broadcast(tensor, output, root_rank, name, process_set, is_urgent=True))
        return result

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        reduced = allreduce(grad_output.contiguous(), op=Average, process_set=ctx.process_set)
        return (reduced if _basics.rank() == ctx.root_rank else reduced * 0), None, None, None


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """The root's tensor on every rank; differentiable. `root_rank` is the global rank."""
    result: Tensor = HorovodBroadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-untyped-call]
    return result


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Overwrites the tensor by the root's. `root_rank` is the global rank."""
    return _enqueue_broadcast(tensor, tensor, root_rank, name, process_set)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Overwrites the tensor by the root's and returns it. `root_rank` is the global rank."""
    result: Tensor = synchronize(_enqueue_broadcast(tensor, tensor, root_rank, name, process_set, is_urgent=True))
    return result


# -- alltoall ---------------------------------------------------------------------------------------------------------


def _enqueue_alltoall(
    tensor: Tensor, splits: Any, name: str | None, process_set: ProcessSet, *, is_urgent: bool = False
) -> int:
    job = _basics.job()
    num_members = len(job.process_sets.get(process_set.process_set_id, (0,)))
    if isinstance(splits, Tensor):
        if splits.dim() > 1:
            raise ValueError("alltoall expects a 1D splits tensor")
        if splits.dtype is not torch.int32:
            raise ValueError("alltoall expects splits to contain 32-bit integer elements.")
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
    return enqueue("alltoall", [tensor], None, name, process_set, splits=given, is_urgent=is_urgent)


def alltoall_async(
    tensor: Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Sends rows to each rank; synchronize() gives what was received and how many rows came from each rank."""
    return _enqueue_alltoall(tensor, splits, name, process_set)


class HorovodAlltoall(torch.autograd.Function):
    """alltoall with a gradient: rows go back to where they came from."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, splits: Any, name: str | None, process_set: ProcessSet) -> Any:
        handle = _enqueue_alltoall(tensor, splits, name, process_set, is_urgent=True)
        output, received = synchronize(handle)
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
        # Rows that no split sent anywhere have no gradient.
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
    """Sends rows to each rank and returns those received; with `splits` also how many came from each rank.

    `splits`: rows for each rank, a list or an int32 tensor; None: as many for each. Differentiable.
    """
    output, received = HorovodAlltoall.apply(tensor, splits, name, process_set)  # type: ignore[no-untyped-call]
    return output if splits is None else (output, received)
