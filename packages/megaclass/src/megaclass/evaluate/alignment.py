"""Aligns a photo by five landmarks: eyes, nose and corners of the mouth move to where every model expects them."""

import numpy as np
from numpy.typing import NDArray

from megaclass.errors import DataError

Floats = NDArray[np.float64]

# Left eye, right eye, nose, left and right corner of the mouth, in a picture of 112 x 112.
STANDARD_POINTS = np.array(
    [[38.2946, 51.6963], [73.5318, 51.5014], [56.0252, 71.7366], [41.5493, 92.3655], [70.7299, 92.2041]]
)
_STANDARD_SIZE = 112


def similarity_transform(points_N2: Floats, targets_N2: Floats) -> Floats:
    """Returns the (2, 3) matrix of the rotation, scale and shift that bring the points closest to the targets.

    Least squares without mirroring, in Umeyama's closed form: the singular value decomposition of the covariance gives the
    rotation.
    """
    mean, target_mean = points_N2.mean(axis=0), targets_N2.mean(axis=0)
    centred, target_centred = points_N2 - mean, targets_N2 - target_mean
    left, spread, right = np.linalg.svd(target_centred.T @ centred)
    # Without this factor the best fit to crossed landmarks could be a mirror image.
    signs = np.array([1.0, np.sign(np.linalg.det(left) * np.linalg.det(right))])
    rotation = left @ np.diag(signs) @ right
    scale = (spread * signs).sum() / np.square(centred).sum()
    return np.column_stack([scale * rotation, target_mean - scale * rotation @ mean])


def align(photo_HW3: NDArray[np.uint8], points_52: Floats, image_size: int, *, where: str) -> NDArray[np.uint8]:
    """Returns the aligned face (S, S, 3): bilinear, black outside the photo. where: names the photo in errors."""
    if not np.isfinite(points_52).all() or np.ptp(points_52, axis=0).max() == 0:
        raise DataError(
            f"The five landmarks of {where} are {points_52.tolist()}: they must be finite and must not all be one point."
        )
    from PIL import Image

    matrix_23 = similarity_transform(points_52, STANDARD_POINTS * (image_size / _STANDARD_SIZE))
    inverse_22 = np.linalg.inv(matrix_23[:, :2])
    # Landmarks count from the centre of the first pixel, Pillow from its corner: half a pixel in both images.
    half = np.array([0.5, 0.5])
    shift = -inverse_22 @ matrix_23[:, 2] + half - inverse_22 @ half
    coefficients = np.column_stack([inverse_22, shift]).ravel().tolist()
    picture = Image.fromarray(photo_HW3).transform(
        (image_size, image_size), Image.Transform.AFFINE, coefficients, Image.Resampling.BILINEAR
    )
    return np.asarray(picture)
