"""`megaclass train`, `demo`, `recipes`, `completion`, `top` and `import-config`."""

import argparse
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

from megaclass.cli.hints import Commands
from megaclass_launch.errors import ConfigError
from megaclass_launch.operating_system import is_linux

_logger = logging.getLogger("megaclass.cli")


def add_train_commands(commands: Commands) -> None:
    """Adds `train`, `top` and `import-config` to the parser's commands."""
    train = commands.add_parser(
        "train",
        help="train, evaluate and export the model of a recipe",
        description="Trains the model of a recipe: megaclass train demo head.sample_rate=0.1 train.epochs=2",
    )
    train.add_argument(
        "recipe",
        type=Path,
        help="TOML file with the settings, name of a built-in recipe, or a folder of images, for which a recipe is chosen",
    )
    train.add_argument(
        "settings",
        nargs="*",
        default=[],
        metavar="section.key=value",
        help="settings that take precedence over the file",
    )
    train.add_argument(
        "--resume",
        metavar="[=auto|best|PATH]",
        help="continue the run from its newest complete checkpoint (also without a value), from its best one "
        "(--resume=best), or from a given one (--resume=PATH)",
    )
    train.add_argument("--overwrite", action="store_true", help="replace the run in the run folder")
    train.add_argument(
        "--match-classes",
        action="store_true",
        help="if the list of classes has changed, keep the centres of classes with the same name, or number",
    )
    train.add_argument(
        "--same-numbers",
        action="store_true",
        help="accept classes without names as the same people if their numbers are equal, although their images differ "
        "(for example because they were encoded again)",
    )
    train.add_argument("--show-config", action="store_true", help="print the resolved settings as TOML and exit")
    train.set_defaults(run=_train)

    top = commands.add_parser(
        "top",
        help="show a running job: loss, speed, ranks, events",
        description="Shows a run while it trains, from its files: megaclass top runs/demo. Ctrl-C ends the view, not the run.",
    )
    top.add_argument("folder", type=Path, metavar="RUN", help="run folder (train.run_dir), on any host that sees it")
    top.add_argument(
        "--once", action="store_true", help="print the view once; the default if the output is not a terminal"
    )
    top.set_defaults(run=_top)

    recipe = commands.add_parser(
        "import-config",
        help="convert an InsightFace config (configs/*.py) into a recipe",
        description="Converts an InsightFace config (configs/*.py) into a recipe, without executing it.",
    )
    recipe.add_argument("file", type=Path, help="the config, for example configs/ms1mv3_r50.py")
    recipe.add_argument(
        "--gpus",
        type=int,
        help="number of GPUs of the published run, because batch_size is per GPU (taken from the file's name, otherwise 8)",
    )
    recipe.add_argument(
        "--lr-power",
        type=int,
        choices=(1, 2),
        default=1,
        help="exponent of the learning rate schedule: 1 as in the current train_v2.py, 2 as in its older one (default: 1)",
    )
    recipe.add_argument("--out", type=Path, help="recipe to write, which must not exist (default: standard output)")
    recipe.set_defaults(run=_import_config)


def _train(options: argparse.Namespace, given: list[str]) -> int:
    from megaclass.config.read import is_data, load_config, to_toml

    for setting in options.settings:
        # An argument after a bare --resume is parsed as a setting.
        if options.resume == "auto" and "=" not in setting:
            raise ConfigError(
                f"Cannot read the argument {setting!r}: expected section.key=value. To resume from it, write "
                f"--resume={setting}."
            )
    is_recipe = not is_data(options.recipe) and "=" not in str(options.recipe)
    # Torch is not loaded for a mistake in a setting, and not for --show-config.
    config = load_config(options.recipe, options.settings) if is_recipe else None
    if options.show_config and config is not None:
        print(to_toml(config), end="")
        return 0
    from megaclass.api import resolve_recipe, start_training
    from megaclass.training.start.restart import StartMode

    mode = StartMode(
        resume=options.resume,
        overwrite=options.overwrite,
        matches_classes=options.match_classes,
        trusts_numbers=options.same_numbers,
        command=("megaclass", *("--resume" if word == "--resume=auto" else word for word in given)),
    )
    if options.show_config:
        print(to_toml(load_config(*resolve_recipe(options.recipe, options.settings, mode))), end="")
        return 0
    return start_training(options.recipe, options.settings, mode, output=options.output).exit_code


