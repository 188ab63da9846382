"""Columns of integers that are collected once and then mapped, so all processes of a host share one copy.

A cache file is one line of JSON, padded to a page, followed by the int64 columns. It lies next to the data, or in the user's
cache folder if that folder is read-only or full. It is valid as long as the files that it was made of keep their sizes and
modification times. If neither folder takes it, every process keeps the columns in memory, and the caller learns why.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaclass.errors import DataError
from megaclass.file_lock import locked
from megaclass_launch.files import published_file

_HEADER_BYTES = 4096
# Raised whenever the meaning of a column changes, so older files are written again.
_FORMAT = 2


@dataclass(frozen=True)
class Columns:
    """Mapped, read-only columns, and the facts that the builder returned."""

    facts: dict[str, Any]
    arrays: Sequence[NDArray[np.int64]]
    why_uncached: str = ""
    """Reason why there is no cache file; empty: there is one."""


def describe_uncached(why: str) -> str:
    """Returns the end of a source's description; empty if there is a cache."""
    return f"; not cached, so every process collects index and labels itself ({why})" if why else ""


Build = Callable[[], tuple[dict[str, Any], Sequence[NDArray[np.int64]]]]
"""Collects the facts and the columns."""


def cached_columns(name: str, made_of: Sequence[Path], num_columns: int, build: Build) -> Columns:
    """Returns what `build` collects, from the cache if it is valid for the files `made_of`.

    `name` is the name of the cache file next to the first of `made_of`. If several processes ask at once, one builds and the
    others wait for it.
    """
    stamp = {"format": _FORMAT, "columns": num_columns, "made_of": _stamp(made_of)}
    folders = _cache_folders(made_of[0].parent)
    for folder in folders:
        found = _open(folder / name, stamp)
        if found is not None:
            return found
    built, reasons = None, []
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = folder / f".{name}.lock"
            with locked(lock):
                try:
                    found = _open(folder / name, stamp)
                    if found is not None:
                        return found
                    built = built or build()
                    _write(folder / name, stamp, *built)
                    return _open(folder / name, stamp) or Columns(*built)
                finally:
                    # Data folders stay clean. At worst two processes then build at once, and both write the same.
                    with contextlib.suppress(OSError):  # Windows keeps an open file
                        lock.unlink()
        except OSError as error:
            reasons.append(f"{folder}: {error.strerror or error}")
    return Columns(*(built or build()), "; ".join(reasons))


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
        return [data, user_cache() / hashlib.sha256(str(data.resolve()).encode()).hexdigest()[:16]]
    except RuntimeError:
        return [data]


def user_cache() -> Path:
    """Returns the package's folder in the user's cache. RuntimeError: no HOME and an unknown user, as in containers."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megaclass"


def _write(path: Path, stamp: dict[str, Any], facts: dict[str, Any], arrays: Sequence[NDArray[np.int64]]) -> None:
    header = json.dumps({**stamp, "num_rows": len(arrays[0]), "facts": facts}).encode() + b"\n"
    assert len(header) <= _HEADER_BYTES
    with published_file(path) as unfinished, unfinished.open("wb") as file:
        file.write(header.ljust(_HEADER_BYTES))
        for array in arrays:
            file.write(np.ascontiguousarray(array, dtype="<i8").data)


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
    arrays = [
        np.frombuffer(mapped, dtype="<i8", count=num_rows, offset=_HEADER_BYTES + 8 * num_rows * column)
        for column in range(stamp["columns"])
    ]
    return Columns(facts, arrays)
