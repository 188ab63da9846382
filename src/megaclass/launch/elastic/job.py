"""The state of an elastic job that the parts of its driver share. Standard library only."""

from dataclasses import dataclass

from megaclass.launch.driver.job_end import JobEnd
from megaclass.launch.driver.output import DriverIo
from megaclass.launch.elastic.agents import ElasticAgents
from megaclass.launch.elastic.discovery import HostTable
from megaclass.launch.elastic.generation import WorkerRecord
from megaclass.launch.elastic.worker_table import WorkerTable
from megaclass.launch.options import RunOptions


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
