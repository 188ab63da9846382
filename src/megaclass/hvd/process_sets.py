"""Subsets of the ranks that run operations of their own."""

from collections.abc import Iterable, Sequence
from typing import Protocol

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]


class _Table(Protocol):
    """What a process set asks of the running job."""

    def rank(self) -> int: ...
    def set_ranks(self, process_set_id: int) -> tuple[int, ...]: ...
    def add_set(self, ranks: list[int]) -> int | None: ...
    def remove_set(self, process_set_id: int) -> int | None: ...


class ProcessSet:
    """Ranks that run collective operations together; give it to hvd.init() or hvd.add_process_set()."""

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: object = None

    def __init__(self, ranks_or_comm: Sequence[int]) -> None:
        if not isinstance(ranks_or_comm, Iterable):
            raise ValueError(
                "Apparently you tried to build a ProcessSet from an MPI communicator, but there is no MPI here. "
                "ProcessSet should be initialized with a list of process ranks."
            )
        ranks = sorted(ranks_or_comm)
        if any(not isinstance(rank, int) for rank in ranks):
            raise ValueError("ProcessSet should be initialized with a list of process ranks or an mpi4py Comm object")
        self.ranks = ranks

    def _invalidate(self) -> None:
        self.process_set_id = None

    def size(self) -> int | None:
        """Number of ranks in it; None if not initialized."""
        if self.process_set_id is None:
            return None
        return len(_table().set_ranks(self.process_set_id))

    def rank(self) -> int | None:
        """This process's place among the ranks of the set; None if not initialized. Roots are still global ranks."""
        if self.process_set_id is None:
            return None
        ranks = _table().set_ranks(self.process_set_id)
        if _table().rank() not in ranks:
            raise ValueError("Process is not part of provided process set.")
        return ranks.index(_table().rank())

    def included(self) -> bool | None:
        """Whether this process is part of it; None if not initialized."""
        if self.ranks is None:
            return None
        return _table().rank() in self.ranks

    def __str__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, mpi_comm={self.mpi_comm})"


global_process_set = ProcessSet([])
global_process_set.process_set_id = 0

_tables: list[_Table] = []


def _setup(table: _Table) -> None:
    _tables[:] = [table]


def _table() -> _Table:
    assert _tables, "process_sets._setup() must be called first"
    return _tables[0]


def add_process_set(process_set: ProcessSet | Sequence[int]) -> ProcessSet:
    """Adds a process set after init() and returns it; all ranks must call it. Needs HOROVOD_DYNAMIC_PROCESS_SETS=1."""
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    assert process_set.ranks is not None
    number = _table().add_set(process_set.ranks)
    if number is None:
        raise ValueError(f"Attempted to add a duplicate process set: {process_set}")
    process_set.process_set_id = number
    return process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Removes a process set; all ranks must call it. False if it was not there. Needs HOROVOD_DYNAMIC_PROCESS_SETS=1."""
    number = process_set.process_set_id
    if number is None or number == 0:
        return False
    process_set._invalidate()
    return _table().remove_set(number) is not None
