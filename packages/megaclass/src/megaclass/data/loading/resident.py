"""All images of a source in the memory of the device: decoded once, then batches are gathered there."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megaclass.data.loading.pool import LoaderSettings
from megaclass.data.loading.prefetch import ProcessBatches
from megaclass.data.loading.reader import BadImages, BatchReader
from megaclass.data.threaded_map import ordered_map
from megaclass.errors import DataError

_log = logging.getLogger("megaclass.data")

_BLOCK_IMAGES = 512
# The model, its activations and the head need the rest.
_LARGEST_SHARE = 0.7


@dataclass(frozen=True)
class ResidentImages:
    """Pixels and labels of all images, and the index actually stored for each: a replacement if it was unreadable."""

    images_NHW3: Tensor
    labels_N: Tensor
    shown_N: NDArray[np.int64]
    num_resized: int

    def batch(self, indices_B: NDArray[np.int64]) -> tuple[Tensor, Tensor, NDArray[np.int64], Tensor]:
        """Returns images (B, 3, H, W) and labels on the device, and the indices of the images, on the host and there."""
        shown_B = self.shown_N[indices_B]
        device = self.images_NHW3.device
        places = torch.from_numpy(shown_B)
        # Pinned, because a copy from pageable memory makes the host wait for the GPU.
        places = places.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else places
        return self.images_NHW3[places].permute(0, 3, 1, 2), self.labels_N[places], shown_B, places


def load_images(
    reader: BatchReader,
    bad_images: BadImages,
    device: torch.device,
    processes: LoaderSettings | None,
    num_threads: int,
) -> ResidentImages:
    """Decodes all images, in loader processes if there are some. Replaces unreadable ones as a batch of `reader` would."""
    source, (height, width) = reader.source, reader.plan.image_size
    _require_room(source.num_images * height * width * 3, device)
    begun = time.monotonic()
    # The seed stays: it decides which image replaces an unreadable one.
    plan = replace(reader.plan, order="file", global_batch=_BLOCK_IMAGES, rank=0, world_size=1)
    in_file_order = BatchReader(source, plan, bad_images.add_bad)
    images = torch.empty((source.num_images, height, width, 3), dtype=torch.uint8, device=device)
    shown = np.empty(source.num_images, dtype=np.int64)
    num_resized = 0
    blocks = (
        _by_threads(in_file_order, bad_images, num_threads)
        if processes is None
        else _by_processes(processes, in_file_order, bad_images, device)
    )
    start = 0
    for block_BHW3, shown_B, num_resized_B in blocks:
        images[start : start + len(shown_B)] = block_BHW3
        shown[start : start + len(shown_B)] = shown_B
        num_resized += num_resized_B
        start += len(shown_B)
    _log.info("decoded %s images onto %s in %.1f s", f"{start:,}", device, time.monotonic() - begun)
    labels = torch.from_numpy(np.ascontiguousarray(source.labels)).to(device)
    return ResidentImages(images, labels, shown, num_resized)


def _by_processes(
    settings: LoaderSettings, reader: BatchReader, bad_images: BadImages, device: torch.device
) -> Iterator[tuple[Tensor, NDArray[np.int64], int]]:
    steps = reader.order.steps_per_epoch
    processes = ProcessBatches(settings, reader, bad_images, device)
    try:
        for loaded in processes.batches(0, steps, steps):
            pixels = loaded.pixels
            yield pixels.images.permute(0, 2, 3, 1), pixels.indices, processes.take_num_resized()
            # Before the next batch is asked for: while they refer to the slot, it cannot be filled again.
            del loaded, pixels
    finally:
        processes.close()


def _by_threads(
    reader: BatchReader, bad_images: BadImages, num_threads: int
) -> Iterator[tuple[Tensor, NDArray[np.int64], int]]:
    def load(step: int) -> tuple[Tensor, NDArray[np.int64], int]:
        num_rows = reader.num_rows(step)
        images_BHW3 = np.empty((num_rows, *reader.plan.image_size, 3), dtype=np.uint8)
        indices_B = np.empty(num_rows, dtype=np.int64)
        num_resized = reader.fill(0, step, range(num_rows), images_BHW3, indices_B)
        bad_images.add_read(num_rows)
        return torch.from_numpy(images_BHW3), indices_B, num_resized

    return ordered_map(load, range(reader.order.steps_per_epoch), num_threads)


def _require_room(num_bytes: int, device: torch.device) -> None:
    if device.type != "cuda":
        return
    # What the driver reports, which counts also the memory of other processes on this GPU.
    free, _ = torch.cuda.mem_get_info(device)
    if num_bytes > _LARGEST_SHARE * free:
        raise DataError(
            f"data.on_gpu is true, but the images need {num_bytes / 2**30:.1f} GiB of GPU memory, more than "
            f"{_LARGEST_SHARE:.0%} of the {free / 2**30:.1f} GiB that are free: leave it out."
        )
