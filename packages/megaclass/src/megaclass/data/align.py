"""Aligns photos of faces by five landmarks: eyes, nose and corners of the mouth move to where every model expects them.

The crops equal those of InsightFace's norm_crop and of OpenCV's warpAffine.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaclass.errors import DataError

Floats = NDArray[np.float64]

# Left eye, right eye, nose, left and right corner of the mouth, in a picture of 112 x 112.
STANDARD_POINTS = np.array(
    [[38.2946, 51.6963], [73.5318, 51.5014], [56.0252, 71.7366], [41.5493, 92.3655], [70.7299, 92.2041]]
)
# InsightFace's IJB scripts add 8 in float32 to points for pictures 96 pixels wide, which rounds the last one differently.
IJB_POINTS = np.array([*STANDARD_POINTS[:4], [70.729904, 92.2041]])
# In pictures whose side is a multiple of 128, norm_crop leaves a margin of 8 of 128 pixels at the left and the right.
_STANDARD_SIZE, _WIDE_SIZE, _MARGIN = 112, 128, 8


def similarity_transform(points_N2: NDArray[Any], targets_N2: NDArray[Any]) -> Floats:
    """Returns the (2, 3) matrix of the rotation, scale and shift that bring the points closest to the targets.

    Least squares without mirroring, in Umeyama's closed form: the singular value decomposition of the covariance gives the
    rotation. The order of operations and, for float32, their precision are those of scikit-image's SimilarityTransform.
    """
    mean, target_mean = points_N2.mean(axis=0), targets_N2.mean(axis=0)
    centred, target_centred = points_N2 - mean, targets_N2 - target_mean
    left, spread, right = np.linalg.svd(target_centred.T @ centred / len(points_N2))
    # Without this factor the best fit to crossed landmarks could be a mirror image.
    signs = np.array([1.0, np.sign(np.linalg.det(left) * np.linalg.det(right))])
    rotation = left @ np.diag(signs) @ right
    scale = 1.0 / centred.var(axis=0).sum() * (spread @ signs)
    return np.column_stack([scale * rotation, target_mean - scale * (rotation @ mean)])


def align(
    photo_HW3: NDArray[np.uint8],
    points_52: Floats,
    image_size: int,
    *,
    where: str,
    standard_52: Floats = STANDARD_POINTS,
) -> NDArray[np.uint8]:
    """Returns the aligned face (S, S, 3): bilinear, black outside the photo.

    where: names the photo in errors.
    standard_52: where the landmarks belong in a picture of 112 x 112.
    """
    if not np.isfinite(points_52).all() or np.ptp(points_52, axis=0).max() == 0:
        raise DataError(
            f"The five landmarks of {where} are {points_52.tolist()}: they must be finite and must not all be one point."
        )
    # InsightFace's landmarks are float32. In float64 one place in 2,000 is rounded to another 1/32 of a pixel.
    is_wide = image_size % _STANDARD_SIZE != 0 and image_size % _WIDE_SIZE == 0
    ratio = np.float32(image_size / (_WIDE_SIZE if is_wide else _STANDARD_SIZE))
    targets_52 = standard_52.astype(np.float32) * ratio
    targets_52[:, 0] += np.float32(_MARGIN if is_wide else 0) * ratio
    matrix_23 = similarity_transform(points_52.astype(np.float32), targets_52)
    return warp_affine(photo_HW3, matrix_23, image_size)


def warp_affine(photo_HW3: NDArray[np.uint8], matrix_23: Floats, image_size: int) -> NDArray[np.uint8]:
    """Returns cv2.warpAffine(photo, matrix, (S, S), borderValue=0) of OpenCV 4, with which InsightFace makes its crops.

    OpenCV rounds the place that each pixel comes from to 1/32 of a pixel, on the way to 1/1024, and the mean of its four
    neighbours to the nearest grey level.
    """
    inverse_22 = np.linalg.inv(matrix_23[:, :2])
    shift_2 = -inverse_22 @ matrix_23[:, 2]
    along = np.arange(image_size)
    from_column = np.rint(inverse_22[:, :1] * along * 1024).astype(np.int64)[:, None, :]
    from_row = np.rint((inverse_22[:, 1:] * along + shift_2[:, None]) * 1024).astype(np.int64)[:, :, None]
    (x_SS, y_SS) = (from_column + from_row + 16) >> 5
    height, width = photo_HW3.shape[:2]
    total_SS3 = np.zeros((image_size, image_size, 3), dtype=np.int64)
    for right, below in ((0, 0), (1, 0), (0, 1), (1, 1)):
        column_SS, row_SS = (x_SS >> 5) + right, (y_SS >> 5) + below
        is_inside_SS = (column_SS >= 0) & (column_SS < width) & (row_SS >= 0) & (row_SS < height)
        part_x_SS, part_y_SS = x_SS & 31, y_SS & 31
        weight_SS = (part_x_SS if right else 32 - part_x_SS) * (part_y_SS if below else 32 - part_y_SS) * is_inside_SS
        total_SS3 += weight_SS[..., None] * photo_HW3[row_SS.clip(0, height - 1), column_SS.clip(0, width - 1)]
    return ((total_SS3 + 512) >> 10).astype(np.uint8)
