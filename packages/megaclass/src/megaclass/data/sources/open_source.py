"""Opens images at a path. The table `FORMATS` lists what such a path may be; the first format that matches reads it.

Two kinds of data become one of these first: addresses (remote.py) are fetched, and Parquet files (parquet.py) converted.

To add a format from outside the package, insert its class: `FORMATS.insert(0, MyFormat)`. See docs/contributing.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from megaclass.data.sources.features import FeatureFormat
from megaclass.data.sources.files import FolderFormat, ListFormat, has_image_name
from megaclass.data.sources.in_memory import DebugSource, DrawnSource, SyntheticFormat
from megaclass.data.sources.joined import JoinedSource
from megaclass.data.sources.parquet import as_records, is_parquet, split_choices
from megaclass.data.sources.records import RecordFormat
from megaclass.data.sources.remote import copy_of, fetch, is_remote
from megaclass.data.sources.source import ImageSource, SourceFormat, list_names
from megaclass.data.sources.tar import TarFormat
from megaclass.errors import DataError


class DebugFormat(SourceFormat):
    """`debug` or `debug:PATH`: one batch, repeated from memory."""

    notation = "debug or debug:PATH"

    @classmethod
    def matches(cls, path: str) -> bool:
        return path == "debug" or path.startswith("debug:")

    def open(self) -> ImageSource:
        _, colon, inner = self.path.partition(":")
        return DebugSource(open_source(inner) if colon else DrawnSource())


class JoinedFormat(SourceFormat):
    """`PATH,PATH,…`: several sources, whose classes are numbered one source after another."""

    notation = "several of these, separated by commas"

    @classmethod
    def matches(cls, path: str) -> bool:
        return "," in path and not Path(path).exists()

    def parts(self) -> list[SourceFormat]:
        return [format_of(part) for part in split_path(self.path)]

    def check(self) -> None:
        for part in self.parts():
            part.check()

    def open(self) -> ImageSource:
        return JoinedSource([part.open() for part in self.parts()])


FORMATS: list[type[SourceFormat]] = [
    SyntheticFormat,
    DebugFormat,
    JoinedFormat,
    FeatureFormat,
    RecordFormat,
    ListFormat,
    TarFormat,
    FolderFormat,
]


def open_source(path: Path | str) -> ImageSource:
    """Opens the data at the path; `describe()` of the result tells what was found."""
    found = format_of(path)
    found.check()
    return found.open()


def check_source(path: Path | str) -> None:
    """Raises the error that `open_source` would raise for a missing file. Reads no file."""
    format_of(path).check()


def has_notation(path: str) -> bool:
    """Returns True for data that is named by a notation, such as synthetic:100, instead of a path."""
    return any(candidate.notation and candidate.matches(path) for candidate in FORMATS)


def format_of(path: Path | str) -> SourceFormat:
    """Returns the format of the data at a path, not opened yet.

    Data at an address is fetched first, and Parquet files are converted; both happen once per host.
    """
    try:
        text = _prepared(str(path))
        place = Path(text)
        for candidate in FORMATS:
            if candidate.matches(text):
                return candidate(text)
        if place.is_file():
            suffixes = _any_of(candidate.suffix for candidate in FORMATS)
            raise DataError(f"Cannot open the data at {place}: expected a folder, or a {suffixes} file.")
        if place.is_dir():
            contents = ", ".join(filter(None, (candidate.contents for candidate in FORMATS)))
            if any(has_image_name(file.name) for file in place.iterdir()):
                raise DataError(
                    f"Cannot open the data at {place}: it holds images, but one folder per identity is expected; "
                    f"{list_names(place)}. If they show one identity, set data.path={place.parent}; otherwise move the images "
                    f"of each identity into a folder of their own."
                )
            raise DataError(
                f"Cannot open the data at {place}: looked for {contents}, all of them missing; {list_names(place)}."
            )
    except OSError as error:
        raise DataError(f"Cannot open the data at {path}: {error.strerror}.") from error
    raise DataError(
        f"Cannot open the data at {place}: there is no such folder. "
        f"Expected one with {_any_of(candidate.contents for candidate in FORMATS)}; "
        f"or {_any_of(candidate.notation for candidate in FORMATS)}."
    )


def _prepared(path: str) -> str:
    """Returns the path of the local data."""
    # An address that was a Path has one slash left of two; debug:/data is none.
    path = re.sub("^(?!debug:)([a-zA-Z][a-zA-Z0-9+.-]+):/(?!/)", r"\1://", path)
    if is_remote(path) and "," not in path:
        address, choices = split_choices(path)
        query = "&".join(f"{name}={value}" for name, value in choices.items())
        path = f"{fetch(address)}{'?' if query else ''}{query}"
    return str(as_records(path)) if is_parquet(path) else path


def split_path(text: str) -> list[str]:
    """Splits a path of several sources at its commas; an existing path is never split."""
    if Path(text).exists():
        return [text]
    return [part.strip() for part in text.split(",") if part.strip()]


def data_folders(path: Path | str) -> list[Path]:
    """Returns the folder of each source in a path. Nothing needs to exist: a run may outlive its data."""
    parts = [split_choices(part.removeprefix("debug:"))[0] for part in split_path(str(path))]
    places = [copy_of(part) if is_remote(part) else Path(part) for part in parts]
    return [place.parent if place.is_file() else place for place in places]


def verification_files(path: Path | str) -> list[Path]:
    """Returns every *.bin next to the data."""
    return [file for folder in data_folders(path) if folder.is_dir() for file in sorted(folder.glob("*.bin"))]


def _any_of(names: Iterable[str]) -> str:
    *others, last = filter(None, names)
    return f"{', '.join(others)} or {last}"
