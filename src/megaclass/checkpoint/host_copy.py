"""The state as it stood at a step, copied to host memory, so that training goes on while it is written."""

from collections.abc import Mapping

import torch
from torch import Tensor


class HostCopy:
    """Host memory for one state, used again at every save: taking pages anew costs more than the copy itself."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._arrived: torch.cuda.Event | None = None

    @torch.no_grad()
    def reserve(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes the memory these will need: pinned for a GPU's, which then copies without the host."""
        for name, tensor in tensors.items():
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                new = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                # Written once now: the system hands out pages at the first touch.
                self._buffers[name] = new if tensor.is_cuda else new.zero_()

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Contiguous copies by name, whole after `wait`. What a GPU does next comes after the copy, in its own order."""
        self.reserve(tensors)
        copies = {name: self._buffers[name].copy_(tensor, non_blocking=True) for name, tensor in tensors.items()}
        if any(tensor.is_cuda for tensor in tensors.values()):
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        return copies

    def wait(self) -> None:
        """Until the copies have arrived; may be called in another thread."""
        if self._arrived is not None:
            self._arrived.synchronize()
