"""Batches of decoded images for one rank, prepared ahead of time by threads."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from megaclass.data.augment import Augment, augment_, mirror_
from megaclass.data.decode import Fit, decode_into, normalise
from megaclass.data.order import ClassOrder, ImageOrder, Order, rank_batch
from megaclass.data.sources.source import ImageSource, PixelSource
from megaclass.errors import DataError, is_transient
from megaclass.keyed_random import combine64
from megaclass.reused_memory import ReusedMemory

_log = logging.getLogger("megaclass.data")

_MIRROR_SALT = 0x6D6972726F72
_REPLACE_SALT = 0x7265706C616365
_MAX_REPLACEMENTS = 100
_READ_AGAIN_S = (0.05, 0.5, 2.0)
# With fewer images the share of bad ones says little; smaller sets are judged by their own size.
_IMAGES_BEFORE_JUDGING = 10_000


@dataclass(frozen=True)
class Batch:
    """This rank's images of one step."""

    images: torch.Tensor
    """uint8 (B, 3, H, W), RGB, in the channels-last layout that decoders write and backbones read."""
    labels: torch.Tensor
    """int64 (B,)."""
    indices: NDArray[np.int64]
    """Indices of these images in the source (B,)."""
    epoch: int
    step: int
    """Counts from 0 within the epoch."""
    treatment: Treatment = field(default_factory=lambda: Treatment())
    """Changes to the pixels that are left to the training device."""

    def prepared(self, device: torch.device, rows: slice = slice(None)) -> torch.Tensor:
        """Returns the backbone's input, mirrored, augmented and normalised on the device: float32 (B, 3, H, W)."""
        images, indices_B = normalise(self.images[rows].to(device, non_blocking=True)), self.indices[rows]
        if self.treatment.mirror:
            mirror_(images, mirrored(self.treatment.seed, self.epoch, indices_B))
        if self.treatment.augment is not None:
            augment_(images, self.treatment.augment, self.treatment.seed, self.treatment.global_step, indices_B)
        return images.to(memory_format=torch.channels_last)


@dataclass(frozen=True)
class Treatment:
    """Mirroring and augmentation, chosen by (seed, step, image) and never by the place of an image in a batch or on a rank."""

    seed: int = 0
    global_step: int = 0
    mirror: bool = False
    augment: Augment | None = None


class BatchLoader:
    """Reads and decodes batches ahead of time. The global batches do not depend on the number of ranks or workers.

    Workers are threads: decoding releases the interpreter lock, nothing is copied between processes, and no worker can
    outlive its process. Each decodes whole batches. An image that cannot be read is replaced by another one, chosen by a
    hash.
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
        augment: Augment | None = None,
        image_size: tuple[int, int] | None = None,
        fit: Fit = "squash",
        keep_last: bool = False,
        order: Literal["images", "classes"] = "images",
        images_per_class: int = 1,
        max_bad_fraction: float = 0.001,
        num_prefetched: int = 4,
        num_parts: int = 1,
        fewest_in_part: int = 2,
    ) -> None:
        """Checks that every rank gets enough images in every step.

        image_size: (height, width), by default that of the source; `fit` tells how images of another size are fitted to it.
        num_parts: parts into which a step splits a rank's images, each of at least fewest_in_part.
        """
        self.source = source
        self.order = _build_order(source, global_batch, seed, keep_last, order, images_per_class)
        _require_fillable(source, self.order, global_batch, world_size, num_parts, fewest_in_part)
        self.rank = rank
        self.world_size = world_size
        self.mirror = mirror
        self.augment = augment
        self.image_size = image_size or source.image_size
        self.fit: Fit = fit
        self.num_resized = 0
        """Images of another size that this rank has fitted so far; workers add to it under _counting."""
        self._counting = threading.Lock()
        self.num_workers = max(1, num_workers)
        self.num_prefetched = max(self.num_workers + 1, num_prefetched)
        self.bad_images = BadImages(source, max_bad_fraction)
        self._batch_shape = (-(-global_batch // world_size), *self.image_size, 3)
        # Enough for the batches that wait, those in the making, and two in the hands of the caller.
        num_kept = self.num_prefetched + self.num_workers + 2
        self._memory = ReusedMemory(num_kept * math.prod(self._batch_shape))

    @property
    def steps_per_epoch(self) -> int:
        return self.order.steps_per_epoch

    def batches(self, epoch: int = 0, step: int = 0, *, num_steps: int | None = None) -> Iterator[Batch]:
        """Yields `num_steps` batches from (epoch, step) on, across epochs; by default up to the end of the epoch.

        Closing the iterator, or dropping it, ends its threads. An error in a thread is raised here.
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
        """Returns one batch, decoded in the calling thread."""
        indices_B = rank_batch(self.order, epoch, step, self.rank, self.world_size)
        if isinstance(self.source, PixelSource):
            images_BHW3 = self.source.pixels(indices_B, self.image_size)
        else:
            whole = self._memory.take(math.prod(self._batch_shape)).reshape(self._batch_shape)
            images_BHW3 = whole[: len(indices_B)]
            num_resized = 0
            for row, index in enumerate(indices_B.tolist()):
                indices_B[row], is_resized = self._fill(images_BHW3[row], index)
                num_resized += is_resized
            self.bad_images.add_read(len(indices_B))
            with self._counting:
                self.num_resized += num_resized
        labels_B = torch.from_numpy(self.source.labels[indices_B])
        treatment = Treatment(self.order.seed, epoch * self.steps_per_epoch + step, self.mirror, self.augment)
        return Batch(torch.from_numpy(images_BHW3).permute(0, 3, 1, 2), labels_B, indices_B, epoch, step, treatment)

    def describe_resized(self) -> str:
        """Returns a sentence about images of another size; empty if there were none."""
        if not self.num_resized:
            return ""
        height, width = self.image_size
        return (
            f"{self.num_resized:,} of {self.bad_images.num_read:,} images had another size and were fitted to "
            f"{width} × {height} (data.fit = {self.fit})."
        )

    def _fill(self, out_HW3: NDArray[np.uint8], index: int) -> tuple[int, bool]:
        """Decodes the image, or else the first readable one of a chain that depends on the seed and the image alone.

        Returns the index of the decoded image, and whether it had another size.
        """
        wanted = index
        for attempt in range(_MAX_REPLACEMENTS):
            try:
                return index, decode_into(out_HW3, self._read(index), self.source.name_of(index), self.fit)
            except DataError as error:
                self.bad_images.add_bad(index, error)
            chain = combine64(self.order.seed, _REPLACE_SALT, wanted, attempt)
            index = int(chain % np.uint64(self.source.num_images))
        raise DataError(f"No image of {self.source.describe()} could be read in {_MAX_REPLACEMENTS} attempts.")

    def _read(self, index: int) -> bytes:
        """Reads the image, and retries after errors that may pass (an I/O error, too many open files)."""
        for pause_s in _READ_AGAIN_S:
            try:
                return self.source.read(index)
            except (DataError, OSError) as error:
                if not is_transient(error):
                    raise
                time.sleep(pause_s)
        return self.source.read(index)


