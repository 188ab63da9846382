"""A job for Open MPI's mpirun. Standard library only."""

import os
import shlex
from collections.abc import Sequence

from megaclass.errors import LaunchError
from megaclass.launch.hosts import Host
from megaclass.launch.options import RunOptions


def mpirun_command(options: RunOptions, hosts: Sequence[Host], names: Sequence[str]) -> list[str]:
    """names: variables that all ranks get; their values travel in the environment, not on the command line."""
    num_processes = options.num_processes or sum(host.slots for host in hosts)
    if not num_processes:
        raise LaunchError("How many processes? Give -np N, or hosts with their slots: -H gpu-1:8,gpu-2:8.")
    listed = ",".join(f"{host.name}:{host.slots}" for host in hosts)
    return [
        "mpirun",
        # It refuses root unless told twice; who typed this as root has decided.
        *(("--allow-run-as-root",) if os.geteuid() == 0 else ()),
        *("-np", str(num_processes)),
        *(("-H", listed) if hosts else ()),
        # Slots were counted by whoever gave them, and a rank's loader threads want more than one core.
        *("--map-by", "slot:OVERSUBSCRIBE", "--bind-to", "none"),
        "--tag-output",
        *_ssh(options),
        *(("--mca", "oob_tcp_if_include", ",".join(options.interfaces)) if options.interfaces else ()),
        *("--wdir", options.workdir),
        *(part for name in names for part in ("-x", name)),
        *options.command,
    ]


def _ssh(options: RunOptions) -> tuple[str, ...]:
    """The same way to the hosts as the driver's own."""
    parts = ["ssh", *options.ssh_args, "-o", "BatchMode=yes"]
    parts += ["-p", str(options.ssh_port)] if options.ssh_port is not None else []
    parts += ["-i", str(options.ssh_identity_file)] if options.ssh_identity_file is not None else []
    return ("--mca", "plm_rsh_agent", shlex.join(parts))
