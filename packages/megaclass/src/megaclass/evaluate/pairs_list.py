"""Reads a text file that names pairs of image files: LFW's pairs.txt, or lines of `first second 0|1`.

In LFW's form a line of counts comes first; then `name n m` names two images of one person and `name n name m` images of
two persons, in files such as name/name_0001.jpg. Paths are relative to the folder of the list.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megaclass.data.decode import IMAGE_SUFFIXES
from megaclass.errors import DataError


@dataclass(frozen=True, kw_only=True, eq=False)
class PairsList:
    """The pairs of a list: pair i consists of the paths 2i and 2i + 1."""

    paths: list[Path]
    is_same_N: NDArray[np.bool_]
    num_folds: int
    """Number of folds from the first line of the list, or ten."""


def read_pairs_list(path: Path, images: Path | None = None) -> PairsList:
    folder = images or path.parent
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"Cannot read the pairs {path}: {error}") from error
    numbered = [(number, line.split()) for number, line in enumerate(lines, start=1) if line.strip()]
    num_folds = 10
    if numbered and len(numbered[0][1]) <= 2 and all(map(_is_number, numbered[0][1])):
        counts = numbered.pop(0)[1]
        num_folds = int(counts[0]) if len(counts) == 2 else 10
    if not numbered:
        raise DataError(f"{path} holds no pairs.")
    paths: list[Path] = []
    is_same: list[bool] = []
    for number, words in numbered:
        first, second, same = _pair(words, folder, f"Line {number} of {path}")
        paths += [first, second]
        is_same.append(same)
    return PairsList(paths=paths, is_same_N=np.array(is_same), num_folds=num_folds)


def _is_number(word: str) -> bool:
    """Tells whether int() reads the word: str.isdigit() is also true of "²", and int() refuses thousands of digits."""
    return word.isascii() and word.isdigit() and len(word) < 10


def _pair(words: list[str], folder: Path, where: str) -> tuple[Path, Path, bool]:
    match words:
        case [name, first, second] if _is_number(first) and _is_number(second):
            return _numbered(folder, name, first, where), _numbered(folder, name, second, where), True
        case [name, first, other, second] if _is_number(first) and _is_number(second):
            return _numbered(folder, name, first, where), _numbered(folder, other, second, where), False
        case [left, right, ("0" | "1") as same]:
            return _existing(folder / left, where), _existing(folder / right, where), same == "1"
    raise DataError(f"{where} is {' '.join(words)[:80]!r}: expected `name n m`, `name n name m` or `first second 0|1`.")


def _numbered(folder: Path, name: str, number: str, where: str) -> Path:
    stem = folder / name / f"{name}_{int(number):04d}"
    for suffix in IMAGE_SUFFIXES:
        if _is_file(path := stem.with_name(stem.name + suffix)):
            return path
    raise DataError(
        f"{where} names image {number} of {name}, but there is no {stem}.jpg (nor {', '.join(IMAGE_SUFFIXES[1:])})."
    )


def _existing(path: Path, where: str) -> Path:
    if not _is_file(path):
        raise DataError(f"{where} names {path}, which does not exist.")
    return path


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False  # a name that is too long, or a folder that may not be entered
