"""Finds images of an evaluation set that are also training images: the same bytes, or the same picture encoded again.

`data pack --size` and `--format pixels` encode images again, so equal bytes alone would miss pairs drawn from the folder that
was packed. Two files are the same picture if their 8 x 8 thumbnails differ by at most 6 of 255 everywhere. Scaling and encoding
by `data pack` change thumbnails of 112 x 112 by at most 4; in Omniglot, whose drawings are alike, the closest two of 2,720
differ by 14. A picture that was cropped or padded is not recognised.
"""

from __future__ import annotations

import hashlib
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megaclass.data.decode import decode_image
from megaclass.data.sources.source import ImageSource
from megaclass.errors import DataError

# Some seconds of reading. If pairs were drawn from the training data, any sample shows many.
_MAX_LOOKED_AT = 2**16
_MAX_SECONDS = 30.0
_THUMBNAIL_SIDE, _TOLERANCE, _BRIGHTNESS_TOLERANCE = 8, 6, 2
# Thumbnails of pictures that are nearly one colour say too little to compare them.
_MIN_CONTRAST = 32


@dataclass(frozen=True, kw_only=True)
class Overlap:
    num_images: int
    """Different images of the evaluation set."""
    num_found: int
    """Images of the set that are also training images."""
    num_looked_at: int
    """Training images that were compared."""
    num_training_images: int

    def describe(self) -> str:
        """Returns a sentence without its full stop."""
        looked_at = f"{self.num_looked_at:,} of {self.num_training_images:,} training images"
        if self.num_looked_at == self.num_training_images:
            looked_at = f"all {self.num_training_images:,} training images"
        if self.num_found:
            return (
                f"{self.num_found:,} of its {self.num_images:,} images are in the training data ({looked_at} were compared), "
                f"so this does not measure identities that were not trained on"
            )
        return f"none of its {self.num_images:,} images is among {looked_at}"

    def to_json(self) -> dict[str, int]:
        return {
            "images": self.num_images,
            "found": self.num_found,
            "looked_at": self.num_looked_at,
            "training_images": self.num_training_images,
        }

    @staticmethod
    def from_json(values: Mapping[str, int]) -> Overlap:
        return Overlap(
            num_images=values["images"],
            num_found=values["found"],
            num_looked_at=values["looked_at"],
            num_training_images=values["training_images"],
        )


def find_overlaps(
    sets: Mapping[str, Iterable[bytes]],
    source: ImageSource,
    max_looked_at: int = _MAX_LOOKED_AT,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, Overlap]:
    """Compares the images of each set with all training images, or with a sample spread over them, in one pass.

    The sample shrinks where the data is slow to read; the result tells how many images were compared.
    """
    by_digest = {name: {_digest(image): image for image in images} for name, images in sets.items()}
    pictures = _Pictures({digest: image for images in by_digest.values() for digest, image in images.items()})
    chosen = np.linspace(0, source.num_images - 1, min(source.num_images, max_looked_at)).astype(np.int64)
    found: set[bytes] = set()
    num_looked_at, deadline = 0, time.monotonic() + _MAX_SECONDS
    # In random order, so that the part read before the deadline is a fair sample.
    for index in np.random.default_rng(0).permutation(chosen).tolist():
        try:
            found |= pictures.same_as(source.read(index))
        except (DataError, OSError):
            continue
        num_looked_at += 1
        if on_progress is not None:
            on_progress(num_looked_at, len(chosen))
        if time.monotonic() > deadline:
            break
    return {
        name: Overlap(
            num_images=len(images),
            num_found=len(images.keys() & found),
            num_looked_at=num_looked_at,
            num_training_images=source.num_images,
        )
        for name, images in by_digest.items()
    }


class _Pictures:
    """The images of the evaluation sets by digest, with the thumbnails of those that have one, ordered by brightness."""

    def __init__(self, images: Mapping[bytes, bytes]) -> None:
        self._digests = images.keys()
        drawn = [
            (digest, thumbnail) for digest, image in images.items() if (thumbnail := _thumbnail(image)) is not None
        ]
        drawn.sort(key=lambda one: float(one[1].mean()))
        self._order = [digest for digest, _ in drawn]
        self._thumbnails = np.array([thumbnail for _, thumbnail in drawn])
        self._brightness = [float(thumbnail.mean()) for _, thumbnail in drawn]

    def same_as(self, image: bytes) -> set[bytes]:
        """Returns the digests of the set images that are this one."""
        digest = _digest(image)
        if digest in self._digests:
            return {digest}
        thumbnail = _thumbnail(image) if self._order else None
        if thumbnail is None:
            return set()
        brightness = float(thumbnail.mean())
        # Encoding hardly changes the mean, so a few percent of the thumbnails are left to compare.
        start = bisect_left(self._brightness, brightness - _BRIGHTNESS_TOLERANCE)
        stop = bisect_right(self._brightness, brightness + _BRIGHTNESS_TOLERANCE)
        differences = np.abs(self._thumbnails[start:stop] - thumbnail).max(axis=1, initial=0)
        return {self._order[start + place] for place in np.flatnonzero(differences <= _TOLERANCE).tolist()}


def _thumbnail(image: bytes) -> NDArray[np.int16] | None:
    """Returns the mean colours of 8 x 8 fields; None if the image does not decode or is nearly one colour."""
    from PIL import Image

    try:
        pixels_HW3 = decode_image(image, "an image")
    except DataError:
        return None
    side = (_THUMBNAIL_SIDE, _THUMBNAIL_SIDE)
    thumbnail = np.asarray(Image.fromarray(pixels_HW3).resize(side, Image.Resampling.BOX), dtype=np.int16).ravel()
    return thumbnail if np.ptp(thumbnail) >= _MIN_CONTRAST else None


def _digest(image: bytes) -> bytes:
    return hashlib.blake2b(image, digest_size=16).digest()
