"""`megaclass run --launcher mpi|slurm|ray|ssh|local`: who starts the processes. Standard library only.

ssh and local are the driver's own way. The others are handed the job: mpirun and srun as a command line, which this process
becomes; Ray as workers of a placement group.
"""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence

from megaclass.errors import LaunchError
from megaclass.launch import driver
from megaclass.launch.hosts import Host, hosts_from_file, hosts_from_option
from megaclass.launch.mpirun import mpirun_command
from megaclass.launch.options import RunOptions, parse_options
from megaclass.launch.plan import passed_on
from megaclass.launch.slurm import srun_command

LAUNCHERS = ("ssh", "local", "mpi", "slurm", "ray")
_CHECK_BUILD = "--check-build"


def run(arguments: Sequence[str]) -> int:
    """Exit code of the run."""
    launcher, rest = _launcher(list(arguments))
    if launcher == "check-build":
        from megaclass.launch.check_build import build_table

        print(build_table())
        return 0
    if launcher in ("", "ssh"):
        return driver.run(rest)
    options = parse_options(rest)
    hosts = _hosts(options)
    if launcher == "local":
        if others := [host.name for host in hosts if not host.is_local]:
            raise LaunchError(
                f"--launcher local starts everything here, but {others[0]} is another machine: leave -H out."
            )
        return driver.run(rest)
    for remark in options.remarks:
        print(f"megaclass run: {remark}", file=sys.stderr)
    if launcher == "ray":
        from megaclass.launch.ray_gang import run_on_ray

        return run_on_ray(options, hosts)
    env = {**os.environ, **options.given_env, "PYTHONUNBUFFERED": "1"}
    names = sorted({*passed_on(), *options.given_env, "PYTHONUNBUFFERED"})
    command = mpirun_command(options, hosts, names) if launcher == "mpi" else srun_command(options, hosts, os.environ)
    return _become(command, env, options)


def _launcher(arguments: list[str]) -> tuple[str, list[str]]:
    """The name given with --launcher and the arguments without it; what stands behind the command is the command's own."""
    for index, text in enumerate(arguments):
        name, equals, value = text.partition("=")
        is_launcher = name == "--launcher"
        is_check = text == "-cb" or (len(text) >= len("--check") and _CHECK_BUILD.startswith(text))
        if not (is_launcher or is_check) or not _is_option(arguments, index):
            continue
        if is_check:
            return "check-build", []
        num_taken = 1 if equals else 2
        value = value if equals else (arguments[index + 1] if index + 1 < len(arguments) else "")
        if value not in LAUNCHERS:
            raise LaunchError(f"--launcher {value!r}: expected one of {', '.join(LAUNCHERS)}.")
        return value, arguments[:index] + arguments[index + num_taken :]
    return "", arguments


def _is_option(arguments: Sequence[str], index: int) -> bool:
    """Whether the command has not begun yet: then a command put in this place would be the whole of it."""
    return parse_options([*arguments[:index], "command"]).command == ("command",)


def _hosts(options: RunOptions) -> list[Host]:
    """None given: the launcher's own."""
    if options.hosts is not None:
        return hosts_from_option(options.hosts)
    return hosts_from_file(options.hostfile) if options.hostfile is not None else []


def _become(command: list[str], env: Mapping[str, str], options: RunOptions) -> int:
    if options.is_dry_run or options.is_verbose:
        print(shlex.join(command), file=sys.stdout if options.is_dry_run else sys.stderr, flush=True)
    if options.is_dry_run:
        return 0
    try:
        os.chdir(options.workdir)
        os.execvpe(command[0], command, dict(env))
    except FileNotFoundError as error:
        package = {"mpirun": "openmpi-bin", "srun": "slurm-client"}[command[0]]
        missing = options.workdir if error.filename == options.workdir else command[0]
        raise LaunchError(
            f"There is no {missing} here: sudo apt install {package}, or leave --launcher out, which needs ssh alone."
        ) from error
