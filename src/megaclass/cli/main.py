"""The command `megaclass`: parse, call one function."""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megaclass import __version__
from megaclass.cli.cluster import add_cluster_commands
from megaclass.cli.data import add_data_commands
from megaclass.cli.evaluate import add_evaluate_commands
from megaclass.cli.logs import add_output_options, messages_on_stderr
from megaclass.errors import EXIT_TRY_AGAIN, AgreedError, ConfigError, UserError, is_transient

# Whoever started the ranks ends the others as soon as the one that failed is gone; on a busy machine that takes a while.
_FAILED_RANK_FIRST_S = 10.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0, 2 for what the user can mend, or 74 for what may pass by itself; both are printed without a traceback."""
    arguments = sys.argv[1:] if arguments is None else arguments
    # A bare --resume must not swallow the setting that follows it.
    given = ["--resume=auto" if a == "--resume" else a for a in arguments]
    # What follows is a command line of its own, in horovodrun's grammar.
    if given[:1] == ["run"]:
        with messages_on_stderr():
            return _run(arguments[1:])
    for argument in given:
        if (shown := argument.encode(errors="backslashreplace").decode()) != argument:
            # It would end up in files that are UTF-8, and fail there.
            print(f"megaclass: {shown} is not UTF-8: rename the file or folder, or name it by a link.", file=sys.stderr)
            return 2
    parser = _parser()
    options, later = parser.parse_known_args(given)
    # argparse takes the settings that stand together; those behind an option come here.
    if any(a.startswith("-") for a in later) or (later and "settings" not in options):
        parser.error(f"unrecognized arguments: {' '.join(later)}")
    if later:
        options.settings += later
    with messages_on_stderr(options.output):
        return _call(options, given)


def _call(options: argparse.Namespace, given: list[str]) -> int:
    try:
        code: int = options.run(options, given)
    except AgreedError as error:
        # The rank that failed prints this, ends first, and is named as the cause; its supervisor then ends this one.
        is_printed = _speaks_for_its_host()
        if is_printed:
            print(f"megaclass: {error}", file=sys.stderr, flush=True)
        time.sleep(_FAILED_RANK_FIRST_S)
        if not is_printed:
            print(f"megaclass: {error}", file=sys.stderr, flush=True)
        return EXIT_TRY_AGAIN if is_transient(error) else 2
    except UserError as error:
        print(f"megaclass: {error}", file=sys.stderr)
        return EXIT_TRY_AGAIN if is_transient(error) else 2
    except OSError as error:
        if not is_transient(error):
            raise
        print(f"megaclass: {error}", file=sys.stderr)
        return EXIT_TRY_AGAIN
    except KeyboardInterrupt:
        return 130
    return code


def _speaks_for_its_host() -> bool:
    """An error of another rank is printed there; where hosts keep logs of their own, the first rank of each says it, too."""
    from megaclass.world import world_from_environment

    world = world_from_environment()
    return world.cross_size > 1 and world.local_rank == 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megaclass", description="Training of classifiers with millions of classes, on one machine or many."
    )
    parser.add_argument("--version", action="version", version=f"megaclass {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser(
        "train",
        help="train, evaluate and export what a recipe says",
        description="Trains what a recipe says: megaclass train recipes/demo.toml head.sample_rate=0.1 train.epochs=2",
    )
    train.add_argument("recipe", type=Path, help="TOML file with the settings")
    train.add_argument("settings", nargs="*", metavar="section.key=value", help="settings that win over the file")
    train.add_argument(
        "--resume",
        metavar="[=auto|best|PATH]",
        help="continue the run from its newest whole checkpoint (also without a value), with --resume=best from its best "
        "one, with --resume=PATH from this one",
    )
    train.add_argument("--overwrite", action="store_true", help="replace the run that the run folder holds")
    train.add_argument(
        "--match-classes",
        action="store_true",
        help="keep centres by class name, or number, where the list of classes has changed",
    )
    train.add_argument(
        "--same-numbers",
        action="store_true",
        help="classes without names are the same people under the same numbers, although their images are others "
        "(encoded anew): do not refuse them",
    )
    train.add_argument("--show-config", action="store_true", help="print the resolved settings as TOML and end")
    train.set_defaults(run=_train)

    recipe = commands.add_parser(
        "import-config",
        help="InsightFace's configs/*.py -> a recipe",
        description="Turns one of InsightFace's configs/*.py into a recipe, without running it.",
    )
    recipe.add_argument("file", type=Path, help="the config, for example configs/ms1mv3_r50.py")
    recipe.add_argument(
        "--gpus",
        type=int,
        help="GPUs the published run used, because batch_size is that of one; unset: as the file's name says, otherwise 8",
    )
    recipe.add_argument(
        "--lr-power",
        type=int,
        choices=(1, 2),
        default=1,
        help="how the learning rate falls: 1 as in today's train_v2.py, 2 as in the scheduler InsightFace had before (1)",
    )
    recipe.add_argument("--out", type=Path, help="recipe to write, a new file; otherwise it is printed")
    recipe.set_defaults(run=_import_config)

    commands.add_parser("run", help="start a command on this machine or many, as horovodrun does")

    add_cluster_commands(commands)

    add_evaluate_commands(commands)

    add_data_commands(commands)
    add_output_options(parser)
    return parser


def _run(arguments: Sequence[str]) -> int:
    from megaclass.launch.run import run

    try:
        return run(arguments)
    except UserError as error:
        print(f"megaclass run: {error}", file=sys.stderr)
        return 2


def _train(options: argparse.Namespace, given: list[str]) -> int:
    from megaclass.config.read import load_config, to_toml

    for setting in options.settings:
        # What stands behind a bare --resume is taken for a setting.
        if options.resume == "auto" and "=" not in setting:
            raise ConfigError(
                f"Cannot read the argument {setting!r}: expected section.key=value. To resume from it, write "
                f"--resume={setting}."
            )
    config = load_config(options.recipe, options.settings)
    if options.show_config:
        print(to_toml(config), end="")
        return 0
    from megaclass.train.run.start import Beginning, start_training
    from megaclass.world import world_from_environment

    beginning = Beginning(
        resume=options.resume,
        overwrite=options.overwrite,
        matches_classes=options.match_classes,
        trusts_numbers=options.same_numbers,
    )
    code = start_training(config, given[1:], beginning)
    if world_from_environment().size > 1:
        # A rank is done; ranks have aborted now and then while the interpreter took itself apart (docs/decisions.md).
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _import_config(options: argparse.Namespace, given: list[str]) -> int:
    from megaclass.insightface.config import import_config, recipe_text

    config, remarks = import_config(options.file, options.gpus, options.lr_power)
    text = recipe_text(config, remarks, options.file)
    for remark in remarks:
        print(f"megaclass: {options.file}: {remark}", file=sys.stderr)
    if options.out is None:
        print(text, end="")
        return 0
    try:
        with options.out.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"Cannot write the recipe {options.out}: {error.strerror}.") from error
    print(f"megaclass train {options.out}", file=sys.stderr)
    return 0
