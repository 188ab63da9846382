"""The facts of one run on one rank that are known before its first step, as one object instead of eight arguments."""

from dataclasses import dataclass

import torch

from megaclass.checkpoint.class_names import ClassList
from megaclass.config.schema import Config
from megaclass.data.fingerprint import DataFingerprint, fingerprint_of
from megaclass.data.loader import BatchLoader
from megaclass.data.sources.source import ImageSource
from megaclass.distributed.agreement import on_every_rank, on_every_rank_for_long
from megaclass.train.observe.events import RunEvents
from megaclass.train.run.class_names import class_list
from megaclass.train.run.data import open_data
from megaclass.train.run.folder import RunFolder
from megaclass.train.run.same_start import check_same_data
from megaclass.world import World


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


def open_run(config: Config, world: World, device: torch.device, folder: RunFolder, hosts: tuple[str, ...]) -> Run:
    """Collective. Opens the data on every rank, and refuses data that differs between hosts.

    The first rank of every host computes the fingerprint, which reads up to 256 images.
    """
    source, loader = on_every_rank_for_long(lambda: open_data(config, world, device), device)
    classes = on_every_rank(lambda: class_list(config.data.path, source), device)
    data_fingerprint = on_every_rank_for_long(
        lambda: fingerprint_of(source) if world.local_rank == 0 else DataFingerprint(), device
    )
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