class BadImages:
    """Counts the images of a run that could not be read, reports each once, and stops the run when there are too many.

    Workers update all fields under _lock.
    """

    def __init__(self, source: ImageSource, max_fraction: float) -> None:
        self._source = source
        self._max_fraction = max_fraction
        self._lock = threading.Lock()
        self.num_read = 0
        """Images requested on this rank."""
        self.num_bad = 0
        """Failed attempts; an image that fails in every epoch counts every time."""
        self.indices: set[int] = set()
        """Indices of the images that failed."""

    def describe(self) -> str:
        return (
            f"{self.num_bad:,} of {self.num_read:,} images could not be read and were replaced, "
            f"{len(self.indices):,} different ones; megaclass data verify lists them."
        )

    def add_read(self, num_images: int) -> None:
        with self._lock:
            self.num_read += num_images

    def add_bad(self, index: int, error: DataError) -> None:
        with self._lock:
            self.num_bad += 1
            is_new = index not in self.indices
            self.indices.add(index)
            judged = max(self.num_read, min(self._source.num_images, _IMAGES_BEFORE_JUDGING))
            # An image that fails in every epoch counts once here.
            num_different = len(self.indices)
            fraction = num_different / judged
        if is_new:
            _log.warning("skipped a bad image: %s", error)
        if fraction > self._max_fraction:
            raise DataError(
                f"{num_different} of {judged} images could not be read, more than data.max_bad_fraction = "
                f"{self._max_fraction} allows. The last one: {error} "
                f"megaclass data verify lists them, and writes a clean copy with --repair."
            )


def mirrored(seed: int, epoch: int, indices: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Half of the images, another half each epoch; asked of the image, not of the rank that happens to hold it."""
    bits = combine64(seed, _MIRROR_SALT, epoch, indices.astype(np.uint64))
    return (bits >> np.uint64(63)).astype(bool)


def _build_order(
    source: ImageSource, global_batch: int, seed: int, keep_last: bool, kind: str, images_per_class: int
) -> Order:
    if kind == "images":
        return ImageOrder(num_images=source.num_images, global_batch=global_batch, seed=seed, keep_last=keep_last)
    return ClassOrder(source.labels, global_batch=global_batch, seed=seed, images_per_class=images_per_class)


def _fitting_batch(num_images: int) -> int:
    """Returns a power of two that gives a few steps per epoch, if there are that many images."""
    return int(2 ** max(1, (max(2, num_images) // 4).bit_length() - 1))


def _require_fillable(
    source: ImageSource, order: Order, global_batch: int, world_size: int, num_parts: int, fewest_in_part: int
) -> None:
    if global_batch < world_size:
        raise DataError(
            f"A global batch of {global_batch} images leaves some of the {world_size} ranks without any: "
            f"use at least two images per rank."
        )
    if global_batch > source.num_images:
        raise DataError(
            f"A global batch of {global_batch} images is more than the {source.num_images} there are: "
            f"{source.describe()}. Lower it, for example with train.global_batch={_fitting_batch(source.num_images)}."
        )
    smallest = order.batch_size(order.steps_per_epoch - 1)
    if smallest // world_size < 2:
        raise DataError(
            f"A batch of {smallest} images leaves one of the {world_size} ranks with a single image, which batch norm "
            f"refuses: use a global batch of at least two images per rank, or four with data.keep_last."
        )
    if smallest // world_size // num_parts < fewest_in_part:
        raise DataError(
            f"The smallest batch, of {smallest} images, gives one of the {world_size} ranks {smallest // world_size}: too few "
            f"for train.accumulate = {num_parts} parts of at least {fewest_in_part}, below which batch norm has no "
            f"statistics. Use fewer parts or a larger global batch, or switch off data.keep_last."
        )
