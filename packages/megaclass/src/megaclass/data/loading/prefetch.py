"""Batches from loader processes, in order: keeps the ring full and hands out one slot after another.

Filled slots go to the training loop as views on a CPU, and as copies made by a side stream on a GPU. Both answer the same
question for the loader: which slots may be filled again?
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megaclass.data.loading.pool import LoaderProcesses, LoaderSettings
from megaclass.data.loading.reader import BadImages, BatchReader
from megaclass.data.loading.ring import BatchRing

_log = logging.getLogger("megaclass.data")

_MIN_AHEAD, _MAX_AHEAD = 4, 16
# A batch in the hands of the training loop, and one that is being copied or that the loop still refers to.
_NUM_HELD = 2
_AHEAD_BYTES = 2**28
_NUM_ON_DEVICE = 2
# The batch of the current step, and the previous one, to which the training loop may still refer.
_MAX_LENT = 2


def num_slots(batch_bytes: int) -> int:
    """Returns how many batches of this size the ring of the loader processes of one rank holds."""
    return min(_MAX_AHEAD, max(_MIN_AHEAD, _AHEAD_BYTES // batch_bytes)) + _NUM_HELD


@dataclass(frozen=True)
class Loaded:
    """One batch as it comes from the ring."""

    epoch: int
    step: int
    pixels: Pixels


class ProcessBatches:
    """Loader processes and their ring for one pass over a range of steps.

    State, used by one thread: _filling holds the steps whose slots are being filled or are full, in order; _ready holds
    those whose copy to the GPU has begun; _free holds slots that were handed out and may still be in use.
    """

    def __init__(
        self, settings: LoaderSettings, reader: BatchReader, bad_images: BadImages, device: torch.device | None
    ) -> None:
        height, width = reader.plan.image_size
        batch_bytes = reader.plan.max_rows * height * width * 3
        slots = num_slots(batch_bytes)
        self._reader = reader
        self._processes = LoaderProcesses(settings, reader.plan, reader.source, bad_images, slots)
        on_device = device is not None and device.type == "cuda"
        self._num_prefetched = _NUM_ON_DEVICE if on_device else 1
        try:
            self._slot_to_batch: SlotToBatch = (
                AsyncCopies(self._processes.ring, device) if on_device and device else LentViews(self._processes.ring)
            )
        except BaseException:
            self._processes.close()
            raise
        self._filling: deque[tuple[int, int]] = deque()
        self._ready: deque[tuple[int, int]] = deque()
        self._free: deque[int] = deque(range(slots))

    @property
    def pids(self) -> list[int]:
        """Process numbers of the loader processes."""
        return self._processes.pids

    def take_num_resized(self) -> int:
        """Returns how many images had another size since the last call."""
        number, self._processes.num_resized = self._processes.num_resized, 0
        return number

    def batches(self, first: int, stop: int, steps_per_epoch: int) -> Iterator[Loaded]:
        """Yields the batches of the steps [first, stop), counted across epochs."""
        upcoming = first
        for _ in range(first, stop):
            upcoming = self._fill_free_slots(upcoming, stop, steps_per_epoch)
            self._prefetch(steps_per_epoch)
            number, slot = self._ready.popleft()
            epoch, step = divmod(number, steps_per_epoch)
            # The last batch of an epoch may be shorter than the slot.
            pixels = self._slot_to_batch.take(slot, self._reader.num_rows(step))
            # The oldest is tried first: the caller has most probably dropped it.
            self._free.append(slot)
            yield Loaded(epoch, step, pixels)

    def close(self) -> None:
        self._slot_to_batch.close()
        self._processes.close()

    def _fill_free_slots(self, upcoming: int, stop: int, steps_per_epoch: int) -> int:
        """Has further steps decoded into all free slots; returns the first step that is left."""
        while upcoming < stop and self._free:
            slot = self._next_free()
            if slot is None:
                break
            epoch, step = divmod(upcoming, steps_per_epoch)
            self._processes.submit(slot, epoch, step, self._reader.num_rows(step))
            self._filling.append((upcoming, slot))
            upcoming += 1
        return upcoming

    def _next_free(self) -> int | None:
        for place, slot in enumerate(self._free):
            if self._slot_to_batch.is_free(slot):
                del self._free[place]
                return slot
        if self._filling or self._ready:
            return None
        # Nothing is on its way: without a free slot there would never be another batch.
        self._slot_to_batch.wait_until_free(self._free[0])
        return self._free.popleft()

    def _prefetch(self, steps_per_epoch: int) -> None:
        """Waits for the next batch, and starts the copy of the one after it if that is complete."""
        while self._filling and len(self._ready) < self._num_prefetched:
            number, slot = self._filling[0]
            if not self._ready:
                self._processes.wait_for(slot)
            # In order: a later slot that is full already has to wait for this one.
            elif not self._processes.is_filled(slot):
                break
            self._filling.popleft()
            self._slot_to_batch.prefetch(slot, self._reader.num_rows(number % steps_per_epoch))
            self._ready.append((number, slot))


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
