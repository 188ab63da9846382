"""The images of each step, as a pure function of (seed, epoch, position): a run can stop and resume at any step.

The shuffle is a keyed permutation that is evaluated where it is needed instead of a list. 40 million images cost no memory
and no start-up time, and every rank computes the same global batches for any number of ranks.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megaclass.errors import DataError
from megaclass.keyed_random import combine64, mix64
from megaclass_launch.even_parts import even_part

_NUM_ROUNDS = 8
_CLASS_SALT, _WITHIN_SALT = 0x636C617373, 0x77697468696E


class Order(Protocol):
    """Global batches of an epoch, of which each rank takes a contiguous part."""

    @property
    def seed(self) -> int: ...
    @property
    def steps_per_epoch(self) -> int: ...
    def batch(self, epoch: int, step: int, rows: slice = slice(None)) -> NDArray[np.int64]:
        """Returns the indices of the images in this step over all ranks (G,), or of some rows of them."""
        ...

    def batch_size(self, step: int) -> int:
        """Returns the number of images in this step over all ranks."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageOrder:
    """Order in which every image occurs once per epoch."""

    num_images: int
    """Images in the source."""
    global_batch: int
    """Images in one step, over all ranks."""
    seed: int = 0
    """Key of the shuffle."""
    keep_last: bool = False
    """Keep the incomplete last batch of an epoch instead of leaving it out."""

    def __post_init__(self) -> None:
        assert self.num_images >= 0 and self.global_batch >= 1

    @property
    def steps_per_epoch(self) -> int:
        whole, rest = divmod(self.num_images, self.global_batch)
        return whole + (1 if self.keep_last and rest else 0)

    def batch(self, epoch: int, step: int, rows: slice = slice(None)) -> NDArray[np.int64]:
        assert 0 <= step < self.steps_per_epoch, (step, self.steps_per_epoch)
        # Only this rank's rows are shuffled: the cost does not depend on the size of the data.
        positions = np.arange(self._start(step), self._start(step + 1))[rows]
        return shuffled(positions, self.num_images, self.seed, epoch)

    def batch_size(self, step: int) -> int:
        return self._start(step + 1) - self._start(step)

    def _start(self, step: int) -> int:
        """Returns the first position of a step. The last two steps share the rest, so neither is smaller than half a batch.

        A step with the rest alone could have a single image, which batch norm refuses. The split must not depend on the
        number of ranks, or the global batches would.
        """
        last = self.steps_per_epoch - 1
        if not self.keep_last or step < last or last < 1:
            return min(step * self.global_batch, self.num_images)
        if step > last:
            return self.num_images
        before = (last - 1) * self.global_batch
        return before + (self.num_images - before + 1) // 2


