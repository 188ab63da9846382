"""The driver of `megaclass run`: it starts the ranks on all hosts and shows their output. Standard library only; no torch.

options -> hosts -> plan -> JobRun (agents, ranks, output) -> exit code
                      ^------- again after a failure, with --restarts (restarts.py)
"""

import logging
import resource
from collections.abc import Sequence

from megaclass_launch.driver.job_run import JobRun
from megaclass_launch.driver.outcome import Outcome
from megaclass_launch.driver.output import DriverIo
from megaclass_launch.driver.restarts import NoRestartError, StartResult, run_job
from megaclass_launch.driver.ssh import SshSettings, agent_command
from megaclass_launch.errors import LaunchError
from megaclass_launch.hosts import Host
from megaclass_launch.options import RunOptions
from megaclass_launch.placement import describe_plan, passed_on, place_ranks

_logger = logging.getLogger("megaclass.launch")

# Three pipes, their other ends while ssh or the agent is being started, and those of an orphan killer.
FILES_PER_HOST = 8
FILES_PER_RANK = 2
_OWN_FILES = 256


def run(options: RunOptions, hosts: Sequence[Host]) -> int:
    """Runs the job on the hosts and returns its exit code (launch/exit_codes.py)."""
    num_processes = options.num_processes or sum(host.slots for host in hosts)
    if options.min_processes is not None and options.min_processes > num_processes:
        raise LaunchError(
            f"--min-np {options.min_processes} is more than the {num_processes} processes to start with: "
            f"lower it, or raise -np."
        )
    ssh = ssh_settings(options)
    placements = place_ranks(hosts, num_processes)
    here = [placement.host.name for placement in placements if placement.host.is_local]
    if len(here) > 1:
        _logger.warning(
            f"{' and '.join(here)} are this machine: taken for {len(here)} hosts, whose ranks share its cores, and its GPUs "
            f"where they choose them by local rank.",
            extra={"sender": "megaclass run"},
        )
    if options.is_dry_run:
        agents = [agent_command(placement.host, ssh) for placement in placements]
        plan = describe_plan(
            placements,
            agents,
            command=options.command,
            workdir=options.workdir,
            given=options.given_env,
            passed=passed_on(),
        )
        print(plan)
        return 0
    raise_file_limit(FILES_PER_HOST * len(placements) + FILES_PER_RANK * num_processes)
    # Not started before this line: everything above can be wrong without a trace on any host.
    return run_job(lambda io: _SshJob(options, ssh, [*hosts], num_processes, io), options, num_processes)


class _SshJob:
    """A RestartableJob whose failed hosts can be excluded from the next start."""

    def __init__(
        self, options: RunOptions, ssh: SshSettings, hosts: list[Host], num_processes: int, io: DriverIo
    ) -> None:
        self._options = options
        self._ssh = ssh
        self._hosts = hosts
        self._num_processes = num_processes
        self._io = io

    def start(self, restart: int) -> StartResult:
        placements = place_ranks(self._hosts, self._num_processes)
        run = JobRun(placements, self._options, self._ssh, self._io, restart=restart)
        outcome = run.run()
        return StartResult(outcome=outcome, has_started=run.has_started, checkpoint_step=run.checkpoint_step)

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


def ssh_settings(options: RunOptions) -> SshSettings:
    return SshSettings(
        port=options.ssh_port,
        identity_file=options.ssh_identity_file,
        extra=options.ssh_args,
        remote_prefix=options.remote_prefix,
        python=options.python,
        heartbeat_s=options.heartbeat_s,
    )


def raise_file_limit(num_files: int) -> None:
    """Raises the soft limit of open files: three pipes per host and two files per rank may exceed the usual 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_files + _OWN_FILES
    if hard != resource.RLIM_INFINITY and wanted > hard:
        raise LaunchError(f"This many hosts and ranks need {wanted} open files; the limit is {hard} (`ulimit -Hn`).")
    if soft != resource.RLIM_INFINITY and wanted > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
