"""Fine-tuning: a new run that starts with the backbone, and optionally the class centres, of another one.

Class centres may also start at the mean embedding of their images, computed with the initial
backbone: in each step every rank embeds its part of the next images, decoded ahead. The embeddings
of all ranks are gathered, and each rank adds up those of its own classes, in the order of the data
independent of the number of ranks.
"""

import logging
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from numpy.typing import NDArray
from torch import Tensor

from megaclass.checkpoint.class_names import ClassList, describe_difference, saved_classes
from megaclass.checkpoint.load import copy_matched_rows, first_whole_on_all_ranks, load_shared, saved_rows
from megaclass.checkpoint.manifest import NAME, read_manifest
from megaclass.checkpoint.retention import published
from megaclass.checkpoint.tensor_file import read_tensors, tensors_with_prefix
from megaclass.config.schema import CLASS_MEANS
from megaclass.data.augment import normalise
from megaclass.data.decode import decode_into
from megaclass.data.loading.reader import BadImages
from megaclass.data.sources.source import PixelSource
from megaclass.data.threaded_map import ordered_map
from megaclass.distributed.agreement import (
    on_every_rank,
    on_every_rank_for_long,
    on_main_rank_for_long,
    text_of_main_rank,
)
from megaclass.errors import CheckpointError, DataError
from megaclass.evaluation.embed import evaluating
from megaclass.head.gather_batch import gather_batch
from megaclass.insightface.checkpoints import load_backbone_, read_backbone, read_centre_shards
from megaclass.progress import progress_bar
from megaclass.training.data_errors import DataErrors
from megaclass.training.model.build import Model
from megaclass.training.run.run import Run
from megaclass.training.start.restart import StartMode
from megaclass.training.start.resume import check_same_people, match_on_all_ranks
from megaclass_launch.even_parts import even_part
from megaclass_launch.ranks.collectives import gather_blocks

_logger = logging.getLogger("megaclass.training")

_MODEL = "model.safetensors"


def load_initial_weights(run: Run, model: Model, mode: StartMode) -> None:
    """Collective. Loads what train.init_backbone and train.init_centres name; every rank reads the files.

    A run folder stands for its newest whole checkpoint in both. Each byte of a checkpoint is checked by one of the ranks.
    """
    config, device, classes = run.config.train, run.device, run.classes
    # One path for both is resolved once, so backbone and centres come from the same checkpoint.
    is_one_path = config.init_backbone == config.init_centres
    backbone = Path()
    if config.init_backbone is not None:
        backbone = _resolve(Path(config.init_backbone), device, or_else=None if is_one_path else _MODEL)
        on_every_rank(lambda: _load_backbone(model, backbone), device)
    if config.init_centres == CLASS_MEANS:
        start_at_class_means(run, model)
    elif config.init_centres is not None:
        path = backbone if is_one_path else _resolve(Path(config.init_centres), device, or_else=None)
        if not mode.trusts_numbers:
            on_main_rank_for_long(lambda: _check_people(path, run), device)
        saved, shards = on_every_rank(lambda: _read_centres(model, path, classes, mode.matches_classes), device)
        saved_K = np.arange(model.head.classes.start, model.head.classes.stop)
        if saved != classes:
            saved_K = match_on_all_ranks(run, model, saved, str(path)).saved_K
        # Only the centres themselves: the state of their optimizer belongs to the other run.
        target, num_subcentres = {"weight": model.head.rows()["weight"]}, model.head.store.num_subcentres
        on_every_rank_for_long(lambda: copy_matched_rows(shards, target, saved_K, num_subcentres, str(path)), device)
        model.head.accept_rows()


