"""What travels between ranks, in the three shapes the head needs. Every call takes its group.

Where no process group was joined (a script on one machine without a starter) the world is one and nothing travels.
"""

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed these two and warns about the names that 2.11 and 2.12 know.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def group_size(group: dist.ProcessGroup | None) -> int:
    return dist.get_world_size(group) if dist.is_initialized() else 1


def group_rank(group: dist.ProcessGroup | None) -> int:
    return dist.get_rank(group) if dist.is_initialized() else 0


def gather_blocks(block: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """All-gather of equal blocks: every rank gets (W, *block.shape), rank by rank. Not differentiable."""
    blocks_W = block.new_empty((group_size(group), *block.shape))
    if dist.is_initialized():
        _all_gather(blocks_W.view(-1), block.contiguous().view(-1), group=group)
    else:
        blocks_W[0].copy_(block)
    return blocks_W


def sum_over_ranks_(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """All-reduce by sum, in place. Not differentiable."""
    if dist.is_initialized():
        dist.all_reduce(tensor, group=group)
    return tensor


def scatter_sum(blocks_W: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Reduce-scatter: rank r gets the sum over ranks of their blocks_W[r]. Not differentiable."""
    if not dist.is_initialized():
        return blocks_W[0]
    block = torch.empty_like(blocks_W[0])
    _reduce_scatter(block.view(-1), blocks_W.contiguous().view(-1), group=group)
    return block
