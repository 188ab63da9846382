"""`megaclass run --launcher mpi|slurm|ray|ssh|local`: who starts the processes. Standard library only.

ssh and local are the driver's own way. The others are handed the job: mpirun and srun as a command line, which this process
becomes; Ray as workers of a placement group.
"""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from megaclass.errors import LaunchError
from megaclass.launch.driver import driver
from megaclass.launch.hosts import given_hosts
from megaclass.launch.launchers.mpi import mpirun_command
from megaclass.launch.launchers.slurm import srun_command
from megaclass.launch.options import RunOptions, parse_options
from megaclass.launch.plan import passed_on
from megaclass.launch.signals import open_standard_streams


def run(arguments: Sequence[str]) -> int:
    """Exit code of the run."""
    open_standard_streams()
    options = parse_options(arguments)
    if options.checks_build:
        from megaclass.launch.check.build_table import build_table

        print(build_table())
        return 0
    for remark in options.remarks:
        print(f"megaclass run: {remark}", file=sys.stderr)
    if options.program_folder is not None:
        # Ranks here inherit it, those on other hosts get it passed on, before the folders of their own.
        os.environ["PATH"] = f"{options.program_folder}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    if options.launcher in ("ssh", "local"):
        return driver.run(options)
    _refuse_what_others_lack(options)
    hosts = given_hosts(options.hosts, options.hostfile)
    options = replace(options, given_env={**_network_names(options), **options.given_env})
    if options.launcher == "ray":
        from megaclass.launch.launchers.ray import run_on_ray

        return run_on_ray(options, hosts)
    env = {**options.given_env, "PYTHONUNBUFFERED": "1"}
    names = sorted({*passed_on(), *env})
    is_mpi = options.launcher == "mpi"
    command = mpirun_command(options, hosts, names) if is_mpi else srun_command(options, hosts, os.environ)
    return _become(command, {**os.environ, **env}, options)


def _refuse_what_others_lack(options: RunOptions) -> None:
    """Options that only the driver knows what to do with: said, not ignored."""
    unknown = {
        "--exclude-failed-hosts": options.excludes_failed_hosts,
        "--min-np": options.min_processes is not None,
        "--hang-timeout": options.hang_timeout_s,
        "--remote-prefix": options.remote_prefix,
    }
    if options.launcher != "ray":
        unknown |= {
            "--restarts": options.restarts,
            "--output-filename": options.output_dir is not None,
            "--prefix-output-with-timestamp": options.with_timestamp,
        }
    if found := [flag for flag, is_given in unknown.items() if is_given]:
        raise LaunchError(
            f"--launcher {options.launcher} cannot do {' and '.join(found)}: leave that out, or leave --launcher out, "
            f"and the ranks are started over ssh."
        )


def _network_names(options: RunOptions) -> dict[str, str]:
    """--network-interface and --master-port as the variables in which the ranks find them."""
    found = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), ",".join(options.interfaces))
    found["MASTER_PORT"] = str(options.master_port or "")
    return {name: value for name, value in found.items() if value}


def _become(command: list[str], env: Mapping[str, str], options: RunOptions) -> int:
    if options.is_dry_run or options.is_verbose:
        print(shlex.join(command), file=sys.stdout if options.is_dry_run else sys.stderr, flush=True)
    if options.is_dry_run:
        return 0
    try:
        os.chdir(options.workdir)
    except OSError as error:
        raise LaunchError(
            f"Cannot work in {options.workdir}: {error.strerror}; give another with --workdir."
        ) from error
    try:
        os.execvpe(command[0], command, dict(env))
    except FileNotFoundError as error:
        package = {"mpirun": "openmpi-bin", "srun": "slurm-client"}[command[0]]
        raise LaunchError(
            f"There is no {command[0]} here: sudo apt install {package}, or leave --launcher out, which needs ssh alone."
        ) from error
