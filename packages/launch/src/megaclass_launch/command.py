"""The commands of this package: megaclass-run, megaclass-check, and `python -m megaclass_launch run|check|bench`.

Packages that are built on this one add the same commands to their own (run, add_check_command, add_allreduce_command).
"""

import argparse
import json
import logging
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from megaclass_launch import __version__
from megaclass_launch.errors import EXIT_TRY_AGAIN, UserError, is_transient
from megaclass_launch.messages import messages_on_stderr, print_error
from megaclass_launch.operating_system import is_linux

_logger = logging.getLogger("megaclass.launch")

_CHECK = {
    "help": "check whether training would start here or on these hosts",
    "description": "Checks whether training would start, and prints a table with advice: %(prog)s -H gpu-1:8,gpu-2:8",
    "epilog": "Exits with 0 only if training would start.",
}


def run_command() -> NoReturn:
    """The program `megaclass-run`."""
    sys.exit(run(sys.argv[1:]))


def check_command() -> NoReturn:
    """The program `megaclass-check`."""
    parser = argparse.ArgumentParser("megaclass-check", description=_CHECK["description"], epilog=_CHECK["epilog"])
    _add_check_arguments(parser)
    sys.exit(_ended(check, parser.parse_args()))


def command() -> NoReturn:
    """The program `python -m megaclass_launch`."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["run"]:
        sys.exit(run(arguments[1:]))
    parser = argparse.ArgumentParser(prog="python -m megaclass_launch", description=__doc__.splitlines()[0])
    parser.add_argument("--version", action="version", version=f"megaclass {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    commands.add_parser("run", help="start a command on this machine or many, as horovodrun does")
    add_check_command(commands)
    bench = commands.add_parser("bench", help="measure collectives")
    add_allreduce_command(bench.add_subparsers(required=True, metavar="COMMAND"))
    options = parser.parse_args(arguments)
    sys.exit(_ended(lambda given: int(given.run(given, arguments)), options))


def _ended(function: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Calls a command and returns the exit code; errors that the user can fix are printed without a traceback."""
    with messages_on_stderr():
        try:
            return function(options)
        except (UserError, OSError) as error:
            if isinstance(error, OSError) and not is_transient(error):
                raise
            print_error(error)
            return EXIT_TRY_AGAIN if is_transient(error) else 2
        except KeyboardInterrupt:
            return 130


def run(arguments: Sequence[str], program: str = "megaclass-run") -> int:
    """Runs the job of a command line and returns its exit code (exit_codes.py); errors are printed.

    program: the command that was typed, for messages.
    """
    with messages_on_stderr():
        # Before the imports: they need modules that only Linux has.
        if not is_linux():
            print(
                f"{program}: jobs are started and watched on Linux only. On {sys.platform}, start your command itself, as one "
                f"process.",
                file=sys.stderr,
            )
            return 2
        from megaclass_launch.check.build_table import build_table
        from megaclass_launch.hosts import given_hosts
        from megaclass_launch.launchers import launch
        from megaclass_launch.options import parse_options
        from megaclass_launch.signals import open_standard_streams

        open_standard_streams()
        try:
            options = parse_options(arguments, program=program)
            if options.checks_build:
                print(build_table())
                return 0
            for remark in options.remarks:
                _logger.info(remark, extra={"sender": program})
            return launch(options, given_hosts(options.hosts, options.hostfile))
        except UserError as error:
            print(f"{program}: {error}", file=sys.stderr)
            return 2


def add_check_command(commands: Any) -> None:
    """Adds `check` to the commands of a parser."""
    parser = commands.add_parser("check", **_CHECK)
    _add_check_arguments(parser)
    parser.set_defaults(run=lambda options, given: check(options))


def _add_check_arguments(check: argparse.ArgumentParser) -> None:
    from megaclass_launch.options import add_host_options, seconds

    check.add_argument("config", nargs="?", help="a configuration that must be the same file on every host")
    add_host_options(check)
    check.add_argument(
        "--start-timeout", type=seconds, default=30.0, metavar="S", help="seconds to wait for a host (default: 30)"
    )
    check.add_argument("--json", action="store_true", help="print the findings as JSON")


def _size(text: str) -> int:
    """Parses a size as all_reduce_perf does: '8' -> 8, '256M' -> 268435456, with the units K, M and G."""
    match = re.fullmatch(r"([0-9]{1,12})([KMG]?)", text.upper())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: expected bytes, or for example 64K, 256M, 1G")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]]


def add_allreduce_command(bench_commands: Any) -> None:
    """Adds `bench allreduce` to the commands of `bench`."""
    allreduce = bench_commands.add_parser(
        "allreduce",
        help="measure all-reduce by size, and check every result",
        description="Prints time and bandwidth by size. To be started on all ranks, by any starter.",
    )
    allreduce.add_argument("-b", "--min-bytes", type=_size, default="8", metavar="SIZE", help="first size (default: 8)")
    allreduce.add_argument(
        "-e", "--max-bytes", type=_size, default="256M", metavar="SIZE", help="last size (default: 256M)"
    )
    allreduce.add_argument("-f", "--factor", type=int, default=2, metavar="N", help="factor between sizes (default: 2)")
    allreduce.add_argument(
        "--backend", choices=("auto", "gloo", "nccl"), default="auto",
        help="gloo, nccl, or auto: all that work here (default: auto)",
    )  # fmt: skip
    allreduce.add_argument("--json", action="store_true", help="print the rows as JSON instead of the table")
    allreduce.set_defaults(run=lambda options, given: bench_allreduce(options))


def check(options: argparse.Namespace) -> int:
    """The command `check`."""
    from megaclass_launch.check.check import check as check_hosts
    from megaclass_launch.hosts import given_hosts
    from megaclass_launch.options import parse_options

    typed = {
        "--ssh-port": options.ssh_port,
        "--ssh-identity-file": options.ssh_identity_file,
        "--network-interface": ",".join(options.interfaces).partition(",")[0],
        "--master-port": options.master_port,
        "--python": options.python,
        "--workdir": options.workdir or str(Path.cwd()),
        "--start-timeout": options.start_timeout,
    }
    arguments = tuple(f"--ssh-arg={argument}" for argument in options.ssh_args)
    arguments += tuple(part for flag, value in typed.items() if value for part in (flag, str(value)))
    hosts = given_hosts(options.hosts, options.hostfile)
    report = check_hosts(hosts, parse_options([*arguments, "true"]), arguments, options.config)
    print(json.dumps(report.as_json(), indent=1) if options.json else report.table().lstrip("\n"))
    return 0 if report.would_start else 1


def bench_allreduce(options: argparse.Namespace) -> int:
    """The command `bench allreduce`."""
    from megaclass_launch.ranks.bench_allreduce import run_bench, sizes_between
    from megaclass_launch.world import world_from_environment

    sizes = sizes_between(options.min_bytes, options.max_bytes, options.factor)
    return run_bench(sizes, options.backend, world_from_environment(), is_json=options.json)
