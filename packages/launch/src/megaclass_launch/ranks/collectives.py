"""Gather, sum and reduce-scatter of blocks of equal shape. Every call takes its group.

A group of one rank sends nothing, and neither does a script without a process group.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed these two functions and warns about the old names, which torch 2.11 and 2.12 still need.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_on_exchange: Callable[[bool], None] | None = None
"""Listener that measures collectives: called with True before and False after each of them."""


@contextmanager
def exchanges_reported(on_exchange: Callable[[bool], None]) -> Iterator[None]:
    """Calls `on_exchange` before (True) and after (False) each collective of this module while the block runs."""
    global _on_exchange
    _on_exchange = on_exchange
    try:
        yield
    finally:
        _on_exchange = None


@contextmanager
def _exchanging() -> Iterator[None]:
    if (report := _on_exchange) is not None:
        report(True)
    yield
    if report is not None:
        report(False)


def group_size(group: dist.ProcessGroup | None) -> int:
    """Number of ranks in the group; 1 without a process group."""
    # A group of Horovod's API exists without a default group.
    return group.size() if group is not None else dist.get_world_size() if dist.is_initialized() else 1


def group_rank(group: dist.ProcessGroup | None) -> int:
    """Rank of this process in the group; 0 without a process group."""
    return group.rank() if group is not None else dist.get_rank() if dist.is_initialized() else 0


def gather_blocks(block: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """All-gathers blocks of equal shape: every rank gets (W, *block.shape), in order of rank. Not differentiable."""
    num_ranks = group_size(group)
    blocks_W = block.new_empty((num_ranks, *block.shape))
    if num_ranks > 1:
        with _exchanging():
            all_gather_single(blocks_W.view(-1), block.contiguous().view(-1), group=group)
    else:
        blocks_W[0].copy_(block)
    return blocks_W


def sum_over_ranks_(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """All-reduces the tensor by sum, in place. Not differentiable."""
    if group_size(group) > 1:
        with _exchanging():
            dist.all_reduce(tensor, group=group)
    return tensor


def scatter_sum(blocks_W: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Reduce-scatters the blocks: rank r gets the sum over ranks of blocks_W[r]. Not differentiable."""
    if group_size(group) == 1:
        return blocks_W[0]
    block = torch.empty_like(blocks_W[0])
    with _exchanging():
        reduce_scatter_single(block.view(-1), blocks_W.contiguous().view(-1), group=group)
    return block
