"""Answers to mistakes on the command line: the line that was probably meant."""

import argparse
import difflib
import shlex
from collections.abc import Collection, Sequence
from typing import NoReturn, TypeAlias

from megaclass.config.read import settings_named

_OTHER_NAMES = {
    "fit": ("train",),
    "finetune": ("train",),
    "predict": ("classify", "embed"),
    "infer": ("classify", "embed"),
    "test": ("evaluate",),
    "eval": ("evaluate",),
    "verify": ("evaluate",),
    "benchmark": ("bench",),
    "convert": ("export", "import-config"),
}
"""Commands by their names in other programs; the first one that exists is proposed."""


class Parser(argparse.ArgumentParser):
    """argparse's parser, whose error for a misspelt command or option shows the line that was probably meant."""

    given: Sequence[str] = ()
    """The whole command line; set on the class, because subparsers are made by argparse."""

    def error(self, message: str) -> NoReturn:
        super().error(message + _hint(Parser.given, self))


Commands: TypeAlias = "argparse._SubParsersAction[Parser]"
"""The object that commands are added to: the result of add_subparsers(), for which argparse has no public name."""


def _hint(given: Sequence[str], parser: argparse.ArgumentParser) -> str:
    commands = _commands_of(parser)
    if not given:
        return "\nmegaclass --help lists the commands. A first one that takes two minutes: megaclass demo"
    if parser.prog == "megaclass train" and len(given) == 1:
        return "\nmegaclass recipes lists the recipes of the package; the first to try: megaclass train demo"
    # `megaclass data` is the parser of what follows `data`.
    depth = len(parser.prog.split()) - 1
    words = [word for word in given if not word.startswith("-")]
    wrong = words[depth] if len(words) > depth else None
    if commands and wrong is not None and wrong not in commands:
        if wrong == "help":
            return f"\nDid you mean: {_line([*(word for word in given if word != wrong), '--help'])}"
        others = [name for name in _OTHER_NAMES.get(wrong, ()) if name in commands]
        close = others or difflib.get_close_matches(wrong, commands, n=1)
        if close:
            place = list(given).index(wrong)
            return f"\nDid you mean: {_line([*given[:place], close[0], *given[place + 1 :]])}"
    return ""


def _commands_of(parser: argparse.ArgumentParser) -> Collection[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return action.choices
    return ()


def settings_for_options(given: Sequence[str], unknown: Sequence[str]) -> str:
    """Returns the line with `--epochs 3` written as `train.epochs=3`; empty if the options are not settings either."""
    line, rest = list(given), list(unknown)
    while rest:
        option = rest.pop(0)
        name, equals, value = option.lstrip("-").partition("=")
        names = settings_named(name.replace("-", "_"))
        if not option.startswith("--") or not names:
            return ""
        place = line.index(option)
        if not equals:
            # argparse may have taken the value for a setting.
            value = line[place + 1] if place + 1 < len(line) else ""
            if not value or value.startswith("-") or "=" in value:
                return ""
            if rest[:1] == [value]:
                rest.pop(0)
            del line[place + 1]
        line[place] = f"{names[0]}={value}"
    return _line(line)


def _line(words: Sequence[str]) -> str:
    return shlex.join(["megaclass", *("--resume" if word == "--resume=auto" else word for word in words)])
