"""Batches of decoded images for one rank, prepared ahead of time by threads or by loader processes."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from megaclass.data.augment import Augment, augment_, mirror_, normalise
from megaclass.data.augment_gpu.prepare import has_program, mirroring_key, prepare, split_augment
from megaclass.data.decode import Fit
from megaclass.data.loading.choose import LoaderSettings
from megaclass.data.loading.reader import BadImages, BatchPlan, BatchReader
from megaclass.data.order import Order, rank_batch
from megaclass.data.ordered_map import ordered_map
from megaclass.data.sources.source import ImageSource, TensorSource
from megaclass.data.sources.tensors import collated
from megaclass.errors import DataError
from megaclass.image_size import is_sequence
from megaclass.keyed_random import combine64
from megaclass_launch.ranks.reused_memory import ReusedMemory

_log = logging.getLogger("megaclass.data")

_MIRROR_SALT = 0x6D6972726F72
# Images, or rows of features, that are read at once if all of them are kept on the device, and the largest share of its free
# memory that they may take: the model, its activations and the head need the rest.
_BLOCK_IMAGES, _BLOCK_ROWS = 512, 1 << 16
_LARGEST_SHARE = 0.7


@dataclass(frozen=True)
class Batch:
    """This rank's images of one step."""

    images: torch.Tensor
    """uint8 (B, 3, H, W), RGB, in the channels-last layout that decoders write and backbones read; or, of a TensorSource,
    features (B, W) or padded sequences (B, T, ...)."""
    labels: torch.Tensor
    """int64 (B,); (B, K) if samples have several labels."""
    indices: NDArray[np.int64]
    """Indices of these images in the source (B,)."""
    epoch: int
    step: int
    """Counts from 0 within the epoch."""
    treatment: Treatment | None = field(default_factory=lambda: Treatment())
    """Changes to the pixels that are left to the training device; None for features and sequences, which have no pixels."""
    lengths: torch.Tensor | None = None
    """int64 (B,), the lengths of sequences before they were padded."""
    index_tensor: torch.Tensor | None = None
    """The indices where the images are, if they are there already."""

    def indices_on(self, device: torch.device) -> torch.Tensor:
        """Returns the indices as a tensor on the device."""
        indices = torch.from_numpy(self.indices) if self.index_tensor is None else self.index_tensor
        return indices.to(device, non_blocking=True)

    def inputs(self, device: torch.device, rows: slice = slice(None)) -> tuple[torch.Tensor, ...]:
        """Returns the arguments of the backbone: images, features, or padded sequences and their lengths."""
        if self.treatment is not None:
            return (self.prepared(device, rows),)
        numbers = self.images[rows].to(device, non_blocking=True)
        numbers = numbers.float() if numbers.is_floating_point() else numbers
        return (numbers,) if self.lengths is None else (numbers, self.lengths[rows].to(device, non_blocking=True))

    def only(self, is_wanted_B: torch.Tensor) -> Batch:
        """Returns these images of the batch, without mirroring and augmentation."""
        return replace(
            self,
            images=self.images[is_wanted_B.to(self.images.device)],
            labels=self.labels[is_wanted_B.to(self.labels.device)],
            indices=self.indices[is_wanted_B.numpy()],
            lengths=None if self.lengths is None else self.lengths[is_wanted_B],
            index_tensor=None,
            treatment=self.treatment and Treatment(),
        )

    def prepared(self, device: torch.device, rows: slice = slice(None)) -> torch.Tensor:
        """Returns the backbone's input, mirrored, augmented and normalised on the device: float32 (B, 3, H, W)."""
        # Copied as bytes, a quarter of the floats' traffic, and converted on the device.
        treatment, pixels = self.treatment or Treatment(), self.images[rows].to(device, non_blocking=True)
        indices_B, left = self.indices[rows], treatment.augment
        if device.type == "cuda" and has_program():
            by_program, left = split_augment(treatment.augment)
            images = prepare(
                pixels,
                self.indices_on(device)[rows],
                mirror_key=mirroring_key(treatment.seed, _MIRROR_SALT) if treatment.mirror else None,
                epoch=self.epoch,
                augment=by_program,
                seed=treatment.seed,
                step=treatment.global_step,
            )
        else:
            images = normalise(pixels)
            if treatment.mirror:
                mirror_(images, mirrored(treatment.seed, self.epoch, indices_B))
        if left is not None:
            augment_(images, left, treatment.seed, treatment.global_step, indices_B)
        return images.to(memory_format=torch.channels_last)


