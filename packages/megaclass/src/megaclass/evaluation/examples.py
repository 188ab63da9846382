"""Pictures of what a classifier confuses: the worst classes, and images that are closer to another class than to their own.

They are stored with their pictures, so a report needs neither the model nor the data.
"""

import io
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from megaclass.data.decode import decode_image
from megaclass.data.sources.source import ImageSource
from megaclass.errors import DataError

_NUM_WORST, _NUM_CONFUSED, _NUM_PICTURES = 10, 12, 4
_PICTURE_SIZE = 112
_SAID = "findings"
DAMAGED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""The exceptions of code that uses damaged values as if they were right."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorstClass:
    """A class whose images are far from its centre."""

    name: str
    mean_cosine: float
    num_images: int
    num_closer_to_another: int
    pictures: list[bytes] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfusedImage:
    """An image that is closer to the centre of another class than to its own."""

    name: str
    own_class: str
    own_cosine: float
    other_class: str
    other_cosine: float
    pictures: list[bytes] = field(default_factory=list)
    """The image, and one of the other class."""
    num_alike: int = 1
    """Number of images of the same class that are closest to the same other one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Examples:
    """The findings."""

    num_classes: int
    num_images: int
    num_confused: int
    """Of the images looked at; `confused` holds a few."""
    worst: list[WorstClass]
    confused: list[ConfusedImage]
    class_pictures: dict[int, bytes] = field(default_factory=dict)
    """A picture of each class that the report names by number."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Judged:
    """Images of a source that were compared with all centres. Classes are numbered as in the model."""

    indices_N: NDArray[np.int64]
    labels_N: NDArray[np.int64]
    own_N: NDArray[np.float64]
    """Cosine with the centre of the own class."""
    other_N: NDArray[np.float64]
    """Cosine with the closest centre of another class."""
    others_N: NDArray[np.int64]
    """The class of that centre."""


def examples_of(
    judged: Judged,
    source: ImageSource,
    labels: NDArray[np.int64],
    names_of: Callable[[Collection[int]], Mapping[int, str]],
    *,
    by_pair: bool,
    shown_classes: Collection[int] = (),
) -> Examples:
    """Finds the examples. labels: the class of every image of the source, numbered as in the model.

    by_pair: show the pairs of classes that are confused most often, otherwise the images that are confused most clearly.
    shown_classes: further classes of which a picture is kept.
    """
    labels_N, is_confused_N = judged.labels_N, judged.other_N >= judged.own_N
    classes, places_N = np.unique(labels_N, return_inverse=True)
    counts = np.bincount(places_N)
    means = np.bincount(places_N, weights=judged.own_N) / counts
    num_wrong = np.bincount(places_N, weights=is_confused_N).astype(np.int64)
    shares = num_wrong / counts if by_pair else np.zeros(len(classes))
    worst = np.lexsort((means, -shares))[:_NUM_WORST].tolist()
    confused = np.flatnonzero(is_confused_N)
    _, firsts_M, num_alike = np.unique(
        np.stack([labels_N[confused], judged.others_N[confused]]), axis=1, return_inverse=True, return_counts=True
    )
    alike_M = num_alike[firsts_M] if len(confused) else num_alike
    clearness = judged.own_N[confused] - judged.other_N[confused]
    order = np.lexsort((clearness, -alike_M)) if by_pair else np.argsort(clearness, kind="stable")
    if by_pair:  # one image of each pair: the clearest
        order = order[np.sort(np.unique(firsts_M[order], return_index=True)[1])] if len(order) else order
    shown = confused[order[:_NUM_CONFUSED]].tolist()
    alike = dict(zip(confused.tolist(), alike_M.tolist(), strict=True))
    others = {int(judged.others_N[place]) for place in shown}
    names = names_of({*classes[worst].tolist(), *labels_N[shown].tolist(), *others})
    pictures = {
        label: picture
        for label, places in images_of(labels, {*shown_classes, *others}, 1).items()
        for picture in thumbnails(source, places)
    }
    return Examples(
        num_classes=len(classes),
        num_images=len(labels_N),
        num_confused=len(confused),
        worst=[
            WorstClass(
                name=names[int(classes[place])],
                mean_cosine=float(means[place]),
                num_images=int(counts[place]),
                num_closer_to_another=int(num_wrong[place]),
                pictures=thumbnails(source, judged.indices_N[places_N == place][:_NUM_PICTURES].tolist()),
            )
            for place in worst
        ],
        confused=[
            ConfusedImage(
                name=source.name_of(int(judged.indices_N[place])),
                own_class=names[int(labels_N[place])],
                own_cosine=float(judged.own_N[place]),
                other_class=names[int(judged.others_N[place])],
                other_cosine=float(judged.other_N[place]),
                pictures=[
                    *thumbnails(source, [int(judged.indices_N[place])]),
                    *([pictures[int(judged.others_N[place])]] if int(judged.others_N[place]) in pictures else []),
                ],
                num_alike=alike[place],
            )
            for place in shown
        ],
        class_pictures={label: pictures[label] for label in shown_classes if label in pictures},
    )


