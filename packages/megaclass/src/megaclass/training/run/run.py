"""One run on one rank: ranks that agree on what to train, the data, and the event log in events.jsonl.

Each host has its own copy of the recipe, the package and perhaps the data. Ranks with different settings would hang in
collectives of different sizes, or worse, train something that no user asked for: they refuse to start and show the difference.
"""

import logging
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megaclass import __version__
from megaclass.backbones import check_backbone, own_size, proposed_size
from megaclass.checkpoint.class_names import ClassList, class_list
from megaclass.config.read import flat_values
from megaclass.config.schema import CLASS_MEANS, Config
from megaclass.data.augment import parse_augment
from megaclass.data.fingerprint import DataFingerprint, fingerprint_of
from megaclass.data.loader import BatchLoader
from megaclass.data.loading.choose import LoaderSettings, choose_processes
from megaclass.data.sources.open_source import check_source, has_notation, open_source
from megaclass.data.sources.source import ImageSource, PixelSource, TensorSource, first_labels, require_one_label
from megaclass.data.tools.inspect import survey_sizes
from megaclass.data.tools.stage import stage
from megaclass.data.tools.synthesize import synthesize
from megaclass.distributed.agreement import facts_that_differ, gather_texts, on_every_rank, on_every_rank_for_long
from megaclass.errors import DataError
from megaclass.evaluation.sets import sets_in_training
from megaclass.image_size import compact_size, shown_size
from megaclass.progress import bar_on_demand
from megaclass.training.model.build import input_size
from megaclass.training.run.folder import RunFolder
from megaclass_launch.errors import ConfigError, LaunchError, UserError
from megaclass_launch.events_file import append_event, read_events
from megaclass_launch.world import World

# Where a host keeps its data and how many threads read it is the host's own business: the data's fingerprint is compared.
OF_EACH_HOST = ("data.path", "data.stage", "data.threads")
_SHOWN = 8
_MIB = 2**20
_logger = logging.getLogger("megaclass.training")
Callback = Callable[[dict[str, Any]], object]
"""Takes a row of metrics, after the step that it reports; if it returns True, the run ends there with all its results."""
_MAX_WARNINGS = 200
"""Warnings per start: one about every image of a broken data set must not fill the disk."""


# ---- the same start on all ranks ----------------------------------------------------------------------------------


def check_same_start(config: Config, device: torch.device) -> tuple[str, ...]:
    """Collective. Returns the host names of all ranks; raises LaunchError on every rank if their settings or versions differ.

    One all-gather of 32 bytes per rank, and of the host names; if the ranks differ, one of all settings.
    """
    hosts = tuple(gather_texts(socket.gethostname(), device))
    facts = {"megaclass": __version__}
    facts |= {name: value for name, value in flat_values(config).items() if name not in OF_EACH_HOST}
    _raise_if_different({name: str(value) for name, value in facts.items()}, hosts, device)
    return hosts


def check_same_data(
    fingerprint: str, num_images: int, num_classes: int, hosts: tuple[str, ...], device: torch.device
) -> None:
    """Collective. Raises LaunchError on every rank if the hosts have different data.

    fingerprint: of the first rank per host; the others of the host see the same files and pass an empty text.
    """
    facts = {"number of images": f"{num_images:,}", "number of classes": f"{num_classes:,}"}
    _raise_if_different(facts, hosts, device)
    found = {rank: text for rank, text in enumerate(gather_texts(fingerprint, device)) if text}
    if len(set(found.values())) > 1:
        raise LaunchError(_described({"data fingerprint": found}, hosts))


def _raise_if_different(facts: dict[str, str], hosts: tuple[str, ...], device: torch.device) -> None:
    if different := facts_that_differ(facts, device):
        raise LaunchError(_described(different, hosts))


