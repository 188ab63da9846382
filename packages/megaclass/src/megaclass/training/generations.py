"""The generations of an elastic training, as one process lives through them.

    rendezvous --> join the group --> train --> last step: the process ends
        ^                               |
        |   all ranks agree to leave    |   at a commit, because hosts have changed
        +-------------------------------+
        |   an error, because a rank is gone: everything of this generation is dropped
        +-------------------------------+

Nothing of a generation outlives it except for the commits in memory (commits.py), the open data and the folder's lock.
"""

import contextlib
import gc
import logging
import socket
import threading
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from megaclass.config.read import flat_values, load_config_values
from megaclass.config.schema import Config
from megaclass.data.sources.open_source import open_source
from megaclass.data.sources.source import ImageSource
from megaclass.errors import DataError, HeadError
from megaclass.head.centres import class_range
from megaclass.training.run.run import OF_EACH_HOST, make_loader, staged_path
from megaclass_launch.elastic import Assignment, ElasticWorker, Why
from megaclass_launch.errors import ConfigError, ConnectionLostError, LaunchError, UserError
from megaclass_launch.rank_status import own_status
from megaclass_launch.ranks.process_group import abort_nccl, is_echo, process_group
from megaclass_launch.rendezvous.connection_watch import OwnConnections
from megaclass_launch.world import World

_logger = logging.getLogger("megaclass.training")
_MOST_ATTEMPTS = 10
"""Generations in a row without a finished step, after which the last error ends this process."""
_NEWS_S = 5.0
"""How long the news of a lost rank may take: the connections to it end before its agent and the driver have noticed."""
_TIMED_OUT = "Timed out waiting"
"""gloo, about a rank that hangs: it does not come to the rendezvous, and the driver kills it."""
_ABORT_S = 2.0
"""Time for NCCL to end its operations before its connections are closed."""
_JOIN_S = 60.0
"""All members were ready when the generation was published: longer means that one of them is gone."""


def through_generations(worker: ElasticWorker, train: Callable[[Assignment], int | None]) -> int:
    """Calls `train` in every generation; returns its exit code. None means that all ranks have left the generation.

    An error that a lost rank explains begins the next generation, all others are raised.
    """
    why, num_failures = Why.START, 0
    while True:
        # Waiting for hosts may take any time, and so does joining: the limits of the steps do not hold.
        own_status().progress(allowed_s=0.0, phase="joining")
        here = worker.rendezvous(why)
        try:
            code = train(here)
        except Exception as error:
            # Steps that were committed are progress: only failures without any are counted, as restarts are.
            num_failures = 0 if worker.has_committed else num_failures + 1
            if num_failures > _MOST_ATTEMPTS or not _is_by_loss(worker, error):
                raise
            _logger.debug(f"{here.world.name()} leaves generation {here.generation}: {error}")
            worker.failed(f"{type(error).__name__}: {error}")
            why = Why.FAILED
        else:
            if code is not None:
                return code
            why, num_failures = Why.CHANGED, 0
        # DistributedDataParallel and the error's frames form cycles, which hold the old group and the old model.
        gc.collect()


@contextlib.contextmanager
def joined_group(worker: ElasticWorker, here: Assignment, device_name: str) -> Iterator[torch.device]:
    """Joins the process group of a generation; its collectives fail as soon as a member is known to be gone."""
    own = OwnConnections()

    def end() -> None:
        # NCCL first: once it has ended by itself, because a connection has, torch prints pages about that. In a thread, because
        # the connections must end in any case.
        aborting = threading.Thread(target=abort_nccl, name="megaclass-abort", daemon=True)
        aborting.start()
        aborting.join(_ABORT_S)
        own.end()

    # Before the group exists: a member may be lost while the others connect to it, and they would wait for it until _JOIN_S.
    worker.when_broken(end)
    with contextlib.ExitStack() as held:
        group = process_group(
            here.world, device=device_name, gpu=here.members[here.world.rank].slot, join_s=_JOIN_S, ends_process=False
        )
        try:
            device = held.enter_context(group)
        except (UserError, RuntimeError) as error:
            own.end()
            # Most likely one of the others is gone.
            raise ConnectionLostError(str(error)) from error
        own.note_sockets()
        if worker.is_broken():
            # The news came while NCCL's group was being created, which end() has not seen.
            end()
            raise ConnectionLostError("a member was lost while the group was being formed")
        try:
            yield device
        except BaseException:
            # The others must not wait for this rank, nor this rank, while it leaves the group, for one that is gone.
            end()
            raise


def _is_by_loss(worker: ElasticWorker, error: Exception) -> bool:
    """Tells whether a lost rank explains the error. Connections to it may fail before the driver knows of it."""
    if isinstance(error, ConnectionLostError) or is_echo(error) or _TIMED_OUT in str(error):
        return True
    # An error of this rank's own needs no news, except over NCCL: what it gathers from a lost rank is garbage, such as a loss
    # that is not a number.
    return worker.is_broken(0.0 if isinstance(error, UserError) and not torch.cuda.is_initialized() else _NEWS_S)


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