def images_of(labels: NDArray[np.int64], classes: Collection[int], most: int) -> dict[int, list[int]]:
    """Returns the first images of each class, in one pass over the labels."""
    found: dict[int, list[int]] = {}
    for index in np.flatnonzero(np.isin(labels, list(classes))).tolist():
        places = found.setdefault(int(labels[index]), [])
        if len(places) < most:
            places.append(index)
    return found


def thumbnails(source: ImageSource, indices: Sequence[int]) -> list[bytes]:
    """Returns small JPEGs; images that cannot be read are left out."""
    found = []
    for index in indices:
        try:
            pixels = decode_image(source.read(index), source.name_of(index))
        except (DataError, OSError):
            continue
        found.append(thumbnail(pixels, _PICTURE_SIZE))
    return found


def thumbnail(pixels: NDArray[np.uint8], side: int) -> bytes:
    """Returns a JPEG whose longer side is at most `side`."""
    small = Image.fromarray(pixels)
    small.thumbnail((side, side))
    with io.BytesIO() as file:
        small.save(file, format="JPEG", quality=88)
        return file.getvalue()


# ---- as arrays of an .npz ------------------------------------------------------------------------------------------


def packed(found: Examples) -> dict[str, NDArray[np.uint8]]:
    """Returns the findings as JSON, in which names of arrays stand for the pictures, and these arrays."""
    arrays: dict[str, NDArray[np.uint8]] = {}

    def kept(picture: bytes) -> str:
        name = f"example_{len(arrays)}"
        arrays[name] = np.frombuffer(picture, dtype=np.uint8)
        return name

    text = json.dumps(asdict(found), default=kept)
    arrays[_SAID] = np.frombuffer(text.encode(), dtype=np.uint8)
    return arrays


def unpacked(arrays: Mapping[str, NDArray[Any]]) -> Examples | None:
    """Returns what `packed` was given; None if the arrays hold no findings. Damaged ones raise one of DAMAGED."""
    if _SAID not in arrays:
        return None

    def built(cls: Any, said: Mapping[str, Any]) -> Any:
        # Converted to the type of each field, which the report relies on: text, float or int.
        kinds: dict[str, Any] = {one.name: one.type for one in fields(cls) if one.name in said}
        pictures = [arrays[name].tobytes() for name in said["pictures"]]
        return cls(**{name: kind(said[name]) for name, kind in kinds.items() if name != "pictures"}, pictures=pictures)

    said = json.loads(arrays[_SAID].tobytes())
    return Examples(
        **{name: int(said[name]) for name in ("num_classes", "num_images", "num_confused")},
        worst=[built(WorstClass, one) for one in said["worst"]],
        confused=[built(ConfusedImage, one) for one in said["confused"]],
        class_pictures={int(label): arrays[name].tobytes() for label, name in said["class_pictures"].items()},
    )
