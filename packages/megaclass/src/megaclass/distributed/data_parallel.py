"""Keeps the backbone identical on all ranks: averages of gradients and of running statistics."""

from contextlib import AbstractContextManager, nullcontext
from inspect import signature

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from megaclass_launch.ranks.collectives import group_size, sum_over_ranks_

# torch 2.13 renamed this option and warns about the old name, which torch 2.11 and 2.12 still need.
_NEW_NAME = "forward_sync_buffers"
_SYNC_BUFFERS = _NEW_NAME if _NEW_NAME in signature(DistributedDataParallel).parameters else "broadcast_buffers"


class NothingToAverage(nn.Module):
    """Stands for DDP, which refuses it, around a backbone without parameters to train."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        embeddings: torch.Tensor = self.module(*inputs)
        return embeddings

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def register_comm_hook(self, *hook: object) -> None:
        """There are no gradients that a hook could exchange."""


def data_parallel(
    backbone: nn.Module, group: dist.ProcessGroup | None = None
) -> DistributedDataParallel | NothingToAverage:
    """Wraps the backbone so that gradients are averaged during backward. Running statistics differ until `average_buffers_`."""
    if not any(parameter.requires_grad for parameter in backbone.parameters()):
        return NothingToAverage(backbone)
    device = next(backbone.parameters()).device
    return DistributedDataParallel(
        backbone,
        device_ids=[device.index] if device.type == "cuda" else None,
        process_group=group,
        gradient_as_bucket_view=True,
        **{_SYNC_BUFFERS: False},  # type: ignore[arg-type]
    )


def exact_average(
    group: dist.ProcessGroup | None,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """DDP hook for CPUs that averages gradients in float64. One all-reduce of 8 bytes per number.

    DDP rebuilds its buckets after the first step, and in gloo's ring the position of a number decides in which order the
    ranks' values are added. In float64 the sum of a few float32 values is exact except for extreme ranges. A resumed run,
    whose first step is a later one, therefore continues with identical bits.
    """
    gradients: torch.Tensor = bucket.buffer()
    gradients.copy_(sum_over_ranks_(gradients.double(), group) / group_size(group))
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(gradients)
    return done


@torch.no_grad()
def average_buffers_(backbone: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Sets batch norm's running statistics to their mean over all ranks. One all-reduce of all of them together."""
    buffers = [buffer for buffer in backbone.buffers() if buffer.is_floating_point()]
    if not buffers:
        return
    flat = sum_over_ranks_(torch.cat([buffer.flatten().float() for buffer in buffers]), group) / group_size(group)
    for buffer, part in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
        buffer.copy_(part.view_as(buffer))
