"""init(), shutdown(), who is there, and what was built."""

import atexit
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megaclass.distributed.network.connection_watch import ConnectionWatch
from megaclass.errors import ConnectionLostError
from megaclass.hvd import process_sets
from megaclass.hvd.engine.controller import Controller, Operation
from megaclass.hvd.engine.meeting import Meeter, Meeting, new_group, watch_connections
from megaclass.hvd.engine.messages import Request
from megaclass.hvd.engine.timeline import Timeline
from megaclass.hvd.exceptions import NOT_INITIALIZED, HorovodInternalError
from megaclass.hvd.process_sets import ProcessSet, global_process_set
from megaclass.hvd.settings import Settings, settings_from_environment
from megaclass.hvd.transport import result_memory as large_tensors
from megaclass.hvd.transport.executor import DataPlane, SetGroups
from megaclass.hvd.transport.ring import connect_ring


@dataclass
class Job:
    """Everything between init() and shutdown()."""

    meeting: Meeting
    settings: Settings
    timeline: Timeline
    data_plane: DataPlane
    process_sets: dict[int, tuple[int, ...]]
    watch: ConnectionWatch
    controller: Controller = field(init=False)
    next_set: int = 1
    num_operations: int = 0
    num_joins: int = 0
    counts: dict[tuple[str, int | None], int] = field(default_factory=dict)
    handles: dict[int, Operation] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def next_handle(self) -> int:
        with self.lock:
            self.num_operations += 1
            return self.num_operations

    def next_name(self, process_set: int | None) -> str:
        """Automatic names count the unnamed operations of one process set: its ranks must call in the same order,
        whatever they run in other sets."""
        number = self._count("unnamed", process_set)
        return f"noname.{self.num_joins}.{number}" if self.num_joins else f"noname.{number}"

    def restart_names(self) -> None:
        """After a join, before which ranks with more data have run more operations: automatic names agree again."""
        with self.lock:
            self.num_joins += 1
            for what, process_set in list(self.counts):
                if what == "unnamed":
                    del self.counts[what, process_set]

    def next_barrier(self, process_set: int | None) -> int:
        """Barriers of one process set meet in the order they are called, whatever other operations are open."""
        return self._count("barrier", process_set)

    def next_object(self, process_set: int | None, name: str) -> int:
        """How many objects of this name the process set has exchanged, this one included."""
        return self._count(f"object {name}", process_set)

    def _count(self, what: str, process_set: int | None) -> int:
        with self.lock:
            self.counts[what, process_set] = self.counts.get((what, process_set), 0) + 1
            return self.counts[what, process_set]


