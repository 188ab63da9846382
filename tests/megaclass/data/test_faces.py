"""Synthetic identities: reproducible to the byte, recognisable, and not by their pixels or colours."""

import numpy as np
import pytest

from megaclass.data.synthetic.faces import draw_faces
from megaclass.errors import DataError


def draw(identity, image, seed=0, size=48):
    return draw_faces(seed, np.asarray(identity, dtype=np.int64), np.asarray(image, dtype=np.int64), size)


def test_an_image_does_not_depend_on_what_is_drawn_beside_it():
    identity, image = np.repeat(np.arange(10), 10), np.tile(np.arange(10), 10)
    together = draw(identity, image)
    assert together.shape == (100, 48, 48, 3) and together.dtype == np.uint8
    assert np.array_equal(draw(identity[::-1], image[::-1])[::-1], together)
    for number in (0, 37, 99):
        assert np.array_equal(draw([identity[number]], [image[number]])[0], together[number])


def test_seed_identity_and_image_each_change_the_picture():
    face = draw([4], [2])
    for other in (draw([4], [2], seed=1), draw([5], [2]), draw([4], [3])):
        assert np.abs(other.astype(int) - face).mean() > 10


@pytest.mark.parametrize("size", [16, 47, 112])
def test_any_size_shows_the_same_scene(size):
    small, large = draw([3], [1], size=size)[0], draw([3], [1], size=224)[0]
    # Mean colours of the four quarters agree: the same face at another resolution.
    for rows in (slice(0, 0.5), slice(0.5, 1)):
        for columns in (slice(0, 0.5), slice(0.5, 1)):
            quarters = [
                picture[
                    int(rows.start * len(picture)) : int(rows.stop * len(picture)),
                    int(columns.start * len(picture)) : int(columns.stop * len(picture)),
                ].mean(axis=(0, 1))
                for picture in (small, large)
            ]
            assert np.abs(quarters[0] - quarters[1]).max() < 12


@pytest.mark.parametrize("size", [0, -64, 15, 5000])
def test_a_size_that_cannot_be_drawn_is_refused(size):
    with pytest.raises(DataError, match=r"\[16, 1024\]"):
        draw([0], [0], size=size)


def best_threshold_accuracy(scores: np.ndarray, is_same: np.ndarray) -> float:
    """10 folds: the threshold that is best on nine is tried on the tenth."""
    is_right = (scores[None] >= np.sort(scores)[:, None]) == is_same[None]
    folds = np.array_split(np.arange(len(scores)), 10)
    return float(
        np.mean([is_right[np.delete(is_right, fold, axis=1).mean(axis=1).argmax(), fold].mean() for fold in folds])
    )


def cosine(features: np.ndarray) -> np.ndarray:
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    return np.sum(unit[0::2] * unit[1::2], axis=1)


def test_neither_pixels_nor_colours_give_an_identity_away():
    num_pairs, size = 300, 64
    first = 10_000 + np.arange(num_pairs)
    is_same = np.arange(num_pairs) % 2 == 0
    identity = np.stack([first, np.where(is_same, first, first + 1)], axis=1).reshape(-1)
    faces = draw(identity, np.tile([0, 1], num_pairs), size=size)
    pixels = faces.reshape(len(faces), -1) / 255.0
    bins = (faces // 32).reshape(len(faces), -1, 3).astype(int) @ [64, 8, 1]
    histograms = np.stack([np.bincount(row, minlength=512) for row in bins]) / size**2
    scores = {
        "cosine of pixels": cosine(pixels - 0.5),
        "cosine of pixels less their mean": cosine(pixels - pixels.mean(axis=1, keepdims=True)),
        "intersection of colour histograms": np.minimum(histograms[0::2], histograms[1::2]).sum(axis=1),
        "cosine of colour histograms": cosine(histograms),
    }
    for name, score in scores.items():
        assert best_threshold_accuracy(score, is_same) <= 0.75, name
