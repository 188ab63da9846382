"""The training data of a run: drawn or found, staged into memory, opened, and described."""

import logging
from pathlib import Path

import numpy as np
import torch

from megaclass.backbones import check_backbone
from megaclass.config.schema import Config
from megaclass.data.augment import parse_augment
from megaclass.data.loader import BatchLoader
from megaclass.data.loading.choose import choose_processes
from megaclass.data.loading.pool import LoaderSettings
from megaclass.data.sources.open_source import check_source, open_source
from megaclass.data.sources.source import ImageSource, PixelSource
from megaclass.data.tools.inspect import survey_sizes
from megaclass.data.tools.stage import stage
from megaclass.data.tools.synthesize import synthesize
from megaclass.errors import DataError
from megaclass.image_size import compact_size
from megaclass.progress import bar_on_demand
from megaclass.training.model.build import input_size
from megaclass_launch.world import World

_logger = logging.getLogger("megaclass.training")
_MIB = 2**20


def make_data(config: Config) -> None:
    """Draws synthetic identities unless they exist; without synth.identities, checks that the data exists."""
    synth = config.synth
    if not synth.identities:
        check_source(config.data.path)
        return
    with bar_on_demand("drawing identities") as on_progress:
        synthesize(
            Path(config.data.path),
            num_identities=synth.identities,
            images_per_identity=synth.images_per_identity,
            image_size=synth.size,
            seed=synth.seed,
            num_pairs=synth.pairs,
            on_progress=on_progress,
        )


def open_data(
    config: Config, world: World, device: torch.device, source: ImageSource | None = None
) -> tuple[ImageSource, BatchLoader]:
    """Opens the data and the loader of this rank; with data.stage, one rank per host first copies the data into memory.

    source: the data, if this process has opened it already.
    """
    path = staged_path(config)
    source = open_source(path) if source is None else source
    height, width = size = input_size(config, source)
    if height != width and not config.data.size:
        # The first photo may have any shape: a model should not take that shape unless the user asks for it.
        raise DataError(
            f"The images at {config.data.path} have {width} × {height} pixels, which is not a square. Set the input size: "
            f"data.size=112 with data.fit=pad, crop or squash for squares, or data.size=[{height},{width}] for rectangles."
        )
    if config.data.on_gpu and device.type != "cuda":
        raise DataError("data.on_gpu is true, but this run trains on the CPU: leave it out.")
    check_backbone(config.backbone.name, compact_size(size))
    warning = check_classes(source, config.data.path)
    if warning and world.is_main:
        _logger.warning(warning)
    processes = choose_processes(
        path,
        workers=config.data.workers,
        threads=config.data.threads,
        device=device,
        num_local_ranks=world.local_size,
    )
    return source, make_loader(config, source, world, device, processes)


def check_classes(source: ImageSource, path: str) -> str:
    """Refuses data of one class; returns a warning if no class has two images, empty otherwise."""
    above = f"If {path} holds the images of one identity, set data.path={Path(path).resolve().parent}."
    if source.num_classes < 2:
        raise DataError(
            f"{path} holds images of a single class, and a classifier needs two: expected one subfolder per identity. {above}"
        )
    # The labels of a large set are counted only if it may be one of single images.
    if source.num_images > source.num_classes or np.bincount(source.labels).max(initial=0) > 1:
        return ""
    return (
        f"each of the {source.num_classes:,} classes at {path} has one image: what images of an identity have in common "
        f"cannot be learned from that. Expected several images per subfolder; if the file names tell the identities, move "
        f"the files of each into one subfolder."
    )


def how_to_verify(path: str, recipe: str = "RECIPE") -> list[str]:
    """Returns the commands that make a verification set for data that has none next to it."""
    place = Path(path).name or "data"
    split = f"megaclass data split {path} --identities 0.1 --out {place}-split"
    return [
        f"there is no .bin file next to {path}: hold identities out with `{split}`, and train on the others",
        f"  {split}",
        f"  megaclass train {recipe} data.path={place}-split/train train.run_dir=runs/{place}-split",
    ]


def make_loader(
    config: Config,
    source: ImageSource,
    world: World,
    device: torch.device,
    processes: LoaderSettings | None = None,
) -> BatchLoader:
    """Builds the loader that yields this rank's part of every global batch."""
    return BatchLoader(
        source,
        global_batch=config.train.global_batch,
        rank=world.rank,
        world_size=world.size,
        seed=config.train.seed,
        num_workers=config.data.threads,
        mirror=config.data.mirror,
        augment=parse_augment(config.data.augment),
        image_size=input_size(config, source),
        fit=config.data.fit,
        keep_last=config.data.keep_last,
        order=config.data.order,
        images_per_class=config.data.images_per_class,
        max_bad_fraction=config.data.max_bad_fraction,
        num_parts=config.train.accumulate,
        # Batch norm needs two images for its statistics; the synchronised one counts those of all ranks.
        fewest_in_part=1 if config.backbone.batch_norm == "sync" and world.size > 1 else 2,
        processes=processes,
        device=device,
        is_resident=config.data.on_gpu,
    )


def describe_sizes(config: Config, source: ImageSource) -> str:
    """Describes which input size the model takes and why, and how many images have another size."""
    height, width = size = input_size(config, source)
    reason = "from data.size" if config.data.size else "the size of the first image; data.size sets another"
    text = f"the model takes images of {width} × {height} pixels, {reason}"
    if isinstance(source, PixelSource):
        return f"{text}."
    found = survey_sizes(source, size)
    if not found.num_other_size:
        return f"{text}; {found.looked_at()} have it."
    text += f"; {found.num_other_size:,} of {found.looked_at()} have another size and are fitted (data.fit={config.data.fit})"
    change = {"pad": "get black borders", "crop": "lose edges", "squash": "are distorted"}[config.data.fit]
    return f"{text}, {found.num_other_shape:,} of these {change}."


def staged_path(config: Config) -> str:
    """Returns where to read the data: its path, or the copy in memory that one rank of this host makes."""
    if not config.data.stage:
        return config.data.path
    with bar_on_demand("copying the data into memory, MiB") as on_progress:
        return stage(
            config.data.path, Path(config.data.stage), lambda done, total: on_progress(done // _MIB, total // _MIB)
        )
