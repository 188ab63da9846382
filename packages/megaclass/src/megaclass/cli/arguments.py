"""The command lines, which are read from a text that lists them. A text holds one block per command:

    name: meaning
        Description of its own help; without one it is the meaning.
      name or names    kind      meaning

kind: a name of KINDS, or choices (a|b). Behind it `!` for a required option, `+`, `*` or `?` for the number of values (an
option with `+` may also be repeated), `=default`, which is added to the meaning, and after a blank the name of the value.
`or` before a name: exactly one of these options must be given. `@name` stands for the line of that name in SHARED, and
`{formats}` for the formats of an export. A line that is indented further continues the meaning.
"""

import argparse
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megaclass.cli.hints import Commands
from megaclass.errors import DataError
from megaclass.export import EXPORTERS
from megaclass.image_size import size_from_text
from megaclass_launch.operating_system import num_cores
from megaclass_launch.options import at_least

Run = Callable[[argparse.Namespace, list[str]], int]
"""A command: takes the parsed arguments and the command line as typed, returns the exit code."""
_MOST = 10**12


def _count(text: str) -> int:
    """Parses a number of classes or images, also with commas or underscores between the digits."""
    digits = text.replace(",", "").replace("_", "")
    if not (digits.isascii() and digits.isdigit()) or not 1 <= int(digits) <= _MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {_MOST:,}")
    return int(digits)


def _size(text: str) -> Any:
    try:
        return size_from_text(text.replace("x", ","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a size; expected 112, or height and width as 112x96"
        ) from None


KINDS: dict[str, Callable[[str], Any]] = {
    "text": str,
    "path": Path,
    "int": int,
    "float": float,
    "positive": at_least(1),
    "count": _count,
    "size": _size,
    "cores": at_least(1),
}
SHARED = """
  path        text                the data, in any form that data.path accepts
  settings    text* section.key=value    settings that take precedence
  --json      flag                print the result as JSON
  --licence   text="not stated"  licence stated in the model card
  --backbone  text MODULE:CLASS   your own backbone, which is imported and built; without this option only built-in
                backbones are built, whatever the model's file says
  --fit       pad|crop|squash     how to fit images of another size (default: as in training)
  --resize    flag                stretch images of another size if the model does not state how to fit them
  --mirror    yes-no              add the embedding of the mirrored image (default: as in training: off after
                data.mirror=false)
  --batch-size    positive=64          images per batch
  --threads   positive=2          number of decoding threads per process
  --nproc     positive=1          number of processes to start on this machine
  --device    auto|cpu|cuda=auto  auto uses GPUs if there are any
  model       text                run folder, exported folder, .safetensors, InsightFace .pth, .onnx, or hf://user/name
"""
_KIND = re.compile(
    r"(?P<kind>[^=!+*? ]+)(?P<many>[+*?]?)(?P<must>!?)(?:=(?P<default>\"[^\"]+\"|\S+))?(?: (?P<value>\S+))?"
)


def add_commands(commands: Commands, text: str, functions: Mapping[str, Run]) -> None:
    """Adds the commands of a text to the parser's commands. functions: by name of the command."""
    text = text.replace("{formats}", "|".join(EXPORTERS))
    shared = {line.split()[0].lstrip("-"): line for line in _whole_lines(SHARED)}
    for block in text.strip("\n").split("\n\n"):
        first, *lines = _whole_lines(block)
        name, meaning = first.split(": ", 1)
        described = [line.strip() for line in lines if line.startswith("    ")]
        description = " ".join(described) or f"{meaning[0].upper()}{meaning[1:]}."
        parser = commands.add_parser(name, help=meaning, description=description)
        parser.set_defaults(run=functions[name])
        one_of = None
        for line in lines:
            if line.startswith("    "):
                continue
            for given in [shared[word[1:]] for word in line.split()] if line.strip()[0] == "@" else [line]:
                names, kind, told = re.split(r"\s{2,}", given.strip(), maxsplit=2)
                target: Any = parser
                if names.startswith("or "):
                    target = one_of = one_of or parser.add_mutually_exclusive_group(required=True)
                target.add_argument(*names.removeprefix("or ").split(), **_settings(names, kind, told))


def _settings(names: str, given: str, meaning: str) -> dict[str, Any]:
    """Returns what argparse is told about one argument."""
    if given == "flag":
        return {"action": "store_true", "help": meaning}
    if given == "yes-no":
        return {"action": argparse.BooleanOptionalAction, "help": meaning}
    found = _KIND.fullmatch(given)
    assert found is not None, given
    kind, many, default = found["kind"], found["many"], found["default"]
    choices = kind.split("|") if "|" in kind else None
    read = KINDS[kind] if choices is None else int if choices[0].isdigit() else str
    settings: dict[str, Any] = {"help": meaning, "type": read, "metavar": found["value"], "nargs": many or None}
    if choices:
        settings["choices"] = [read(one) for one in choices]
    if default is not None:
        default = default.strip('"')
        settings["const" if many == "?" else "default"] = num_cores() if kind == "cores" else read(default)
        if many != "?" and "default" not in meaning:
            settings["help"] = f"{meaning} (default: {default})"
    if many in ("+", "*"):
        settings |= {"default": []} | ({"action": "extend"} if names.startswith("-") else {})
    return settings | ({"required": True} if found["must"] else {})


def _whole_lines(text: str) -> list[str]:
    """Returns the lines, with those appended that continue a meaning."""
    lines: list[str] = []
    for line in text.strip("\n").split("\n"):
        if line.startswith(" " * 8):
            lines[-1] += " " + line.strip()
        else:
            lines.append(line)
    return lines


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Turns an error of the disk in the block into one that names the place that --out has chosen."""
    try:
        yield
    except OSError as error:
        raise DataError(f"Cannot write {out}: {error.strerror or error}. Choose another place with --out.") from error
