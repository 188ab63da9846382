"""`--launcher mpi`: hands the job to Open MPI's mpirun. Standard library only."""

import os
import shlex
from collections.abc import Sequence

from megaclass_launch.driver.ssh import port_and_key
from megaclass_launch.errors import LaunchError
from megaclass_launch.hosts import Host
from megaclass_launch.launchers.replace_process import replace_process, variable_names, with_network_variables
from megaclass_launch.options import RunOptions


def launch(options: RunOptions, hosts: Sequence[Host]) -> int:
    """Replaces this process by mpirun."""
    options = with_network_variables(options)
    return replace_process(_mpirun_command(options, hosts), options, package="openmpi-bin")


def _mpirun_command(options: RunOptions, hosts: Sequence[Host]) -> list[str]:
    num_processes = options.num_processes or sum(host.slots for host in hosts)
    if not num_processes:
        raise LaunchError("How many processes? Give -np N, or hosts with their slots: -H gpu-1:8,gpu-2:8.")
    ssh = ["ssh", *options.ssh_args, "-o", "BatchMode=yes", *port_and_key(options)]
    listed = ",".join(f"{host.name}:{host.slots}" for host in hosts)
    return [
        "mpirun",
        # mpirun refuses to run as root without this option; the user has decided to be root.
        *(("--allow-run-as-root",) if os.geteuid() == 0 else ()),
        *("-np", str(num_processes)),
        *(("-H", listed) if hosts else ()),
        # The user has counted the slots, and a rank's loader threads need more than one core.
        *("--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none"),
        "--tag-output",
        # The ssh command that the driver would use.
        *("--mca", "plm_rsh_agent", shlex.join(ssh)),
        *(("--mca", "oob_tcp_if_include", ",".join(options.interfaces)) if options.interfaces else ()),
        *("--wdir", options.workdir),
        # Names only: the values travel in the environment, not on a command line that `ps` shows.
        *(part for name in variable_names(options) for part in ("-x", name)),
        *options.command,
    ]
