"""Which images make up a step: a pure function of (seed, epoch, position), so a run can stop and go on at any step.

The shuffle is a keyed permutation evaluated where it is needed, not a list: 40 million images cost no memory and no
start-up time, and every rank sees the same global batches, however many ranks there are.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megaclass.data.hashing import combine64, mix64

_NUM_ROUNDS = 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    num_images: int
    """Images in the source."""
    global_batch: int
    """Images in one step, over all ranks."""
    seed: int = 0
    """Another seed, another order."""
    keep_last: bool = False
    """Whether an epoch ends with a smaller batch of what is left, or leaves it out."""

    def __post_init__(self) -> None:
        assert self.num_images >= 0 and self.global_batch >= 1

    @property
    def steps_per_epoch(self) -> int:
        whole, rest = divmod(self.num_images, self.global_batch)
        return whole + (1 if self.keep_last and rest else 0)

    def batch(self, epoch: int, step: int) -> NDArray[np.int64]:
        """Indices of the images in this step, over all ranks (G,)."""
        assert 0 <= step < self.steps_per_epoch, (step, self.steps_per_epoch)
        start = step * self.global_batch
        return shuffled(
            np.arange(start, min(start + self.global_batch, self.num_images)), self.num_images, self.seed, epoch
        )

    def rank_batch(self, epoch: int, step: int, rank: int, world_size: int) -> NDArray[np.int64]:
        """This rank's contiguous part of the step's images (B,)."""
        indices_G = self.batch(epoch, step)
        return indices_G[rank_part(len(indices_G), rank, world_size)]


def rank_part(num_items: int, rank: int, world_size: int) -> slice:
    """Contiguous parts, in the order of ranks, whose lengths differ by at most one."""
    assert 0 <= rank < world_size
    share, rest = divmod(num_items, world_size)
    start = share * rank + min(rank, rest)
    return slice(start, start + share + (1 if rank < rest else 0))


def epoch_order(num_images: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """All images in the order of this epoch: each exactly once."""
    return shuffled(np.arange(num_images), num_images, seed, epoch)


def shuffled(positions: NDArray[np.int64], num_images: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Image at each position of the epoch: a permutation of [0, num_images).

    A Feistel network permutes the next power of four; a value that falls outside is sent through it again until it
    lands inside, which keeps the map one to one and takes fewer than four passes on average.
    """
    half_bits = np.uint64(max(1, (max(num_images - 1, 1).bit_length() + 1) // 2))
    keys = combine64(seed, epoch, np.arange(_NUM_ROUNDS, dtype=np.uint64))
    values = positions.astype(np.uint64)
    outside = np.ones(values.shape, dtype=bool)
    while outside.any():
        values[outside] = _feistel(values[outside], half_bits, keys)
        outside = values >= np.uint64(num_images)
    return values.astype(np.int64)


def _feistel(values: NDArray[np.uint64], half_bits: np.uint64, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = values >> half_bits, values & mask
    for key in keys:
        left, right = right, left ^ (mix64(right ^ key) & mask)
    return left << half_bits | right
