"""Reads the pages of the documentation as their readers do: the commands to type and the Python blocks, with their places."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from subprocess import STDOUT

from tests.commands import ended_in_this_process

ROOT = Path(__file__).parents[1]
_PROGRAMS = ("megaclass", "make", "pip", "mpirun", "python", "srun", "sbatch", "torchrun", "ray", "torch.save")


@dataclass(frozen=True)
class Snippet:
    """A command or a block of a page, and where it stands."""

    page: str
    line: int
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


def python_blocks(page: Path) -> list[Snippet]:
    text = page.read_text()
    return [
        Snippet(page.name, text[: match.start()].count("\n") + 1, match[1])
        for match in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    ]


def commands(page: Path) -> list[Snippet]:
    """Returns indented lines outside of fences that start with the name of a program, without their remarks."""
    lines = _without_fences(page.read_text()).splitlines()
    found, number = [], 0
    while number < len(lines):
        first, line = number + 1, lines[number]
        while line.endswith("\\"):
            number += 1
            line = line[:-1] + lines[number].strip()
        number += 1
        if re.match(r"    [\w.]+", line) and _program(line) in _PROGRAMS:
            found.append(Snippet(page.name, first, re.split(r"\s+#|\s{3,}", line.strip())[0]))
    return found


def _without_fences(text: str) -> str:
    """Replaces fenced blocks by empty lines, so line numbers stay."""
    return re.sub(r"^```.*?^```", lambda block: "\n" * block[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE)


def _program(line: str) -> str:
    """Returns the first word; `megaclass:` is the beginning of a message, not a command."""
    return line.split(maxsplit=1)[0].split("(")[0]


def why_not_run(command: str, reasons: Mapping[str, str]) -> str:
    """Returns the reason of the first pattern that the command matches; empty if the command runs."""
    return next((reason for pattern, reason in reasons.items() if re.search(pattern, command)), "")


def unused_reasons(found: list[Snippet], reasons: Mapping[str, str]) -> list[str]:
    return [pattern for pattern in reasons if not any(re.search(pattern, command.text) for command in found)]


def run_in_this_process(words: list[str]) -> str:
    """Runs one command of `megaclass` through its entry point; fails with its output if it does. Returns the output."""
    done = ended_in_this_process(words[1:], stderr=STDOUT)
    assert done.returncode == 0, f"{shlex.join(words)}\nexit code {done.returncode}\n{done.stdout[-1500:]}"
    return done.stdout