def _resolve(path: Path, device: torch.device, *, or_else: str | None) -> Path:
    """Collective. Returns what to read: a whole checkpoint, else the file `or_else` in the run folder, else the path itself."""
    folder, passed_over = first_whole_on_all_ranks(lambda: _checkpoints_of(path), device)

    def resolve() -> str:
        for reason in passed_over if folder is not None else ():
            _logger.info(f"passed over a checkpoint: {reason}")
        if folder is not None:
            _logger.info(f"starting with the weights of {folder}")
            return str(folder)
        if or_else is not None and (path / or_else).is_file():
            return str(path / or_else)
        if passed_over or (path / "checkpoints").is_dir():
            why = "; ".join(passed_over) or "the folder is empty"
            raise CheckpointError(f"There is no whole checkpoint in {path}: {why}.")
        return str(path)

    return Path(text_of_main_rank(resolve, device))


def _checkpoints_of(path: Path) -> list[Path]:
    """Returns the checkpoint itself, or those of a run folder, newest first."""
    return [path] if (path / NAME).is_file() else published(path / "checkpoints")[::-1]


def _load_backbone(model: Model, path: Path) -> None:
    load_backbone_(model.backbone, _read_backbone(path), path)
    if model.ema is not None:
        # The moving average starts at the loaded weights, not at the random ones.
        model.ema.load({name: parameter.detach() for name, parameter in model.backbone.named_parameters()})


def _read_backbone(path: Path) -> dict[str, Tensor]:
    if (path / NAME).is_file():
        shared = load_shared(path)
        # If training kept a moving average of the weights, it evaluated and exported that.
        return tensors_with_prefix(shared, "backbone.") | tensors_with_prefix(shared, "ema.")
    if path.is_dir():
        raise CheckpointError(
            f"{path} is neither a checkpoint nor a run folder: it holds no {NAME}, no checkpoints/ and no {_MODEL}."
        )
    return read_tensors(path) if path.suffix == ".safetensors" else read_backbone(path)


def _check_people(path: Path, run: Run) -> None:
    """Rank 0. Compares people by their images if `path` is a checkpoint; InsightFace's files do not record any."""
    if (path / NAME).is_file():
        manifest = read_manifest(path)
        saved = saved_classes(path, manifest)
        check_same_people(manifest.data, run.data_fingerprint, run.source, saved, run.classes, path)


def _read_centres(
    model: Model, path: Path, classes: ClassList, matches_classes: bool
) -> tuple[ClassList, Iterator[tuple[int, dict[str, Tensor]]]]:
    """Returns the classes of the saved centres, and an iterator over the centres, shard by shard."""
    if (path / NAME).is_file():
        manifest = read_manifest(path)
        saved, shards = saved_classes(path, manifest), saved_rows(path, manifest, 0, manifest.num_classes)
    else:
        centres = read_centre_shards(path)
        num_saved = sum(len(shard) for _, shard in centres) // model.head.store.num_subcentres
        # InsightFace identifies classes by number alone: if there are as many as in the data, they are taken as equal.
        saved = classes if num_saved == classes.num_classes else ClassList(num_saved)
        shards = ((first, {"weight": shard}) for first, shard in centres)
    if saved != classes and not matches_classes:
        raise CheckpointError(f"The centres in {path} are of other classes: {describe_difference(saved, classes)}.")
    return saved, shards


def start_at_class_means(run: Run, model: Model) -> None:
    """Collective. Passes over the data once, without augmentation; classes without a readable image keep random centres.

    With sub-centres, the first one of each class starts at the mean and the others at random: equal ones would stay equal.
    Traffic: one all-gather per step, as in the head's forward: W * (16 + max_batch * (8 + D * 4)) bytes.
    """
    data_errors = DataErrors()
    sums_KD = _sum_by_class(run, model, data_errors)
    is_finite_K = sums_KD.isfinite().all(1)

    def check() -> None:
        data_errors.check()
        if not is_finite_K.all():
            first = model.head.classes.start + int((~is_finite_K).nonzero()[0])
            raise DataError(
                f"The embeddings of class {first} by {run.config.train.init_backbone} are not finite: "
                f"check that train.init_backbone is a trained backbone and that train.precision is wide enough for it."
            )

    # All ranks leave together, with the error of the rank that has one.
    on_every_rank(check, run.device)
    num_started = gather_blocks(model.head.store.start_at_(sums_KD), None).sum()
    if run.world.is_main:
        _logger.info(f"{int(num_started):,} of {run.source.num_classes:,} centres start at the mean of their images.")


