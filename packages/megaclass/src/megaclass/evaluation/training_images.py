"""Looks at a sample of the training images with the trained model: classes far from their centre, and images closer to the
centre of another class than to their own. Both are where wrong labels show.

The findings, with small pictures, are kept in the run folder, so a report needs neither the model nor the data.
Letters: N images, D numbers per embedding, R rows of centres.
"""

import io
import json
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from megaclass.data.decode import Fit, decode_image
from megaclass.data.sources.source import ImageSource
from megaclass.errors import DataError
from megaclass.evaluation.embed import OnProgress, embed_part
from megaclass.evaluation.images import SourceImages
from megaclass.evaluation.protocols.centre_health import CentreReader
from megaclass.evaluation.results import UNREADABLE, built, read_arrays, write_findings
from megaclass.evaluation.search import unit_rows_or_zero
from megaclass.image_size import ImageSize

FILE = "training_images.npz"
_MAX_CLASSES, _MAX_IMAGES_PER_CLASS = 256, 8
_CHUNK = 64
_MAX_SECONDS = 15.0
# Multiplications of the comparison with all centres: a few seconds on two cores.
_MAX_MULTIPLICATIONS = 10**11
_NUM_WORST, _NUM_CONFUSED, _NUM_PICTURES = 10, 12, 4
_PICTURE_SIZE = 112


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


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingImages:
    """The findings."""

    num_classes: int
    num_images: int
    num_confused: int
    """Of the images looked at; `confused` holds the clearest ones."""
    worst: list[WorstClass]
    confused: list[ConfusedImage]
    class_pictures: dict[int, bytes] = field(default_factory=dict)
    """A picture of each class that the report names by number."""


def examine_training_images(
    network: nn.Module,
    source: ImageSource,
    centres: CentreReader,
    *,
    image_size: ImageSize,
    fit: Fit,
    device: torch.device,
    shown_classes: Collection[int] = (),
    on_progress: OnProgress | None = None,
) -> TrainingImages:
    """Embeds a few images of classes spread over all of them, as many as a quarter of a minute allows.

    shown_classes: further classes of which a picture is kept.
    """
    images = SourceImages(source=source, image_size=image_size, fit=fit)
    indices_N, embeddings_ND = _embedded_sample(network, images, device, centres.num_rows, on_progress)
    labels_N = np.asarray(source.labels)[indices_N]
    own_N, other_N, others_N = _compared(embeddings_ND, labels_N, centres)
    is_confused_N = other_N > own_N
    confused = np.argsort(own_N - other_N, kind="stable")[: min(_NUM_CONFUSED, int(is_confused_N.sum()))]
    worst = _worst_classes(labels_N, own_N)
    names = centres.names_of({*worst, *labels_N[confused].tolist(), *others_N[confused].tolist()})
    wanted = {*shown_classes, *others_N[confused].tolist()}
    pictures = {
        label: picture
        for label, places in _images_of(source, wanted, 1).items()
        for picture in _thumbnails(images, places)
    }
    return TrainingImages(
        num_classes=len(np.unique(labels_N)),
        num_images=len(indices_N),
        num_confused=int(is_confused_N.sum()),
        worst=[
            WorstClass(
                name=names[label],
                mean_cosine=float(own_N[labels_N == label].mean()),
                num_images=int((labels_N == label).sum()),
                num_closer_to_another=int(is_confused_N[labels_N == label].sum()),
                pictures=_thumbnails(images, indices_N[labels_N == label][:_NUM_PICTURES].tolist()),
            )
            for label in worst
        ],
        confused=[
            ConfusedImage(
                name=source.name_of(int(indices_N[place])),
                own_class=names[int(labels_N[place])],
                own_cosine=float(own_N[place]),
                other_class=names[int(others_N[place])],
                other_cosine=float(other_N[place]),
                pictures=[
                    *_thumbnails(images, [int(indices_N[place])]),
                    *([pictures[int(others_N[place])]] if int(others_N[place]) in pictures else []),
                ],
            )
            for place in confused.tolist()
        ],
        class_pictures={label: pictures[label] for label in shown_classes if label in pictures},
    )