@dataclass(frozen=True)
class Treatment:
    """Mirroring and augmentation, chosen by (seed, step, image) and never by the place of an image in a batch or on a rank."""

    seed: int = 0
    global_step: int = 0
    mirror: bool = False
    augment: Augment | None = None


class BatchLoader:
    """Reads and decodes batches ahead of time. The global batches do not depend on the number of ranks or workers.

    Workers are threads of this process, each of which decodes whole batches, or with `processes` processes of their own,
    which leave the interpreter to training (loading/pool.py). An image that cannot be read is replaced by another
    one, chosen by a hash. All modes yield the same bytes.
    """

    def __init__(
        self,
        source: ImageSource,
        *,
        global_batch: int,
        rank: int = 0,
        world_size: int = 1,
        seed: int = 0,
        num_workers: int = 1,
        mirror: bool = True,
        augment: Augment | None = None,
        image_size: tuple[int, int] | None = None,
        fit: Fit = "squash",
        keep_last: bool = False,
        order: Literal["images", "classes"] = "images",
        images_per_class: int = 1,
        max_bad_fraction: float = 0.001,
        num_parts: int = 1,
        fewest_in_part: int = 2,
        processes: LoaderSettings | None = None,
        device: torch.device | None = None,
        is_resident: bool = False,
    ) -> None:
        """Checks that every rank gets enough images in every step.

        image_size: (height, width), by default that of the source; `fit` tells how images of another size are fitted to it.
        num_parts: parts into which a step splits a rank's images, each of at least fewest_in_part.
        processes: read in other processes, which open the data at a path themselves; num_workers threads are for None.
        device: a GPU to which loader processes' batches are copied ahead of time.
        is_resident: decode all images once, at the first step, and keep their pixels on the device.
        """
        self.source = source
        self.image_size = image_size or source.image_size
        self.fit: Fit = fit
        self.bad_images = BadImages(source.num_images, max_bad_fraction)
        plan = BatchPlan(
            global_batch=global_batch,
            image_size=self.image_size,
            rank=rank,
            world_size=world_size,
            seed=seed,
            fit=fit,
            keep_last=keep_last,
            order=order,
            images_per_class=images_per_class,
        )
        self._reader = BatchReader(source, plan, self.bad_images.add_bad)
        self.order: Order = self._reader.order
        if isinstance(source, TensorSource) and is_resident and is_sequence(self.image_size):
            raise DataError(
                f"data.on_gpu is true, but the samples differ in length: {source.describe()}. Leave it out."
            )
        _require_fillable(source, self.order, global_batch, world_size, num_parts, fewest_in_part)
        self.rank = rank
        self.world_size = world_size
        self.mirror = mirror
        self.augment = augment
        self.num_workers = max(1, num_workers)
        self.processes = processes
        if processes is not None:
            # Windows has neither a fork server nor what the pool is made of.
            from megaclass.data.loading.pool import start_fork_server

            start_fork_server()
        self.device = device
        self.is_resident = is_resident
        self._resident: _ResidentImages | None = None
        num_bytes = 0 if isinstance(source, TensorSource) else plan.max_rows * math.prod(self.image_size) * 3
        # Batches that wait, those in the making, and two that the caller has.
        num_batches = _prefetched(self.num_workers) + self.num_workers + 2
        self._memory = ReusedMemory(num_batches * num_bytes)

    @property
    def steps_per_epoch(self) -> int:
        return self.order.steps_per_epoch

    @property
    def num_resized(self) -> int:
        """Images of another size that this rank has fitted so far."""
        return self.bad_images.num_resized

    def batches(self, epoch: int = 0, step: int = 0, *, num_steps: int | None = None) -> Iterator[Batch]:
        """Yields `num_steps` batches from (epoch, step) on, across epochs; by default up to the end of the epoch.

        Closing the iterator, or dropping it, ends its threads or processes. An error in one of them is raised here.
        """
        first = epoch * self.steps_per_epoch + step
        stop = (epoch + 1) * self.steps_per_epoch if num_steps is None else first + num_steps
        return self._from_device(first, stop) if self.is_resident else self._read(self._reader, first, stop)

    def once(self, global_batch: int) -> Iterator[Batch]:
        """Yields this rank's part of every image once, in the order of the source.

        Unreadable images are left out: a replacement would count twice for its own class.
        """
        plan = replace(self._reader.plan, order="file", global_batch=global_batch)
        reader = BatchReader(self.source, plan, self.bad_images.add_bad)
        reader.crashes = self._reader.crashes
        steps = reader.order.steps_per_epoch
        for batch in (
            self._read(reader, 0, steps) if self._resident is None else self._from_device(0, steps, reader.order)
        ):
            wanted_B = rank_batch(reader.order, 0, batch.step, self.rank, self.world_size)
            is_wanted_B = torch.from_numpy(batch.indices == wanted_B)
            yield batch if bool(is_wanted_B.all()) else batch.only(is_wanted_B)

    def blank(self, num_images: int, label: int) -> Batch:
        """Returns a batch of black images, or of copies of the first sample of a TensorSource, all of them with this label."""
        labels = torch.full((num_images, *self.source.labels.shape[1:]), label)
        indices = np.zeros(num_images, dtype=np.int64)
        images, lengths = torch.zeros((num_images, 3, *self.image_size), dtype=torch.uint8), None
        if isinstance(self.source, TensorSource):
            images, lengths = collated(self.source.tensors, indices, self.source.name_of)
        return Batch(images, labels, indices, 0, 0, self._treatment(0, 0), lengths=lengths)

    def load(self, epoch: int, step: int) -> Batch:
        """Returns one batch, decoded in the calling thread."""
        return self._load(self._reader, epoch, step)

    def describe_resized(self) -> str:
        """Returns a sentence about images of another size; empty if there were none."""
        if not self.num_resized:
            return ""
        height, width = self.image_size
        return (
            f"{self.num_resized:,} of {self.bad_images.num_read:,} images had another size and were fitted to "
            f"{width} × {height} (data.fit = {self.fit})."
        )

    def _treatment(self, epoch: int, step: int) -> Treatment | None:
        if isinstance(self.source, TensorSource):
            return None
        return Treatment(self.order.seed, epoch * self.steps_per_epoch + step, self.mirror, self.augment)

    def _load(self, reader: BatchReader, epoch: int, step: int) -> Batch:
        if isinstance(self.source, TensorSource):
            wanted_B = rank_batch(reader.order, epoch, step, reader.plan.rank, reader.plan.world_size)
            samples, lengths = collated(self.source.tensors, wanted_B, self.source.name_of)
            self.bad_images.add_read(len(wanted_B))
            labels = torch.from_numpy(self.source.labels[wanted_B])
            return Batch(samples, labels, wanted_B, epoch, step, None, lengths=lengths)
        num_rows, shape = reader.num_rows(step), (reader.plan.max_rows, *self.image_size, 3)
        images_BHW3 = self._memory.take(math.prod(shape)).reshape(shape)[:num_rows]
        indices_B: NDArray[np.int64] = np.empty(num_rows, dtype=np.int64)
        num_resized = reader.fill(epoch, step, range(num_rows), images_BHW3, indices_B)
        self.bad_images.add_read(num_rows, num_resized)
        labels_B = torch.from_numpy(self.source.labels[indices_B])
        images = torch.from_numpy(images_BHW3).permute(0, 3, 1, 2)
        return Batch(images, labels_B, indices_B, epoch, step, self._treatment(epoch, step))

    def _read(self, reader: BatchReader, first: int, stop: int) -> Iterator[Batch]:
        """Yields the batches of a reader for the steps [first, stop), counted across epochs."""
        steps = reader.order.steps_per_epoch
        if self.processes is None:
            # Batches are submitted in order and taken in order, whichever thread finishes first.
            numbers, num_ahead = range(first, stop), _prefetched(self.num_workers) - 1
            yield from ordered_map(
                lambda n: self._load(reader, *divmod(n, steps)), numbers, self.num_workers, num_ahead
            )
            return
        from megaclass.data.loading.pool import LoaderProcesses

        processes = LoaderProcesses(self.processes, reader, self.bad_images, self.device)
        try:
            for number, loaded in enumerate(processes.batches(first, stop), start=first):
                epoch, step = divmod(number, steps)
                yield Batch(*loaded[:3], epoch, step, self._treatment(epoch, step), loaded[3])
        finally:
            processes.close()

    def _from_device(self, first: int, stop: int, order: Order | None = None) -> Iterator[Batch]:
        order = order or self.order
        if self._resident is None:
            self._resident = self._load_all(self.device or torch.device("cpu"))
        for number in range(first, stop):
            epoch, step = divmod(number, order.steps_per_epoch)
            indices = rank_batch(order, epoch, step, self.rank, self.world_size)
            images, labels, indices_B, index_tensor = self._resident.batch(indices)
            yield Batch(images, labels, indices_B, epoch, step, self._treatment(epoch, step), index_tensor)

    def _load_all(self, device: torch.device) -> _ResidentImages:
        """Decodes all images, or reads all features. Replaces unreadable images as a batch would."""
        source, begun = self.source, time.monotonic()
        shape: tuple[int, ...] = (source.num_images, *self.image_size, 3)
        dtype, block_size = torch.uint8, _BLOCK_IMAGES
        if isinstance(source, TensorSource):
            dtype, block_size = self.blank(1, 0).images.dtype, _BLOCK_ROWS
            shape = (source.num_images, self.image_size[1])
        _require_room(math.prod(shape) * dtype.itemsize, device)
        # The seed stays: it decides which image replaces an unreadable one.
        plan = replace(self._reader.plan, order="file", global_batch=block_size, rank=0, world_size=1)
        reader = BatchReader(source, plan, self.bad_images.add_bad)
        images = torch.empty(shape, dtype=dtype, device=device)
        shown = np.empty(source.num_images, dtype=np.int64)
        start = 0
        for block in self._read(reader, 0, reader.order.steps_per_epoch):
            rows = slice(start, start + len(block.indices))
            images[rows] = block.images if block.treatment is None else block.images.permute(0, 2, 3, 1)
            shown[rows] = block.indices
            start = rows.stop
        self._memory.release()
        what = "read %s rows" if isinstance(source, TensorSource) else "decoded %s images"
        _log.info(f"{what} onto %s in %.1f s", f"{start:,}", device, time.monotonic() - begun)
        return _ResidentImages(images, torch.tensor(source.labels, device=device), shown)


