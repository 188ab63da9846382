"""The default, `--launcher ssh`: the package's own driver, over ssh or on this machine. Standard library only."""

import logging
import os
from collections.abc import Sequence

from megaclass_launch.driver import driver
from megaclass_launch.errors import LaunchError
from megaclass_launch.hosts import Host, hosts_from_batch_system
from megaclass_launch.options import RunOptions

_logger = logging.getLogger("megaclass.launch")


def launch(options: RunOptions, hosts: Sequence[Host]) -> int:
    """Runs the job on the given hosts, on those of the batch system, or else on this machine."""
    if options.host_discovery_script is not None:
        return driver.run(options, [])
    if not hosts and (found := hosts_from_batch_system(os.environ)) is not None:
        hosts, what = found
        _logger.info("detected %s", what, extra={"sender": options.program})
    return driver.run(options, hosts or [this_machine(options)])


def this_machine(options: RunOptions) -> Host:
    """Returns this machine with as many slots as there are processes to start."""
    num_slots = options.max_processes or options.num_processes or options.min_processes
    if num_slots is None:
        raise LaunchError("How many processes? Give -np N, or hosts with their slots: -H gpu-1:8,gpu-2:8.")
    return Host(name="localhost", slots=num_slots, is_local=True)
