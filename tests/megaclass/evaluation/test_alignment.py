"""Landmarks onto the standard face, against known transforms and a bilinear warp in float64."""

import numpy as np
import pytest

from megaclass.errors import DataError
from megaclass.evaluation.images import STANDARD_POINTS, align, similarity_transform


def _turned(points, degrees, scale, shift):
    angle = np.radians(degrees)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    return scale * points @ turn.T + shift


def _warp_in_float64(photo, matrix, size):
    """Each pixel of the result looks up where it comes from and mixes its four neighbours."""
    inverse = np.linalg.inv(np.vstack([matrix, [0, 0, 1]]))
    result = np.zeros((size, size, 3))
    for row in range(size):
        for column in range(size):
            x, y, _ = inverse @ [column, row, 1]
            if not (-0.5 <= x < photo.shape[1] - 0.5 and -0.5 <= y < photo.shape[0] - 0.5):
                continue
            left, top = int(np.floor(x)), int(np.floor(y))
            for neighbour_y, weight_y in ((top, 1 - (y - top)), (top + 1, y - top)):
                for neighbour_x, weight_x in ((left, 1 - (x - left)), (left + 1, x - left)):
                    inside = photo[
                        min(max(neighbour_y, 0), len(photo) - 1), min(max(neighbour_x, 0), len(photo[0]) - 1)
                    ]
                    result[row, column] += weight_y * weight_x * inside
    return result


@pytest.mark.parametrize(("degrees", "scale"), [(0, 1), (30, 2.5), (-170, 0.4)])
def test_a_similarity_is_found_again(degrees, scale):
    points = _turned(STANDARD_POINTS, degrees, scale, [40, -7])
    matrix = similarity_transform(points, STANDARD_POINTS)
    assert points @ matrix[:, :2].T + matrix[:, 2] == pytest.approx(STANDARD_POINTS, abs=1e-9)


def test_the_fit_is_the_least_squares_one_and_never_mirrors():
    rng = np.random.default_rng(0)
    points = STANDARD_POINTS + rng.normal(scale=4, size=(5, 2))
    matrix = similarity_transform(points, STANDARD_POINTS)

    def error(candidate):
        return np.square(points @ candidate[:, :2].T + candidate[:, 2] - STANDARD_POINTS).sum()

    for _ in range(200):
        a, b, x, y = rng.normal(scale=1e-3, size=4)
        assert error(matrix) <= error(matrix + np.array([[a, -b, x], [b, a, y]]))
    mirrored = STANDARD_POINTS * [-1, 1]
    assert np.linalg.det(similarity_transform(mirrored, STANDARD_POINTS)[:, :2]) > 0


def test_pixels_are_those_of_a_bilinear_warp_and_black_outside():
    photo = np.random.default_rng(0).integers(0, 256, (50, 60, 3), dtype=np.uint8)
    points = _turned(STANDARD_POINTS, 20, 0.4, [25, 2])
    want = _warp_in_float64(photo, similarity_transform(points, STANDARD_POINTS * (32 / 112)), 32)
    got = align(photo, points, 32, where="a photo").astype(float)
    assert (want == 0).all(axis=2).any(), "part of the face lies outside the photo"
    # Pixels on the edge of the photo may fall on either side of it.
    assert np.mean(np.abs(got - want) <= 1.5) > 0.99


def test_an_aligned_photo_stays_as_it_is():
    photo = np.random.default_rng(0).integers(0, 256, (112, 112, 3), dtype=np.uint8)
    assert np.abs(align(photo, STANDARD_POINTS, 112, where="a photo").astype(int) - photo).max() <= 1


@pytest.mark.parametrize("points", [np.full((5, 2), 3.0), np.full((5, 2), np.nan)], ids=["one point", "NaN"])
def test_landmarks_that_span_nothing_are_refused_by_name(points):
    with pytest.raises(DataError, match=r"landmarks of crop/7\.jpg"):
        align(np.zeros((9, 9, 3), np.uint8), points, 32, where="crop/7.jpg")
