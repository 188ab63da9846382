"""broadcast, and its gradient: the average over ranks on the root, zeros elsewhere."""

from typing import Any

import torch
from torch import Tensor

from horovod.collectives.allreduce import allreduce
from horovod.collectives.handles import enqueue, synchronize
from horovod.common.basics import _basics
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.engine.kinds import Average
from horovod.transport.arithmetic import empty_result

__all__ = ["broadcast", "broadcast_", "broadcast_async", "broadcast_async_"]


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
    members = job.members(process_set.process_set_id)
    # For an unknown process set, or one without this rank, enqueue() raises the error about membership instead.
    if members and job.meeting.rank in members and root_rank not in members:
        raise ValueError(
            f"broadcast received invalid root rank {root_rank} for provided process set: its ranks are {list(members)}."
        )
    return enqueue("broadcast", [tensor], [output], name, process_set, root=root_rank, is_urgent=is_urgent)


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
    result: Tensor = synchronize(_enqueue_broadcast(tensor, tensor, root_rank, name, process_set, is_urgent=True))
    return result
