"""Fine-tuning: a new run that starts with the backbone, and optionally the class centres, of another one."""

import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megaclass.backbones.timm_network import TimmNetwork, origin_of_weights
from megaclass.checkpoint.class_names import ClassList, describe_difference, saved_classes
from megaclass.checkpoint.load import copy_matched_rows, first_whole_on_all_ranks, load_shared, saved_rows
from megaclass.checkpoint.manifest import NAME, read_manifest
from megaclass.checkpoint.retention import published
from megaclass.checkpoint.tensor_file import read_tensors, tensors_with_prefix
from megaclass.config.schema import CLASS_MEANS
from megaclass.distributed.agreement import (
    on_every_rank,
    on_every_rank_for_long,
    on_main_rank_for_long,
    text_of_main_rank,
)
from megaclass.errors import CheckpointError
from megaclass.insightface.checkpoints import load_backbone_, read_backbone, read_centre_shards
from megaclass.training.class_means import start_at_class_means
from megaclass.training.model.build import Model
from megaclass.training.run.run import Run
from megaclass.training.start.restart import StartMode
from megaclass.training.start.resume import check_same_people, match_on_all_ranks

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
    elif run.config.backbone.pretrained:
        on_every_rank_for_long(lambda: _load_pretrained(run, model), device)
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


def _load_pretrained(run: Run, model: Model) -> None:
    assert isinstance(model.backbone, TimmNetwork)
    model.backbone.load_pretrained_(run.config.backbone.pretrained)
    if model.ema is not None:
        model.ema.load({name: parameter.detach() for name, parameter in model.backbone.named_parameters()})
    if run.world.is_main:
        _logger.info(f"starting with {origin_of_weights(run.config.backbone.name, run.config.backbone.pretrained)}")


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
