import io
import math
import tracemalloc

import numpy as np
import pytest
from PIL import Image

from megaclass.data.pair_file import PairSet
from megaclass.errors import DataError
from megaclass.evaluation.protocols.pairs import pixel_cosine, score_pixels


def _png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def _plain(red: int, green: int, blue: int) -> np.ndarray:
    return np.full((4, 4, 3), (red, green, blue), dtype=np.uint8)


def test_the_cosine_of_pixels_sees_direction_not_brightness():
    assert pixel_cosine(_plain(100, 50, 20), _plain(200, 100, 40)) == pytest.approx(1)
    assert pixel_cosine(_plain(255, 0, 0), _plain(0, 255, 0)) == 0
    assert pixel_cosine(_plain(255, 0, 0), _plain(255, 255, 0)) == pytest.approx(math.sqrt(0.5))
    assert pixel_cosine(_plain(0, 0, 0), _plain(9, 9, 9)) == 0


def _noise(rng: np.random.Generator, *, low: int, high: int) -> np.ndarray:
    return rng.integers(low, high, (4, 4, 3), dtype=np.uint8)


def test_pixels_tell_apart_a_picture_and_a_permutation_of_it():
    """Same pairs repeat a picture with little noise, different pairs permute its pixels."""
    rng = np.random.default_rng(0)
    images, is_same = [], np.arange(100) % 2 == 0
    for same in is_same:
        # Values in the middle of their bins, so the noise does not change the histogram.
        first = (_noise(rng, low=0, high=8) * 32 + 16).astype(np.uint8)
        shown = first if same else rng.permutation(first.reshape(16, 3)).reshape(4, 4, 3)
        images += [_png(first), _png((shown + _noise(rng, low=0, high=3)).astype(np.uint8))]
    pair_set = PairSet(images, is_same)
    pixels = score_pixels(pair_set, image_size=4)
    assert pixels.verification.auc == 1
    assert pixels.verification.accuracy > 0.95
    assert math.isfinite(pixels.verification.threshold)


def test_thresholds_are_as_fine_as_the_scores():
    """Cosines that differ in the fourth decimal, far below the grid of 0.01, are told apart."""
    is_same = np.arange(40) % 2 == 0
    grey = _plain(200, 200, 200)
    images = []
    for same in is_same:
        other = grey.copy()
        other[0, 0] = 198 if same else 180
        images += [_png(grey), _png(other)]
    scored = score_pixels(PairSet(images, is_same), image_size=4)
    assert np.ptp(scored.distances_N) < 0.01
    assert scored.verification.accuracy == 1


def test_memory_does_not_grow_with_the_number_of_pairs():
    rng = np.random.default_rng(0)
    encoded = [_png(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)) for _ in range(2)]

    def peak(num_pairs: int) -> int:
        pair_set = PairSet(encoded * num_pairs, np.arange(num_pairs) % 2 == 0)
        tracemalloc.start()
        try:
            score_pixels(pair_set, image_size=64)
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    # 180 more pairs would hold 180 x 2 x 12 kB = 4.4 MB as bytes and 35 MB as float64.
    assert peak(200) < peak(20) + 1_000_000


def test_an_image_that_does_not_decode_is_named():
    pair_set = PairSet(
        [_png(_plain(1, 2, 3))] * 25 + [b"no image"] + [_png(_plain(1, 2, 3))] * 14, np.arange(20) % 2 == 0
    )
    with pytest.raises(DataError, match=r"Cannot decode image 25 of lfw\.bin \(pair 12\)"):
        score_pixels(pair_set, image_size=4, name="lfw.bin")


def test_too_few_pairs_are_refused():
    with pytest.raises(DataError, match="0 pairs cannot be split into 10 folds"):
        score_pixels(PairSet([], np.zeros(0, dtype=bool)), image_size=4)
