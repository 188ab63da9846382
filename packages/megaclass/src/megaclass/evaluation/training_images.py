"""Looks at a sample of the training images with the trained model: classes far from their centre, and images closer to the
centre of another class than to their own. Both are where wrong labels show.

The findings, with small pictures, are kept in the run folder. Letters: N images, D numbers per embedding.
"""

import time
from collections.abc import Collection
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from megaclass.data.decode import Fit
from megaclass.data.sources.source import ImageSource
from megaclass.errors import DataError
from megaclass.evaluation.centres import ModelCentres
from megaclass.evaluation.embed import OnProgress, embed_part
from megaclass.evaluation.examples import DAMAGED, Examples, Judged, examples_of, images_of, packed, unpacked
from megaclass.evaluation.images import Images, images_of_source
from megaclass.evaluation.results import read_arrays
from megaclass.evaluation.search import GalleryShard, search
from megaclass.image_size import ImageSize
from megaclass_launch.files import published_file

FILE = "training_images.npz"
_MAX_CLASSES, _MAX_IMAGES_PER_CLASS = 256, 8
_CHUNK = 64
_MAX_SECONDS = 15.0
# Multiplications of the comparison with all centres: a few seconds on two cores.
_MAX_MULTIPLICATIONS = 10**11


def examine_training_images(
    network: nn.Module,
    source: ImageSource,
    centres: ModelCentres,
    *,
    image_size: ImageSize,
    fit: Fit,
    device: torch.device,
    shown_classes: Collection[int] = (),
    on_progress: OnProgress | None = None,
) -> Examples:
    """Embeds a few images of classes spread over all of them, as many as a quarter of a minute allows.

    shown_classes: further classes of which a picture is kept.
    """
    images = images_of_source(source, image_size, fit)
    indices_N, embeddings_ND = _embedded_sample(network, images, source, device, centres.num_rows, on_progress)
    labels = np.asarray(source.labels)
    judged = _compared(indices_N, embeddings_ND, labels[indices_N], centres)
    return examples_of(judged, source, labels, centres.names_of, by_pair=False, shown_classes=shown_classes)


def _embedded_sample(
    network: nn.Module,
    images: Images,
    source: ImageSource,
    device: torch.device,
    num_rows: int,
    on_progress: OnProgress | None,
) -> tuple[NDArray[np.int64], Tensor]:
    """Returns the numbers of the images that could be read in time, and their unit embeddings."""
    classes = np.unique(np.linspace(0, source.num_classes - 1, _MAX_CLASSES).astype(np.int64))
    by_class = images_of(np.asarray(source.labels), classes.tolist(), _MAX_IMAGES_PER_CLASS)
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
    indices_N: NDArray[np.int64], embeddings_ND: Tensor, labels_N: NDArray[np.int64], centres: ModelCentres
) -> Judged:
    """Compares the images with all centres, one block of centres at a time."""
    own, other, others = np.full(len(labels_N), -2.0), np.full(len(labels_N), -2.0), np.zeros(len(labels_N), np.int64)
    for first, rows in centres.blocks():
        classes_B = np.arange(first, first + len(rows)) // centres.rows_per_class
        block = GalleryShard(embeddings_ND=rows, labels_N=classes_B, first=first, is_normalised=False)
        found = search(embeddings_ND, block, k=1, device=torch.device("cpu"), probe_labels_P=labels_N, is_alone=True)
        own = np.maximum(own, found.mate_scores_P.numpy())
        is_closer = found.other_scores_Pk[:, 0].numpy() > other
        other = np.where(is_closer, found.other_scores_Pk[:, 0], other)
        others = np.where(is_closer, found.other_indices_Pk[:, 0] // centres.rows_per_class, others)
    return Judged(indices_N=indices_N, labels_N=labels_N, own_N=own, other_N=other, others_N=others)


def write_training_images(run: Path, found: Examples) -> None:
    """Stores the findings in the run folder."""
    with published_file(run / FILE, is_private=True) as unfinished:
        np.savez(unfinished, **packed(found))  # type: ignore[arg-type]


def read_training_images(run: Path) -> Examples | None:
    """Returns the findings of a run; None if it has none."""
    path = run / FILE
    if not path.is_file():
        return None
    arrays = read_arrays(path)
    try:
        found = unpacked(arrays)
        if found is None:
            raise ValueError("it holds no findings")
        return found
    except DAMAGED as error:
        raise DataError(f"Cannot read {path}: {error}. Train again, or delete it.") from error