def _top(options: argparse.Namespace, given: list[str]) -> int:
    try:
        from megaclass.training.top import watch_run
    except ImportError:
        raise ConfigError("megaclass top needs rich: pip install 'megaclass[ui]'") from None
    return watch_run(options.folder, is_once=options.once)


def _import_config(options: argparse.Namespace, given: list[str]) -> int:
    from megaclass.insightface.import_config import import_config, recipe_text

    config, remarks = import_config(options.file, options.gpus, options.lr_power)
    text = recipe_text(config, remarks, options.file)
    for remark in remarks:
        _logger.info(f"{options.file}: {remark}")
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


_RECIPES = "_megaclass_recipes"
"""Shell function that completes names of recipes and files."""


def add_recipe_commands(commands: Commands, parser: argparse.ArgumentParser) -> None:
    """Adds `demo`, `recipes` and `completion` to the parser's commands."""
    demo = commands.add_parser(
        "demo",
        help="the whole job in two minutes on a CPU: train, evaluate, report, export",
        description="Two processes (outside of Linux one) train on synthetic identities, evaluate on unseen ones, write a "
        "report and export a model, in the current folder: runs/demo and datasets/demo. The same as: megaclass train demo "
        "--overwrite",
    )
    demo.add_argument(
        "settings", nargs="*", default=[], metavar="section.key=value", help="settings that take precedence"
    )
    demo.add_argument(
        "--resume", nargs="?", const="auto", metavar="", help="continue the demo, for example with train.epochs=10"
    )
    demo.set_defaults(run=lambda options, given: _demo(options, parser))
    recipes = commands.add_parser(
        "recipes", help="list the built-in recipes", description="Lists the built-in recipes with their first line."
    )
    recipes.set_defaults(run=_recipes)
    completion = commands.add_parser(
        "completion",
        help="print a completion script for your shell",
        description='Prints a completion script. For bash: eval "$(megaclass completion bash)", for example in ~/.bashrc.',
    )
    completion.add_argument("shell", choices=("bash", "zsh", "tcsh"))
    completion.set_defaults(run=lambda options, given: _completion(options, parser))


def _demo(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    output = [] if options.output == "normal" else [f"--{options.output}"]
    # Several processes are started and watched on Linux only. Before the settings, which take precedence.
    own = [] if is_linux() else ["train.nproc=1"]
    # The ranks are started with these arguments.
    how = "--overwrite" if options.resume is None else f"--resume={options.resume}"
    given = ["train", "demo", *own, *options.settings, how, *output]
    train = parser.parse_args(given)
    code: int = train.run(train, given)
    return code


def _recipes(options: argparse.Namespace, given: list[str]) -> int:
    from megaclass.config.read import recipe_summaries

    summaries = list(recipe_summaries())
    width = max(len(name) for name, _ in summaries)
    for name, summary in summaries:
        print(f"{name:{width}}  {summary}")
    print(
        "\nTrain one by its name: megaclass train NAME data.path=FOLDER. All its settings: megaclass train NAME --show-config."
    )
    return 0


def _completion(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    try:
        import shtab
    except ImportError:
        raise ConfigError("Completion needs the package shtab: pip install 'megaclass[ui]'.") from None
    from megaclass.config.read import recipe_names
    from megaclass_launch.options import run_parser

    commands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    commands.choices["run"] = run_parser("megaclass run")
    for action in _positionals(parser):
        if not action.choices:
            # The attribute is how shtab is told what an argument is.
            action.complete = shtab.FILE | ({"bash": _RECIPES} if action.dest == "recipe" else {})  # type: ignore[attr-defined]
    names = " ".join(recipe_names())
    function = f'{_RECIPES}() {{ compgen -W "{names}" -- "$1"; compgen -f -- "$1"; }}'
    print(shtab.complete(parser, shell=options.shell, preamble=function if options.shell == "bash" else ""))
    return 0


def _positionals(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Yields the arguments without dashes of all commands and their subcommands."""
    for action in parser._get_positional_actions():
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _positionals(command)
        else:
            yield action