def _embedded_sample(
    network: nn.Module, images: SourceImages, device: torch.device, num_rows: int, on_progress: OnProgress | None
) -> tuple[NDArray[np.int64], Tensor]:
    """Returns the numbers of the images that could be read in time, and their unit embeddings."""
    source = images.source
    classes = np.unique(np.linspace(0, source.num_classes - 1, _MAX_CLASSES).astype(np.int64))
    by_class = _images_of(source, classes.tolist(), _MAX_IMAGES_PER_CLASS)
    # Classes in random order, so those embedded before the deadline are a fair sample.
    order = np.random.default_rng(0).permutation(sorted(by_class))
    chosen = [index for label in order.tolist() for index in by_class[label]]
    kept: list[int] = []
    parts: list[Tensor] = []
    deadline = time.monotonic() + _MAX_SECONDS
    for start in range(0, len(chosen), _CHUNK):
        part = chosen[start : start + _CHUNK]
        rows = embed_part(network, images, part, device=device, mirror=False, on_bad=lambda index, error: None)
        rows_ND = rows[:, :-1].float().cpu()
        is_read = torch.isfinite(rows_ND).all(1)
        parts.append(nn.functional.normalize(rows_ND[is_read]))
        kept += [index for index, usable in zip(part, is_read.tolist(), strict=True) if usable]
        if on_progress is not None:
            on_progress(min(start + _CHUNK, len(chosen)), len(chosen))
        enough = len(kept) * num_rows * rows_ND.shape[1] > _MAX_MULTIPLICATIONS
        if enough or time.monotonic() > deadline:
            break
    if not kept:
        raise DataError("none of the training images looked at could be read")
    return np.array(kept, dtype=np.int64), torch.cat(parts)


def _compared(
    embeddings_ND: Tensor, labels_N: NDArray[np.int64], centres: CentreReader
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64]]:
    """Returns the cosine with the own centre, with the closest other one, and the class of that one."""
    num_subcentres = centres.num_rows // max(1, centres.num_classes)
    own = torch.full((len(labels_N),), -2.0)
    other, others = torch.full((len(labels_N),), -2.0), torch.zeros(len(labels_N), dtype=torch.int64)
    labels = torch.from_numpy(np.ascontiguousarray(labels_N))
    for first, rows in centres.blocks():
        classes_B = torch.arange(first, first + len(rows)) // num_subcentres
        unit_BD = unit_rows_or_zero(rows)
        for start in range(0, len(labels), 256):
            here = slice(start, start + 256)
            cosines = embeddings_ND[here] @ unit_BD.T
            is_own = labels[here, None] == classes_B[None, :]
            own[here] = torch.maximum(own[here], cosines.masked_fill(~is_own, -2.0).amax(1))
            best = cosines.masked_fill(is_own, -2.0).max(1)
            is_closer = best.values > other[here]
            other[here] = torch.where(is_closer, best.values, other[here])
            others[here] = torch.where(is_closer, classes_B[best.indices], others[here])
    return own.numpy(), other.numpy(), others.numpy()


def _worst_classes(labels_N: NDArray[np.int64], own_N: NDArray[np.float32]) -> list[int]:
    labels, places = np.unique(labels_N, return_inverse=True)
    means = np.bincount(places, weights=own_N) / np.bincount(places)
    return [int(label) for label in labels[np.argsort(means, kind="stable")][:_NUM_WORST]]


def _images_of(source: ImageSource, classes: Collection[int], most: int) -> dict[int, list[int]]:
    """Returns the first images of each class, in one pass over the labels."""
    found: dict[int, list[int]] = {}
    labels = np.asarray(source.labels)
    for index in np.flatnonzero(np.isin(labels, list(classes))).tolist():
        places = found.setdefault(int(labels[index]), [])
        if len(places) < most:
            places.append(index)
    return found


def _thumbnails(images: SourceImages, indices: Sequence[int]) -> list[bytes]:
    """Returns small JPEGs; images that cannot be read are left out."""
    found = []
    for index in indices:
        try:
            pixels = decode_image(images.source.read(index), images.name(index))
        except (DataError, OSError):
            continue
        small = Image.fromarray(pixels)
        small.thumbnail((_PICTURE_SIZE, _PICTURE_SIZE))
        with io.BytesIO() as file:
            small.save(file, format="JPEG", quality=88)
            found.append(file.getvalue())
    return found


# ---- the file ------------------------------------------------------------------------------------------------------


def write_training_images(run: Path, found: TrainingImages) -> None:
    """Stores the findings in the run folder."""
    write_findings(run / FILE, "findings", found)


def read_training_images(run: Path) -> TrainingImages | None:
    """Returns the findings of a run; None if it has none."""
    path = run / FILE
    if not path.is_file():
        return None
    arrays = read_arrays(path)
    try:
        found: TrainingImages = built(TrainingImages, json.loads(arrays["findings"].tobytes()), arrays)
        return found
    except UNREADABLE as error:
        raise DataError(f"Cannot read {path}: {error}. Train again, or delete it.") from error
