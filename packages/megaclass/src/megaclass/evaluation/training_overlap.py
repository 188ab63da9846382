"""Finds out how a verification set relates to the training data: held-out identities, unknown ones, or training images.

An image is in the training data if the same bytes are there, or the same picture encoded again: `data pack --size` encodes
images again, so equal bytes alone would miss pairs drawn from the folder that was packed. Two files are the same picture if
their 8 x 8 thumbnails differ by at most 6 of 255 everywhere. Scaling and encoding by `data pack` change thumbnails of 112 x 112
by at most 4; in Omniglot, whose drawings are alike, the closest two of 2,720 differ by 14. A picture that was cropped or padded
is not recognised.
"""

import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaclass.data.decode import decode_image
from megaclass.data.pair_file import read_pairs
from megaclass.data.sources.source import ImageSource
from megaclass.data.tools.split import is_unseen
from megaclass.errors import DataError
from megaclass.evaluation.protocol import SetResult
from megaclass.progress import OnProgress, no_progress

# Some seconds of reading. If pairs were drawn from the training data, any sample shows many.
_MAX_LOOKED_AT = 2**16
_MAX_SECONDS = 30.0
# Images that are compared at once.
_BLOCK = 32
_THUMBNAIL_SIDE, _TOLERANCE, _BRIGHTNESS_TOLERANCE = 8, 6, 2
# Thumbnails of pictures that are nearly one colour say too little to compare them.
_MIN_CONTRAST = 32


def compared_with_training_data(
    results: Sequence[SetResult],
    source: ImageSource,
    data_path: str,
    drawn: Path | None = None,
    on_progress: OnProgress = no_progress,
) -> list[SetResult]:
    """Returns the results with `training_data` added to each .bin: how many of its images are training images, and whether
    `megaclass data split` held its identities out of the data at `data_path`.

    drawn: a .bin of synthetic identities, which are not in the training data by construction.
    """
    bins = {one.name: Path(one.path) for one in results if one.error is None and one.path.endswith(".bin")}
    images = {name: read_pairs(path).images for name, path in bins.items()}
    overlaps = find_overlaps(images, source, on_progress=on_progress) if bins else {}
    compared = []
    for one in results:
        if one.name in overlaps:
            is_held_out = bins[one.name] == drawn or is_unseen(bins[one.name], data_path)
            found = {**overlaps[one.name], "is_held_out": is_held_out}
            one = replace(one, numbers={**one.numbers, "training_data": found})
        compared.append(one)
    return compared


def training_data_line(numbers: Mapping[str, Any]) -> str:
    """Returns a sentence on how the set relates to the training data; empty if they were not compared."""
    said = numbers.get("training_data")
    if said is None:
        return ""
    looked_at = f"{said['looked_at']:,} of {said['training_images']:,} training images"
    if said["looked_at"] == said["training_images"]:
        looked_at = f"all {said['training_images']:,} training images"
    if said["found"]:
        return (
            f"WARNING: {said['found']:,} of its {said['images']:,} images are in the training data ({looked_at} were "
            f"compared), so this does not measure identities that were not trained on. Hold some out first: megaclass data "
            f"split."
        )
    of_its_images = f"of its {said['images']:,} images is among {looked_at}"
    if said["is_held_out"]:
        return f"Its identities were held out of training; none {of_its_images}."
    return (
        f"None {of_its_images}; other images of the same people may be in the training data: `megaclass data clean RUN "
        f"--tests SET` looks for them."
    )


def find_overlaps(
    sets: Mapping[str, Iterable[bytes]],
    source: ImageSource,
    max_looked_at: int = _MAX_LOOKED_AT,
    on_progress: OnProgress = no_progress,
) -> dict[str, dict[str, int]]:
    """Compares the images of each set with all training images, or with a sample spread over them, in one pass.

    The sample shrinks if the data is slow to read. Returns for each set the numbers of its different images, of those that
    are training images too, of training images that were compared, and of all training images.
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
        on_progress(num_looked_at, len(order))
        if time.monotonic() > deadline:
            break
    return {
        name: {
            "images": len(images),
            "found": len(images.keys() & found),
            "looked_at": num_looked_at,
            "training_images": source.num_images,
        }
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
        drawn = {digest: found for digest, image in images.items() if (found := _thumbnail(image)) is not None}
        self._order = sorted(drawn, key=lambda digest: float(drawn[digest].mean()))
        self._thumbnails = np.array([drawn[digest] for digest in self._order])
        self._brightness = np.array([drawn[digest].mean() for digest in self._order])

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
    from PIL import Image

    try:
        picture = Image.fromarray(decode_image(image, "an image"))
    except DataError:
        return None
    fields = picture.resize((_THUMBNAIL_SIDE, _THUMBNAIL_SIDE), Image.Resampling.BOX)
    thumbnail = np.asarray(fields, dtype=np.float32).ravel()
    return thumbnail if np.ptp(thumbnail) >= _MIN_CONTRAST else None


def _digest(image: bytes) -> bytes:
    return hashlib.blake2b(image, digest_size=16).digest()