class _Basics:
    """The one job of this process, and the questions that can be asked about it."""

    def __init__(self) -> None:
        self._job: Job | None = None
        self._meeter = Meeter()
        self._is_registered = False
        self._starting = threading.Lock()

    # -- life -----------------------------------------------------------------------------------------------------

    def init(self, comm: Sequence[int] | None = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
        """Joins the other ranks. A second call does nothing; after shutdown() it joins anew.

        comm: ranks that take part, None for all. process_sets: sets to make at once, or "dynamic" to allow
        add_process_set() later.
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
            if self._job is not None and not self._job.controller.closed:
                return
            # Another rank has ended the job, this one starts over without having said so.
            self._leave()
            if not self._is_registered:
                atexit.register(self.shutdown)
                self._is_registered = True
            self._job = self._start(list(comm) if comm else None, list(process_sets or []))

    def _start(self, ranks: list[int] | None, wanted: list[ProcessSet]) -> Job:
        settings = settings_from_environment()
        watch = watch_connections()
        try:
            job = self._meet(ranks, wanted, settings, watch)
        except BaseException as error:
            watch.stop()
            if watch.reason and isinstance(error, Exception):
                raise ConnectionLostError(watch.reason) from error
            raise
        # In a user's own loop operations fail, and the user may handle that.
        watch.settle(ends_process=False)
        return job

    def _meet(
        self, ranks: list[int] | None, wanted: list[ProcessSet], settings: Settings, watch: ConnectionWatch
    ) -> Job:
        meeting = self._meeter.meet(ranks, settings)
        timeline = Timeline()
        if meeting.rank == 0 and settings.timeline not in ("", "DYNAMIC"):
            timeline.start(settings.timeline, settings.mark_cycles)
        data_plane = DataPlane(meeting.rank, timeline, uses_nccl=meeting.uses_nccl)
        everybody = tuple(range(meeting.size))
        job = Job(meeting, settings, timeline, data_plane, {0: everybody}, watch)
        data_plane.sets[0] = _groups(job, 0, everybody)
        data_plane.change_sets = lambda request: _change_sets(job, request)
        global_process_set.ranks = list(everybody)
        wrong = _make_sets(job, wanted)
        # Nobody returns, and perhaps ends, while another rank still connects to it.
        dist.all_reduce(torch.zeros(1), group=data_plane.sets[0].cpu)
        job.controller = Controller(
            meeting.rank,
            meeting.hosts,
            settings,
            timeline,
            job.process_sets,
            data_plane,
            meeting.links,
            watch,
        )
        if wrong:
            self._job = job
            self._leave()
            raise ValueError(wrong)
        return job

    def shutdown(self) -> None:
        """Leaves the job. Operations of other ranks that wait for this one fail there."""
        with self._starting:
            self._leave()

    def _leave(self) -> None:
        job, self._job = self._job, None
        if job is None:
            return
        job.watch.stop()
        job.controller.stop()
        job.timeline.stop()
        large_tensors.release()
        # Else the job would hold itself, and its connections, until the garbage collector comes by.
        job.data_plane.change_sets = lambda request: -1
        for groups in job.data_plane.sets.values():
            groups.close()
        job.data_plane.sets.clear()

    def is_initialized(self) -> bool:
        return self._job is not None

    def job(self) -> Job:
        """For those who run operations."""
        if self._job is None:
            raise HorovodInternalError(NOT_INITIALIZED)
        return self._job

    def _known(self) -> Job:
        """For those who ask."""
        if self._job is None:
            raise ValueError(NOT_INITIALIZED)
        return self._job

    # -- who is there ---------------------------------------------------------------------------------------------

    def size(self) -> int:
        """Number of processes."""
        return self._known().meeting.size

    def rank(self) -> int:
        """This process among all."""
        return self._known().meeting.rank

    def local_size(self) -> int:
        """Number of processes on this host."""
        meeting = self._known().meeting
        return meeting.hosts.count(meeting.hosts[meeting.rank])

    def local_rank(self) -> int:
        """This process among those on this host."""
        meeting = self._known().meeting
        return meeting.local_ranks[meeting.rank]

    def cross_size(self) -> int:
        """Number of hosts that have a process with this local rank."""
        meeting = self._known().meeting
        return meeting.local_ranks.count(meeting.local_ranks[meeting.rank])

    def cross_rank(self) -> int:
        """This host among those."""
        meeting = self._known().meeting
        return meeting.local_ranks[: meeting.rank].count(meeting.local_ranks[meeting.rank])

    def is_homogeneous(self) -> bool:
        """Whether every host has the same number of processes."""
        hosts = self._known().meeting.hosts
        return len({hosts.count(host) for host in hosts}) == 1

    def start_timeline(self, file_path: str, mark_cycles: bool = False) -> None:
        """Begins a Chrome trace at `file_path`, written by rank 0. Needs HOROVOD_TIMELINE=DYNAMIC at init()."""
        job = self._known()
        if not job.settings.timeline:
            raise ValueError("Set HOROVOD_TIMELINE=DYNAMIC to enable dynamic timeline usage.")
        if job.meeting.rank == 0:
            job.timeline.start(file_path, mark_cycles)

    def stop_timeline(self) -> None:
        """Ends the trace and closes its file."""
        self._known().timeline.stop()

    # -- what was built -------------------------------------------------------------------------------------------

    def mpi_threads_supported(self) -> bool:
        raise ValueError("Horovod MPI is not enabled; Please make sure it's installed and enabled.")

    def mpi_enabled(self) -> bool:
        return False

    def mpi_built(self) -> bool:
        return False

    def gloo_enabled(self) -> bool:
        return True

    def gloo_built(self) -> bool:
        return True

    def nccl_built(self) -> int:
        """NCCL's version code, as 22105 for 2.21.5, or 0."""
        if not (torch.backends.cuda.is_built() and dist.is_nccl_available()):
            return 0
        major, minor, patch = torch.cuda.nccl.version()[:3]
        return int(major) * 10_000 + int(minor) * 100 + int(patch)

    def ddl_built(self) -> bool:
        return False

    def ccl_built(self) -> bool:
        return False

    def cuda_built(self) -> bool:
        return torch.version.cuda is not None

    def rocm_built(self) -> bool:
        return torch.version.hip is not None

    # -- process sets ---------------------------------------------------------------------------------------------

    def set_ranks(self, process_set_id: int) -> tuple[int, ...]:
        sets = self._known().process_sets
        if process_set_id not in sets:
            raise ValueError("Process set does not exist or has not been registered.")
        return sets[process_set_id]

    def add_set(self, ranks: list[int]) -> int | None:
        """Number of the new set; None if there is one of these ranks."""
        return self._negotiate_set("add_process_set", f"ranks {ranks}", tuple(ranks), "adding")

    def remove_set(self, process_set_id: int) -> int | None:
        return self._negotiate_set("remove_process_set", f"set {process_set_id}", (process_set_id,), "removing")

    def _negotiate_set(self, kind: str, name: str, numbers: tuple[int, ...], doing: str) -> int | None:
        job = self._known()
        if not (job.settings.dynamic_process_sets or os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS") == "1"):
            raise ValueError(
                f"Set HOROVOD_DYNAMIC_PROCESS_SETS=1 to allow {doing} process sets after Horovod initialization."
            )
        if kind == "add_process_set" and (wrong := _wrong_ranks(numbers, job.meeting.size)):
            raise ValueError(wrong)
        # The name is the same for all sets, so that ranks that want different ones meet, and are told.
        operation = Operation(Request(kind, "process sets", splits=numbers, repeats=False))
        job.controller.submit(operation, is_urgent=True)
        job.controller.wait(operation)
        result: int = operation.result
        return result if result >= 0 else None


def _make_sets(job: Job, wanted: list[ProcessSet]) -> str:
    """The process sets given to init(); the text of an error if two are the same or one has ranks that are not there."""
    error = ""
    for place, process_set in enumerate(wanted):
        assert process_set.ranks is not None
        wrong = _wrong_ranks(process_set.ranks, job.meeting.size)
        number = -1 if wrong else _add_set(job, tuple(process_set.ranks))
        process_set.process_set_id = number if number >= 0 else None
        if number < 0 and not error:
            error = wrong or (
                f"Horovod could not be initialized because process_sets entry number {place} is a duplicate: "
                f"{process_set}"
            )
    return error


def _wrong_ranks(ranks: Sequence[int], size: int) -> str:
    """The text of an error; empty if these ranks can be a process set."""
    if any(not 0 <= rank < size for rank in ranks):
        return f"Process set {list(ranks)}: ranks must lie in [0, {size})."
    if len(set(ranks)) < len(ranks):
        return f"Process set {list(ranks)}: each rank may stand there once."
    return ""


def _change_sets(job: Job, request: Request) -> int:
    """On the controllers of all ranks, at the same place in the order of operations; -1: nothing was changed."""
    if request.kind == "add_process_set":
        return _add_set(job, request.splits)
    number = request.splits[0]
    if number not in job.process_sets:
        return -1
    del job.process_sets[number]
    groups = job.data_plane.sets.pop(number, None)
    if groups is not None:
        groups.close()
    return number


def _add_set(job: Job, ranks: tuple[int, ...]) -> int:
    if ranks in job.process_sets.values():
        return -1
    number = job.next_set
    job.next_set += 1
    # A set of no ranks is allowed, as in Horovod, and needs no group.
    if job.meeting.rank in ranks:
        job.data_plane.sets[number] = _groups(job, number, ranks)
    job.process_sets[number] = ranks
    return number


def _groups(job: Job, number: int, ranks: tuple[int, ...]) -> SetGroups:
    """The connections of a process set; its members call it."""
    meeting, settings = job.meeting, job.settings
    name = f"set {number}"
    names = [f"rank {rank} ({meeting.hosts[rank]})" for rank in ranks]
    place = ranks.index(meeting.rank)
    cpu = new_group(meeting, name, ranks, settings)
    gpu = new_group(meeting, name, ranks, settings, backend="nccl") if meeting.uses_nccl else None
    ring = None
    if settings.cpu_operations == "ring":
        ring = connect_ring(meeting.signed_store(name), meeting.secret, place, names, meeting.address, settings)
    return SetGroups(ranks, cpu, gpu, ring)


_basics: Any = _Basics()
process_sets._setup(_basics)
