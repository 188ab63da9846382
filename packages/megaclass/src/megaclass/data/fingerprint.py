"""Fingerprints of data, by which a resumed run notices that its data or the numbering of its classes has changed."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from megaclass.data.loading.reader import read_image
from megaclass.data.sources.source import ImageSource, first_labels
from megaclass.errors import DataError

_NUM_IMAGES = 64
_NUM_CLASSES = 64
_IMAGES_PER_CLASS = 3


@dataclass(frozen=True, kw_only=True)
class DataFingerprint:
    """Fingerprint of a source. Copies elsewhere or in another format have the same one if the images' bytes are equal."""

    fingerprint: str = ""
    """Hash of all labels in order and of some images; empty: not known."""
    class_images: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Digests of the first, a middle and the last image of some classes, keyed by the number of the class."""


def fingerprint_of(source: ImageSource) -> DataFingerprint:
    """Returns the fingerprint of a source. Reads at most 256 images and all labels twice (about 1 s for 42 million labels)."""
    class_images: dict[str, list[str]] = {}
    for label, images in _images_of(source, _spread(source.num_classes, _NUM_CLASSES)).items():
        chosen = images[_spread(len(images), _IMAGES_PER_CLASS)]
        digests = [digest for index in chosen if (digest := _digest(source, int(index)))]
        if digests:
            class_images[str(label)] = digests
    return DataFingerprint(fingerprint=source_hash(source), class_images=class_images)


def source_hash(source: ImageSource) -> str:
    """Returns a hash of the labels and of 64 images spread over the source. Other images almost certainly change it."""
    digest = hashlib.sha256(f"{source.num_classes} {source.num_images} {source.image_size}".encode())
    digest.update(np.ascontiguousarray(source.labels, dtype="<i8").data)
    for index in _spread(source.num_images, _NUM_IMAGES):
        try:
            digest.update(read_image(source, int(index)))
        except (DataError, OSError):
            digest.update(b"cannot be read")
    return digest.hexdigest()[:16]


def foreign_class(saved: DataFingerprint, source: ImageSource) -> int | None:
    """Returns the first class of the saved fingerprint that no longer holds any of its images; None if all do."""
    labels = np.array([int(label) for label in saved.class_images], dtype=np.int64)
    images = _images_of(source, labels)
    for label, digests in saved.class_images.items():
        if not any(_digest(source, int(index)) in digests for index in images.get(int(label), ())):
            return int(label)
    return None


def _images_of(source: ImageSource, labels: NDArray[np.int64]) -> dict[int, NDArray[np.int64]]:
    """Returns the indices of the images of these classes, in order; classes without images are left out."""
    # np.isin builds a table of all classes only if there are enough images for them: a file may claim any number.
    own_labels = first_labels(source)
    found = np.flatnonzero(np.isin(own_labels, labels))
    found_labels = own_labels[found]
    images = {int(label): found[found_labels == label] for label in labels}
    return {label: numbers for label, numbers in images.items() if len(numbers)}


def _spread(count: int, wanted: int) -> NDArray[np.int64]:
    return np.unique(np.linspace(0, count - 1, wanted).astype(np.int64))


def _digest(source: ImageSource, index: int) -> str:
    """Returns the digest of an image; empty if it cannot be read."""
    try:
        return hashlib.sha256(read_image(source, index)).hexdigest()[:16]
    except (DataError, OSError):
        return ""
