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
from megaclass.evaluation.centres import ModelCentres, compared_with_centres
from megaclass.evaluation.embed import embed_part
from megaclass.evaluation.examples import DAMAGED, Examples, Judged, examples_of, images_of, packed, unpacked
from megaclass.evaluation.images import Images, images_of_source
from megaclass.evaluation.results import read_arrays
from megaclass.image_size import ImageSize
from megaclass.progress import OnProgress, no_progress
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
    on_progress: OnProgress = no_progress,
) -> Examples:
    """Embeds a few images of classes spread over all of them, as many as a quarter of a minute allows.

    shown_classes: further classes of which a picture is kept.
    """
    images = images_of_source(source, image_size, fit)
    indices_N, embeddings_ND = _embedded_sample(network, images, source, device, centres.num_rows, on_progress)
    labels = np.asarray(source.labels)
    labels_N = labels[indices_N]
    own_N, other_N, others_N = compared_with_centres(embeddings_ND, labels_N, centres, torch.device("cpu"))
    judged = Judged(
        indices_N=indices_N,
        labels_N=labels_N,
        own_N=own_N.astype(np.float64),
        other_N=other_N.astype(np.float64),
        others_N=others_N,
    )
    return examples_of(judged, source, labels, centres.classes.names_of, by_pair=False, shown_classes=shown_classes)


def _embedded_sample(
    network: nn.Module,
    images: Images,
    source: ImageSource,
    device: torch.device,
    num_rows: int,
    on_progress: OnProgress,
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
        on_progress(min(start + _CHUNK, len(chosen)), len(chosen))
        enough = len(kept) * num_rows * rows_ND.shape[1] > _MAX_MULTIPLICATIONS
        if enough or time.monotonic() > deadline:
            break
    if not kept:
        raise DataError("none of the training images looked at could be read")
    return np.array(kept, dtype=np.int64), torch.cat(parts)


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
