"""Images as files: one folder per identity, or a list `label.txt` of paths and labels."""

from __future__ import annotations

import itertools
import os
import stat
from array import array
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from megaclass.data.decode import IMAGE_SUFFIXES, MAX_ENCODED_BYTES, first_image_size
from megaclass.data.sources.records import require_index
from megaclass.data.sources.source import SourceFormat
from megaclass.errors import DataError
from megaclass_launch.operating_system import open_flags

_NUM_NAMED = 3
# The largest label decides how much memory the classes take; more classes per image than this are a mistake.
_CLASSES_PER_IMAGE = 1000
_MAX_SPARSE_CLASSES = 2**26


class SkippedFiles:
    """Counts files whose names are not those of images, and keeps the first few names."""

    def __init__(self) -> None:
        self.num_files = 0
        self._names: list[str] = []

    def add(self, name: str) -> None:
        self.num_files += 1
        if len(self._names) < _NUM_NAMED:
            self._names.append(name)

    def describe(self) -> str:
        """Returns a phrase about the files left out; empty if there are none."""
        if not self.num_files:
            return ""
        what = "file that is not an image is" if self.num_files == 1 else "files that are not images are"
        more = ", …" if self.num_files > len(self._names) else ""
        return f"{self.num_files:,} {what} left out: {', '.join(self._names)}{more}"


def has_image_name(name: str) -> bool:
    return name.lower().endswith(IMAGE_SUFFIXES)


def require_plausible_labels(labels: NDArray[np.int64], name_of: Callable[[int], str]) -> None:
    """Raises a DataError for a label that implies far more classes than there are images; `name_of` names the image."""
    largest, allowed = int(labels.max()), max(_MAX_SPARSE_CLASSES, _CLASSES_PER_IMAGE * len(labels))
    if largest >= allowed:
        raise DataError(
            f"{name_of(int(labels.argmax()))} has label {largest}, which implies {largest + 1:,} classes for {len(labels):,} "
            f"images: at most {allowed:,} are accepted. Number the classes 0, 1, 2, …"
        )


class FileSource:
    """Image files below a folder. All names are kept in one bytes object: millions of Python strings take gigabytes."""

    def __init__(
        self,
        root: Path,
        kind: str,
        names: Iterator[tuple[bytes, int]],
        num_classes: int | None,
        skipped_files: SkippedFiles | None = None,
    ) -> None:
        """Reads all of `names`, pairs of (name, label). skipped_files: the iterator adds the files that it skips."""
        self.root = root
        self._kind = kind
        self.skipped_files = skipped_files or SkippedFiles()
        text = bytearray()
        ends, labels = array("q", [0]), array("q")
        for name, label in names:
            text += name
            ends.append(len(text))
            labels.append(label)
        if not labels:
            others = f" ({self.skipped_files.describe()})" if self.skipped_files.num_files else ""
            if nested := folders_of_identities(root):
                raise DataError(
                    f"Cannot open the data at {root}: expected one folder per identity, but the identities are in the folders "
                    f"{' and '.join(one.name for one in nested[:3])} below it. Train on one of them with "
                    f"data.path={nested[0]}{_how_to_verify(nested)}"
                )
            raise DataError(
                f"Cannot open the data at {root}: {kind}, but there is no image in it{others}. "
                f"Names of images end in {', '.join(IMAGE_SUFFIXES)}."
            )
        self._text = bytes(text)
        self._ends = np.array(ends, dtype=np.int64)
        self.labels: NDArray[np.int64] = np.array(labels, dtype=np.int64)
        if num_classes is None:
            require_plausible_labels(self.labels, self.name_of)
        self.num_classes = num_classes if num_classes is not None else int(self.labels.max()) + 1

    @property
    def num_images(self) -> int:
        return len(self.labels)

    @cached_property
    def image_size(self) -> tuple[int, int]:
        return first_image_size(self)

    def path_of(self, index: int) -> Path:
        name = self._text[self._ends[index] : self._ends[index + 1]]
        return self.root / os.fsdecode(name)

    def read(self, index: int) -> bytes:
        return read_image_file(self.path_of(index))

    def name_of(self, index: int) -> str:
        return str(self.path_of(index))

    def describe(self) -> str:
        height, width = self.image_size
        contents = f"{self.num_images:,} images of {self.num_classes:,} classes, {width} × {height}"
        num_empty = self.num_classes - len(np.unique(self.labels))
        without = f"; {num_empty:,} classes without images" if num_empty else ""
        others = f"; {self.skipped_files.describe()}" if self.skipped_files.num_files else ""
        return f"{self._kind} at {self.root}: {contents}{without}{others}"


