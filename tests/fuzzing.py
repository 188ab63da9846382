"""Mutations of real files, and the loop that reads them: shared by the samples in `make test` and by tests/soak/fuzz.py."""

import copy
import json
import resource
import signal
import tempfile
import traceback
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megaclass_launch.errors import UserError

MAX_SECONDS = 60
"""A reader that takes longer is killed by SIGALRM, in C code as well."""
MAX_BYTES = 2**29
"""Memory that the mutations of one process may need together, beyond what the whole file needs."""
INTERESTING = [
    b"\0\0\0\0",
    b"\xff\xff\xff\xff",
    b"\xff\xff\xff\x7f",
    b"\0\0\0\x80",
    b"\x0a\x23\xd7\xce",
    b"\xff\xd8\xff\xe0",
    b"99999999",
]
ODD_VALUES = [
    None,
    True,
    -1,
    0,
    2**63,
    1e308,
    10**30,
    "",
    "../x",
    "a" * 300,
    [],
    {},
    [[]],
    {"1": None},
    "NaN",
    float("inf"),
]


def mutate(whole: bytes, rng: np.random.Generator) -> bytes:
    """One to four changes: bits, bytes, telling numbers, cuts, repetitions, swaps."""
    content = bytearray(whole)
    for _ in range(int(rng.integers(1, 5))):
        if not content:
            break
        # Headers are where the danger is: half of the changes go to the first bytes.
        reach = len(content) if rng.random() < 0.5 else min(len(content), 128)
        at, length = int(rng.integers(reach)), int(rng.integers(1, 32))
        kind = int(rng.integers(7))
        if kind == 0:
            content[at] ^= 1 << int(rng.integers(8))
        elif kind == 1:
            content[at] = int(rng.integers(256))
        elif kind == 2:
            chosen = INTERESTING[int(rng.integers(len(INTERESTING)))]
            content[at : at + len(chosen)] = chosen
        elif kind == 3:
            del content[at : at + length]
        elif kind == 4:
            content[at:at] = content[at : at + length]
        elif kind == 5:
            content[at : at + length] = rng.integers(0, 256, length, dtype=np.uint8).tobytes()
        else:
            del content[at:]
    return bytes(content)


def mutate_json(whole: bytes, rng: np.random.Generator) -> bytes:
    """As bytes in three of ten cases, otherwise one to three values of the tree, so that it stays JSON."""
    if rng.random() < 0.3:
        return mutate(whole, rng)
    tree = json.loads(whole)
    for _ in range(int(rng.integers(1, 4))):
        at, key = tree, None
        while isinstance(at, dict | list) and at and (key is None or rng.random() < 0.7):
            above = at
            key = list(at)[int(rng.integers(len(at)))] if isinstance(at, dict) else int(rng.integers(len(at)))
            at = above[key]
        if key is None:
            break
        chosen = int(rng.integers(len(ODD_VALUES) + 2))
        if chosen < len(ODD_VALUES):
            above[key] = copy.deepcopy(ODD_VALUES[chosen])
        elif chosen == len(ODD_VALUES):
            del above[key]
        elif isinstance(above, dict):
            above["other"] = above.pop(key)
    return json.dumps(tree).encode()


_ODD_NUMBERS = [float("nan"), float("-inf"), 10**400, -(10**400), 1e18, "\x1b[2J"]


def mutate_lines(whole: bytes, rng: np.random.Generator) -> bytes:
    """Changes the JSON of one to three lines; in half of the cases one of its values becomes a number that is hard to use."""
    lines = whole.splitlines()
    for _ in range(int(rng.integers(1, 4))):
        at = int(rng.integers(len(lines)))
        try:
            row = json.loads(lines[at])
            keys = list(row)
            row[keys[int(rng.integers(len(keys)))]] = _ODD_NUMBERS[int(rng.integers(len(_ODD_NUMBERS)))]
            lines[at] = json.dumps(row).encode() if rng.random() < 0.5 else mutate_json(lines[at], rng)
        except (ValueError, TypeError, AttributeError):
            # An earlier change has left no object there.
            continue
    return b"\n".join([*lines, b""])