class ClassOrder:
    """Order in which every class occurs equally often, in groups of k images of one class.

    One permutation of all classes follows another, across epochs. The images of a class follow permutations, too, so none
    occurs twice before all have occurred. An epoch has as many steps as with `ImageOrder`.
    """

    def __init__(
        self, labels: NDArray[np.int64], *, global_batch: int, seed: int = 0, images_per_class: int = 1
    ) -> None:
        if global_batch % images_per_class:
            raise DataError(
                f"A global batch of {global_batch} images cannot be divided into groups of {images_per_class} "
                f"images of a class: use a multiple of {images_per_class}."
            )
        self.seed = seed
        self.global_batch = global_batch
        self.images_per_class = images_per_class
        self._labels = labels

    @property
    def steps_per_epoch(self) -> int:
        return len(self._labels) // self.global_batch

    def batch(self, epoch: int, step: int, rows: slice = slice(None)) -> NDArray[np.int64]:
        assert 0 <= step < self.steps_per_epoch, (step, self.steps_per_epoch)
        order, first, count = self._classes
        k = self.images_per_class
        position = (epoch * self.steps_per_epoch + step) * self.global_batch + np.arange(self.global_batch)[rows]
        # Group number -> how often all classes were visited before, and the place in this permutation of them.
        visit, which = np.divmod(position // k, len(first))
        row = permute(which, np.array(len(first)), combine64(self.seed, _CLASS_SALT, visit.astype(np.uint64)))
        # A visit takes k successive images of one permutation, so they differ if the class has k.
        visits_per_pass = np.maximum(count[row] // k, 1)
        passes, visit_in_pass = np.divmod(visit, visits_per_pass)
        within = (visit_in_pass * k + position % k) % count[row]
        # Each class has another permutation of its images in every pass over them.
        key = combine64(self.seed, _WITHIN_SALT, row.astype(np.uint64), passes.astype(np.uint64))
        index = first[row] + permute(within, count[row], key)
        return index if order is None else order[index]

    def batch_size(self, step: int) -> int:
        return self.global_batch

    @cached_property
    def _classes(self) -> tuple[NDArray[np.int64] | None, NDArray[np.int64], NDArray[np.int64]]:
        """Images sorted by class (None if they are already), the first image of each non-empty class, and their numbers."""
        order = None if bool((self._labels[1:] >= self._labels[:-1]).all()) else np.argsort(self._labels, kind="stable")
        by_class = self._labels if order is None else self._labels[order]
        first = np.flatnonzero(np.diff(by_class, prepend=-1))
        return order, first, np.diff(first, append=len(by_class))


@dataclass(frozen=True, kw_only=True, slots=True)
class FileOrder:
    """All images once, in the order of the source; the last step has the rest."""

    num_images: int
    global_batch: int
    seed: int = 0

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_images // self.global_batch)

    def batch(self, epoch: int, step: int, rows: slice = slice(None)) -> NDArray[np.int64]:
        return np.arange(step * self.global_batch, step * self.global_batch + self.batch_size(step))[rows]

    def batch_size(self, step: int) -> int:
        return min(self.global_batch, self.num_images - step * self.global_batch)


def rank_batch(order: Order, epoch: int, step: int, rank: int, world_size: int) -> NDArray[np.int64]:
    """Returns this rank's contiguous part of the step's images (B,)."""
    part = even_part(order.batch_size(step), rank, world_size)
    return order.batch(epoch, step, slice(part.start, part.stop))


def shuffled(positions: NDArray[np.int64], num_images: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Returns the image at each position of the epoch: a permutation of [0, num_images)."""
    return permute(positions, np.array(num_images), combine64(seed, epoch))


def permute(values: NDArray[np.int64], sizes: NDArray[np.int64], keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Returns the image of each value under a permutation of [0, size); entries of equal size and key share one.

    A Feistel network permutes a rectangle of about sqrt(size) by sqrt(size) that is hardly larger than the size. A value
    that falls outside is sent through it again until it lands inside, which keeps the map one to one.
    """
    limits = np.atleast_1d(np.asarray(sizes, dtype=np.uint64))
    # Floating point may round, which is harmless: any rectangle that holds all values will do.
    num_rows = np.ceil(np.sqrt(limits)).astype(np.uint64)
    num_columns = (limits + num_rows - np.uint64(1)) // num_rows
    # (rounds, 1) where all share a permutation, (rounds, N) where they do not.
    round_keys = mix64(mix64(np.arange(_NUM_ROUNDS, dtype=np.uint64))[:, None] ^ np.atleast_1d(keys)[None])
    permuted = _feistel(values.astype(np.uint64), num_rows, num_columns, round_keys)
    # Few values fall outside: the rectangle is larger than the size by less than a column.
    outside = np.flatnonzero(permuted >= limits)
    while len(outside):
        shared = (_at(array, outside) for array in (num_rows, num_columns, round_keys))
        permuted[outside] = _feistel(permuted[outside], *shared)
        outside = outside[permuted[outside] >= _at(limits, outside)]
    return permuted.astype(np.int64)


def _at(values: NDArray[np.uint64], places: NDArray[np.int64]) -> NDArray[np.uint64]:
    # One entry stands for all values; otherwise there is one per value.
    return values if values.shape[-1] == 1 else values[..., places]


def _feistel(
    values: NDArray[np.uint64],
    num_rows: NDArray[np.uint64],
    num_columns: NDArray[np.uint64],
    round_keys: NDArray[np.uint64],
) -> NDArray[np.uint64]:
    """Rotates row and column in turn by a hash of the other. Every rotation can be undone, so this is a permutation."""
    row, column = np.divmod(values, num_columns)
    for number, keys in enumerate(round_keys):
        # The rotation of one coordinate depends only on the other one, which this round leaves unchanged.
        if number % 2 == 0:
            row = (row + mix64(column ^ keys) % num_rows) % num_rows
        else:
            column = (column + mix64(row ^ keys) % num_columns) % num_columns
    return np.asarray(row * num_columns + column, dtype=np.uint64)
