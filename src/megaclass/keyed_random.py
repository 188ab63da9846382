"""Random numbers without a generator: each is a hash of what it belongs to, so order and grouping cannot change it."""

import numpy as np
from numpy.typing import NDArray


def mix64(values: NDArray[np.uint64] | np.uint64) -> NDArray[np.uint64]:
    """A 64-bit hash, one to one (SplitMix64). Written out: NumPy's generators may change between versions."""
    # At least one dimension: NumPy warns of the overflow of scalars, and this is all overflow.
    mixed = np.atleast_1d(np.asarray(values, dtype=np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed.reshape(np.shape(values))


def combine64(*keys: NDArray[np.uint64] | np.uint64 | int) -> NDArray[np.uint64]:
    """One key out of several, broadcast against each other; their order matters."""
    combined: NDArray[np.uint64] = np.zeros((), dtype=np.uint64)
    for key in keys:
        part = np.uint64(key % 2**64) if isinstance(key, int) else key
        combined = mix64(mix64(part) ^ combined)
    return combined
