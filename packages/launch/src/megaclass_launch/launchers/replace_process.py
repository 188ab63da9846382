"""Shared by launchers that hand the job to another program: its environment, and becoming it. Standard library only."""

import os
import shlex
import sys
from dataclasses import replace

from megaclass_launch.errors import LaunchError
from megaclass_launch.options import RunOptions
from megaclass_launch.placement import passed_on


def with_network_variables(options: RunOptions) -> RunOptions:
    """Adds --network-interface and --master-port to the ranks' variables, where they find them."""
    found = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), ",".join(options.interfaces))
    found["MASTER_PORT"] = str(options.master_port or "")
    given = {name: value for name, value in found.items() if value}
    return replace(options, given_env={**given, **options.given_env})


def variable_names(options: RunOptions) -> list[str]:
    """Returns the names of the variables that all ranks get."""
    return sorted({*passed_on(), *options.given_env, "PYTHONUNBUFFERED"})


def replace_process(command: list[str], options: RunOptions, *, package: str) -> int:
    """Replaces this process by the command; with --dry-run only prints it. package: has the command, on Debian and Ubuntu."""
    if options.is_dry_run or options.is_verbose:
        print(shlex.join(command), file=sys.stdout if options.is_dry_run else sys.stderr, flush=True)
    if options.is_dry_run:
        return 0
    try:
        os.chdir(options.workdir)
    except OSError as error:
        raise LaunchError(
            f"Cannot use the working folder {options.workdir}: {error.strerror}; give another with --workdir."
        ) from error
    try:
        os.execvpe(command[0], command, {**os.environ, **options.given_env, "PYTHONUNBUFFERED": "1"})
    except FileNotFoundError as error:
        raise LaunchError(
            f"There is no {command[0]} here: sudo apt install {package}, or leave --launcher out, which needs ssh only."
        ) from error
