"""Centres that begin where the initial backbone sees their classes: the mean of the images' embeddings.

A step on every rank: its part of the next images, decoded ahead, through the backbone; the embeddings of all ranks are
gathered, and each rank adds up those of its own classes, in the order of the data whatever the number of ranks.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor

from megaclass.config.schema import Config
from megaclass.data.decode import decode_into, normalise
from megaclass.data.loader import BadImages
from megaclass.data.sources.source import ImageSource, PixelSource
from megaclass.data.threaded_map import ordered_map
from megaclass.distributed.agreement import on_every_rank
from megaclass.distributed.collectives import gather_blocks
from megaclass.errors import DataError
from megaclass.evaluate.embed import evaluating
from megaclass.head.gather_batch import gather_batch
from megaclass.progress import progress_bar
from megaclass.train.build import Model, input_size
from megaclass.train.data_errors import DataErrors
from megaclass.world import World


def start_at_class_means(config: Config, model: Model, source: ImageSource, world: World, device: torch.device) -> None:
    """Collective. One pass over the data, not augmented; classes without a readable image keep their random start.

    With sub-centres the first of each class begins at the mean, the others as ever: equal ones would stay equal.
    An all-gather a step, as of the head's forward: W * (16 + max_batch * (8 + D * 4)) bytes.
    """
    data_errors = DataErrors()
    sums_KD = _sum_by_class(config, model, source, world, device, data_errors)
    is_finite_K = sums_KD.isfinite().all(1)

    def check() -> None:
        data_errors.check()
        if not is_finite_K.all():
            first = model.head.classes.start + int((~is_finite_K).nonzero()[0])
            raise DataError(
                f"The embeddings of class {first} by {config.train.init_backbone} are not finite: "
                f"is train.init_backbone a trained backbone, and train.precision wide enough for it?"
            )

    on_every_rank(check, device)
    num_started = gather_blocks(model.head.store.start_at_(sums_KD), None).sum()
    if world.is_main:
        print(
            f"megaclass: {int(num_started):,} of {source.num_classes:,} centres begin at the mean of their images.",
            file=sys.stderr,
            flush=True,
        )


def _sum_by_class(
    config: Config, model: Model, source: ImageSource, world: World, device: torch.device, data_errors: DataErrors
) -> Tensor:
    """(K, D) float32: unit embeddings of this rank's classes, added up; of some images where a rank's data failed.

    That rank brings no images any more and says so in place of the step's number: all leave, one step later.
    """
    own, width = model.head.classes, model.head.embedding_dim
    largest = -(-config.train.global_batch // world.size)
    # The last row is for images of other ranks' classes.
    sums = torch.zeros((len(own) + 1, width), device=device)
    bar_of = progress_bar("class means", source.num_images) if world.is_main else nullcontext(None)
    starts = range(0, source.num_images, config.train.global_batch)
    nothing = torch.zeros((0, 3, *input_size(config, source)), dtype=torch.uint8), torch.zeros(0, dtype=torch.int64)
    batches = data_errors.kept(_batches(config, source, world, starts), nothing)
    is_failed = torch.zeros((), dtype=torch.bool)
    with evaluating(model.backbone), bar_of as bar:
        for start, (images_B, labels_B) in zip(starts, batches, strict=False):
            inputs = normalise(images_B.to(device)).to(memory_format=torch.channels_last)
            with torch.autocast(device.type, model.precision.dtype, enabled=model.precision.uses_autocast):
                embeddings_BD = model.backbone(inputs) if len(inputs) else inputs.new_zeros((0, width))
            unit_BD = F.normalize(embeddings_BD.float())
            failed = int(data_errors.is_any)
            batch = gather_batch(unit_BD, labels_B.to(device), step=failed, max_batch=largest, group=None)
            local_G = batch.labels_G - own.start
            rows_G = torch.where((local_G >= 0) & (local_G < len(own)), local_G, len(own))
            _add_rows_(sums, rows_G, batch.embeddings_GD)
            if bar is not None:
                bar.advance_to(min(start + config.train.global_batch, source.num_images))
            if is_failed:
                # The step before this one: a GPU has done that by now, or nearly so.
                break
            is_failed = batch.steps_W.any()
    return sums[:-1]


def _batches(
    config: Config, source: ImageSource, world: World, starts: Iterable[int]
) -> Iterator[tuple[Tensor, Tensor]]:
    """(uint8 images, labels): this rank's part of every batch, in the order of the data; unreadable images left out."""
    bad_images = BadImages(source, config.data.max_bad_fraction)
    size = input_size(config, source)

    def load(start: int) -> tuple[Tensor, Tensor]:
        stop = min(start + config.train.global_batch, source.num_images)
        indices_B: NDArray[np.int64] = np.array_split(np.arange(start, stop), world.size)[world.rank]
        if isinstance(source, PixelSource):
            images_BHW3 = source.pixels(indices_B, size)
        else:
            images_BHW3 = np.empty((len(indices_B), *size, 3), dtype=np.uint8)
            is_read_B = np.ones(len(indices_B), dtype=bool)
            for row, index in enumerate(indices_B.tolist()):
                try:
                    decode_into(images_BHW3[row], source.read(index), source.name_of(index), config.data.fit)
                except DataError as error:
                    bad_images.add_bad(index, error)
                    is_read_B[row] = False
            bad_images.add_read(len(indices_B))
            images_BHW3, indices_B = images_BHW3[is_read_B], indices_B[is_read_B]
        return torch.from_numpy(images_BHW3).permute(0, 3, 1, 2), torch.from_numpy(source.labels[indices_B])

    return ordered_map(load, starts, config.data.threads)


def _add_rows_(sums: Tensor, rows_G: Tensor, values_GD: Tensor) -> None:
    """In the same order in every run: on a GPU index_add_ would not, on a CPU index_put_."""
    if sums.is_cuda:
        sums.index_put_((rows_G,), values_GD, accumulate=True)
    else:
        sums.index_add_(0, rows_G, values_GD)
