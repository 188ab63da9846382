"""Finds images of an evaluation set that are also training images: the same bytes, or the same picture encoded again.

`data pack --size` encodes images again, so equal bytes alone would miss pairs drawn from the folder that was packed. Two
files are the same picture if their 8 x 8 thumbnails differ by at most 6 of 255 everywhere. Scaling and encoding by `data pack`
change thumbnails of 112 x 112 by at most 4; in Omniglot, whose drawings are alike, the closest two of 2,720 differ by 14. A
picture that was cropped or padded is not recognised.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from megaclass.data.decode import decode_image
from megaclass.data.sources.source import ImageSource
from megaclass.errors import DataError

# Some seconds of reading. If pairs were drawn from the training data, any sample shows many.
_MAX_LOOKED_AT = 2**16
_MAX_SECONDS = 30.0
# Images that are compared at once.
_BLOCK = 32
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

    The sample shrinks if the data is slow to read; the result tells how many images were compared.
    """
    by_digest = {name: {_digest(image): image for image in images} for name, images in sets.items()}
    pictures = _Pictures({digest: image for images in by_digest.values() for digest, image in images.items()})
    chosen = np.linspace(0, source.num_images - 1, min(source.num_images, max_looked_at)).astype(np.int64)
    # In random order, so the part read before the deadline is a fair sample.
    order = np.random.default_rng(0).permutation(chosen).tolist()
    found: set[bytes] = set()
    num_looked_at, deadline = 0, time.monotonic() + _MAX_SECONDS
    for start in range(0, len(order), _BLOCK):
        images = list(_read(source, order[start : start + _BLOCK]))
        found |= pictures.same_as(images)
        num_looked_at += len(images)
        if on_progress is not None:
            on_progress(num_looked_at, len(order))
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


def _read(source: ImageSource, indices: Iterable[int]) -> Iterator[bytes]:
    """Yields the images that can be read."""
    for index in indices:
        try:
            yield source.read(index)
        except (DataError, OSError):
            continue


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
        self._brightness = np.array([thumbnail.mean() for _, thumbnail in drawn])

    def same_as(self, images: Iterable[bytes]) -> set[bytes]:
        """Returns the digests of the set images that are among these."""
        found, thumbnails = set(), []
        for image in images:
            digest = _digest(image)
            if digest in self._digests:
                found.add(digest)
            elif self._order and (thumbnail := _thumbnail(image)) is not None:
                thumbnails.append(thumbnail)
        if not thumbnails:
            return found
        brightness = np.array(thumbnails).mean(axis=1)
        # Encoding hardly changes the mean, so a few percent of the thumbnails are left to compare.
        starts = np.searchsorted(self._brightness, brightness - _BRIGHTNESS_TOLERANCE, side="left").tolist()
        stops = np.searchsorted(self._brightness, brightness + _BRIGHTNESS_TOLERANCE, side="right").tolist()
        for thumbnail, start, stop in zip(thumbnails, starts, stops, strict=True):
            differences = np.abs(self._thumbnails[start:stop] - thumbnail).max(axis=1, initial=0)
            found |= {self._order[start + place] for place in np.flatnonzero(differences <= _TOLERANCE).tolist()}
        return found


def _thumbnail(image: bytes) -> NDArray[np.float32] | None:
    """Returns the mean colours of 8 x 8 fields; None if the image does not decode or is nearly one colour."""
    try:
        pixels_HW3 = decode_image(image, "an image")
    except DataError:
        return None
    height, width, _ = pixels_HW3.shape
    rows_8W3 = (_fields(height) @ pixels_HW3.reshape(height, -1).astype(np.float32)).reshape(-1, width, 3)
    thumbnail = np.matmul(_fields(width), rows_8W3).ravel()
    return thumbnail if np.ptp(thumbnail) >= _MIN_CONTRAST else None


@lru_cache(maxsize=256)
def _fields(side: int) -> NDArray[np.float32]:
    """Returns (8, side): the share of each pixel in each of 8 equal fields. A pixel on the border belongs to both in part."""
    borders = np.linspace(0, side, _THUMBNAIL_SIDE + 1)[:, None]
    pixels = np.arange(side)
    inside = np.minimum(borders[1:], pixels + 1) - np.maximum(borders[:-1], pixels)
    shares: NDArray[np.float32] = (np.maximum(inside, 0) * (_THUMBNAIL_SIDE / side)).astype(np.float32)
    return shares


def _digest(image: bytes) -> bytes:
    return hashlib.blake2b(image, digest_size=16).digest()
