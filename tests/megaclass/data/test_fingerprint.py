"""What data is known by: the same for the same images, another for others, and classes that are no longer themselves."""

import numpy as np
import pytest

from megaclass.data.fingerprint import DataFingerprint, fingerprint_of, foreign_class
from megaclass.errors import DataError


class Listed:
    """Images by (class, content); one of content None cannot be read."""

    image_size = (8, 8)

    def __init__(self, images, num_classes=None):
        self._images = images
        self.labels = np.array([label for label, _ in images], dtype=np.int64)
        self.num_images, self.num_classes = len(images), num_classes or int(self.labels.max()) + 1

    def read(self, index):
        content = self._images[index][1]
        if content is None:
            raise DataError(f"image {index} cannot be read")
        return content.encode()


IMAGES = [(label, f"{label}, {number}") for label in range(100) for number in range(7)]


def test_marks_are_those_of_the_images_whoever_holds_them():
    assert fingerprint_of(Listed(IMAGES)) == fingerprint_of(Listed(list(IMAGES)))
    marks = fingerprint_of(Listed(IMAGES))
    assert len(marks.class_images) == 64 and {"0", "99"} < set(marks.class_images)
    assert all(len(digests) == 3 for digests in marks.class_images.values())


@pytest.mark.parametrize(
    ("change", "foreign"),
    [
        (lambda images: images[::-1], None),
        (lambda images: images + [(label, "more") for label, _ in images], None),
        (lambda images: [image for place, image in enumerate(images) if place % 7 in (1, 3)], None),
        (lambda images: [(label, f"other {content}") for label, content in images], 0),
        (lambda images: [((label + 1) % 100, content) for label, content in images], 0),
        (lambda images: [(label + (label >= 50) - 50 * (label == 99), content) for label, content in images], 50),
    ],
    ids=["another order", "more images", "fewer images", "other images", "renumbered", "one moved to the middle"],
)
def test_every_change_is_seen_and_only_classes_without_any_of_their_images_are_foreign(change, foreign):
    marks, changed = fingerprint_of(Listed(IMAGES)), Listed(change(IMAGES), 100)
    assert fingerprint_of(changed).fingerprint != marks.fingerprint
    assert foreign_class(marks, changed) == foreign


def test_images_that_cannot_be_read_and_classes_without_images_are_left_out():
    images = [(0, None), (2, "a"), (2, None)]
    marks = fingerprint_of(Listed(images))
    assert set(marks.class_images) == {"2"} and len(marks.class_images["2"]) == 1
    assert foreign_class(marks, Listed(images)) is None
    assert foreign_class(marks, Listed([(0, "a"), (2, None)])) == 2
    assert foreign_class(marks, Listed([(0, "a")])) == 2, "fewer classes"
    assert foreign_class(DataFingerprint(), Listed(images)) is None
