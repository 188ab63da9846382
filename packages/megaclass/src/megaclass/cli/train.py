"""`megaclass train`, `demo`, `recipes`, `completion`, `top` and `import-config`."""

import argparse
import logging
import sys
from collections.abc import Iterator

from megaclass.cli.arguments import add_commands
from megaclass.cli.hints import Commands
from megaclass_launch.errors import ConfigError
from megaclass_launch.operating_system import is_linux

_logger = logging.getLogger("megaclass.cli")
_COMMANDS = """
train: train, evaluate and export the model of a recipe
    Trains the model of a recipe: megaclass train demo head.sample_rate=0.1 train.epochs=2
  recipe           path  TOML file with the settings, name of a built-in recipe, or a folder of images, for which a recipe is
                chosen
  @settings
  --resume         text [=auto|best|PATH]    continue the run from its newest complete checkpoint (also without a value), from
                its best one (--resume=best), or from a given one (--resume=PATH)
  --overwrite      flag  replace the run in the run folder
  --match-classes  flag  if the list of classes has changed, keep the centres of classes with the same name, or number
  --same-numbers   flag  accept classes without names as the same people if their numbers are equal, although their images
                differ (for example because they were encoded again)
  --show-config    flag  print the resolved settings as TOML and exit

top: show a running job: loss, speed, ranks, events
    Shows a run while it trains, from its files: megaclass top runs/demo. Ctrl-C ends the view, not the run.
  folder  path RUN  run folder (train.run_dir), on any host that sees it
  --once  flag      print the view once; the default if the output is not a terminal

import-config: convert an InsightFace config (configs/*.py) into a recipe
    Converts an InsightFace config (configs/*.py) into a recipe, without executing it.
  file        path   the config, for example configs/ms1mv3_r50.py
  --gpus      int    number of GPUs of the published run, because batch_size is per GPU (taken from the file's name,
                otherwise 8)
  --lr-power  1|2=1  exponent of the learning rate schedule: 1 as in the current train_v2.py, 2 as in its older one
  --out       path   recipe to write, which must not exist (default: standard output)
"""
_RECIPE_COMMANDS = """
demo: the whole job in two minutes on a CPU: train, evaluate, report, export
    Two processes (outside of Linux one) train on synthetic identities, evaluate on unseen ones, write a report and export a
        model, in the current folder: runs/demo and datasets/demo. The same as: megaclass train demo --overwrite
  @settings
  --resume  text?=auto  continue the demo, for example with train.epochs=10

recipes: list the built-in recipes
    Lists the built-in recipes with their first line.

completion: print a completion script for your shell
    Prints a completion script. For bash: eval "$(megaclass completion bash)", for example in ~/.bashrc.
  shell  bash|zsh|tcsh  shell that reads the script
"""


def add_train_commands(commands: Commands) -> None:
    """Adds `train`, `top` and `import-config` to the parser's commands."""
    add_commands(commands, _COMMANDS, {"train": _train, "top": _top, "import-config": _import_config})


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
    functions = {
        "demo": lambda options, given: _demo(options, parser),
        "recipes": _recipes,
        "completion": lambda options, given: _completion(options, parser),
    }
    add_commands(commands, _RECIPE_COMMANDS, functions)


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
