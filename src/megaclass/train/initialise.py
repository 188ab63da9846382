"""Fine-tuning: a new run that begins with the weights, and perhaps the centres, of another one."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megaclass.checkpoint.class_names import ClassList, describe_difference, saved_classes
from megaclass.checkpoint.insightface import load_backbone_, read_backbone, read_centre_shards
from megaclass.checkpoint.load import copy_matched_rows, load_shared, newest_whole, saved_rows
from megaclass.checkpoint.manifest import NAME, check_files, read_manifest
from megaclass.config import CLASS_MEANS, Config
from megaclass.data.source import ImageSource
from megaclass.distributed.agreement import on_every_rank
from megaclass.errors import CheckpointError
from megaclass.export.safetensors_file import load_state
from megaclass.train.build import Model
from megaclass.train.class_means import start_at_class_means
from megaclass.train.resume import match_on_all_ranks
from megaclass.world import World


def initialise(
    config: Config,
    model: Model,
    source: ImageSource,
    classes: ClassList,
    world: World,
    device: torch.device,
    *,
    matches_classes: bool,
) -> None:
    """Collective. Copies in what train.init_backbone and train.init_centres name; every rank reads the files."""
    if config.train.init_backbone is not None:
        backbone = Path(config.train.init_backbone)
        on_every_rank(lambda: _load_backbone(model, backbone), device)
    if config.train.init_centres == CLASS_MEANS:
        start_at_class_means(config, model, source, world, device)
    elif config.train.init_centres is not None:
        path = Path(config.train.init_centres)
        saved, shards = on_every_rank(lambda: _read_centres(model, path, classes, matches_classes), device)
        saved_K = np.arange(model.head.classes.start, model.head.classes.stop)
        if saved != classes:
            saved_K = match_on_all_ranks(saved, classes, model, world, device, str(path)).saved_K
        target, num_subcentres = {"weight": model.head.rows()["weight"]}, model.head.store.num_subcentres
        on_every_rank(lambda: copy_matched_rows(shards, target, saved_K, num_subcentres, str(path)), device)


def read_initial_backbone(path: Path) -> dict[str, Tensor]:
    """State dict of a backbone, from any of the files and folders that train.init_backbone takes."""
    if path.is_dir() and (path / "model.safetensors").is_file():
        return load_state(path / "model.safetensors")
    if path.is_dir():
        shared = load_shared(_checked_checkpoint(path))
        # Where a running mean was kept, it is what the run stands for.
        parts = ("backbone.", "ema.")
        return {name.removeprefix(p): tensor for p in parts for name, tensor in shared.items() if name.startswith(p)}
    if path.suffix == ".safetensors":
        return load_state(path)
    return read_backbone(path)


def _load_backbone(model: Model, path: Path) -> None:
    load_backbone_(model.backbone, read_initial_backbone(path), path)
    if model.ema is not None:
        model.ema.load({name: parameter.detach() for name, parameter in model.backbone.named_parameters()})


def _read_centres(
    model: Model, path: Path, classes: ClassList, matches_classes: bool
) -> tuple[ClassList, Iterator[tuple[int, dict[str, Tensor]]]]:
    """The classes these centres are of, and the centres, shard by shard."""
    if _is_ours(path):
        folder = _checked_checkpoint(path)
        manifest = read_manifest(folder)
        saved, shards = saved_classes(folder, manifest), saved_rows(folder, manifest, 0, manifest.num_classes)
    else:
        centres = read_centre_shards(path)
        num_saved = sum(len(shard) for _, shard in centres) // model.head.store.num_subcentres
        # InsightFace knows its classes by number alone: as many as the data has are taken for the same ones.
        saved = classes if num_saved == classes.num_classes else ClassList(num_saved)
        shards = ((first, {"weight": shard}) for first, shard in centres)
    if saved != classes and not matches_classes:
        raise CheckpointError(f"The centres in {path} are of other classes: {describe_difference(saved, classes)}.")
    return saved, shards


def _is_ours(path: Path) -> bool:
    return (path / NAME).is_file() or (path / "checkpoints").is_dir()


def _checked_checkpoint(path: Path) -> Path:
    """The checkpoint itself, or the newest whole one of a run folder."""
    if not _is_ours(path):
        raise CheckpointError(
            f"{path} is neither a checkpoint nor a run folder: it holds no {NAME} and no checkpoints/."
        )
    if (path / NAME).is_file():
        check_files(path, read_manifest(path))
        return path
    found, reasons = newest_whole(path / "checkpoints")
    if found is None:
        raise CheckpointError(f"There is no whole checkpoint in {path}: {'; '.join(reasons) or 'the folder is empty'}.")
    return found
