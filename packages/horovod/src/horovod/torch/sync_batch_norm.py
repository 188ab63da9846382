"""SyncBatchNorm by Horovod's name and arguments; the arithmetic is that of megaclass_launch/ranks/sync_batch_norm.py."""

from torch import Tensor

from horovod.collectives.operations import allreduce_
from horovod.engine.kinds import Sum
from megaclass_launch.ranks import sync_batch_norm

__all__ = ["SyncBatchNorm"]


class SyncBatchNorm(sync_batch_norm.SyncBatchNorm):
    """nn.BatchNorm with statistics over all ranks in training, on the CPU as well as on GPUs.

    Traffic: one allreduce of 2 x channels + 1 float64 forward, one of 2 x channels float64 backward.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__(
            num_features, eps=eps, momentum=momentum, affine=affine, track_running_stats=track_running_stats
        )

    def sum_over_ranks(self, sums: Tensor) -> Tensor:
        # Forward has an odd number of sums and backward an even one, so the two never share a name.
        total: Tensor = allreduce_(sums, op=Sum, name=f"sync_batch_norm.{sums.numel()}")
        return total
