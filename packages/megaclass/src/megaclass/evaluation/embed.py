"""Embeds images with a network; each rank embeds a part of them."""

import itertools
import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from megaclass.data.augment import normalise, to_tensor
from megaclass.errors import DataError
from megaclass.evaluation.images import Images, OtherSizeError, Samples
from megaclass.image_size import ImageSize, height_and_width, shown_size
from megaclass.progress import OnProgress, no_progress

_log = logging.getLogger("megaclass.evaluation")
OnBad = Callable[[int, DataError], None]
"""Called with the number of an image that cannot be read, and the reason."""
_NUM_NAMED = 20


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Embedded:
    """The embeddings of N images."""

    sums_ND: NDArray[np.float32]
    """f(x) + f(mirrored x), or f(x) without mirroring; not normalised."""
    norms_N: NDArray[np.float32]
    """Mean of the norms of f(x) and f(mirrored x), or the norm of f(x)."""

    @property
    def xnorm(self) -> float:
        return float(self.norms_N.mean(dtype=np.float64))

    def normalised_ND(self) -> NDArray[np.float32]:
        return np.asarray(self.sums_ND / np.linalg.norm(self.sums_ND, axis=1, keepdims=True), dtype=np.float32)


def distinct_images(images: Images) -> tuple[list[int], NDArray[np.int64]]:
    """Returns the first image of each content, and for every image the place of its content among them."""
    firsts: list[int] = []
    places: dict[Hashable, int] = {}
    places_N = np.empty(len(images), dtype=np.int64)
    for index in range(len(images)):
        places_N[index] = place = places.setdefault(images.content(index), len(firsts))
        if place == len(firsts):
            firsts.append(index)
    return firsts, places_N


def log_bad_images() -> OnBad:
    """Returns a function that names the first bad images in the log: there may be thousands."""
    numbers = itertools.count()

    def log(index: int, error: DataError) -> None:
        if next(numbers) < _NUM_NAMED:
            _log.warning("left out a bad image: %s", error)

    return log


def log_resized(num_resized: int, num_images: int, image_size: ImageSize, which: str) -> None:
    """Logs how many images had another size, if there were any."""
    if num_resized:
        _log.info(
            "%s of %s images (%s) had another size and were fitted to %s.",
            f"{num_resized:,}",
            f"{num_images:,}",
            which,
            shown_size(image_size),
        )


