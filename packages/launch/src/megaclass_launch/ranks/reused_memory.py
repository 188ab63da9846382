"""Large blocks of memory that are used again.

Fresh memory is expensive: Linux hands it out and clears it page by page. For a batch of images this costs a tenth of the
decoding, and for a result of 64 MiB more than its all-reduce costs in copying.
"""

import threading
import weakref

import numpy as np
import torch
from numpy.typing import NDArray


class ReusedMemory:
    """Lends blocks of host memory, and lends a block again once nothing refers to it any more. Safe between threads.

    _kept, under _lock: each block with a weak reference to the array that it was last lent as. Views and tensors made of
    that array keep it alive, so a dead reference means that the block is free. The block unused for longest comes first.
    """

    def __init__(self, max_kept_bytes: int) -> None:
        self._max_kept_bytes = max_kept_bytes
        self._lock = threading.Lock()
        self._kept: list[tuple[torch.Tensor, weakref.ref[NDArray[np.uint8]]]] = []

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """Returns `num_bytes` bytes with any content."""
        with self._lock:
            for place, (memory, lent) in enumerate(self._kept):
                if memory.nbytes == num_bytes and lent() is None:
                    del self._kept[place]
                    break
            else:
                memory = torch.empty(num_bytes, dtype=torch.uint8)
            array: NDArray[np.uint8] = memory.numpy()
            self._kept.append((memory, weakref.ref(array)))
            while sum(kept.nbytes for kept, _ in self._kept) > self._max_kept_bytes:
                # Whatever still uses this block keeps it alive; it is just not lent again.
                self._kept.pop(0)
            return array

    def release(self) -> None:
        """Gives up all blocks that are not in use."""
        with self._lock:
            self._kept.clear()
