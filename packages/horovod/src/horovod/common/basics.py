"""Horovod's basic functions: init(), shutdown(), rank(), size() and questions about the build."""

import atexit
import contextlib
import gc
import os
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.settings import Settings, settings_from_environment
from horovod.engine.control_connection import close_listeners
from horovod.engine.controller import Controller
from horovod.engine.job import Job, current
from horovod.engine.rendezvous import Rendezvous, watch_connections
from horovod.engine.timeline import Timeline
from horovod.transport.arithmetic import release_memory
from horovod.transport.executor import Executor
from horovod.transport.process_set_table import ProcessSetTable
from megaclass_launch.elastic import Why, elastic_worker
from megaclass_launch.errors import ConnectionLostError, UserError
from megaclass_launch.rank_status import own_status
from megaclass_launch.ranks.gloo_exit import end_gloo
from megaclass_launch.ranks.process_group import outlive_lost_ranks
from megaclass_launch.rendezvous.connection_watch import ConnectionWatch, OwnConnections

_BROKEN_S = 5.0
"""How long operations may take to fail after a member of the generation is gone, until they are failed from outside."""
_TICK_S = 0.05
_MOST_ATTEMPTS = 10
"""Generations of an elastic job that init() tries to join in a row before it raises the last error."""


class _Basics:
    """Starts and ends the job of this process, and answers questions about it. There is one instance, `_basics`."""

    def __init__(self) -> None:
        self.why_joining = Why.START
        """Reason that init() tells the driver of an elastic job; set by abandon()."""
        self._rendezvous = Rendezvous()
        self._is_registered = False
        self._starting = threading.Lock()

    # -- life -----------------------------------------------------------------------------------------------------

    def init(self, comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
        """Connects this process to the other ranks. A second call does nothing, but init() works again after shutdown().

        comm: ranks that take part, None for all.
        process_sets: sets to create at once, or "dynamic" to allow add_process_set() later.
        """
        if comm is not None and not hasattr(comm, "__iter__"):
            raise ValueError(
                "Horovod has not been built with MPI support. Ensure MPI is installed and "
                "reinstall Horovod with HOROVOD_WITH_MPI=1 to debug the build error."
            )
        if isinstance(process_sets, str):
            if process_sets.lower() != "dynamic":
                raise ValueError(
                    f'process_sets={process_sets!r}: expected a list of hvd.ProcessSet, "dynamic" or None.'
                )
            os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
            process_sets = None
        with self._starting:
            if current.job is not None and not current.job.controller.closed:
                return
            # Another rank has ended the job, and this rank starts again without a call of shutdown().
            self._leave()
            if not self._is_registered:
                atexit.register(self._shutdown_at_exit)
                self._is_registered = True
            # An array of numpy has no truth value of its own; an empty list means all ranks, as None does.
            ranks = [int(rank) for rank in comm] if comm is not None else []
            current.job = self._start(ranks or None, list(process_sets or []))

    def _start(self, ranks: list[int] | None, wanted: list[ProcessSet]) -> Job:
        worker = elastic_worker()
        if worker is None:
            return self._start_once(ranks, wanted)
        _import_before_ready()
        outlive_lost_ranks()
        failure: Exception | None = None
        for _ in range(_MOST_ATTEMPTS):
            # Every generation has a store of its own. The old one is closed before the driver is told that this rank is ready:
            # with --master-port the next one listens at the same port. Frames of errors form cycles that may hold it.
            self._rendezvous = Rendezvous()
            if worker.here is not None:
                gc.collect()
            worker.rendezvous(self.why_joining)
            own, has_left = OwnConnections(), threading.Event()
            worker.when_broken(partial(_end_generation, own, has_left))
            try:
                job = self._start_once(ranks, wanted)
            except (UserError, RuntimeError) as error:
                # Most likely another member is gone, and the driver forms a generation without it.
                # Without its frames, which hold the store.
                failure, self.why_joining = error.with_traceback(None), Why.FAILED
                has_left.set()
                worker.failed(str(error))
                own.end()
            else:
                own.note_sockets()
                job.connections, job.has_left, self.why_joining = own, has_left, Why.START
                return job
        assert failure is not None
        raise failure

    def _start_once(self, ranks: list[int] | None, wanted: list[ProcessSet]) -> Job:
        settings = settings_from_environment()
        # Under `megaclass run` the agent can then ask for the stacks of this rank at any time.
        own_status().give_stacks(str(Path(__file__).parents[1]))
        watch = watch_connections()
        try:
            job = self._connect(ranks, wanted, settings, watch)
        except BaseException as error:
            watch.stop()
            if watch.reason and isinstance(error, Exception):
                raise ConnectionLostError(watch.reason) from error
            raise
        # From now on a lost connection fails operations, and the script may handle that.
        watch.joined(ends_process=False)
        return job

    def _connect(
        self, ranks: list[int] | None, wanted: list[ProcessSet], settings: Settings, watch: ConnectionWatch
    ) -> Job:
        meeting = self._rendezvous.meet(ranks, settings)
        timeline = Timeline()
        if meeting.rank == 0 and settings.timeline not in ("", "DYNAMIC"):
            timeline.start(settings.timeline, settings.mark_cycles)
        sets = ProcessSetTable(meeting, settings)
        global_process_set.ranks = list(sets.ranks[0])
        wrong = _add_sets(sets, wanted)
        if not meeting.uses_nccl:
            # No rank returns, and perhaps ends, while another rank still connects to it.
            dist.all_reduce(torch.zeros(1), group=sets.connections[0].cpu)
        executor = Executor(timeline, sets)
        controller = Controller(
            meeting.rank, meeting.hosts, settings, timeline, sets.ranks, executor, meeting.connections, watch
        )
        job = Job(meeting, settings, timeline, sets, watch, controller)
        if wrong:
            job.close()
            raise ValueError(wrong)
        return job

    def _shutdown_at_exit(self) -> None:
        self.shutdown()
        # Also a group that the script itself has made.
        end_gloo()

    def shutdown(self) -> None:
        """Leaves the job. Operations of other ranks that need this one fail there."""
        with self._starting:
            self._leave()

    def abandon(self, why: Why) -> None:
        """Leaves a generation of an elastic job; after a failure at once, without waiting for ranks that may be gone."""
        self.why_joining = why
        job = current.job
        if why is Why.FAILED and job is not None and job.connections is not None:
            job.connections.end()
            job.sets.abort()
        self.shutdown()

    def _leave(self) -> None:
        job, current.job = current.job, None
        if job is not None:
            job.has_left.set()
            job.close()
            release_memory()

    def is_initialized(self) -> bool:
        """Returns whether init() has been called, and shutdown() has not."""
        return current.job is not None

    # -- ranks and hosts ---------------------------------------------------------------------------------------------

    def size(self) -> int:
        """Returns the number of processes."""
        return current.known().meeting.size

    def rank(self) -> int:
        """Returns the number of this process among all."""
        return current.known().meeting.rank

    def local_size(self) -> int:
        """Returns the number of processes on this host."""
        meeting = current.known().meeting
        return meeting.hosts.count(meeting.hosts[meeting.rank])

    def local_rank(self) -> int:
        """Returns the number of this process among those on this host."""
        meeting = current.known().meeting
        return meeting.local_ranks[meeting.rank]

    def cross_size(self) -> int:
        """Returns the number of hosts that have a process with this local rank."""
        meeting = current.known().meeting
        return meeting.local_ranks.count(meeting.local_ranks[meeting.rank])

    def cross_rank(self) -> int:
        """Returns the number of this host among those."""
        meeting = current.known().meeting
        return meeting.local_ranks[: meeting.rank].count(meeting.local_ranks[meeting.rank])

    def is_homogeneous(self) -> bool:
        """Returns whether every host has the same number of processes."""
        hosts = current.known().meeting.hosts
        return len({hosts.count(host) for host in hosts}) == 1

    def start_timeline(self, file_path: str, mark_cycles: bool = False) -> None:
        """Starts a Chrome trace in `file_path`, written by rank 0. Needs HOROVOD_TIMELINE=DYNAMIC at init()."""
        job = current.known()
        if not job.settings.timeline:
            raise ValueError("Set HOROVOD_TIMELINE=DYNAMIC to enable dynamic timeline usage.")
        if job.meeting.rank == 0:
            job.timeline.start(file_path, mark_cycles)

    def stop_timeline(self) -> None:
        """Ends the trace and closes its file."""
        current.known().timeline.stop()

    # -- what was built -------------------------------------------------------------------------------------------

    def mpi_threads_supported(self) -> bool:
        raise ValueError("Horovod MPI is not enabled; Please make sure it's installed and enabled.")

    def _no(self) -> bool:
        return False

    mpi_enabled = mpi_built = ddl_built = ccl_built = _no

    def gloo_built(self) -> bool:
        return True

    gloo_enabled = gloo_built

    def nccl_built(self) -> int:
        """Returns NCCL's version code, for example 22105 for 2.21.5, or 0 without NCCL."""
        if not (torch.backends.cuda.is_built() and dist.is_nccl_available()):
            return 0
        major, minor, patch = torch.cuda.nccl.version()[:3]
        return int(major) * 10_000 + int(minor) * 100 + int(patch)

    def cuda_built(self) -> bool:
        return torch.version.cuda is not None

    def rocm_built(self) -> bool:
        return torch.version.hip is not None


def _end_generation(own: OwnConnections, has_left: threading.Event) -> None:
    """Makes everything fail that waits for another member of the generation, until this process has left it.

    The news may come while the generation is still being joined: connections that are made later are ended as well, and the
    time limit holds for the job that init() is about to return.
    """
    ends_at = time.monotonic() + _BROKEN_S
    while not has_left.is_set():
        own.end()
        close_listeners()
        job = current.job
        if job is not None and job.connections is own:
            # Operations on GPUs wait in NCCL's kernels, which no closed connection ends.
            job.sets.abort()
            # The engine thread mostly learns at once which rank is gone. Whatever it may hang in, no thread waits longer.
            if job.controller.closed or time.monotonic() >= ends_at:
                job.controller.fail("A member of this generation of the elastic job is gone.")
                return
        has_left.wait(_TICK_S)


def _import_before_ready() -> None:
    """Imports what a training needs after init(): the other ranks wait for this one from the rendezvous on."""
    with contextlib.suppress(ImportError):
        import_module("keras" if "tensorflow" in sys.modules else "torch._dynamo")
    import_module("horovod.torch.elastic")


def _add_sets(sets: ProcessSetTable, wanted: list[ProcessSet]) -> str:
    """Adds the process sets given to init(); returns the text of an error if a set is invalid or a duplicate."""
    error = ""
    for place, process_set in enumerate(wanted):
        assert process_set.ranks is not None
        wrong = sets.wrong_ranks(process_set.ranks)
        number = -1 if wrong else sets.add(tuple(process_set.ranks))
        process_set.process_set_id = number if number >= 0 else None
        if number < 0 and not error:
            error = wrong or (
                f"Horovod could not be initialized because process_sets entry number {place} is a duplicate: "
                f"{process_set}"
            )
    return error


_basics = _Basics()

# Its methods as functions.
init = _basics.init
shutdown = _basics.shutdown
is_initialized = _basics.is_initialized
start_timeline = _basics.start_timeline
stop_timeline = _basics.stop_timeline
size = _basics.size
local_size = _basics.local_size
cross_size = _basics.cross_size
rank = _basics.rank
local_rank = _basics.local_rank
cross_rank = _basics.cross_rank
mpi_threads_supported = _basics.mpi_threads_supported
mpi_enabled = _basics.mpi_enabled
mpi_built = _basics.mpi_built
gloo_enabled = _basics.gloo_enabled
gloo_built = _basics.gloo_built
nccl_built = _basics.nccl_built
ddl_built = _basics.ddl_built
ccl_built = _basics.ccl_built
cuda_built = _basics.cuda_built
rocm_built = _basics.rocm_built

if not TYPE_CHECKING:
    # Type checkers take every name of this module that has no underscore.
    __all__ = [name for name, value in globals().items() if getattr(value, "__self__", None) is _basics]
