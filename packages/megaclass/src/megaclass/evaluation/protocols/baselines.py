"""Verification without any training, by the cosine of raw pixels. The gain over it is what training achieved."""

import numpy as np
from numpy.typing import NDArray

from megaclass.data.decode import Fit, decode_batch
from megaclass.data.pair_file import PairSet
from megaclass.evaluation.protocols.verification import ScoredPairs, verify_distances
from megaclass.image_size import ImageSize, height_and_width


def score_pixels(
    pair_set: PairSet, *, image_size: ImageSize, fit: Fit = "squash", name: str = "the pairs"
) -> ScoredPairs:
    """Verifies pairs by the cosine of their raw pixel values (0 to 255, all positions and channels).

    Images are decoded pair by pair: two are in memory at a time. name: of the set, in errors.
    """
    similarities_N = np.empty(len(pair_set.is_same))
    for pair in range(len(similarities_N)):
        indices = [2 * pair, 2 * pair + 1]
        names = [f"image {index} of {name} (pair {pair})" for index in indices]
        both = decode_batch([pair_set.images[index] for index in indices], height_and_width(image_size), names, fit)
        similarities_N[pair] = pixel_cosine(both[0], both[1])
    # A cosine s is a squared distance 2 - 2 s. These distances fill a small part of [0, 4], for which the published
    # grid is too coarse: every distance that occurs may be the threshold, and one above all of them.
    distances_N = 2 - 2 * similarities_N
    distinct = np.unique(distances_N)
    thresholds_T = np.append(distinct, np.nextafter(distinct[-1:], np.inf))
    verification = verify_distances(distances_N, pair_set.is_same, thresholds_T=thresholds_T)
    return ScoredPairs(
        name="raw pixels", distances_N=distances_N, is_same_N=pair_set.is_same, verification=verification
    )


def pixel_cosine(first: NDArray[np.uint8], second: NDArray[np.uint8]) -> float:
    first_flat, second_flat = first.ravel().astype(np.float64), second.ravel().astype(np.float64)
    norms = np.linalg.norm(first_flat) * np.linalg.norm(second_flat)
    # Only an entirely black image has norm 0; it is similar to none.
    return float(first_flat @ second_flat / norms) if norms else 0.0
