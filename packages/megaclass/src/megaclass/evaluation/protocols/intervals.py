"""95 % confidence intervals of shares, computed without random numbers.

A true accept rate at a false accept rate is uncertain in two ways: the same pairs are a sample, and so are the different
pairs that set the threshold. Each gets an interval of 97.5 %; together they hold with 95 % (Bonferroni). The interval of
the threshold lies between two of the sorted different pairs (binomial distribution), that of the rate is Wilson's.
"""

import math

import numpy as np
from numpy.typing import NDArray

Interval = tuple[float, float]

# Two-sided quantiles of the normal distribution.
_Z_95, _Z_97_5 = 1.959963984540054, 2.241402727604947


def wilson_interval(num_hits: int, num_trials: int, *, z: float = _Z_95) -> Interval:
    """Returns the interval of a share of independent trials; it is sensible at 0 and 1, where the usual ± is not."""
    share = num_hits / num_trials
    widened = num_trials + z * z
    middle = (num_hits + z * z / 2) / widened
    half = z / widened * math.sqrt(num_trials * share * (1 - share) + z * z / 4)
    return max(0.0, middle - half), min(1.0, middle + half)


def rank_interval(num_trials: int, share: float, *, confidence: float = 0.975) -> tuple[int, int]:
    """Returns (low, high) between which a binomial count lies with at least this confidence."""
    tail = (1 - confidence) / 2
    # Counts up to ten standard deviations above the mean: what lies beyond is far smaller than any tail.
    mean, deviation = num_trials * share, math.sqrt(num_trials * share * (1 - share))
    last = min(num_trials, math.ceil(mean + 10 * deviation + 10))
    counts = np.arange(1, last + 1, dtype=np.float64)
    steps = np.log((num_trials - counts + 1) / counts) + math.log(share) - math.log1p(-share)
    log_chances = np.concatenate([[0.0], np.cumsum(steps)]) + num_trials * math.log1p(-share)
    below = np.cumsum(np.exp(log_chances))
    # The probability of a count below low is at most the tail, and likewise that of one above high.
    low = int(np.searchsorted(below, tail, side="right"))
    high = int(np.searchsorted(below, 1 - tail, side="left"))
    return low, min(high, num_trials)


def tar_interval(same_N: NDArray[np.float64], different_N: NDArray[np.float64], far: float) -> Interval:
    """Returns the 95 % interval of the TAR at a FAR, from distances in rising order.

    If fewer than about five different pairs are expected below the threshold, the sample does not bound the threshold
    from below; the closest different pair stands in for it.
    """
    low_rank, high_rank = rank_interval(len(different_N), far)
    # At least the same pairs strictly closer than the lowest threshold count, at most those up to the highest.
    closer = int(np.searchsorted(same_N, different_N[max(low_rank, 1) - 1], side="left"))
    farther = len(same_N)
    if high_rank < len(different_N):
        farther = int(np.searchsorted(same_N, different_N[high_rank], side="right"))
    return wilson_interval(closer, len(same_N), z=_Z_97_5)[0], wilson_interval(farther, len(same_N), z=_Z_97_5)[1]
