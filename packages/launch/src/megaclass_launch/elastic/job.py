"""The state of an elastic job: the table of its workers, and what the parts of its driver share. Standard library only."""

from collections.abc import Iterable
from dataclasses import dataclass

from megaclass_launch.driver.failure_report import LastLines, failure_report
from megaclass_launch.driver.job_end import JobEnd
from megaclass_launch.driver.output import DriverIo
from megaclass_launch.driver.rank_table import RankTable
from megaclass_launch.elastic.agents import ElasticAgents
from megaclass_launch.elastic.discovery import HostTable
from megaclass_launch.elastic.generation import WorkerRecord
from megaclass_launch.options import RunOptions


class WorkerTable(RankTable):
    """One row per worker that was ever started, keyed by its number; `alive` has those that run."""

    def __init__(self) -> None:
        super().__init__(())
        self.alive: dict[int, WorkerRecord] = {}

    def add(self, host: str, slot: int, now: float) -> WorkerRecord:
        """Adds a worker that is about to be started."""
        # Rows are never removed, so that no number is given twice.
        number = len(self.hosts)
        self.hosts[number] = host
        self._last_lines[number] = LastLines()
        self.alive[number] = WorkerRecord(number, host, slot, since=now)
        return self.alive[number]

    def remove(self, number: int, pid: int, code: int) -> WorkerRecord:
        """Notes that a worker has ended."""
        self.note_exit(number, pid, code)
        return self.alive.pop(number)

    def staying(self) -> list[WorkerRecord]:
        """Returns the workers that run and were not told to leave."""
        return [worker for worker in self.alive.values() if not worker.is_leaving]

    def members(self) -> list[WorkerRecord]:
        """Returns the members of the current generation that run and were not told to leave, in the order of their ranks."""
        found = [worker for worker in self.staying() if worker.rank is not None]
        return sorted(found, key=lambda worker: worker.rank or 0)

    def free_slots(self, host: str, num_slots: int) -> list[int]:
        """Returns the slots of a host that no running worker has, the lowest first."""
        # Workers that are leaving included: until it has ended, a process holds the GPU of its slot.
        taken = {worker.slot for worker in self.alive.values() if worker.host == host}
        return [slot for slot in range(num_slots) if slot not in taken]

    def on_host(self, host: str) -> list[WorkerRecord]:
        return [worker for worker in self.alive.values() if worker.host == host]

    def report_of(self, worker: WorkerRecord, code: int) -> str:
        """Returns the last message of a job that ends because this worker failed."""
        last_lines = self._last_lines[worker.number].shown()
        return failure_report(worker.shown_rank, worker.host, self.pids[worker.number], code, last_lines)

    def name_running(self) -> str:
        return named(self.alive.values())


def named(workers: Iterable[WorkerRecord]) -> str:
    """Returns the workers by rank: "rank 1 on h2, rank 3 on h4"."""
    return ", ".join(f"rank {worker.shown_rank} on {worker.host}" for worker in workers)


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticJob:
    """One elastic job as its driver knows it: where it may run, where it runs, and whether it is being ended."""

    options: RunOptions
    hosts: HostTable
    """Hosts that may be used, and hosts that have failed."""
    agents: ElasticAgents
    """One agent per host in use; every order to a worker goes through them."""
    table: WorkerTable
    """All workers: rank, ready or not, leaving or not."""
    end: JobEnd
    io: DriverIo

    def is_wanted(self, worker: WorkerRecord) -> bool:
        """Returns whether the job may still use the worker's slot: its host is listed, with at least as many slots."""
        return worker.slot < self.hosts.slots(worker.host)
