"""`megaclass run`: reads the command line and hands the job to a launcher (launchers/). Standard library only."""

import logging
from collections.abc import Sequence

from megaclass_launch.errors import LaunchError
from megaclass_launch.hosts import given_hosts
from megaclass_launch.launchers import LAUNCHERS
from megaclass_launch.options import RunOptions, parse_options
from megaclass_launch.signals import open_standard_streams

_logger = logging.getLogger("megaclass.launch")


def run(arguments: Sequence[str]) -> int:
    """Runs the job of a command line and returns its exit code (exit_codes.py)."""
    open_standard_streams()
    options = parse_options(arguments)
    if options.checks_build:
        from megaclass_launch.check.build_table import build_table

        print(build_table())
        return 0
    for remark in options.remarks:
        _logger.info(remark, extra={"sender": "megaclass run"})
    _refuse_unsupported(options)
    return LAUNCHERS[options.launcher].launch(options, given_hosts(options.hosts, options.hostfile))


def _refuse_unsupported(options: RunOptions) -> None:
    """Raises LaunchError for options that the launcher would ignore."""
    given = {
        "--exclude-failed-hosts": options.excludes_failed_hosts,
        "--min-np": options.min_processes is not None,
        "--max-np": options.max_processes is not None,
        "--host-discovery-script": options.host_discovery_script is not None,
        "--hang-timeout": options.hang_timeout_s,
        "--remote-prefix": options.remote_prefix,
        "--restarts": options.restarts,
        "--output-filename": options.output_dir is not None,
        "--prefix-output-with-timestamp": options.with_timestamp,
    }
    if found := [flag for flag in LAUNCHERS[options.launcher].unsupported if given[flag]]:
        raise LaunchError(
            f"--launcher {options.launcher} does not support {' and '.join(found)}: leave that out, or leave --launcher "
            f"out, and the ranks are started over ssh."
        )
