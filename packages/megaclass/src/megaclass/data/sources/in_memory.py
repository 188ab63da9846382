"""Images without IO, made in memory or repeated from one real batch. They show whether reading is the bottleneck."""

from __future__ import annotations

import re

import numpy as np
from numpy.typing import NDArray

from megaclass.data.decode import decode_batch, encode_jpeg
from megaclass.data.sources.source import ImageSource, SourceFormat
from megaclass.data.synthetic.faces import draw_faces
from megaclass.errors import DataError
from megaclass.keyed_random import combine64

_DEFAULT_IMAGES = 2**20
_DEFAULT_SIZE = 112
# Enough that a batch is not one image repeated, and few enough to stay in memory.
_NUM_KEPT = 256
_JPEG_QUALITY = 92


class SyntheticSource:
    """Noise images of any number of classes, with labels spread evenly over all of them. Nothing is read or decoded."""

    def __init__(self, num_classes: int, num_images: int, size: int) -> None:
        self.num_classes = num_classes
        self.num_images = num_images
        self.image_size = (size, size)
        # Not i * C // N: that would overflow for 2**40 classes.
        self.labels: NDArray[np.int64] = np.linspace(0, num_classes, num_images, endpoint=False).astype(np.int64)
        noise = combine64(num_classes, np.arange(_NUM_KEPT * size * size * 3 // 8 + 1, dtype=np.uint64))
        self._kept = noise.view(np.uint8)[: _NUM_KEPT * size * size * 3].reshape(_NUM_KEPT, size, size, 3)

    def pixels(self, indices: NDArray[np.int64], image_size: tuple[int, int]) -> NDArray[np.uint8]:
        return _fit(self._kept, image_size)[indices % _NUM_KEPT]

    def read(self, index: int) -> bytes:
        return encode_jpeg(self._kept[index % _NUM_KEPT], _JPEG_QUALITY)

    def name_of(self, index: int) -> str:
        return f"synthetic image {index}"

    def describe(self) -> str:
        size = self.image_size[0]
        return f"synthetic: {self.num_images:,} images of {self.num_classes:,} classes made in memory, {size} × {size}"


class DebugSource:
    """A few images of a source, decoded once and repeated: as many images and classes as the source has, without IO."""

    def __init__(self, inner: ImageSource) -> None:
        self._inner = inner
        self.num_images = inner.num_images
        self.num_classes = inner.num_classes
        self.image_size = inner.image_size
        kept = np.unique(np.linspace(0, inner.num_images - 1, _NUM_KEPT).astype(np.int64))
        self._indices = kept
        self._kept = decode_batch(
            [inner.read(int(index)) for index in kept], self.image_size, [inner.name_of(int(index)) for index in kept]
        )
        self.labels: NDArray[np.int64] = np.resize(inner.labels[kept], inner.num_images)

    def pixels(self, indices: NDArray[np.int64], image_size: tuple[int, int]) -> NDArray[np.uint8]:
        return _fit(self._kept, image_size)[indices % len(self._kept)]

    def read(self, index: int) -> bytes:
        return self._inner.read(int(self._indices[index % len(self._kept)]))

    def name_of(self, index: int) -> str:
        return self._inner.name_of(int(self._indices[index % len(self._kept)]))

    def describe(self) -> str:
        return f"debug: {len(self._kept)} images repeated from memory, of {self._inner.describe()}"


class DrawnSource:
    """A few identities drawn in memory, which `debug` repeats if no data is named."""

    num_classes = 32
    num_images = 64
    image_size = (_DEFAULT_SIZE, _DEFAULT_SIZE)

    def __init__(self) -> None:
        self.labels: NDArray[np.int64] = np.arange(self.num_images) % self.num_classes

    def read(self, index: int) -> bytes:
        face_HW3 = draw_faces(0, self.labels[index : index + 1], np.array([index]), _DEFAULT_SIZE)[0]
        return encode_jpeg(face_HW3, _JPEG_QUALITY)

    def name_of(self, index: int) -> str:
        return f"drawn image {index}"

    def describe(self) -> str:
        return f"{self.num_images} drawn images of {self.num_classes} identities"


class SyntheticFormat(SourceFormat):
    """`synthetic:C[xN][@SIZE]`: N images of C classes."""

    notation = "synthetic:C[xN][@SIZE]"

    @classmethod
    def matches(cls, path: str) -> bool:
        return path.startswith("synthetic:")

    def open(self) -> SyntheticSource:
        fields = re.fullmatch(r"synthetic:([0-9]{1,15})(?:x([0-9]{1,12}))?(?:@([0-9]{1,4}))?", self.path)
        given = fields.groups() if fields else ("0", "0", "0")
        defaults = (0, _DEFAULT_IMAGES, _DEFAULT_SIZE)
        num_classes, num_images, size = (
            default if field is None else int(field) for field, default in zip(given, defaults, strict=True)
        )
        if not num_classes or not 1 <= num_images <= 2**31 or not 8 <= size <= 1024:
            raise DataError(
                f"Cannot read {self.path!r}: expected synthetic:C, synthetic:CxN or synthetic:CxN@SIZE, C classes, N images, "
                f"SIZE in [8, 1024] pixels, for example synthetic:1000000x5000000."
            )
        return SyntheticSource(num_classes, num_images, size)


def _fit(kept: NDArray[np.uint8], image_size: tuple[int, int]) -> NDArray[np.uint8]:
    """Crops or repeats the pixels to the size. They mean nothing, so this only has to be fast."""
    if kept.shape[1:3] == image_size:
        return kept
    rows, columns = (np.arange(side) % had for side, had in zip(image_size, kept.shape[1:3], strict=True))
    return np.ascontiguousarray(kept[:, rows][:, :, columns])
