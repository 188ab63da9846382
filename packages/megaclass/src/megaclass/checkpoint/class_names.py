"""Class names, saved with the centres, so training can resume on a changed list of identities.

`classes.txt` holds one name per line, line i for class i. Without names, classes are identified by their numbers.
"""

import io
import itertools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megaclass.checkpoint.manifest import CLASSES, Manifest
from megaclass.data.sources.open_source import format_of
from megaclass.data.sources.source import ImageSource
from megaclass.errors import CheckpointError, DataError

_SHOWN = 3


@dataclass(frozen=True)
class ClassList:
    """The classes of a data set or of a checkpoint, in order."""

    num_classes: int
    text: bytes = b""
    """One name per line; empty if classes are identified by their numbers."""

    @staticmethod
    def of(names: Iterable[bytes], where: str) -> "ClassList":
        listed = list(names)
        for number, name in enumerate(listed):
            if not name or b"\n" in name:
                raise CheckpointError(
                    f"Class {number} of {where} has the name {name!r}: expected a name without line breaks."
                )
        return ClassList(len(listed), b"\n".join(listed) + b"\n" if listed else b"")

    @property
    def kind_of_name(self) -> str:
        return "name" if self.text else "number"

    def names(self) -> Iterator[bytes]:
        if not self.text:
            return (b"%d" % number for number in range(self.num_classes))
        return (line.rstrip(b"\n") for line in io.BytesIO(self.text))

    def names_of(self, numbers: Collection[int]) -> dict[int, str]:
        """Returns the names of some classes as text."""
        # One pass over the list: a hundred million names need not be in memory to show twenty.
        listed = itertools.islice(enumerate(self.names()), max(numbers, default=-1) + 1)
        return {number: name.decode(errors="replace") for number, name in listed if number in numbers}


def class_list(path: str, source: ImageSource) -> ClassList:
    """Reads names from a classes.txt next to the data, or takes those of its folders if each is an identity.

    Without names (train.rec and its property file have numbers only), classes are identified by their numbers.
    """
    names = format_of(path).class_names()
    if names is None:
        return ClassList(source.num_classes)
    classes = ClassList.of(names, path)
    if classes.num_classes != source.num_classes:
        raise DataError(f"{path} names {classes.num_classes:,} classes, but has labels for {source.num_classes:,}.")
    return classes


@dataclass(frozen=True)
class ClassMatch:
    """The positions of the classes [start, stop) of a new list in a saved one."""

    saved_K: NDArray[np.int64]
    """Saved number of each class, or -1 for a class that is new."""
    num_same: int
    num_renumbered: int
    num_new: int


def saved_classes(folder: Path, manifest: Manifest) -> ClassList:
    """Returns the class list of a checkpoint whose files have been checked."""
    if CLASSES not in manifest.files:
        return ClassList(manifest.num_classes)
    classes = ClassList(manifest.num_classes, (folder / CLASSES).read_bytes())
    num_names = classes.text.count(b"\n")
    if num_names != manifest.num_classes:
        raise CheckpointError(
            f"{folder / CLASSES} names {num_names} classes, but there are {manifest.num_classes} centres."
        )
    return classes


def match_classes(saved: ClassList, current: ClassList, start: int, stop: int) -> ClassMatch:
    """Finds the current classes [start, stop) in the saved list by name.

    Memory: the names of these classes, and 8 bytes per class of the whole list.
    """
    _check_names_differ(current)
    places = {name: place for place, name in enumerate(itertools.islice(current.names(), start, stop))}
    saved_K = np.full(stop - start, -1, dtype=np.int64)
    for number, name in enumerate(saved.names()):
        place_here = places.get(name)
        if place_here is not None:
            saved_K[place_here] = number
    num_same = int((saved_K == np.arange(start, stop)).sum())
    num_new = int((saved_K < 0).sum())
    return ClassMatch(saved_K, num_same, len(saved_K) - num_same - num_new, num_new)


def _check_names_differ(classes: ClassList) -> None:
    """Refuses two classes of the same name. All classes are compared, so every rank comes to the same result."""
    if not classes.text:
        return
    # Hashes take 8 bytes per class, a set of names ten times as much. Only names whose hashes collide are compared.
    hashes = np.fromiter(map(hash, classes.names()), dtype=np.int64, count=classes.num_classes)
    hashes.sort()
    suspects, seen = set(hashes[1:][hashes[1:] == hashes[:-1]].tolist()), set[bytes]()
    for name in (name for name in classes.names() if suspects and hash(name) in suspects):
        if name in seen:
            raise CheckpointError(
                f"Two classes of the data have the name {name.decode(errors='replace')!r}: names must be unique."
            )
        seen.add(name)


def describe_match(num_same: int, num_renumbered: int, num_new: int, num_saved: int) -> str:
    """Returns a table with the number of centres of each kind."""
    num_kept = num_same + num_renumbered
    rows = (
        ("kept, under the same number", num_same),
        ("kept, renumbered", num_renumbered),
        ("new, initialised", num_new),
        ("gone, dropped", num_saved - num_kept),
    )
    width = max(len(f"{count:,}") for _, count in rows)
    return "\n".join(f"  {kind:28} {count:>{width},}" for kind, count in rows)


def describe_difference(saved: ClassList, current: ClassList) -> str:
    """Explains how the lists differ and what --match-classes would do; empty if they are equal."""
    if saved == current:
        return ""
    if saved.kind_of_name != current.kind_of_name:
        return (
            f"the saved classes are identified by {saved.kind_of_name}, those of the data by {current.kind_of_name}. "
            f"A file classes.txt next to the data (line i for class i) gives them names; if the classes are the same, copy "
            f"it from the checkpoint"
        )
    known, now = set(saved.names()), set(current.names())
    parts = [f"{saved.num_classes:,} classes were saved, the data has {current.num_classes:,}"]
    for kind, names, others in (("new", current, known), ("gone", saved, now)):
        found = [name for name in names.names() if name not in others]
        if found:
            shown = ", ".join(name.decode(errors="replace") for name in found[:_SHOWN])
            parts.append(f"{len(found):,} {kind} ({shown}{', …' if len(found) > _SHOWN else ''})")
    match = match_classes(saved, current, 0, current.num_classes)
    if match.num_renumbered:
        parts.append(f"{match.num_renumbered:,} with another number")
    keeps = f"--match-classes keeps the centres of those with the same {current.kind_of_name}"
    if not current.text:
        keeps += "; names would come from a file classes.txt next to the data"
    return f"{'; '.join(parts)}. {keeps}"
