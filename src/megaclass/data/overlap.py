"""Are images of an evaluation set among the training images, byte for byte?"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from megaclass.data.source import ImageSource
from megaclass.errors import DataError

# Some seconds of reading. Of pairs that were drawn from the training data, any sample shows many.
_MAX_LOOKED_AT = 2**16


@dataclass(frozen=True, kw_only=True)
class Overlap:
    num_images: int
    """Different images of the evaluation set."""
    num_found: int
    """Of those, images that are also training images."""
    num_looked_at: int
    """Training images that were compared."""
    num_training_images: int

    def describe(self) -> str:
        """A sentence without its full stop."""
        looked_at = f"{self.num_looked_at:,} of {self.num_training_images:,} training images"
        if self.num_looked_at == self.num_training_images:
            looked_at = f"all {self.num_training_images:,} training images"
        if self.num_found:
            return (
                f"{self.num_found:,} of its {self.num_images:,} images are in the training data ({looked_at} were compared), "
                f"so this is no measure of identities that were not trained on"
            )
        return f"none of its {self.num_images:,} images is among {looked_at}"


def find_overlap(images: Iterable[bytes], source: ImageSource, max_looked_at: int = _MAX_LOOKED_AT) -> Overlap:
    """Compares with all training images, or with as many spread evenly over them."""
    wanted = {_digest(image): len(image) for image in images}
    lengths = set(wanted.values())
    num_looked_at = min(source.num_images, max_looked_at)
    found: set[bytes] = set()
    for index in np.linspace(0, source.num_images - 1, num_looked_at).astype(np.int64).tolist():
        try:
            image = source.read(index)
        except (DataError, OSError):
            continue
        if len(image) in lengths and (digest := _digest(image)) in wanted:
            found.add(digest)
    return Overlap(
        num_images=len(wanted),
        num_found=len(found),
        num_looked_at=num_looked_at,
        num_training_images=source.num_images,
    )


def _digest(image: bytes) -> bytes:
    return hashlib.blake2b(image, digest_size=16).digest()
