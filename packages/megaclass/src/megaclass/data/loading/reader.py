"""Reads the images of a batch into memory of the caller.

`BatchPlan` holds all that decides the images of one rank in a step, and their pixels, so a thread and a process that are
given the same plan fill the same bytes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megaclass.data.decode import Fit, decode_into
from megaclass.data.order import ClassOrder, FileOrder, ImageOrder, Order
from megaclass.data.sources.source import ImageSource, PixelSource
from megaclass.errors import DataError
from megaclass.keyed_random import combine64
from megaclass_launch.errors import is_transient
from megaclass_launch.even_parts import even_part

_log = logging.getLogger("megaclass.data")
_REPLACE_SALT = 0x7265706C616365
_MAX_REPLACEMENTS = 100
# A network file system that fails over is away for seconds; a longer wait would keep all ranks waiting.
_READ_AGAIN_S = (0.05, 0.5, 2.0)
# With fewer images the share of bad ones says little; smaller sets are judged by their own size.
_IMAGES_BEFORE_JUDGING = 10_000
# Above this share the data is not what the user takes it for.
_MAX_BAD_SHARE = 0.2


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """Choice of the images of one rank in every step, and their size."""

    global_batch: int
    image_size: tuple[int, int]
    rank: int = 0
    world_size: int = 1
    seed: int = 0
    fit: Fit = "squash"
    keep_last: bool = False
    order: Literal["images", "classes", "file"] = "images"
    images_per_class: int = 1

    @property
    def max_rows(self) -> int:
        """Largest number of images that this rank gets in a step."""
        return -(-self.global_batch // self.world_size)

    def order_of(self, source: ImageSource) -> Order:
        sizes = {"num_images": source.num_images, "global_batch": self.global_batch, "seed": self.seed}
        if self.order == "file":
            return FileOrder(**sizes)
        if self.order == "images":
            return ImageOrder(**sizes, keep_last=self.keep_last)
        return ClassOrder(
            source.labels, global_batch=self.global_batch, seed=self.seed, images_per_class=self.images_per_class
        )


class BatchReader:
    """Fills rows of this rank's batches. An image that cannot be read is replaced by another one, chosen by a hash.

    Safe between threads, as long as they fill different rows.
    """

    def __init__(
        self,
        source: ImageSource,
        plan: BatchPlan,
        on_bad: Callable[[int, DataError], None],
        on_image: Callable[[int], None] = lambda index: None,
    ) -> None:
        """on_bad: called with every image that is replaced; may raise. on_image: called before an image is decoded."""
        self.source = source
        self.plan = plan
        self.order = plan.order_of(source)
        self.crashes: dict[int, str] = {}
        """Images on which a decoder has crashed, with the reason; they count as bad and are not decoded again."""
        self._on_bad = on_bad
        self._on_image = on_image

    def num_rows(self, step: int) -> int:
        """Returns the number of images of this rank in a step of an epoch."""
        return len(even_part(self.order.batch_size(step), self.plan.rank, self.plan.world_size))

    def fill(
        self,
        epoch: int,
        step: int,
        rows: range,
        images_BHW3: NDArray[np.uint8],
        indices_B: NDArray[np.int64],
    ) -> int:
        """Fills these rows of the step's images, and the indices of the images that they hold.

        Returns how many images had another size.
        """
        # Rows count within this rank's part of the step, and the part within the global batch.
        part = even_part(self.order.batch_size(step), self.plan.rank, self.plan.world_size)[rows.start : rows.stop]
        wanted_R = self.order.batch(epoch, step, slice(part.start, part.stop))
        if isinstance(self.source, PixelSource):
            indices_B[rows.start : rows.stop] = wanted_R
            images_BHW3[rows.start : rows.stop] = self.source.pixels(wanted_R, self.plan.image_size)
            return 0
        num_resized = 0
        for row, index in zip(rows, wanted_R.tolist(), strict=True):
            # A replaced image keeps its row but changes its index, and with it the label.
            indices_B[row], is_resized = self._fill_one(images_BHW3[row], index)
            num_resized += is_resized
        return num_resized

    def _fill_one(self, out_HW3: NDArray[np.uint8], index: int) -> tuple[int, bool]:
        """Decodes the image, or else the first readable one of a chain that depends on the seed and the image alone.

        Returns the index of the image, and whether it had another size.
        """
        wanted = index
        for attempt in range(_MAX_REPLACEMENTS):
            try:
                return index, self._decode(out_HW3, index)
            except DataError as error:
                self._on_bad(index, error)
            # Neither the rank nor the time decides, so a resumed run replaces it by the same image.
            # The salt keeps this stream apart from those of the order and of the augmentations, which hash the same indices.
            chain = combine64(self.plan.seed, _REPLACE_SALT, wanted, attempt)
            index = int(chain % np.uint64(self.source.num_images))
        raise DataError(f"No image of {self.source.describe()} could be read in {_MAX_REPLACEMENTS} attempts.")

    def _decode(self, out_HW3: NDArray[np.uint8], index: int) -> bool:
        if index in self.crashes:
            raise DataError(f"Cannot decode {self.source.name_of(index)}: {self.crashes[index]}.")
        # Before the read, which may block for long: the table names the image if the process is killed meanwhile.
        self._on_image(index)
        encoded = read_image(self.source, index)
        return decode_into(out_HW3, encoded, self.source.name_of(index), self.plan.fit)


def read_image(source: ImageSource, index: int) -> bytes:
    """Reads an image, and again after errors that may pass (an I/O error, too many open files)."""
    for pause_s in _READ_AGAIN_S:
        try:
            return source.read(index)
        except (DataError, OSError) as error:
            if not is_transient(error):
                raise
            time.sleep(pause_s)
    return source.read(index)


class BadImages:
    """Counts the images of a run, reports each that could not be read once, and stops the run when there are too many.

    Workers update all fields under _lock.
    """

    def __init__(self, num_images: int, max_fraction: float, allowed_by: str = "data.max_bad_fraction") -> None:
        """num_images: of the whole source. allowed_by: names the limit in the error."""
        self._num_images = num_images
        self._max_fraction = max_fraction
        self._allowed_by = allowed_by
        self._lock = threading.Lock()
        self.num_read = 0
        """Images requested on this rank."""
        self.num_bad = 0
        """Failed attempts; an image that fails in every epoch counts every time."""
        self.indices: set[int] = set()
        """Indices of the images that failed."""
        self.num_resized = 0
        """Images of another size that this rank has fitted so far."""

    @staticmethod
    def of_tool(num_images: int) -> BadImages:
        """Returns the rule of the tools, which leave bad images out: each is named once, and there may be a few."""
        return BadImages(num_images, _MAX_BAD_SHARE, "the limit of this command")

    def describe(self) -> str:
        return (
            f"{self.num_bad:,} of {self.num_read:,} images could not be read and were replaced, "
            f"{len(self.indices):,} different ones; megaclass data verify lists them."
        )

    def add_read(self, num_images: int, num_resized: int = 0) -> None:
        with self._lock:
            self.num_read += num_images
            self.num_resized += num_resized

    def add_bad(self, index: int, error: DataError) -> None:
        with self._lock:
            self.num_bad += 1
            is_new = index not in self.indices
            self.indices.add(index)
            # A run that has only read a few images is judged as if it had read more, unless there are no more.
            judged = max(self.num_read, min(self._num_images, _IMAGES_BEFORE_JUDGING))
            # An image that fails in every epoch counts once here.
            num_different = len(self.indices)
            fraction = num_different / judged
        # Outside of the lock: logging may block on a full pipe, and other threads count meanwhile.
        if is_new:
            _log.warning("skipped a bad image: %s", error)
        if fraction > self._max_fraction:
            raise DataError(
                f"{num_different} of {judged} images could not be read, more than {self._allowed_by} = "
                f"{self._max_fraction} allows. The last one: {error} "
                f"megaclass data verify lists them, and writes a clean copy with --repair."
            )
