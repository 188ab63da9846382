"""Random numbers that are hashes of what they belong to, so that order, grouping and number of ranks cannot change them.

This module has the 64-bit arithmetic for Python integers and NumPy arrays; `head/counter_random.py` builds the 32-bit
numbers of the training device on it.
"""

import hashlib
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

MASK_64 = (1 << 64) - 1


class Stream(IntEnum):
    """Purposes of random numbers. Each keeps its draws of one seed apart from all others; a number is never reused."""

    INITIAL_CENTRES = 1
    DRAW_NEGATIVES = 2
    MARGIN_NOISE = 3
    ROUND_WEIGHTS = 4
    DROPOUT = 5


def mix64_int(value: int) -> int:
    """Returns a 64-bit hash of a 64-bit integer, one to one (SplitMix64)."""
    value = (value + 0x9E3779B97F4A7C15) & MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK_64
    return value ^ (value >> 31)


def mix64(values: NDArray[np.uint64] | np.uint64) -> NDArray[np.uint64]:
    """Returns the hash of `mix64_int` for every element. Written out: NumPy's generators may change between versions."""
    # At least one dimension: NumPy warns of the overflow of scalars, and this is all overflow.
    mixed = np.atleast_1d(np.asarray(values, dtype=np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed.reshape(np.shape(values))


def combine64(*keys: NDArray[np.uint64] | np.uint64 | int) -> NDArray[np.uint64]:
    """Returns one key made of several, broadcast against each other; their order matters."""
    combined: NDArray[np.uint64] = np.zeros((), dtype=np.uint64)
    for key in keys:
        part = np.uint64(key % 2**64) if isinstance(key, int) else key
        combined = mix64(mix64(part) ^ combined)
    return combined


def name_key(name: str) -> int:
    """Returns a 64-bit key of a name, the same on every machine and in every version."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
