"""Process sets: subsets of the ranks that run operations of their own."""

import os
from collections.abc import Iterable, Sequence

import torch.distributed as dist

from horovod.engine.job import Job, current
from horovod.engine.messages import Request
from horovod.engine.operation import Operation

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]


class ProcessSet:
    """Ranks that run collective operations together; pass it to hvd.init() or hvd.add_process_set()."""

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: object = None

    def __init__(self, ranks_or_comm: Sequence[int]) -> None:
        if not isinstance(ranks_or_comm, Iterable):
            raise ValueError(
                "A ProcessSet cannot be built from an MPI communicator, because MPI is not supported: "
                "ProcessSet should be initialized with a list of process ranks."
            )
        ranks = sorted(ranks_or_comm)
        if any(not isinstance(rank, int) for rank in ranks):
            raise ValueError("ProcessSet should be initialized with a list of process ranks or an mpi4py Comm object")
        self.ranks = ranks

    def _members(self) -> tuple[int, ...]:
        members = members_of(self, current.known())
        if members is None:
            raise ValueError("Process set does not exist or has not been registered.")
        return members

    def size(self) -> int | None:
        """Returns the number of ranks in the set; None if it is not initialized."""
        if self.process_set_id is None:
            return None
        return len(self._members())

    def rank(self) -> int | None:
        """Returns this process's position in the set; None if it is not initialized. Roots are still global ranks."""
        if self.process_set_id is None:
            return None
        ranks, own_rank = self._members(), current.known().meeting.rank
        if own_rank not in ranks:
            raise ValueError("Process is not part of provided process set.")
        return ranks.index(own_rank)

    @property
    def group(self) -> dist.ProcessGroup:
        """Returns the torch process group of the set, for torch.distributed's collectives and PartialFC(group=...).

        The first use is collective: all members of the set ask for it. It uses NCCL if every rank has a GPU of its own, else
        gloo. Raises ValueError if this process is not a member.
        """
        job = current.known()
        members = members_of(self, job)
        if self.process_set_id is None or members is None or job.meeting.rank not in members:
            raise ValueError(f"{self} has no group on this process: only members of a registered set have one.")
        return job.sets.scripts_group(self.process_set_id)

    def included(self) -> bool | None:
        """Returns whether this process is a member; None if the set is not initialized."""
        if self.ranks is None:
            return None
        return current.known().meeting.rank in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0


def members_of(process_set: ProcessSet, job: Job) -> tuple[int, ...] | None:
    """Returns the ranks of a set of this job; None if it is not one."""
    number, ranks = process_set.process_set_id, tuple(process_set.ranks or ())
    # Also the ranks: a set of a job that was shut down may have the number of another set of this job.
    return ranks if number is not None and job.process_sets.get(number) == ranks else None


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Adds a process set after init() and returns it; all ranks must call it. Needs HOROVOD_DYNAMIC_PROCESS_SETS=1."""
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    assert process_set.ranks is not None
    number = _negotiate("add_process_set", tuple(process_set.ranks), "adding")
    if number is None:
        raise ValueError(f"Attempted to add a duplicate process set: {process_set}")
    process_set.process_set_id = number
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a process set; all ranks must call it. Needs HOROVOD_DYNAMIC_PROCESS_SETS=1.

    Returns False if the set did not exist.
    """
    number = process_set.process_set_id
    if number is None or number == 0 or members_of(process_set, current.known()) is None:
        return False
    was_removed = _negotiate("remove_process_set", (number,), "removing") is not None
    process_set.process_set_id = None
    return was_removed


def _negotiate(kind: str, numbers: tuple[int, ...], doing: str) -> int | None:
    """Changes the table of sets on all ranks; returns the number of the set, None if nothing was changed."""
    job = current.known()
    if not (job.settings.dynamic_process_sets or os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS") == "1"):
        raise ValueError(
            f"Set HOROVOD_DYNAMIC_PROCESS_SETS=1 to allow {doing} process sets after Horovod initialization."
        )
    if kind == "add_process_set" and (wrong := job.sets.wrong_ranks(numbers)):
        raise ValueError(wrong)
    # The name is the same for all sets, so ranks that want different sets are compared and get an error.
    operation = Operation(Request.of(kind, "process sets", splits=numbers, repeats=False))
    job.controller.submit(operation)
    job.wait(operation)
    number = int(operation.result)
    return number if number >= 0 else None
