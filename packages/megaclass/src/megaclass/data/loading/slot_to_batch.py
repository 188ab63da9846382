"""Hands filled slots of the ring to the training loop: as views on a CPU, as copies made by a side stream on a GPU.

Both answer the same question for the loader: which slots may be filled again?
"""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megaclass.data.loading.ring import BatchRing

_log = logging.getLogger("megaclass.data")

# The batch of the current step, and the previous one, to which the training loop may still refer.
_MAX_LENT = 2


@dataclass(frozen=True)
class Pixels:
    """The content of a slot as the training loop gets it."""

    images: Tensor
    """uint8 (B, 3, H, W) in the channels-last layout."""
    labels: Tensor
    indices: NDArray[np.int64]
    """On the host, in memory of its own."""
    index_tensor: Tensor
    """The indices where the images are."""


class SlotToBatch(Protocol):
    def prefetch(self, slot: int, num_rows: int) -> None:
        """Called as soon as a slot is filled; slots are then handed out in the same order."""
        ...

    def take(self, slot: int, num_rows: int) -> Pixels:
        """Returns the content of a filled slot."""
        ...

    def is_free(self, slot: int) -> bool:
        """Tells whether a slot that was taken may be filled again."""
        ...

    def wait_until_free(self, slot: int) -> None: ...

    def close(self) -> None: ...


class LentViews:
    """Lends views of the slots. A slot is free once nothing refers to its images any more.

    A caller that keeps many batches gets copies: the ring must not run out of slots.
    """

    def __init__(self, ring: BatchRing) -> None:
        self._ring = ring
        self._lent: dict[int, weakref.ref[NDArray[np.uint8]]] = {}

    def prefetch(self, slot: int, num_rows: int) -> None:
        pass

    def take(self, slot: int, num_rows: int) -> Pixels:
        content = self._ring.slot(slot)
        images_BHW3 = content.images_BHW3[:num_rows]
        # A caller may keep every batch. Only a copy leaves the slot to the loader, which would otherwise wait without end.
        if sum(not self.is_free(other) for other in self._lent) >= _MAX_LENT:
            images_BHW3 = images_BHW3.copy()
        else:
            # An array of its own: tensors and views made of it keep it alive, and nothing else does.
            images_BHW3 = np.asarray(images_BHW3.data)
            self._lent[slot] = weakref.ref(images_BHW3)
        # Labels and indices are small and always copied: only the images decide how long the slot is lent.
        indices_B = content.indices_B[:num_rows].copy()
        return Pixels(
            torch.from_numpy(images_BHW3).permute(0, 3, 1, 2),
            torch.from_numpy(content.labels_B[:num_rows].copy()),
            indices_B,
            torch.from_numpy(indices_B),
        )

    def is_free(self, slot: int) -> bool:
        lent = self._lent.get(slot)
        return lent is None or lent() is None

    def wait_until_free(self, slot: int) -> None:
        assert self.is_free(slot), "more slots are lent than there are"

    def close(self) -> None:
        pass


class AsyncCopies:
    """Copies slots to the GPU on a stream of its own, while the GPU computes. A slot is free when its copy is done.

    The ring is page-locked once, at the start: otherwise every copy would go through a buffer of the driver and make the
    host wait.
    """

    def __init__(self, ring: BatchRing, device: torch.device) -> None:
        self._ring, self._device = ring, device
        self._bytes = torch.frombuffer(ring.memory, dtype=torch.uint8)
        self._stream = torch.cuda.Stream(device)
        self._copies: dict[int, tuple[Tensor, torch.cuda.Event]] = {}
        """Slots on their way to the GPU, or there, that have not been taken yet."""
        self._copied: dict[int, torch.cuda.Event] = {}
        self._is_locked = self._lock_pages()

    def prefetch(self, slot: int, num_rows: int) -> None:
        with torch.cuda.stream(self._stream):
            on_device = self._copy(slot)
            done = torch.cuda.Event()
            done.record(self._stream)
        self._copies[slot] = on_device, done
        self._copied[slot] = done

    def take(self, slot: int, num_rows: int) -> Pixels:
        on_device, done = self._copies.pop(slot)
        current = torch.cuda.current_stream(self._device)
        # The stream waits, not the host, which continues to queue the kernels of the step.
        current.wait_event(done)
        # The memory belongs to the side stream: it is not to be used again before the current stream is done with it.
        on_device.record_stream(current)
        labels, indices = on_device[: 16 * self._ring.layout.rows].view(torch.int64).view(2, -1)
        return Pixels(
            self._images_BHW3(on_device, num_rows).permute(0, 3, 1, 2),
            labels[:num_rows],
            self._ring.slot(slot).indices_B[:num_rows].copy(),
            indices[:num_rows],
        )

    def is_free(self, slot: int) -> bool:
        # Filled but not taken is not free: the images may be on the GPU, but the indices are still read from the slot.
        return slot not in self._copied or (slot not in self._copies and self._copied[slot].query())

    def wait_until_free(self, slot: int) -> None:
        self._copied[slot].synchronize()

    def close(self) -> None:
        # A copy under way reads the pages that are unlocked, and later unmapped, below.
        self._stream.synchronize()
        if self._is_locked:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())

    def _copy(self, slot: int) -> Tensor:
        layout = self._ring.layout
        start = layout.slots_at + slot * layout.slot_bytes
        return self._bytes[start : start + layout.slot_bytes].to(self._device, non_blocking=True)

    def _images_BHW3(self, on_device: Tensor, num_rows: int) -> Tensor:
        layout, (height, width) = self._ring.layout, self._ring.layout.image_size
        num_bytes = num_rows * height * width * 3
        return on_device[layout.images_at : layout.images_at + num_bytes].view(num_rows, height, width, 3)

    def _lock_pages(self) -> bool:
        cudart = torch.cuda.cudart()
        code = int(cudart.cudaHostRegister(self._bytes.data_ptr(), self._bytes.nbytes, 0))
        if code:
            _log.warning(
                "the memory of batches cannot be page-locked (CUDA error %d): copies to the GPU take longer", code
            )
        return code == 0