def part_of_rank(num_images: int, rank: int, num_ranks: int) -> list[int]:
    """Returns the images that this rank embeds: contiguous, and the same number on every rank.

    The all-gather needs blocks of equal size, so this is not the split of even_parts: blocks have ceil(N / W) images, and
    places past the end repeat the last image. Every rank thus learns D, even with fewer images than ranks.
    """
    part_size = -(-num_images // num_ranks)
    return [min(rank * part_size + place, num_images - 1) for place in range(part_size)]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Switches to eval mode without gradients inside the block; afterwards every module has its previous mode."""
    # Restored module by module instead of by model.train(): parts may be frozen in eval mode on purpose.
    was_training = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, is_training in was_training:
            module.training = is_training


def embed_part(
    network: nn.Module,
    images: Images,
    part: Sequence[int],
    *,
    device: torch.device,
    batch_size: int = 64,
    num_threads: int = 1,
    mirror: bool = True,
    on_progress: OnProgress = no_progress,
    on_bad: OnBad | None = None,
) -> Tensor:
    """Embeds some of the images on this rank; nothing is exchanged.

    Returns (len(part), D + 1) on the device: f(x) + f(mirrored x), and the mean norm in the last column. Without `mirror`
    these are f(x) and its norm. on_bad: is told of an image that cannot be read, whose row is then NaN; without it such an
    image is an error.
    """
    if not part:
        raise DataError("Nothing to embed: there are no images.")
    rows: Tensor | None = None
    done = 0
    with evaluating(network), ThreadPoolExecutor(num_threads) as threads:
        batches = (
            _sample_batches(images, part, batch_size)
            if isinstance(images, Samples)
            else _decoded_ahead(images, part, batch_size, threads, on_bad)
        )
        for indices, inputs, is_bad_B in batches:
            embedded = _embed_batch(network, tuple(one.to(device) for one in inputs), mirror)
            _require_usable(embedded, indices, images, is_bad_B.to(device))
            embedded[is_bad_B.to(device)] = torch.nan
            if rows is None:
                # One block for all rows: keeping small results between large temporary ones fragments the heap (1.1 GB
                # instead of 0.3 GB for 12,000 images).
                rows = embedded.new_empty((len(part), embedded.shape[1]))
            rows[done : done + len(indices)] = embedded
            done += len(indices)
            on_progress(done, len(part))
    assert rows is not None
    return rows


def _decoded_ahead(
    images: Images, part: Sequence[int], batch_size: int, threads: ThreadPoolExecutor, on_bad: OnBad | None
) -> Iterator[tuple[Sequence[int], tuple[Tensor, ...], Tensor]]:
    """Yields the numbers, the pixels and the bad images of each batch; a bad image is black.

    While the device works on one batch, the threads decode the next one and no more than that.
    """
    batches = [part[start : start + batch_size] for start in range(0, len(part), batch_size)]
    upcoming = [threads.submit(images.pixels, index) for index in batches[0]]
    for place, indices in enumerate(batches):
        current = upcoming
        upcoming = [threads.submit(images.pixels, i) for i in batches[place + 1]] if place + 1 < len(batches) else []
        is_bad_B = torch.zeros(len(indices), dtype=torch.bool)
        pixels = []
        for row, future in enumerate(current):
            try:
                pixels.append(future.result())
            except DataError as error:
                if on_bad is None or isinstance(error, OtherSizeError):
                    raise
                on_bad(indices[row], error)
                is_bad_B[row] = True
                pixels.append(np.zeros((*height_and_width(images.image_size), 3), dtype=np.uint8))
        yield indices, (to_tensor(np.stack(pixels)),), is_bad_B


def _sample_batches(
    samples: Samples, part: Sequence[int], batch_size: int
) -> Iterator[tuple[Sequence[int], tuple[Tensor, ...], Tensor]]:
    for start in range(0, len(part), batch_size):
        indices = part[start : start + batch_size]
        yield indices, samples.inputs(indices), torch.zeros(len(indices), dtype=torch.bool)


def _embed_batch(network: nn.Module, inputs: tuple[Tensor, ...], mirror: bool) -> Tensor:
    """Embeds pixels (B, 3, H, W) or, as they are, features or padded sequences with their lengths."""
    is_image = inputs[0].dtype == torch.uint8
    images_B, *lengths = (normalise(inputs[0]),) if is_image else inputs
    straight_BD = network(images_B, *lengths).float()
    if not (mirror and is_image):
        return torch.cat([straight_BD, straight_BD.norm(dim=1, keepdim=True)], dim=1)
    mirrored_BD = network(images_B.flip(3)).float()
    norms_B1 = (straight_BD.norm(dim=1, keepdim=True) + mirrored_BD.norm(dim=1, keepdim=True)) / 2
    return torch.cat([straight_BD + mirrored_BD, norms_B1], dim=1)


def _require_usable(rows_BD1: Tensor, indices: Sequence[int], images: Images, is_bad_B: Tensor) -> None:
    """Refuses rows that cannot be normalised: they would turn into distances that look like any other."""
    lengths_B = rows_BD1[:, :-1].norm(dim=1)
    is_usable_B = (torch.isfinite(lengths_B) & (lengths_B > 0)) | is_bad_B
    if not is_usable_B.all():
        first = int((~is_usable_B).nonzero()[0])
        what = "all zeros" if lengths_B[first] == 0 else "not finite (NaN or infinity)"
        raise DataError(
            f"The embedding of {images.name(indices[first])} is {what}: the model has diverged or was loaded wrongly."
        )
