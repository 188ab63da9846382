"""Batches from loader processes, in order: keeps the ring full and hands out one slot after another."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megaclass.data.loading.pool import LoaderProcesses, LoaderSettings
from megaclass.data.loading.reader import BadImages, BatchReader
from megaclass.data.loading.slot_to_batch import AsyncCopies, LentViews, Pixels, SlotToBatch

_MIN_AHEAD, _MAX_AHEAD = 4, 16
# A batch in the hands of the training loop, and one that is being copied or that the loop still refers to.
_NUM_HELD = 2
_AHEAD_BYTES = 2**28
_NUM_ON_DEVICE = 2


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
