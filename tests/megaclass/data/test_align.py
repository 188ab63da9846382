"""Landmarks onto the standard face, against known transforms and a bilinear warp in float64."""

import numpy as np
import pytest

from megaclass.data.align import STANDARD_POINTS, align, similarity_transform
from megaclass.errors import DataError


def _turned(points, degrees, scale, shift):
    angle = np.radians(degrees)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    return scale * points @ turn.T + shift


def _warp_in_float64(photo, matrix, size):
    """Each pixel of the result looks up where it comes from and mixes its four neighbours, which are black outside."""
    inverse = np.linalg.inv(np.vstack([matrix, [0, 0, 1]]))
    framed = np.zeros((photo.shape[0] + 2, photo.shape[1] + 2, 3))
    framed[1:-1, 1:-1] = photo
    result = np.zeros((size, size, 3))
    for row in range(size):
        for column in range(size):
            x, y, _ = inverse @ [column, row, 1]
            left, top = int(np.floor(x)), int(np.floor(y))
            for neighbour_y, weight_y in ((top, 1 - (y - top)), (top + 1, y - top)):
                for neighbour_x, weight_x in ((left, 1 - (x - left)), (left + 1, x - left)):
                    if -1 <= neighbour_y <= photo.shape[0] and -1 <= neighbour_x <= photo.shape[1]:
                        result[row, column] += weight_y * weight_x * framed[neighbour_y + 1, neighbour_x + 1]
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
    # Places are rounded to 1/32 of a pixel, which noise, the worst of photos, shows as up to 255 / 32 per direction.
    assert np.abs(got - want).max() <= 10 and np.abs(got - want).mean() < 1.5


# What SimilarityTransform().estimate of scikit-image 0.26 returned for float32 landmarks, onto the standard face.
_OF_SCIKIT_IMAGE = [
    (
        [[81.68, 104.169], [143.662, 102.142], [106.641, 148.515], [97.767, 186.096], [140.313, 194.602]],
        [0.4973603672285525, -0.013522260833502145, 1.3100039535714174],
        [0.013522260833502145, 0.4973603672285525, -2.805024376741869],
    ),
    (
        [[46.752, 53.458], [87.685, 67.857], [54.912, 81.683], [32.585, 98.869], [68.022, 108.166]],
        [0.7941346346400573, 0.29177531876709023, -13.954162742862636],
        [-0.29177531876709023, 0.7941346346400573, 23.696893509775663],
    ),
    (
        [[80.231, 106.424], [147.686, 81.966], [108.958, 145.286], [85.421, 173.855], [139.377, 178.492]],
        [0.4890779869335957, -0.02495779508168566, 4.510108160391923],
        [0.02495779508168566, 0.4890779869335957, 1.9934038667825718],
    ),
]


@pytest.mark.parametrize(("points", "first", "second"), _OF_SCIKIT_IMAGE)
def test_float32_landmarks_give_the_matrix_of_scikit_image(points, first, second):
    """InsightFace's matrices are made of float32 landmarks; those of float64 differ by about 1e-6."""
    matrix = similarity_transform(np.array(points, dtype=np.float32), STANDARD_POINTS.astype(np.float32))
    np.testing.assert_allclose(matrix, [first, second], rtol=2e-7, atol=1e-7)


def test_crops_are_those_of_opencv_everywhere():
    """OpenCV is what InsightFace makes its crops with. Version 5 computes places exactly, so the versions differ by 7."""
    cv2 = pytest.importorskip("cv2", reason="pip install -e 'packages/megaclass[dev]' brings opencv-python-headless")
    assert cv2.__version__ < "5"
    rng = np.random.default_rng(1)
    for _ in range(60):
        height, width = rng.integers(20, 400, 2)
        photo = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
        # Also faces of which a part, or everything, lies outside of the photo.
        points = STANDARD_POINTS * rng.uniform(0.2, 4) + rng.uniform(-100, 150, 2) + rng.normal(0, 4, (5, 2))
        matrix = similarity_transform(points.astype(np.float32), STANDARD_POINTS.astype(np.float32))
        want = cv2.warpAffine(photo, matrix, (112, 112), borderValue=0.0)
        np.testing.assert_array_equal(align(photo, points, 112, where="a photo"), want)


def test_an_aligned_photo_stays_as_it_is():
    photo = np.random.default_rng(0).integers(0, 256, (112, 112, 3), dtype=np.uint8)
    assert np.abs(align(photo, STANDARD_POINTS, 112, where="a photo").astype(int) - photo).max() == 0


@pytest.mark.parametrize("points", [np.full((5, 2), 3.0), np.full((5, 2), np.nan)], ids=["one point", "NaN"])
def test_landmarks_that_span_nothing_are_refused_by_name(points):
    with pytest.raises(DataError, match=r"landmarks of crop/7\.jpg"):
        align(np.zeros((9, 9, 3), np.uint8), points, 32, where="crop/7.jpg")
