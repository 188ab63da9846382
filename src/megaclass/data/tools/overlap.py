"""Finds images of an evaluation set that are also training images, byte for byte."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from megaclass.data.sources.source import ImageSource
from megaclass.errors import DataError

# Some seconds of reading. If pairs were drawn from the training data, any sample shows many.
_MAX_LOOKED_AT = 2**16
_MAX_SECONDS = 30.0


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
    wanted = {name: {_digest(image) for image in images} for name, images in sets.items()}
    chosen = np.linspace(0, source.num_images - 1, min(source.num_images, max_looked_at)).astype(np.int64)
    found: set[bytes] = set()
    num_looked_at, deadline = 0, time.monotonic() + _MAX_SECONDS
    # In random order, so that the part read before the deadline is a fair sample.
    for index in np.random.default_rng(0).permutation(chosen).tolist():
        try:
            found.add(_digest(source.read(index)))
        except (DataError, OSError):
            continue
        num_looked_at += 1
        if on_progress is not None:
            on_progress(num_looked_at, len(chosen))
        if time.monotonic() > deadline:
            break
    return {
        name: Overlap(
            num_images=len(digests),
            num_found=len(digests & found),
            num_looked_at=num_looked_at,
            num_training_images=source.num_images,
        )
        for name, digests in wanted.items()
    }


def _digest(image: bytes) -> bytes:
    return hashlib.blake2b(image, digest_size=16).digest()
