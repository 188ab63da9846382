"""The driver of `megaclass run`: it starts the ranks on all hosts and shows their output. Standard library only; no torch.

options -> hosts -> plan -> JobRun (one loop around one JobState) -> exit code
                      ^------- again after a failure, with --restarts (restarts.py)

An elastic job is one JobState for all generations: its hosts come from a Discovery, and no restart follows.
"""

import logging
import resource
from collections.abc import Sequence

from megaclass_launch.driver.discovery import Discovery, Source, source_of
from megaclass_launch.driver.job import JobState
from megaclass_launch.driver.job_run import JobRun
from megaclass_launch.driver.outcome import Outcome
from megaclass_launch.driver.output import DriverIo
from megaclass_launch.driver.restarts import NoRestartError, StartResult, run_job
from megaclass_launch.driver.ssh import SshSettings, agent_command
from megaclass_launch.errors import LaunchError
from megaclass_launch.hosts import Host
from megaclass_launch.options import RunOptions
from megaclass_launch.placement import describe_plan, passed_on, place_ranks
from megaclass_launch.signals import DRIVER_SIGNALS, SignalQueue

_logger = logging.getLogger("megaclass.launch")

# Three pipes, their other ends while ssh or the agent is being started, and those of an orphan killer.
_FILES_PER_HOST = 8
_FILES_PER_RANK = 2
_OWN_FILES = 256
_MAX_ELASTIC_HOSTS = 1024


def run(options: RunOptions, hosts: Sequence[Host]) -> int:
    """Runs the job on the hosts and returns its exit code (launch/exit_codes.py). hosts: empty with a discovery script."""
    if options.is_elastic:
        return _run_elastic(options, hosts)
    num_processes = options.num_processes or sum(host.slots for host in hosts)
    if options.min_processes is not None and options.min_processes > num_processes:
        raise LaunchError(
            f"--min-np {options.min_processes} is more than the {num_processes} processes to start with: "
            f"lower it, or raise -np."
        )
    placements = place_ranks(hosts, num_processes)
    here = [placement.host.name for placement in placements if placement.host.is_local]
    if len(here) > 1:
        _logger.warning(
            f"{' and '.join(here)} are this machine: taken for {len(here)} hosts, whose ranks share its cores, and its GPUs "
            f"where they choose them by local rank.",
            extra={"sender": options.program},
        )
    if options.is_dry_run:
        print(_plan(options, hosts, num_processes))
        return 0
    _raise_file_limit(_FILES_PER_HOST * len(placements) + _FILES_PER_RANK * num_processes)
    # Not started before this line: everything above can be wrong without a trace on any host.
    return run_job(lambda io: _StaticJob(options, [*hosts], num_processes, io), options, num_processes)


class _StaticJob:
    """A RestartableJob, which starts as a new JobState each time and may exclude hosts that have failed."""

    def __init__(self, options: RunOptions, hosts: list[Host], num_processes: int, io: DriverIo) -> None:
        self._options = options
        self._hosts = hosts
        self._num_processes = num_processes
        self._io = io

    def start(self, restart: int) -> StartResult:
        placements = place_ranks(self._hosts, self._num_processes)
        used = [placement.host_with_ranks() for placement in placements]
        job = JobState(self._options, _ssh_settings(self._options), self._io, used, restart)
        outcome = JobRun(job).run()
        return StartResult(outcome=outcome, has_started=job.ranks.has_started, checkpoint_step=job.checkpoint_step)

    def exclude_failed_hosts(self, outcome: Outcome) -> bool:
        left = [host for host in self._hosts if host.name not in outcome.failed_hosts]
        if not self._options.excludes_failed_hosts or len(left) == len(self._hosts):
            return False
        num_slots = sum(host.slots for host in left)
        if num_slots < (self._options.min_processes or self._num_processes):
            raise NoRestartError(f"without {', '.join(outcome.failed_hosts)} too few slots are left for --min-np.")
        self._hosts, self._num_processes = left, min(self._num_processes, num_slots)
        return True

    def describe(self) -> str:
        listed = ", ".join(f"{host.name}:{host.slots}" for host in self._hosts)
        return f"{self._num_processes} ranks on {listed}"


def _run_elastic(options: RunOptions, hosts: Sequence[Host]) -> int:
    source = source_of(options.host_discovery_script, options.hostfile, hosts, options.slots_per_host)
    if options.is_dry_run:
        _print_elastic_plan(options, source)
        return 0
    # Hosts may still be added: for the names of output files and the limit of open files, a guess is enough.
    num_ranks = options.max_processes or sum(host.slots for host in hosts) or options.min_ranks
    _raise_file_limit(_FILES_PER_HOST * _MAX_ELASTIC_HOSTS + _FILES_PER_RANK * num_ranks)
    with SignalQueue(DRIVER_SIGNALS) as signals:
        io = DriverIo.open(options, num_ranks, signals)
        # Counts if the run raises an error: its message must not wait for a screen that is not read.
        outcome = Outcome(exit_code=1, may_restart=False)
        try:
            outcome = JobRun(JobState(options, _ssh_settings(options), io), Discovery(source)).run()
        finally:
            io.close(is_patient=outcome.exit_code == 0)
    return outcome.exit_code


def _print_elastic_plan(options: RunOptions, source: Source) -> None:
    now = source.ask()
    print(f"elastic: at least {options.min_ranks} ranks; hosts from {source.name}; with the hosts of this moment:")
    print(_plan(options, now, min(options.max_ranks, sum(host.slots for host in now))))


def _plan(options: RunOptions, hosts: Sequence[Host], num_processes: int) -> str:
    placements = place_ranks(hosts, num_processes)
    return describe_plan(
        placements,
        [agent_command(placement.host, _ssh_settings(options)) for placement in placements],
        command=options.command,
        workdir=options.workdir,
        given=options.given_env,
        passed=passed_on(),
    )


def _ssh_settings(options: RunOptions) -> SshSettings:
    return SshSettings(
        port=options.ssh_port,
        identity_file=options.ssh_identity_file,
        extra=options.ssh_args,
        remote_prefix=options.remote_prefix,
        python=options.python,
        heartbeat_s=options.heartbeat_s,
    )


def _raise_file_limit(num_files: int) -> None:
    """Raises the soft limit of open files: three pipes per host and two files per rank may exceed the usual 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_files + _OWN_FILES
    if hard != resource.RLIM_INFINITY and wanted > hard:
        raise LaunchError(f"This many hosts and ranks need {wanted} open files; the limit is {hard} (`ulimit -Hn`).")
    if soft != resource.RLIM_INFINITY and wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
