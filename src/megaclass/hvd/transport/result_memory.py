"""Memory for large results, used again (see `ReusedMemory`)."""

import torch
from torch import Tensor

from megaclass.reused_memory import ReusedMemory

_LARGE_BYTES = 4 * 1024 * 1024
_KEPT_BYTES = 256 * 1024 * 1024

_memory = ReusedMemory(_KEPT_BYTES)
release = _memory.release


def empty_result(like: Tensor) -> Tensor:
    """Returns a tensor as torch.empty_like does, without a gradient and contiguous."""
    num_bytes = like.numel() * like.element_size()
    if num_bytes < _LARGE_BYTES or num_bytes > _KEPT_BYTES // 2 or like.device.type != "cpu":
        return torch.empty_like(like, requires_grad=False, memory_format=torch.contiguous_format)
    return torch.from_numpy(_memory.take(num_bytes)).view(like.dtype).view(like.shape)