_ODD_WORDS = [
    "",
    "0",
    "-1",
    "1e400",
    "nan",
    "9" * 5000,
    "inf",
    "None",
    "[",
    "]",
    "(",
    "'",
    '"',
    "\\",
    "=",
    "\n",
    "\0",
    "é",
]
_ODD_WORDS += [
    "../x",
    "**",
    "<<",
    "lambda: 0",
    "[[]]",
    "0x",
    "1_0",
    "#",
    "{",
    "}",
    ".",
    "%",
    "١",
    "²",
    "\u2028",
    "-oProxyCommand=x",
]


def mutate_text(whole: bytes, rng: np.random.Generator) -> bytes:
    """As bytes in three of ten cases, otherwise one to three words are replaced, repeated, swapped or removed."""
    if rng.random() < 0.3:
        return mutate(whole, rng)
    words = [word for line in whole.decode().splitlines(keepends=True) for word in _parts(line)]
    for _ in range(int(rng.integers(1, 4))):
        at = int(rng.integers(len(words)))
        match int(rng.integers(5)):
            case 0 | 1:
                words[at] = _ODD_WORDS[int(rng.integers(len(_ODD_WORDS)))]
            case 2:
                words[at] = words[at] * int(rng.integers(2, 40))
            case 3:
                words[at] = words[int(rng.integers(len(words)))]
            case 4:
                words[at] = ""
    return "".join(words).encode("utf-8", "surrogateescape")


def _parts(line: str) -> list[str]:
    """Cuts a line between letters or digits and everything else."""
    parts = [""]
    for character in line:
        if parts[-1] and (character.isalnum() or character == "_") != (parts[-1][-1].isalnum() or parts[-1][-1] == "_"):
            parts.append("")
        parts[-1] += character
    return parts


@dataclass(frozen=True)
class Target:
    """A file, how it is mutated, and what reads it."""

    whole: bytes
    attempt: Callable[[bytes], object]
    """Gets the mutated bytes; reads them, or raises a UserError of its kind."""
    mutate: Callable[[bytes, np.random.Generator], bytes] = mutate
    refusal: type[Exception] = UserError
    """What a clean refusal raises."""


@dataclass
class Counts:
    """Outcomes of the mutations of one kind."""

    refused: int = 0
    accepted: int = 0
    tracebacks: list[str] = field(default_factory=list)
    """Texts of all exceptions that were no clean refusal, with the bytes that caused them."""
    grown_bytes: int = 0


def fuzz(
    make: Callable[[str, Path], Target],
    name: str,
    numbers: range,
    seed: int = 0,
    before_each: Callable[[int], object] = lambda number: None,
) -> Counts:
    """Reads the mutations with these numbers. In memory, because each attempt writes files.

    A mutation depends on seed, kind and number only: `range(n, n + 1)` repeats one of them.
    """
    counts = Counts()
    place = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=place) as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        target = make(name, Path(folder))
        before = _peak_bytes()
        for number in numbers:
            content = target.mutate(target.whole, np.random.default_rng([seed, zlib.crc32(name.encode()), number]))
            before_each(number)
            signal.alarm(MAX_SECONDS)
            try:
                target.attempt(content)
                counts.accepted += 1
            except target.refusal as error:
                if str(error):
                    counts.refused += 1
                else:
                    counts.tracebacks.append(f"mutation {number} of {name}: a refusal without a reason")
            except Exception:
                text = traceback.format_exc(limit=-6)
                counts.tracebacks.append(f"mutation {number} of {name}, seed {seed}: {content[:2000]!r}\n{text}")
            finally:
                signal.alarm(0)
        counts.grown_bytes = _peak_bytes() - before
    return counts


def assert_clean(counts: Counts) -> None:
    assert not counts.tracebacks, counts.tracebacks[0]
    assert counts.grown_bytes < MAX_BYTES


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
