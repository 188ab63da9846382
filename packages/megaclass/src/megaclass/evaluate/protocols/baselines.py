"""Verification without any training: similarity of raw pixels and of colour histograms.

The gain over these baselines is what training achieved. Images are decoded pair by pair: two are in memory at a time.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from megaclass.data.decode import Fit, decode_batch
from megaclass.data.pair_file import PairSet
from megaclass.evaluate.protocols.verification import Floats, ScoredPairs, verify_distances
from megaclass.image_size import ImageSize, height_and_width

_LEVELS = 8
"""Number of levels per colour channel in a histogram: 8 x 8 x 8 = 512 bins."""

Images = NDArray[np.uint8]


def score_pixels(
    pair_set: PairSet, *, image_size: ImageSize, fit: Fit = "squash", name: str = "the pairs"
) -> ScoredPairs:
    """Verifies pairs by the cosine of their raw pixel values (0 to 255, all positions and channels)."""
    return _score("raw pixels", pixel_cosine, pair_set, image_size, fit, name)


def score_histograms(
    pair_set: PairSet, *, image_size: ImageSize, fit: Fit = "squash", name: str = "the pairs"
) -> ScoredPairs:
    """Verifies pairs by the overlap of 8 x 8 x 8 RGB histograms (Bhattacharyya coefficient)."""
    return _score("colour histograms", histogram_overlap, pair_set, image_size, fit, name)


def pixel_cosine(first: Images, second: Images) -> float:
    first_flat, second_flat = first.ravel().astype(np.float64), second.ravel().astype(np.float64)
    norms = np.linalg.norm(first_flat) * np.linalg.norm(second_flat)
    # Only an entirely black image has norm 0; it is similar to none.
    return float(first_flat @ second_flat / norms) if norms else 0.0


def histogram_overlap(first: Images, second: Images) -> float:
    """Returns the sum over bins of sqrt(p q): 1 for equal histograms, 0 for histograms without a common colour."""
    return float(np.sqrt(_histogram(first) * _histogram(second)).sum())


def _histogram(image_HW3: Images) -> Floats:
    levels_HW3 = image_HW3.astype(np.int64) * _LEVELS // 256
    bins_HW = (levels_HW3[..., 0] * _LEVELS + levels_HW3[..., 1]) * _LEVELS + levels_HW3[..., 2]
    return np.bincount(bins_HW.ravel(), minlength=_LEVELS**3) / bins_HW.size


def _score(
    title: str,
    similarity: Callable[[Images, Images], float],
    pair_set: PairSet,
    image_size: ImageSize,
    fit: Fit,
    name: str,
) -> ScoredPairs:
    similarities_N = np.empty(len(pair_set.is_same))
    for pair in range(len(similarities_N)):
        indices = [2 * pair, 2 * pair + 1]
        names = [f"image {index} of {name} (pair {pair})" for index in indices]
        both = decode_batch([pair_set.images[index] for index in indices], height_and_width(image_size), names, fit)
        similarities_N[pair] = similarity(both[0], both[1])
    # A cosine s is a squared distance 2 - 2 s. The distances of these baselines fill a small part of [0, 4], for which the
    # published grid is too coarse: every distance that occurs may be the threshold, and one above all of them.
    distances_N = 2 - 2 * similarities_N
    distinct = np.unique(distances_N)
    thresholds_T = np.append(distinct, np.nextafter(distinct[-1:], np.inf))
    verification = verify_distances(distances_N, pair_set.is_same, thresholds_T=thresholds_T)
    return ScoredPairs(name=title, distances_N=distances_N, is_same_N=pair_set.is_same, verification=verification)
