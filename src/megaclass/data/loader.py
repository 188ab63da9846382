"""Batches of decoded images for one rank, ready before they are asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from megaclass.data.decode import decode_batch, to_tensor
from megaclass.data.hashing import combine64
from megaclass.data.order import Order
from megaclass.data.source import ImageSource
from megaclass.errors import DataError

_MIRROR_SALT = 0x6D6972726F72


@dataclass(frozen=True)
class Batch:
    """This rank's images of one step. Training goes on after it at (epoch, step + 1)."""

    images: torch.Tensor
    """uint8 (B, 3, H, W), RGB, contiguous."""
    labels: torch.Tensor
    """int64 (B,)."""
    indices: NDArray[np.int64]
    """Which images of the source these are (B,)."""
    epoch: int
    step: int
    """Counts from 0 within the epoch."""


class BatchLoader:
    """Reads, decodes and mirrors; the same global batches whatever the number of ranks and workers.

    Threads suffice, since decoding releases the interpreter; each decodes whole batches.
    """

    def __init__(
        self,
        source: ImageSource,
        *,
        global_batch: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        num_workers: int = 1,
        mirror: bool = True,
        image_size: tuple[int, int] | None = None,
        keep_last: bool = False,
        num_prefetched: int = 4,
    ) -> None:
        if global_batch < world_size:
            raise DataError(
                f"A global batch of {global_batch} images leaves some of the {world_size} ranks without any: "
                f"use at least one a rank."
            )
        if global_batch > source.num_images:
            raise DataError(
                f"A global batch of {global_batch} images is more than the {source.num_images} there are: "
                f"{source.describe()}."
            )
        self.source = source
        self.order = Order(num_images=source.num_images, global_batch=global_batch, seed=seed, keep_last=keep_last)
        self.rank = rank
        self.world_size = world_size
        self.mirror = mirror
        self.image_size = image_size or source.image_size
        self.num_workers = max(1, num_workers)
        self.num_prefetched = max(1, num_prefetched)

    @property
    def steps_per_epoch(self) -> int:
        return self.order.steps_per_epoch

    def batches(self, epoch: int = 0, step: int = 0, *, num_steps: int | None = None) -> Iterator[Batch]:
        """From (epoch, step) on, across epochs, `num_steps` batches; without a number, to the end of the epoch.

        Closing the iterator (or leaving it to the garbage collector) ends its threads; an error in one is raised here.
        """
        first = epoch * self.steps_per_epoch + step
        stop = (epoch + 1) * self.steps_per_epoch if num_steps is None else first + num_steps
        pool = ThreadPoolExecutor(self.num_workers, thread_name_prefix="megaclass-decode")
        waiting: deque[Future[Batch]] = deque()
        upcoming = first
        try:
            for _ in range(first, stop):
                while upcoming < stop and len(waiting) < self.num_prefetched:
                    waiting.append(pool.submit(self.load, *divmod(upcoming, self.steps_per_epoch)))
                    upcoming += 1
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def load(self, epoch: int, step: int) -> Batch:
        """One batch, at once, in the calling thread."""
        indices_B = self.order.rank_batch(epoch, step, self.rank, self.world_size)
        encoded = [self.source.read(index) for index in indices_B.tolist()]
        images_BHW3 = decode_batch(
            encoded, self.image_size, [self.source.name_of(index) for index in indices_B.tolist()]
        )
        if self.mirror:
            is_mirrored_B = mirrored(self.order.seed, epoch, indices_B)
            images_BHW3[is_mirrored_B] = images_BHW3[is_mirrored_B, :, ::-1]
        labels_B = torch.from_numpy(self.source.labels[indices_B])
        return Batch(to_tensor(images_BHW3), labels_B, indices_B, epoch, step)


def mirrored(seed: int, epoch: int, indices: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Half of the images, another half each epoch; asked of the image, not of the rank that happens to hold it."""
    bits = combine64(seed, _MIRROR_SALT, epoch, indices.astype(np.uint64))
    return (bits >> np.uint64(63)).astype(bool)