def _described(table: dict[str, dict[int, str]], hosts: tuple[str, ...]) -> str:
    lines = []
    for name, values in list(table.items())[:_SHOWN]:
        by_value: dict[str, list[int]] = {}
        for rank, value in values.items():
            by_value.setdefault(value, []).append(rank)
        sides = []
        for value, ranks in by_value.items():
            more = f" and {len(ranks) - 1} more" if len(ranks) > 1 else ""
            sides.append(f"{value} on rank {ranks[0]} ({hosts[ranks[0]]}){more}")
        lines.append(f"  {name}: {'; '.join(sides)}")
    if len(table) > _SHOWN:
        lines.append(f"  and {len(table) - _SHOWN} more")
    listed = "\n".join(lines)
    return (
        f"The ranks would not train the same thing, so none of them starts. They differ in\n{listed}\n"
        f"Use the same recipe, package version and data on all hosts."
    )


# ---- the training data: drawn or found, staged into memory, opened, and described ---------------------------------


def make_data(config: Config) -> None:
    """Draws synthetic identities unless they exist; checks that the data and the sets of train.evaluate_sets exist."""
    synth, path = config.synth, config.data.path
    if synth.identities:
        with bar_on_demand("drawing identities") as on_progress:
            synthesize(
                Path(path),
                num_identities=synth.identities,
                images_per_identity=synth.images_per_identity,
                image_size=synth.size,
                seed=synth.seed,
                num_pairs=synth.pairs,
                on_progress=on_progress,
            )
    else:
        check_source(path)
    near = [one.name for one in sets_in_training(path, ())]
    for name in config.train.evaluate_sets:
        if name not in near and not (Path(name).exists() or has_notation(name)):
            there = f"those next to it are {', '.join(near)}" if near else "there is no .bin file next to it"
            raise ConfigError(
                f"train.evaluate_sets names {name}, but there is no {name}.bin next to the data at {path}: {there}. "
                f"Labelled images that are to be classified are named by their path. Without train.evaluate_sets all sets "
                f"next to the data are evaluated."
            )
        if name not in near:
            check_source(name)


def open_data(
    config: Config, world: World, device: torch.device, source: ImageSource | None = None
) -> tuple[ImageSource, BatchLoader]:
    """Opens the data and the loader of this rank; with data.stage, one rank per host first copies the data into memory.

    source: the data, if this process has opened it already.
    """
    path = staged_path(config)
    source = open_source(path) if source is None else source
    height, width = size = input_size(config, source)
    if isinstance(source, TensorSource):
        _check_for_rows(config, source)
    elif height != width and not config.data.size:
        # The first photo may have any shape: a model should not take that shape unless the user asks for it.
        raise DataError(
            f"The images at {config.data.path} have {shown_size(size)} pixels, which is not a square. Set the input size: "
            f"data.size=112 with data.fit=pad, crop or squash for squares, or data.size={proposed_size(size)}, height first, "
            f"for rectangles."
        )
    if config.data.on_gpu and device.type != "cuda":
        raise DataError("data.on_gpu is true, but this run trains on the CPU: leave it out.")
    check_backbone(config.backbone.name, compact_size(size))
    warning = check_classes(source, config.data.path)
    if warning and world.is_main:
        _logger.warning(warning)
    processes = None
    if not isinstance(source, TensorSource):
        processes = choose_processes(
            path,
            workers=config.data.workers,
            device=device,
            num_local_ranks=world.local_size,
        )
    return source, make_loader(config, source, world, device, processes)


def _check_for_rows(config: Config, source: ImageSource) -> None:
    """Refuses settings that only images have, and those that need one label per sample."""
    data = config.data
    for name, value, allowed in (
        ("data.size", data.size, 0),
        ("data.augment", data.augment, ""),
        ("data.workers", data.workers, 0),
        ("distil.cache", config.distil.cache, False),
    ):
        if value not in (allowed, "auto"):
            raise ConfigError(
                f"{name} is {value}, but {data.path} holds features or sequences, which are not decoded, resized, augmented or "
                f"embedded in advance: leave it out."
            )
    for name, is_set in (
        ("data.order=classes", data.order == "classes"),
        ("train.init_centres=class_means", config.train.init_centres == CLASS_MEANS),
        ("train.mean_weight", bool(config.train.mean_weight)),
    ):
        if is_set:
            require_one_label(source, name)


