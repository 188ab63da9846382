"""Columns of integers that are collected once and then mapped, so that all processes of a host share one copy.

A cache file is one line of JSON, padded to a page, followed by the int64 columns. It lies beside the data, or in the user's
cache folder if that folder is read-only or full. It is valid as long as the files that it was made of keep their sizes and
modification times. Where neither folder takes it, every process keeps the columns in memory, and the caller learns why.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from megaclass.errors import DataError
from megaclass.file_lock import locked
from megaclass_launch.files import published_file

_HEADER_BYTES = 4096
# Raised whenever the meaning of a column changes, so that older files are written again.
_FORMAT = 1


@dataclass(frozen=True)
class Columns:
    """Mapped, read-only columns, and the facts that the builder returned."""

    facts: dict[str, Any]
    arrays: tuple[NDArray[np.int64], ...]
    why_uncached: str = ""
    """Reason why there is no cache file; empty: there is one."""


def describe_uncached(why: str) -> str:
    """Returns the end of a source's description; empty if there is a cache."""
    return f"; not cached, so every process collects index and labels itself ({why})" if why else ""


class ColumnWriter:
    """Appends rows block by block, so that a build never holds all of them in memory."""

    def __init__(self, files: Sequence[IO[bytes]]) -> None:
        self._files = files
        self.num_rows = 0

    def append(self, *columns: NDArray[np.int64]) -> None:
        assert len(columns) == len(self._files) and len({len(column) for column in columns}) == 1
        for file, column in zip(self._files, columns, strict=True):
            try:
                file.write(np.ascontiguousarray(column, dtype="<i8").data)
            except OSError as error:
                # Builders read files, too: their errors must not be mistaken for a full disk here.
                raise _NoRoomError(error) from error
        self.num_rows += len(columns[0])


class _NoRoomError(Exception):
    """The cache file cannot be written."""


Build = Callable[[ColumnWriter], dict[str, Any]]


def cached_columns(name: str, made_of: Sequence[Path], num_columns: int, build: Build) -> Columns:
    """Returns the columns that `build` writes, from the cache if it is valid for the files `made_of`.

    `name` is the name of the cache file beside the first of `made_of`. If several processes ask at once, one builds and the
    others wait for it.
    """
    stamp = {"format": _FORMAT, "columns": num_columns, "made_of": _stamp(made_of)}
    folders = _cache_folders(made_of[0].parent)
    for folder in folders:
        found = _open(folder / name, stamp)
        if found is not None:
            return found
    reasons = []
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = folder / f".{name}.lock"
            with locked(lock):
                try:
                    return _open(folder / name, stamp) or _build(folder, name, stamp, build)
                finally:
                    # Data folders stay clean. At worst two processes then build at once, and both write the same.
                    lock.unlink(missing_ok=True)
        except (OSError, _NoRoomError) as error:
            cause = error.__cause__ if isinstance(error, _NoRoomError) else error
            reasons.append(f"{folder}: {getattr(cause, 'strerror', None) or cause}")
    return _build_in_memory(num_columns, build, "; ".join(reasons))


def _stamp(paths: Sequence[Path]) -> str:
    """Returns one hash of names, sizes and modification times: there may be thousands of files."""
    stamps: list[list[object]] = []
    for path in paths:
        try:
            found = path.stat()
            stamps.append([path.name, found.st_size, found.st_mtime_ns])
        except FileNotFoundError:
            stamps.append([path.name])
        except OSError as error:
            raise DataError(f"Cannot read {path}: {error.strerror}.") from error
    return hashlib.sha256(json.dumps(stamps).encode()).hexdigest()


def _cache_folders(data: Path) -> list[Path]:
    """Returns the folder of the data, then one in the user's cache folder, if the user has one."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # no HOME and an unknown user, as in containers
        return [data]
    return [data, base / "megaclass" / hashlib.sha256(str(data.resolve()).encode()).hexdigest()[:16]]


def _build(folder: Path, name: str, stamp: dict[str, Any], build: Build) -> Columns:
    num_columns = stamp["columns"]
    with published_file(folder / name) as unfinished, contextlib.ExitStack() as opened:
        first = opened.enter_context(unfinished.open("r+b"))
        first.write(b" " * _HEADER_BYTES)
        rest = [opened.enter_context(tempfile.TemporaryFile(dir=folder)) for _ in range(num_columns - 1)]
        writer = ColumnWriter([first, *rest])
        facts = build(writer)
        for column in rest:
            column.seek(0)
            shutil.copyfileobj(column, first, 2**22)
        header = json.dumps({**stamp, "num_rows": writer.num_rows, "facts": facts}).encode() + b"\n"
        assert len(header) <= _HEADER_BYTES
        first.seek(0)
        first.write(header)
    found = _open(folder / name, stamp)
    if found is None:
        raise DataError(f"The cache {folder / name} changed while it was written: does another program write there?")
    return found


def _build_in_memory(num_columns: int, build: Build, why: str) -> Columns:
    columns = [io.BytesIO() for _ in range(num_columns)]
    facts = build(ColumnWriter(columns))
    return Columns(facts, tuple(np.frombuffer(column.getbuffer().toreadonly(), dtype="<i8") for column in columns), why)


def _open(path: Path, stamp: dict[str, Any]) -> Columns | None:
    """Maps a cache file; None if it is absent, damaged or made of other files."""
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(_HEADER_BYTES).split(b"\n", 1)[0])
            if not isinstance(header, dict) or any(header.get(key) != value for key, value in stamp.items()):
                return None
            num_rows, facts = header.get("num_rows"), header.get("facts")
            num_bytes = os.fstat(file.fileno()).st_size
            if not isinstance(num_rows, int) or not isinstance(facts, dict) or num_rows < 1:
                return None
            if num_bytes != _HEADER_BYTES + 8 * num_rows * stamp["columns"]:
                return None
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError, RecursionError):
        return None
    arrays = tuple(
        np.frombuffer(mapped, dtype="<i8", count=num_rows, offset=_HEADER_BYTES + 8 * num_rows * column)
        for column in range(stamp["columns"])
    )
    return Columns(facts, arrays)
