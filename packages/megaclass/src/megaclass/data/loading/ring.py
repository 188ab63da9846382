"""Batch slots in memory that a rank shares with its loader processes. Free of torch.

The memory is a memfd: it has no name, needs no room in /dev/shm (64 MiB in many containers), and is gone with its last
process. A slot holds one batch of a rank:

    labels     int64 (rows,)
    indices    int64 (rows,)
    images     uint8 (rows, H, W, 3), from a multiple of 64 bytes on

so that one copy takes all of it to the device. Before the slots, a table with one number per decoding thread says which
image that thread is decoding (−1: none): after a crash the rank reads there which image it was.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megaclass.errors import DataError

_PAGE = 4096
_ALIGNED = 64
NO_IMAGE = -1


@dataclass(frozen=True, kw_only=True)
class RingLayout:
    """Sizes and places in the shared memory; the same in all processes."""

    num_slots: int
    rows: int
    image_size: tuple[int, int]
    num_threads: int
    """Decoding threads of all loader processes together."""

    @property
    def images_at(self) -> int:
        """First byte of the images within a slot."""
        return _rounded_up(16 * self.rows, _ALIGNED)

    @property
    def slot_bytes(self) -> int:
        height, width = self.image_size
        return _rounded_up(self.images_at + self.rows * height * width * 3, _PAGE)

    @property
    def slots_at(self) -> int:
        return _rounded_up(8 * self.num_threads, _PAGE)

    @property
    def num_bytes(self) -> int:
        return self.slots_at + self.num_slots * self.slot_bytes


@dataclass(frozen=True)
class Slot:
    """Views of one slot."""

    labels_B: NDArray[np.int64]
    indices_B: NDArray[np.int64]
    images_BHW3: NDArray[np.uint8]


class BatchRing:
    """The shared memory, mapped into this process."""

    def __init__(self, layout: RingLayout, handle: int) -> None:
        self.layout = layout
        self.handle = handle
        # Never unmapped by hand: arrays of the training loop may refer to it, and the last of them unmaps it.
        self.memory = mmap.mmap(handle, layout.num_bytes)
        self.decoding: NDArray[np.int64] = np.frombuffer(self.memory, dtype=np.int64, count=layout.num_threads)
        """Index of the image that each thread is decoding; written by that thread alone."""

    def slot(self, number: int) -> Slot:
        """Returns new views of a slot; as long as one of them lives, the memory stays mapped."""
        layout, at = self.layout, self.layout.slots_at + number * self.layout.slot_bytes
        numbers = np.frombuffer(self.memory, dtype=np.int64, count=2 * layout.rows, offset=at).reshape(2, layout.rows)
        shape = (layout.rows, *layout.image_size, 3)
        pixels = np.frombuffer(self.memory, dtype=np.uint8, count=int(np.prod(shape)), offset=at + layout.images_at)
        return Slot(numbers[0], numbers[1], pixels.reshape(shape))


def new_ring(layout: RingLayout) -> BatchRing:
    """Makes the shared memory. All of it is allocated here: later a lack of memory would end a process with SIGBUS."""
    handle = os.memfd_create("megaclass-batches", os.MFD_CLOEXEC)
    try:
        # ftruncate alone reserves nothing: a lack of memory would show at the first write to a page.
        os.ftruncate(handle, layout.num_bytes)
        os.posix_fallocate(handle, 0, layout.num_bytes)
        ring = BatchRing(layout, handle)
    except OSError as error:
        os.close(handle)
        raise DataError(
            f"There is no memory for {layout.num_slots} batches of {layout.rows} images, {layout.num_bytes / 2**20:,.0f} MiB: "
            f"{error.strerror}. Use fewer loader processes (data.workers; 0 decodes in the rank itself) or a smaller "
            f"train.global_batch."
        ) from error
    ring.decoding[:] = NO_IMAGE
    return ring


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
