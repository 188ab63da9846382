"""Memory for large results that is used again.

A fresh tensor of 64 MiB costs more time in page faults than its all-reduce costs in copying: Linux hands out and clears
it page by page, every time. Here the memory of results that nobody holds any more is kept for the next ones.
"""

import sys
import threading

import numpy as np
import torch
from torch import Tensor

_LARGE_BYTES = 4 * 1024 * 1024
_KEPT_BYTES = 256 * 1024 * 1024

_lock = threading.Lock()
_kept: list[np.ndarray] = []


def empty_result(like: Tensor) -> Tensor:
    """Like torch.empty_like, without a gradient, contiguous."""
    num_bytes = like.numel() * like.element_size()
    if num_bytes < _LARGE_BYTES or num_bytes > _KEPT_BYTES // 2 or like.device.type != "cpu":
        return torch.empty_like(like, requires_grad=False, memory_format=torch.contiguous_format)
    with _lock:
        for place in range(len(_kept)):
            memory = _kept[place]
            # Held by the list, by this name and by the call: by no tensor.
            if memory.nbytes == num_bytes and sys.getrefcount(memory) == 3:
                _kept.append(_kept.pop(place))
                break
        else:
            memory = np.empty(num_bytes, dtype=np.uint8)
            _kept.append(memory)
            while sum(other.nbytes for other in _kept) > _KEPT_BYTES:
                # Tensors that still use it keep it alive; it is just not used again.
                _kept.pop(0)
        # Within the lock: from here on a tensor holds it.
        return torch.from_numpy(memory).view(like.dtype).view(like.shape)


def release() -> None:
    """Gives up all memory that no tensor uses."""
    with _lock:
        _kept.clear()
