"""Memory for large results that is used again.

A fresh tensor of 64 MiB costs more time in page faults than its all-reduce costs in copying: Linux hands out and clears
it page by page, every time. Here the memory of results that nobody holds any more is kept for the next ones.
"""

import threading
import weakref

import numpy as np
import torch
from torch import Tensor

_LARGE_BYTES = 4 * 1024 * 1024
_KEPT_BYTES = 256 * 1024 * 1024

_lock = threading.Lock()
# Memory, and the array it was last lent as, which the tensors made of it keep alive. The longest unused first.
_kept: list[tuple[Tensor, "weakref.ref[np.ndarray]"]] = []


def empty_result(like: Tensor) -> Tensor:
    """Like torch.empty_like, without a gradient, contiguous."""
    num_bytes = like.numel() * like.element_size()
    if num_bytes < _LARGE_BYTES or num_bytes > _KEPT_BYTES // 2 or like.device.type != "cpu":
        return torch.empty_like(like, requires_grad=False, memory_format=torch.contiguous_format)
    with _lock:
        for place, (memory, lent) in enumerate(_kept):
            if memory.nbytes == num_bytes and lent() is None:
                del _kept[place]
                break
        else:
            memory = torch.empty(num_bytes, dtype=torch.uint8)
        array = memory.numpy()
        _kept.append((memory, weakref.ref(array)))
        while sum(other.nbytes for other, _ in _kept) > _KEPT_BYTES:
            # Tensors that still use it keep it alive; it is just not used again.
            _kept.pop(0)
    return torch.from_numpy(array).view(like.dtype).view(like.shape)


def release() -> None:
    """Gives up all memory that no tensor uses."""
    with _lock:
        _kept.clear()
