"""allgather, alone and in groups, and the allreduce of sparse tensors, which is two allgathers."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from horovod.collectives.allreduce import grouped_allreduce
from horovod.collectives.handles import enqueue, fetch, group_of, synchronize
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.engine.kinds import Average, Sum

__all__ = [
    "allgather",
    "allgather_async",
    "grouped_allgather",
    "grouped_allgather_async",
    "sparse_allreduce_async",
]


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Starts an allgather and returns its handle."""
    return enqueue("allgather", [tensor], None, name, process_set)


class HorovodAllgather(torch.autograd.Function):
    """allgather with a gradient: each rank takes its own rows of the gradient averaged over ranks."""

    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, is_grouped: bool, *tensors: Tensor) -> Any:
        ctx.process_set = process_set
        handle = enqueue("allgather", tensors, None, name, process_set, is_grouped=is_grouped, is_urgent=True)
        outputs, ctx.sizes = fetch(handle, lambda operation: (tuple(operation.outputs), operation.sizes))
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
