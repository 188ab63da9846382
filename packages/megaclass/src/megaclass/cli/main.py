"""The command `megaclass`: parses arguments, calls one function, prints errors."""

import argparse
import atexit
import logging
import os
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from megaclass import __version__
from megaclass.cli.data import add_data_commands
from megaclass.cli.hints import Parser, settings_for_options
from megaclass.cli.models import add_model_commands
from megaclass.cli.plan import add_plan_command
from megaclass.cli.train import add_recipe_commands, add_train_commands
from megaclass.torch_version import check_torch
from megaclass_launch.command import add_allreduce_command, add_check_command, run
from megaclass_launch.errors import EXIT_TRY_AGAIN, AgreedError, UserError, is_transient
from megaclass_launch.messages import add_output_options, messages_on_stderr, print_error

# Launchers end the other ranks as soon as the failed one is gone, which takes a while on a busy machine.
_FAILED_RANK_FIRST_S = 10.0


def command() -> NoReturn:
    """The program `megaclass`: calls `main` and ends the process with its exit code.

    A process that has loaded torch would take up to 1.5 s to free its objects one by one. It ends without that, but only
    after its threads have ended and the functions that it has registered with atexit were called. Those registered before
    this one, by a profiler for example, are not called. After an unforeseen error it ends the same way, because to free a
    process group may mean to wait for the other ranks; the error is printed first.
    """
    code: int | None = None

    def leave() -> None:
        # Without a code argparse has ended the process, or a signal.
        if code is None:
            return
        # The logging module registers this when it is imported, which was before.
        logging.shutdown()
        try:
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:
                    stream.flush()
        except (OSError, ValueError):
            return  # the interpreter reports it
        os._exit(code)

    # Functions are called in reverse order: this one after those that are registered from here on.
    atexit.register(leave)
    try:
        code = main()
    except Exception:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.exit(code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0; 2 for errors that the user can fix; 74 for errors after which a retry may succeed.

    Such errors are printed without a traceback.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    # A bare --resume must not swallow the setting that follows it.
    given = ["--resume=auto" if a == "--resume" else a for a in arguments]
    # The rest of the line is parsed by `run` itself, in horovodrun's grammar.
    if given[:1] == ["run"]:
        return run(arguments[1:], "megaclass run")
    for argument in given:
        if (shown := argument.encode(errors="backslashreplace").decode()) != argument:
            # It would be written into UTF-8 files later, and fail there.
            print(
                f"megaclass: {shown} is not UTF-8: rename the file or folder, or use a symbolic link.", file=sys.stderr
            )
            return 2
    Parser.given = given
    parser = _parser()
    options, later = parser.parse_known_args(given)
    # argparse collects adjacent settings only; those behind an option are left over.
    if any(a.startswith("-") for a in later) or (later and "settings" not in options):
        meant = settings_for_options(given, later) if "settings" in options else ""
        hint = f"\nSettings are written section.key=value: {meant}" if meant else ""
        parser.error(f"unrecognized arguments: {' '.join(later)}{hint}")
    if later:
        options.settings += later
    with messages_on_stderr(options.output):
        return _call(options, given)


def _call(options: argparse.Namespace, given: list[str]) -> int:
    try:
        check_torch()
        code: int = options.run(options, given)
    except AgreedError as error:
        # The failed rank prints the error and must end first, so its launcher names it as the cause.
        is_printed = _speaks_for_its_host()
        if is_printed:
            print_error(error)
        time.sleep(_FAILED_RANK_FIRST_S)
        if not is_printed:
            print_error(error)
        return EXIT_TRY_AGAIN if is_transient(error) else 2
    except UserError as error:
        print_error(error)
        return EXIT_TRY_AGAIN if is_transient(error) else 2
    except OSError as error:
        if not is_transient(error):
            raise
        print_error(error)
        return EXIT_TRY_AGAIN
    except KeyboardInterrupt:
        return 130
    return code


def _speaks_for_its_host() -> bool:
    """Tells whether this rank repeats the error of another one: the first rank per host does, for hosts with separate logs."""
    from megaclass_launch.world import world_from_environment

    world = world_from_environment()
    return world.cross_size > 1 and world.local_rank == 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="megaclass", description="Training of classifiers with millions of classes, on one machine or many."
    )
    parser.add_argument("--version", action="version", version=f"megaclass {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    add_train_commands(commands)
    add_plan_command(commands)
    add_recipe_commands(commands, parser)
    commands.add_parser("run", help="start a command on this machine or many, as horovodrun does")
    add_check_command(commands)
    bench = commands.add_parser("bench", help="measure collectives")
    add_allreduce_command(bench.add_subparsers(required=True, metavar="COMMAND"))
    add_model_commands(commands)
    add_data_commands(commands)
    add_output_options(parser)
    return parser