@dataclass(frozen=True)
class _ResidentImages:
    """Pixels and labels of all images on the device, and the index actually stored for each: unreadable ones are replaced."""

    images_NHW3: torch.Tensor
    """(N, W) of features."""
    labels_N: torch.Tensor
    shown_N: NDArray[np.int64]

    def batch(self, indices_B: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor, NDArray[np.int64], torch.Tensor]:
        """Returns images (B, 3, H, W) and labels on the device, and the indices of the images, on the host and there."""
        shown_B = self.shown_N[indices_B]
        device = self.images_NHW3.device
        places = torch.from_numpy(shown_B)
        # Pinned, because a copy from pageable memory makes the host wait for the GPU.
        places = places.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else places
        images = self.images_NHW3[places]
        return images.permute(0, 3, 1, 2) if images.ndim == 4 else images, self.labels_N[places], shown_B, places


def _prefetched(num_threads: int) -> int:
    """Returns how many finished batches wait for the caller if threads of the rank decode."""
    return max(num_threads + 1, 4)


def mirrored(seed: int, epoch: int, indices: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Returns which images are mirrored: half of them, another half in each epoch, on whichever rank they are."""
    # The topmost bit of a hash is a fair coin.
    bits = combine64(seed, _MIRROR_SALT, epoch, indices.astype(np.uint64))
    return (bits >> np.uint64(63)).astype(bool)


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


def _fitting_batch(num_images: int) -> int:
    """Returns a power of two that gives a few steps per epoch, if there are that many images."""
    return int(2 ** max(1, (max(2, num_images) // 4).bit_length() - 1))


def _require_fillable(
    source: ImageSource, order: Order, global_batch: int, world_size: int, num_parts: int, fewest_in_part: int
) -> None:
    if global_batch < world_size:
        raise DataError(
            f"A global batch of {global_batch} images leaves some of the {world_size} ranks without any: "
            f"use at least two images per rank."
        )
    if global_batch > source.num_images:
        raise DataError(
            f"A global batch of {global_batch} images is more than the {source.num_images} there are: "
            f"{source.describe()}. Lower it, for example with train.global_batch={_fitting_batch(source.num_images)}."
        )
    # Only the last step of an epoch can be smaller than the others.
    smallest = order.batch_size(order.steps_per_epoch - 1)
    if smallest // world_size < 2:
        raise DataError(
            f"A batch of {smallest} images leaves one of the {world_size} ranks with a single image, which batch norm "
            f"refuses: use a global batch of at least two images per rank, or four with data.keep_last."
        )
    if smallest // world_size // num_parts < fewest_in_part:
        raise DataError(
            f"The smallest batch, of {smallest} images, gives one of the {world_size} ranks {smallest // world_size}: too few "
            f"for train.accumulate = {num_parts} parts of at least {fewest_in_part}, below which batch norm has no "
            f"statistics. Use fewer parts or a larger global batch, or switch off data.keep_last."
        )
