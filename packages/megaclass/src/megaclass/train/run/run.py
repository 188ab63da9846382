"""The facts of one run on one rank that are known before its first step, as one object instead of eight arguments."""

from dataclasses import dataclass

import torch

from megaclass.checkpoint.class_names import ClassList, class_list
from megaclass.config.schema import Config
from megaclass.data.fingerprint import DataFingerprint, fingerprint_of
from megaclass.data.loader import BatchLoader
from megaclass.data.sources.source import ImageSource
from megaclass.distributed.agreement import on_every_rank, on_every_rank_for_long
from megaclass.train.run.data import open_data
from megaclass.train.run.events import RunEvents
from megaclass.train.run.folder import RunFolder
from megaclass.train.run.same_start import check_same_data
from megaclass_launch.world import World


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
