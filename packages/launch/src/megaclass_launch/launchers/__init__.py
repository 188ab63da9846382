"""The table of launchers: the ways in which `--launcher NAME` starts the processes of a job.

To add a launcher, write a module with a function `launch` of the type below and add one line to the table. Modules are
imported when they are used, so a launcher may depend on packages that others do not need. Standard library only.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    from megaclass_launch.hosts import Host
    from megaclass_launch.options import RunOptions


class Launch(Protocol):
    """Starts the job and returns its exit code. hosts: those of -H or --hostfile; empty if neither was given."""

    def __call__(self, options: "RunOptions", hosts: "Sequence[Host]") -> int: ...


@dataclass(frozen=True, slots=True)
class Launcher:
    module: str
    """Has a function `launch`."""
    unsupported: tuple[str, ...] = ()
    """Options that are refused with this launcher."""

    def launch(self, options: "RunOptions", hosts: "Sequence[Host]") -> int:
        """Starts the job and returns its exit code."""
        start = cast(Launch, importlib.import_module(f"{__name__}.{self.module}").launch)
        return start(options, hosts)


_ELASTIC = ("--min-np", "--max-np", "--host-discovery-script")
_DRIVER_ONLY = ("--exclude-failed-hosts", *_ELASTIC, "--hang-timeout", "--remote-prefix")
_NOT_THEIRS = (*_DRIVER_ONLY, "--restarts", "--output-filename", "--prefix-output-with-timestamp")
LAUNCHERS = {
    "ssh": Launcher("ssh"),
    "local": Launcher("local"),
    "mpi": Launcher("mpi", unsupported=_NOT_THEIRS),
    "slurm": Launcher("slurm", unsupported=_NOT_THEIRS),
    "ray": Launcher("ray", unsupported=_DRIVER_ONLY),
}
