"""Checks of an elastic job: those of a host that is about to join it, and those of the largest number of ranks.

An error in a host that joins must not end the job: the process ends before the other ranks wait for it, and the driver leaves
the host out. Errors of a member are those of all ranks.
"""

import socket
import tomllib
from dataclasses import replace
from pathlib import Path

import torch

from megaclass.config.read import flat_values, load_config_values
from megaclass.config.schema import Config
from megaclass.data.sources.open_source import open_source
from megaclass.data.sources.source import ImageSource
from megaclass.errors import DataError, HeadError
from megaclass.head.shards import class_range
from megaclass.train.run.data import make_loader, staged_path
from megaclass.train.run.same_start import OF_EACH_HOST
from megaclass_launch.errors import ConfigError, LaunchError
from megaclass_launch.world import World


def open_to_join(config: Config) -> ImageSource:
    """Opens the data of a process that joins a running job, and compares its settings with those in the run folder."""
    host, file = socket.gethostname(), Path(config.train.run_dir) / "config.toml"
    try:
        saved = load_config_values(tomllib.loads(file.read_text(encoding="utf-8")), where=str(file))
    except (OSError, ValueError, ConfigError) as error:
        raise LaunchError(
            f"{host} cannot join the job, because it does not see its run folder: {error}. The run folder must be the same on "
            f"all hosts: put train.run_dir on a file system that they share."
        ) from error
    theirs, own = flat_values(saved), flat_values(config)
    different = [name for name in own if name not in OF_EACH_HOST and own[name] != theirs[name]]
    if different:
        listed = "; ".join(f"{name} is {theirs[name]!r} there and {own[name]!r} here" for name in different[:8])
        raise LaunchError(f"{host} cannot join the job of {file}, because its settings differ: {listed}.")
    return open_source(staged_path(config))


def check_most_ranks(config: Config, source: ImageSource, max_ranks: int) -> None:
    """Refuses a largest number of ranks with which there would not be enough images per step, or classes, for each."""
    most = World(size=max_ranks, local_size=max_ranks)
    try:
        class_range(source.num_classes, 0, max_ranks)
        make_loader(replace(config, data=replace(config.data, on_gpu=False)), source, most, torch.device("cpu"))
    except (DataError, HeadError) as error:
        raise LaunchError(f"--max-np {max_ranks} is too much for this run: {error}") from error
