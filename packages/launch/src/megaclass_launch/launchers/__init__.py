"""The table of launchers: the ways in which `--launcher NAME` starts the processes of a job.

To add a launcher, write a module of its name with a function `launch`, which takes what `launch` below takes and returns the
job's exit code, and add one line to the table. Modules are imported when they are used, so a launcher may depend on packages
that others do not need. Standard library only.
"""

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megaclass_launch.hosts import Host
    from megaclass_launch.options import RunOptions

_ELASTIC = ("--min-np", "--max-np", "--host-discovery-script")
_DRIVER_ONLY = ("--exclude-failed-hosts", *_ELASTIC, "--hang-timeout", "--remote-prefix")
_NOT_THEIRS = (*_DRIVER_ONLY, "--restarts", "--output-filename", "--prefix-output-with-timestamp")
LAUNCHERS: dict[str, tuple[str, ...]] = {
    "ssh": (),
    "local": (),
    "mpi": _NOT_THEIRS,
    "slurm": _NOT_THEIRS,
    "ray": ("--exclude-failed-hosts", *_ELASTIC, "--remote-prefix"),
}
"""Options that are refused with each launcher."""


def launch(options: "RunOptions", hosts: "Sequence[Host]") -> int:
    """Starts the job and returns its exit code. hosts: those of -H or --hostfile; empty if neither was given."""
    launcher = importlib.import_module(f"{__name__}.{options.launcher}")
    exit_code: int = launcher.launch(options, hosts)
    return exit_code
