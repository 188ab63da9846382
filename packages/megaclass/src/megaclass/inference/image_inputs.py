"""The forms in which a model takes images: paths, Pillow images, arrays, tensors, and lists of these."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from megaclass.errors import DataError
from megaclass.evaluate.images import find_images

ImageInput = str | Path | Image.Image | NDArray[np.uint8] | Tensor
"""One image for embed(), or a batch of images in one array or tensor."""
Comparable = ImageInput | Sequence[ImageInput] | NDArray[np.floating[Any]]
"""Images for embed(), or embeddings as floating numbers of shape (N, D) or (D,)."""


def listed_images(images: object) -> list[Any]:
    """Returns the images one by one: of a list, of a batch in one array or tensor, of a folder, or the only one."""
    if isinstance(images, str | Path) and Path(images).is_dir():
        return list(find_images(Path(images)))
    if isinstance(images, str | Path | Image.Image) or (isinstance(images, np.ndarray | Tensor) and images.ndim <= 3):
        return [images]
    if isinstance(images, Iterable):
        return list(images)
    raise DataError(
        f"Cannot embed an object of {type(images).__name__}: expected the path of an image or a folder, a Pillow image, an "
        f"array, a tensor, or a list of these."
    )