class FolderFormat(SourceFormat):
    """One folder per identity. Sorted names of the folders are the labels 0, 1, …; one without images keeps its label."""

    contents = "one folder per identity"

    @classmethod
    def matches(cls, path: str) -> bool:
        place = Path(path)
        return place.is_dir() and any(entry.is_dir() for entry in place.iterdir() if not entry.name.startswith("."))

    def check(self) -> None:
        if (self.place / "train.idx").exists():
            # An index without its records: the folders next to it are hardly identities.
            require_index(self.place / "train.rec")

    def open(self) -> FileSource:
        skipped_files = SkippedFiles()
        try:
            entries = sorted((entry.name, entry.is_dir()) for entry in os.scandir(self.place) if entry.name[0] != ".")
        except OSError as error:
            raise DataError(f"Cannot open the data at {self.place}: {error.strerror}.") from error
        for name, is_folder in entries:
            if not is_folder and has_image_name(name):
                skipped_files.add(f"{name} (in no identity's folder)")
        identities = [name for name, is_folder in entries if is_folder]
        names = _names_in_folders(self.place, identities, skipped_files)
        return FileSource(self.place, "one folder per identity", names, len(identities), skipped_files)

    def files(self) -> Iterator[Path]:
        return _all_files(self.place)

    def folders(self) -> list[str]:
        return [entry.name for entry in os.scandir(self.place) if entry.is_dir()]

    def class_names(self) -> list[bytes] | None:
        named = super().class_names()
        return [os.fsencode(name) for name in sorted(self.folders()) if name[0] != "."] if named is None else named


class ListFormat(SourceFormat):
    """Lines of `path<TAB>label`; paths are relative to the list's folder and stay below it."""

    suffix = ".txt"
    contents = "label.txt"

    @classmethod
    def matches(cls, path: str) -> bool:
        place = Path(path)
        return (place.is_file() and place.suffix == cls.suffix) or (place / "label.txt").is_file()

    def open(self) -> FileSource:
        path = self.place if self.place.is_file() else self.place / "label.txt"
        return FileSource(path.parent, f"list {path.name}", _names_in_list(path), None)

    def files(self) -> Iterator[Path]:
        return _all_files(self.folder)


def _all_files(folder: Path) -> Iterator[Path]:
    # With links that lead nowhere: a copy names them, instead of leaving them out silently.
    return (file for file in sorted(folder.rglob("*")) if file.is_file() or not file.exists())


def read_image_file(path: Path) -> bytes:
    """Returns the content of a file. Never waits for a pipe, and never reads more than an image may have."""
    try:
        handle = os.open(path, os.O_RDONLY | open_flags("O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))
        try:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode):
                raise DataError(f"Cannot read {path}: it is not a regular file.")
            if found.st_size > MAX_ENCODED_BYTES:
                raise DataError(
                    f"Cannot read {path}: {found.st_size:,} bytes, at most {MAX_ENCODED_BYTES:,} are accepted."
                )
            with open(handle, "rb", closefd=False) as file:
                return file.read(found.st_size)
        finally:
            os.close(handle)
    except (OSError, ValueError) as error:
        # A name with a zero byte is a ValueError.
        raise DataError(f"Cannot read {path}: {getattr(error, 'strerror', None) or error}.") from error


def _names_in_folders(root: Path, identities: list[str], skipped_files: SkippedFiles) -> Iterator[tuple[bytes, int]]:
    for label, identity in enumerate(identities):
        try:
            found = sorted(entry.name for entry in os.scandir(root / identity) if entry.name[0] != ".")
        except OSError as error:
            raise DataError(f"Cannot read the folder {root / identity}: {error.strerror}.") from error
        for name in found:
            if has_image_name(name):
                yield os.fsencode(f"{identity}/{name}"), label
            else:
                skipped_files.add(f"{identity}/{name}")


def _names_in_list(path: Path) -> Iterator[tuple[bytes, int]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _parse_line(line, f"{path}, line {number}")
    except OSError as error:
        raise DataError(f"Cannot read the list {path}: {error.strerror}.") from error


def _parse_line(line: bytes, where: str) -> tuple[bytes, int]:
    name, tab, label = line.rstrip(b"\r\n").rpartition(b"\t")
    if not (tab and name and label.isdigit() and len(label) <= 18):
        raise DataError(f"Cannot read {where}: {line[:80]!r}; expected <path><TAB><label> with a label of 0 or more.")
    pure = PurePosixPath(os.fsdecode(name))
    if pure.is_absolute() or ".." in pure.parts:
        raise DataError(
            f"{where} names {os.fsdecode(name)!r}: paths must be relative to the list and stay below its folder."
        )
    return name, int(label)


def folders_of_identities(root: Path) -> list[Path]:
    """Returns the folders in `root` that hold one folder per identity each, such as train/ and val/; train/ first."""
    found = [
        folder
        for folder in (root.iterdir() if root.is_dir() else ())
        if folder.is_dir() and any(_holds_an_image(inner) for inner in itertools.islice(folder.iterdir(), 100))
    ]
    return sorted(found, key=lambda folder: (not folder.name.startswith("train"), folder.name))


def _holds_an_image(folder: Path) -> bool:
    return folder.is_dir() and any(has_image_name(name.name) for name in itertools.islice(folder.iterdir(), 100))


def _how_to_verify(nested: list[Path]) -> str:
    if len(nested) == 1:
        return "."
    names = [entry.name for folder in nested for entry in folder.iterdir()]
    # The same names mean the same identities, which would be different classes if the folders were joined.
    joined = (
        f", train on all of them with data.path={','.join(map(str, nested))}" if len({*names}) == len(names) else ""
    )
    return (
        f"{joined}, or verify on another with pairs of its images: megaclass data pairs {nested[1]} "
        f"--out {nested[0] / nested[1].name}.bin"
    )
