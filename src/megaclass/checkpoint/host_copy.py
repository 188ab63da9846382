"""Copies the state of a step to host memory, so that training continues while the copy is written."""

from collections.abc import Mapping

import torch
from torch import Tensor


class HostCopy:
    """Host memory for one state, reused at every save: allocating pages costs more than the copy itself."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._arrived: torch.cuda.Event | None = None

    @torch.no_grad()
    def reserve(self, tensors: Mapping[str, Tensor]) -> None:
        """Allocates the memory for these tensors; pinned for GPU tensors, so that the GPU copies without the host."""
        for name, tensor in tensors.items():
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                new = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                # Written once now, because the system allocates pages at the first access.
                self._buffers[name] = new if tensor.is_cuda else new.zero_()

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Starts contiguous copies, which are complete after `wait`. Later work on the same GPU stream runs after the copy."""
        self.reserve(tensors)
        copies = {name: self._buffers[name].copy_(tensor, non_blocking=True) for name, tensor in tensors.items()}
        if any(tensor.is_cuda for tensor in tensors.values()):
            self._arrived = torch.cuda.Event()
            # Recorded on the loop's stream, behind the copies: the event is reached when all of them have arrived.
            self._arrived.record()
        return copies

    def wait(self) -> None:
        """Waits until the copies are complete; may be called from another thread."""
        if self._arrived is not None:
            self._arrived.synchronize()
