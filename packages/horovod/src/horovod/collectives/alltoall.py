"""alltoall, and its gradient: an alltoall that sends every row back to where it came from."""

from typing import Any

import torch
from torch import Tensor

from horovod.collectives.handles import enqueue, synchronize
from horovod.common.basics import _basics
from horovod.common.process_sets import ProcessSet, global_process_set

__all__ = ["alltoall", "alltoall_async"]


def _enqueue_alltoall(
    tensor: Tensor, splits: Any, name: str | None, process_set: ProcessSet, *, is_urgent: bool = False
) -> int:
    job = _basics.job()
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
    return enqueue("alltoall", [tensor], None, name, process_set, splits=given, is_urgent=is_urgent)


def alltoall_async(
    tensor: Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts an alltoall and returns its handle; synchronize() gives the received rows and their number per rank."""
    return _enqueue_alltoall(tensor, splits, name, process_set)


class HorovodAlltoall(torch.autograd.Function):
    """alltoall with a gradient: rows of the gradient go back to the rank that sent them."""

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