def _sum_by_class(run: Run, model: Model, data_errors: DataErrors) -> Tensor:
    """Returns (K, D) float32 sums of the unit embeddings of this rank's classes; partial sums if the data of a rank failed.

    A rank whose data failed sends empty batches, and 1 instead of 0 in the field for the step's number: all ranks read
    that one step later and leave together.
    """
    config, source, world, device = run.config, run.source, run.world, run.device
    own, width = model.head.classes, model.head.embedding_dim
    # Blocks of the all-gather have the same size on all ranks: that of the largest part.
    largest = -(-config.train.global_batch // world.size)
    # The last row collects images of classes on other ranks; it is dropped.
    sums = torch.zeros((len(own) + 1, width), device=device)
    new_bar = progress_bar("class means", source.num_images) if world.is_main else nullcontext(None)
    starts = range(0, source.num_images, config.train.global_batch)
    nothing = torch.zeros((0, 3, *run.image_size), dtype=torch.uint8), torch.zeros(0, dtype=torch.int64)
    batches = data_errors.keep_error(_batches(run, starts), nothing)
    is_failed = torch.zeros((), dtype=torch.bool)
    with evaluating(model.backbone), new_bar as bar:
        for start, (images_B, labels_B) in zip(starts, batches, strict=False):
            inputs = normalise(images_B.to(device)).to(memory_format=torch.channels_last)
            with torch.autocast(device.type, model.precision.dtype, enabled=model.precision.uses_autocast):
                embeddings_BD = model.backbone(inputs) if len(inputs) else inputs.new_zeros((0, width))
            unit_BD = F.normalize(embeddings_BD.float())
            # No collective of its own: the flag travels in the block that is gathered anyway.
            failed = int(data_errors.is_any)
            batch = gather_batch(unit_BD, labels_B.to(device), step=failed, max_batch=largest, group=None)
            local_G = batch.labels_G - own.start
            rows_G = torch.where((local_G >= 0) & (local_G < len(own)), local_G, len(own))
            _add_rows_(sums, rows_G, batch.embeddings_GD)
            if bar is not None:
                bar.advance_to(min(start + config.train.global_batch, source.num_images))
            if is_failed:
                # Read one step late, so the host does not wait for the GPU in every step.
                break
            is_failed = batch.steps_W.any()
    return sums[:-1]


def _batches(run: Run, starts: Iterable[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields (uint8 images, labels) of this rank's part of every batch, in the order of the data, without unreadable images."""
    config, source, size = run.config, run.source, run.image_size
    bad_images = BadImages(source, config.data.max_bad_fraction)

    def load(start: int) -> tuple[Tensor, Tensor]:
        stop = min(start + config.train.global_batch, source.num_images)
        part = even_part(stop - start, run.world.rank, run.world.size)
        indices_B: NDArray[np.int64] = np.arange(start + part.start, start + part.stop)
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
            # Unreadable images are left out, not replaced: a replacement would belong to another class.
            images_BHW3, indices_B = images_BHW3[is_read_B], indices_B[is_read_B]
        return torch.from_numpy(images_BHW3).permute(0, 3, 1, 2), torch.from_numpy(source.labels[indices_B])

    return ordered_map(load, starts, config.data.threads)


def _add_rows_(sums: Tensor, rows_G: Tensor, values_GD: Tensor) -> None:
    """Adds rows in the same order in every run: index_add_ does not on a GPU, index_put_ does not on a CPU."""
    if sums.is_cuda:
        sums.index_put_((rows_G,), values_GD, accumulate=True)
    else:
        sums.index_add_(0, rows_G, values_GD)
