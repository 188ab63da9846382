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
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from megaclass_launch.elastic.worker import Assignment, ElasticWorker, Why
from megaclass_launch.errors import ConnectionLostError, UserError
from megaclass_launch.rank_status import own_status
from megaclass_launch.ranks.process_group import is_echo, process_group
from megaclass_launch.rendezvous.connection_watch import OwnConnections

_logger = logging.getLogger("megaclass.train")
_MOST_ATTEMPTS = 10
"""Generations in a row without a finished step, after which the last error ends this process."""
_NEWS_S = 5.0
"""How long the news of a lost rank may take: the connections to it end before its agent and the driver have noticed."""
_TIMED_OUT = "Timed out waiting"
"""gloo, about a rank that hangs: it does not come to the rendezvous, and the driver kills it."""
_JOIN_S = 60.0
"""All members were ready when the generation was published: longer means that one of them is gone."""


class JoinError(ConnectionLostError):
    """This process and the others could not form a process group: most likely one of them is gone."""


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
    # Before the group exists: a member may be lost while the others connect to it, and they would wait for it until _JOIN_S.
    own = OwnConnections()
    worker.when_broken(own.end)
    with contextlib.ExitStack() as held:
        group = process_group(
            here.world, device=device_name, gpu=here.members[here.world.rank].slot, join_s=_JOIN_S, ends_process=False
        )
        try:
            device = held.enter_context(group)
        except (UserError, RuntimeError) as error:
            own.end()
            raise JoinError(str(error)) from error
        own.note_sockets()
        if device.type == "cuda":
            # NCCL may wait on a GPU for memory that a dead rank should write, which no socket ends.
            worker.when_broken(_abort_nccl)
        try:
            yield device
        except BaseException:
            # The others must not wait for this rank, nor this rank, while it leaves the group, for one that is gone.
            own.end()
            raise


def _abort_nccl() -> None:
    if dist.is_initialized():
        dist.distributed_c10d._abort_process_group()


def _is_by_loss(worker: ElasticWorker, error: Exception) -> bool:
    """Tells whether a lost rank explains the error. Connections to it may fail before the driver knows of it."""
    if isinstance(error, ConnectionLostError) or is_echo(error) or _TIMED_OUT in str(error):
        return True
    return worker.is_broken(0.0 if isinstance(error, UserError) else _NEWS_S)
