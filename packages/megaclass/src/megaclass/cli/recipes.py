"""`megaclass demo`, `megaclass recipes` and `megaclass completion`."""

import argparse
from collections.abc import Iterator

from megaclass.cli.hints import Commands
from megaclass_launch.errors import ConfigError
from megaclass_launch.operating_system import is_linux

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
    given = ["train", "demo", *own, *options.settings, "--overwrite", *output]
    train = parser.parse_args(given)
    code: int = train.run(train, given)
    return code


def _recipes(options: argparse.Namespace, given: list[str]) -> int:
    from megaclass.config.recipes import recipe_summaries

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
    from megaclass.config.recipes import recipe_names
    from megaclass_launch.options import run_parser

    commands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    commands.choices["run"] = run_parser()
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