def check_classes(source: ImageSource, path: str) -> str:
    """Refuses data of one class; returns a warning if no class has two images, empty otherwise."""
    above = f"If {path} holds the images of one identity, set data.path={Path(path).resolve().parent}."
    if source.num_classes < 2:
        raise DataError(
            f"{path} holds images of a single class, and a classifier needs two: expected one subfolder per identity. {above}"
        )
    # The labels of a large set are counted only if it may be one of single images.
    if source.num_images > source.num_classes or np.bincount(first_labels(source)).max(initial=0) > 1:
        return ""
    return (
        f"each of the {source.num_classes:,} classes at {path} has one image: what images of an identity have in common "
        f"cannot be learned from that. Expected several images per subfolder; if the file names tell the identities, move "
        f"the files of each into one subfolder."
    )


def how_to_verify(path: str, recipe: str = "RECIPE") -> list[str]:
    """Returns why no accuracy is measured, and the commands that hold a part of the data out."""
    place = Path(path).name or "data"
    split = f"megaclass data split {path} --images 0.1 --out {place}-split"
    return [
        f"there is no .bin file next to {path}, and no images were held out: hold some out with `{split}` and train "
        "on the rest",
        f"  {split}",
        f"  megaclass train {recipe} data.path={place}-split/train train.run_dir=runs/{place}-split",
        "With --identities instead of --images whole classes are held out: verification of people that training never saw.",
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
    size = input_size(config, source)
    if isinstance(source, TensorSource):
        return f"the model takes samples of {shown_size(size)}."
    first = "of the first image" if own_size(config.backbone.name) is None else "for which the network was made"
    reason = "from data.size" if config.data.size else f"the size {first}; data.size sets another"
    text = f"the model takes images of {shown_size(compact_size(size))} pixels, {reason}"
    if isinstance(source, PixelSource):
        return f"{text}."
    looked_at, num_other_size, num_other_shape = survey_sizes(source, size)
    if not num_other_size:
        return f"{text}; {looked_at} have it."
    text += f"; {num_other_size:,} of {looked_at} have another size and are fitted (data.fit={config.data.fit})"
    change = {"pad": "get black borders", "crop": "lose edges", "squash": "are distorted"}[config.data.fit]
    return f"{text}, {num_other_shape:,} of these {change}."


def staged_path(config: Config) -> str:
    """Returns where to read the data: its path, or the copy in memory that one rank of this host makes."""
    if not config.data.stage:
        return config.data.path
    with bar_on_demand("copying the data into memory, MiB") as on_progress:
        return stage(
            config.data.path, Path(config.data.stage), lambda done, total: on_progress(done // _MIB, total // _MIB)
        )


# ---- the run and its events ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class RunEvents:
    """The event log of one start of a run. Used by the loop and by the thread that publishes checkpoints."""

    folder: Path
    is_main: bool
    has_begun: bool = False
    """False until the loop starts. Before, nothing is written: a run that could not begin leaves its folder free."""
    has_failed: bool = False
    """True once the disk has refused an event, which is logged once."""

    def note(self, event: str, step: int | None = None, **fields: Any) -> None:
        """Rank 0 appends the event; no error of the disk ends a run because of it."""
        if (
            not (self.is_main and self.has_begun)
            or append_event(self.folder, event, step=step, **fields)
            or self.has_failed
        ):
            return
        self.has_failed = True
        _logger.info(f"an event ({event}) could not be written to {self.folder}: events.jsonl will have gaps.")

    def note_begin(
        self, first_step: int, num_steps: int, world_size: int, change: Mapping[str, object] | None = None
    ) -> None:
        """Notes the start or resumption of the run, and a number of ranks that differs from the previous one.

        change: fields of the event `rank_change`, in an elastic job whose ranks have changed while it ran.
        """
        self.has_begun = True
        if not self.is_main:
            return
        if change:
            self.note("rank_change", first_step, **change)
            return
        # The number of ranks is in `start` and `resume`, and in `rank_change` of an elastic job.
        sizes = [event.get("world_size", event.get("after")) for event in read_events(self.folder)[0]]
        earlier = [size for size in sizes if size is not None]
        if first_step and earlier and earlier[-1] != world_size:
            self.note("rank_change", first_step, before=earlier[-1], after=world_size)
        begins = {"num_steps": num_steps, "world_size": world_size, "version": __version__}
        self.note("resume" if first_step else "start", first_step, **begins)

    @contextmanager
    def ending_noted(self, *, is_elastic: bool = False) -> Iterator[None]:
        """Notes warnings while the block runs, and how it ends if that is by an error.

        is_elastic: an error may be the loss of another rank, after which the run continues with those that are left.
        """
        handler = _WarningsToEvents(self)
        logger = logging.getLogger("megaclass")
        if self.is_main:
            logger.addHandler(handler)
        try:
            yield
        except BaseException as error:
            if not is_elastic or isinstance(error, UserError) or not isinstance(error, Exception):
                self.note("end", outcome="failed", text=f"{type(error).__name__}: {error}")
            raise
        finally:
            logger.removeHandler(handler)


class _WarningsToEvents(logging.Handler):
    """Copies the warnings of this process into events.jsonl."""

    def __init__(self, events: RunEvents) -> None:
        super().__init__(logging.WARNING)
        self._events, self._num_left = events, _MAX_WARNINGS

    def emit(self, record: logging.LogRecord) -> None:
        if self._num_left > 0:
            self._num_left -= 1
            self._events.note("warning", text=record.getMessage())


@dataclass(frozen=True, kw_only=True)
class Run:
    """Settings, place among the ranks, data and folder of a run. Nothing here changes while it trains."""

    config: Config
    world: World
    device: torch.device
    folder: RunFolder
    events: RunEvents
    hosts: tuple[str, ...]
    """Host name of every rank."""
    source: ImageSource
    loader: BatchLoader
    classes: ClassList
    """Names or numbers of the classes, the same on every rank."""
    data_fingerprint: DataFingerprint
    """Fingerprint of the data on rank 0; empty on the other ranks, which do not compute it."""
    command: tuple[str, ...] = ()
    """The command line as typed; empty if it is not known."""
    callbacks: tuple[Callback, ...] = ()
    """Called on rank 0 with every row of metrics."""

    @property
    def image_size(self) -> tuple[int, int]:
        """(height, width) of the images that the backbone takes."""
        return self.loader.image_size


@dataclass(slots=True)
class OpenedData:
    """Open data that a process keeps while the ranks of its job change; None for parts that it has not needed yet."""

    source: ImageSource | None = None
    classes: ClassList | None = None
    fingerprint: DataFingerprint | None = None


def open_run(
    config: Config,
    world: World,
    device: torch.device,
    folder: RunFolder,
    hosts: tuple[str, ...],
    opened: OpenedData,
) -> Run:
    """Collective. Opens the data on every rank, and refuses data that differs between hosts.

    The first rank of every host computes the fingerprint, which reads up to 256 images. opened: what this process has
    already; what is missing is added.
    """
    source, loader = on_every_rank_for_long(lambda: open_data(config, world, device, opened.source), device)
    classes = on_every_rank(lambda: opened.classes or class_list(config.data.path, source), device)
    opened.source, opened.classes = source, classes

    def fingerprint() -> DataFingerprint:
        if world.local_rank:
            return DataFingerprint()
        opened.fingerprint = opened.fingerprint or fingerprint_of(source)
        return opened.fingerprint

    data_fingerprint = on_every_rank_for_long(fingerprint, device)
    check_same_data(data_fingerprint.fingerprint, source.num_images, source.num_classes, hosts, device)
    return Run(
        config=config,
        world=world,
        device=device,
        folder=folder,
        events=RunEvents(folder.path, is_main=world.is_main),
        hosts=hosts,
        source=source,
        loader=loader,
        classes=classes,
        data_fingerprint=data_fingerprint if world.is_main else DataFingerprint(),
    )
