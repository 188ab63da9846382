"""Copies the state of a step to host memory, so that training continues while the copy is written.

Copies from a GPU need pinned memory: otherwise the host waits for them. torch's own pinned memory (`pin_memory=True`) is
rounded up to a power of two per tensor, up to twice what is needed, which counts for centres of many gigabytes. Here all
tensors from a GPU share one block of exactly their size, which is registered with CUDA.
"""

import logging
import math
import weakref
from collections.abc import Mapping

import torch
from torch import Tensor

_log = logging.getLogger("megaclass.checkpoint")
_PAGE = 4096
"""CUDA registers whole pages; two registered blocks must not share one."""
_ALIGNMENT = 64
"""Tensors begin at multiples of this within the block."""

Shape = tuple[int, ...]


class HostCopy:
    """Host memory for one state, reused at every save: allocating pages costs more than the copy itself."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._arrived: torch.cuda.Event | None = None
        self._unpin: weakref.finalize | None = None  # type: ignore[type-arg]
        """Ends the registration of the pinned block, at the latest with this object. The block lives until then."""

    @torch.no_grad()
    def reserve(self, tensors: Mapping[str, Tensor], num_rows: int | None = None) -> dict[str, Tensor]:
        """Allocates the memory for these tensors and returns it; pinned for GPU tensors, so that the GPU copies alone.

        num_rows: room for so many rows of each tensor, instead of those it has.
        """
        shapes = {name: _shape(tensor, num_rows) for name, tensor in tensors.items()}
        missing = [name for name, tensor in tensors.items() if not self._fits(name, shapes[name], tensor.dtype)]
        if any(tensors[name].is_cuda for name in missing):
            pinned = {name: (shapes[name], tensor.dtype) for name, tensor in tensors.items() if tensor.is_cuda}
            self._pin(pinned)
        # Zeros are written once now, because the system allocates pages at the first access.
        self._buffers |= {
            name: torch.zeros(shapes[name], dtype=tensors[name].dtype) for name in missing if not tensors[name].is_cuda
        }
        return {name: self._buffers[name] for name in tensors}

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Starts contiguous copies, which are complete after `wait`. Later work on the same GPU stream runs after the copy."""
        buffers = self.reserve(tensors)
        copies = {name: buffers[name].copy_(tensor, non_blocking=True) for name, tensor in tensors.items()}
        if any(tensor.is_cuda for tensor in tensors.values()):
            self._arrived = torch.cuda.Event()
            # Recorded on the loop's stream, behind the copies: the event is reached when all of them have arrived.
            self._arrived.record()
        return copies

    def wait(self) -> None:
        """Waits until the copies are complete; may be called from another thread."""
        if self._arrived is not None:
            self._arrived.synchronize()

    def _fits(self, name: str, shape: Shape, dtype: torch.dtype) -> bool:
        buffer = self._buffers.get(name)
        return buffer is not None and tuple(buffer.shape) == shape and buffer.dtype == dtype

    def _pin(self, wanted: Mapping[str, tuple[Shape, torch.dtype]]) -> None:
        """Replaces the pinned block by one for the tensors that are wanted now."""
        self.wait()
        if self._unpin is not None:
            self._unpin()
        # Before the new block is allocated: there may be no room for both.
        self._buffers = {name: buffer for name, buffer in self._buffers.items() if name not in wanted}
        offsets, num_bytes = block_layout(wanted)
        memory = torch.empty(num_bytes + _PAGE, dtype=torch.uint8)
        block = memory[-memory.data_ptr() % _PAGE :][:num_bytes]
        error = int(torch.cuda.cudart().cudaHostRegister(block.data_ptr(), num_bytes, 0))
        if error:
            # Copies are right all the same; only the host waits for them.
            _log.warning(
                f"{num_bytes / 2**30:.2f} GiB of host memory for copies of the state could not be pinned (CUDA error {error}; "
                f"is `ulimit -l` too low?): each save and commit takes longer."
            )
            self._unpin = None
        else:
            # The arguments keep the memory alive for as long as it is registered.
            self._unpin = weakref.finalize(self, _unregister, memory, block.data_ptr())
        for name, (shape, dtype) in wanted.items():
            part = block[offsets[name] :][: math.prod(shape) * dtype.itemsize]
            self._buffers[name] = part.view(dtype).view(shape)


def block_layout(wanted: Mapping[str, tuple[Shape, torch.dtype]]) -> tuple[dict[str, int], int]:
    """Returns the offset of each tensor in a block, and the bytes of the block, which are whole pages."""
    offsets, end = {}, 0
    for name, (shape, dtype) in wanted.items():
        offsets[name] = end
        end += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    return offsets, max(1, -(-end // _PAGE)) * _PAGE


def _shape(tensor: Tensor, num_rows: int | None) -> Shape:
    return tuple(tensor.shape) if num_rows is None else (num_rows, *tensor.shape[1:])


def _unregister(memory: Tensor, address: int) -> None:
    assert memory.nbytes
    torch.cuda.cudart().cudaHostUnregister(address)
