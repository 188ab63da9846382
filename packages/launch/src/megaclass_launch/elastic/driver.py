"""The entry to elastic jobs: `megaclass run --min-np 2 --max-np 8 --host-discovery-script ./hosts.sh …`.

    options -> source of hosts (discovery.py) -> ElasticRun (elastic_run.py) -> exit code

elastic_run.py lists the parts of the driver; generation.py decides who gets which rank. On the hosts agent.py starts the
workers, and worker.py is their side. Standard library only.
"""

import secrets
from collections.abc import Sequence

from megaclass_launch.driver.driver import FILES_PER_HOST, FILES_PER_RANK, raise_file_limit, ssh_settings
from megaclass_launch.driver.outcome import Outcome
from megaclass_launch.driver.output import DriverIo
from megaclass_launch.driver.ssh import agent_command
from megaclass_launch.elastic.discovery import source_of
from megaclass_launch.elastic.elastic_run import ElasticRun
from megaclass_launch.errors import LaunchError
from megaclass_launch.hosts import Host
from megaclass_launch.options import RunOptions
from megaclass_launch.placement import describe_plan, passed_on, place_ranks
from megaclass_launch.signals import DRIVER_SIGNALS, SignalQueue

_MAX_HOSTS = 1024


def run(options: RunOptions, hosts: Sequence[Host]) -> int:
    """Runs an elastic job and returns its exit code. hosts: those of -H, or of this machine; empty with a script."""
    if options.master_port:
        raise LaunchError("--master-port does not work in elastic jobs: every generation needs ports of its own.")
    if options.hang_timeout_s:
        raise LaunchError(
            "--hang-timeout does not work in elastic jobs, whose ranks may wait for others. `megaclass train` needs none: "
            "train.hang_after_s finds a rank that hangs. For hvd, to end operations that some ranks do not take part in, add "
            "-x HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=600."
        )
    source = source_of(options.host_discovery_script, options.hostfile, hosts, options.slots_per_host)
    ssh = ssh_settings(options)
    if options.is_dry_run:
        now = source.ask()
        num_slots = sum(host.slots for host in now)
        placements = place_ranks(now, min(options.max_ranks, num_slots))
        print(f"elastic: at least {options.min_ranks} ranks; hosts from {source.name}; with the hosts of this moment:")
        print(
            describe_plan(
                placements,
                [agent_command(placement.host, ssh) for placement in placements],
                command=options.command,
                workdir=options.workdir,
                given=options.given_env,
                passed=passed_on(),
            )
        )
        return 0
    # Hosts may still be added: for the names of output files and the limit of open files, a guess is enough.
    num_ranks = options.max_processes or sum(host.slots for host in hosts) or options.min_ranks
    raise_file_limit(FILES_PER_HOST * _MAX_HOSTS + FILES_PER_RANK * num_ranks)
    with SignalQueue(DRIVER_SIGNALS) as signals:
        io = DriverIo.open(options, num_ranks, signals)
        # Counts if the run raises an error: its message must not wait for a screen that is not read.
        outcome = Outcome(exit_code=1, may_restart=False)
        try:
            outcome = ElasticRun(options, source, ssh, io, secrets.token_hex(16)).run()
        finally:
            io.close(is_patient=outcome.exit_code == 0)
    return outcome.exit_code
