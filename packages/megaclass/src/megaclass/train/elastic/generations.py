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
import threading
from collections.abc import Callable, Iterator

import torch

from megaclass_launch.elastic.worker import Assignment, ElasticWorker, Why
from megaclass_launch.errors import ConnectionLostError, UserError
from megaclass_launch.rank_status import own_status
from megaclass_launch.ranks.process_group import abort_nccl, is_echo, process_group
from megaclass_launch.rendezvous.connection_watch import OwnConnections

_logger = logging.getLogger("megaclass.train")
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
            raise JoinError(str(error)) from error
        own.note_sockets()
        if worker.is_broken():
            # The news came while NCCL's group was being created, which end() has not seen.
            end()
            raise JoinError("a member was lost while the group was being formed")
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
