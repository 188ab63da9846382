"""One run on one rank: the facts that are known before its first step, as one object, and the event log in events.jsonl.

Rank 0 notes the events of the run; all other ranks note nothing.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megaclass import __version__
from megaclass.checkpoint.class_names import ClassList, class_list
from megaclass.config.schema import Config
from megaclass.data.fingerprint import DataFingerprint, fingerprint_of
from megaclass.data.loader import BatchLoader
from megaclass.data.sources.source import ImageSource
from megaclass.distributed.agreement import on_every_rank, on_every_rank_for_long
from megaclass.training.run.data import open_data
from megaclass.training.run.folder import RunFolder
from megaclass.training.run.same_start import check_same_data
from megaclass_launch.errors import UserError
from megaclass_launch.events_file import append_event, read_events
from megaclass_launch.world import World

_logger = logging.getLogger("megaclass.training")
_MAX_WARNINGS = 200
"""Warnings per start: one about every image of a broken data set must not fill the disk."""


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

    def note_published(self, step: int) -> None:
        """Notes that the checkpoint of a step is on the disk."""
        self.note("save", step)

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
    opened: OpenedData | None = None,
) -> Run:
    """Collective. Opens the data on every rank, and refuses data that differs between hosts.

    The first rank of every host computes the fingerprint, which reads up to 256 images. opened: what this process has
    already; what is missing is added.
    """
    known = OpenedData() if opened is None else opened
    source, loader = on_every_rank_for_long(lambda: open_data(config, world, device, known.source), device)
    classes = on_every_rank(lambda: known.classes or class_list(config.data.path, source), device)
    known.source, known.classes = source, classes

    def fingerprint() -> DataFingerprint:
        if world.local_rank:
            return DataFingerprint()
        known.fingerprint = known.fingerprint or fingerprint_of(source)
        return known.fingerprint

    data_fingerprint = on_every_rank_for_long(fingerprint, device)
    check_same_data(data_fingerprint.fingerprint, source.num_images, source.num_classes, hosts, world, device)
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
