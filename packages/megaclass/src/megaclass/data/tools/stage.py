"""A copy of the data in memory (`/dev/shm/…`), made once per host and shared by all its ranks.

A copy has a list of its files with the sizes and times of the originals, and is used again as long as they are unchanged.
Only files in that list are ever removed.

Staging folders lie in places that all users share, so their content is not trusted. The folder must belong to the user and
must not be world-writable (see safe_folder.py). Every file is opened, replaced and removed relative to the opened folder
without following links, and a list that names anything outside is refused.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath

from megaclass.data.sources.open_source import FORMATS, format_of
from megaclass.data.tools.safe_folder import SafeFolder, is_inside
from megaclass.errors import DataError
from megaclass.file_lock import locked

_LIST = ".staged.json"
_LOCK = ".lock"
_COPY_BYTES = 2**24

Progress = Callable[[int, int], None]


def stage(path: str, folder: Path, on_progress: Progress | None = None) -> str:
    """Copies the data at `path` (see `open_source`) into `folder` unless it is there; returns the path to open instead.

    If several processes of a host stage the same data, one copies and the others wait. `on_progress` gets the bytes done and
    their total.
    """
    found = format_of(path)
    found.check()
    parts = list(enumerate(found.parts()))
    wanted = {
        PurePosixPath(f"{number}") / file.relative_to(part.folder): file
        for number, part in parts
        for file in part.files()
    }
    if not wanted:
        return path
    listed: _List = [(str(name), *_size_and_time(file)) for name, file in sorted(wanted.items())]
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with SafeFolder(folder) as own, locked(own.path_of(_LOCK)):
            before = _read_list(own)
            if before != listed:
                for name in (PurePosixPath(name) for name, *_ in before or ()):
                    if name not in wanted:
                        # Otherwise the copy would keep an image that the data no longer has.
                        own.remove(name)
                _copy_all(wanted, own, on_progress)
                _write_list(own, listed)
            for number, part in parts:
                if folders := set(part.folders()):
                    _match_folders(folders, own, PurePosixPath(f"{number}"))
    except OSError as error:
        raise DataError(f"Cannot stage {path} in {folder}: {error.strerror or error}.") from error
    copies = {f"{number}" for number, *_ in (name.parts for name in wanted)}
    return ",".join(
        str(folder / f"{number}" / part.place.relative_to(part.folder)) if f"{number}" in copies else part.path
        for number, part in parts
    )


def unstage(folder: Path) -> int:
    """Removes a staged copy, and nothing that was not copied; returns the number of files."""
    if not folder.exists() and not folder.is_symlink():
        raise DataError(f"{folder} holds no staged data: there is no such folder.")
    try:
        with SafeFolder(folder) as own:
            listed = _read_list(own)
            if listed is None:
                raise DataError(f"{folder} holds no staged data: there is no {_LIST} in it, so nothing is removed.")
            for name in (PurePosixPath(name) for name, *_ in listed):
                own.remove(name)
                own.remove(_partial(name))
            own.remove(PurePosixPath(_LIST))
            own.remove(PurePosixPath(_LOCK))
            # Opening the copy may have written caches into it.
            caches = [pattern for candidate in FORMATS for pattern in candidate.caches]
            own.remove_empty_folders(lambda name: any(fnmatch.fnmatch(name, pattern) for pattern in caches))
    except OSError as error:
        raise DataError(f"Cannot remove the copy in {folder}: {error.strerror or error}.") from error
    with contextlib.suppress(OSError):
        folder.rmdir()
    return len(listed)


_List = list[tuple[str, int, int]]
"""Name below the staging folder, size and modification time of the original."""


def _match_folders(wanted: set[str], own: SafeFolder, copy: PurePosixPath) -> None:
    """Makes the folders below `copy` those that are wanted: an identity without images has a label, too."""
    for name in wanted:
        with own.opened(copy / name, create=True):
            pass
    with own.opened(copy, create=True) as handle:
        for name in {entry.name for entry in os.scandir(handle) if entry.is_dir(follow_symlinks=False)} - wanted:
            with contextlib.suppress(OSError):
                os.rmdir(name, dir_fd=handle)


def _size_and_time(file: Path) -> tuple[int, int]:
    try:
        found = file.stat()
    except OSError as error:
        raise DataError(f"Cannot stage {file}: {error.strerror}.") from error
    return found.st_size, found.st_mtime_ns


def _copy_all(wanted: Mapping[PurePosixPath, Path], own: SafeFolder, on_progress: Progress | None) -> None:
    to_copy = {name: file for name, file in wanted.items() if own.size_and_time(name) != _size_and_time(file)}
    total = sum(_size_and_time(file)[0] for file in to_copy.values())
    free = shutil.disk_usage(own.path).free
    if total > free:
        raise DataError(
            f"Cannot stage the data in {own.path}: it takes {total / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free there. "
            f"Choose another data.stage, or leave it empty."
        )
    # Until the copy is finished, the list tells `unstage` what it may remove.
    _write_list(own, [(str(name), -1, -1) for name in sorted(wanted)])
    done = 0
    for name, file in to_copy.items():
        try:
            with file.open("rb") as source, own.new_file(_partial(name)) as target:
                while block := source.read(_COPY_BYTES):
                    target.write(block)
                    done += len(block)
                    if on_progress is not None:
                        on_progress(done, total)
                target.flush()
                # With equal times, the caches, which check them, are valid for the copies.
                found = os.fstat(source.fileno())
                os.utime(target.fileno(), ns=(found.st_atime_ns, found.st_mtime_ns))
            own.rename(_partial(name), name)
        finally:
            own.remove(_partial(name))


def _partial(name: PurePosixPath) -> PurePosixPath:
    return name.with_name(f".{name.name}.partial")


def _read_list(own: SafeFolder) -> _List | None:
    """Returns the list; None if it is missing or damaged. Names outside the folder are an attack and are refused."""
    try:
        with own.existing_file(PurePosixPath(_LIST)) as file:
            found = json.loads(file.read())
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    if not isinstance(found, list):
        return None
    listed: _List = []
    for entry in found:
        match entry:
            case [str(name), int(size), int(time)]:
                if not is_inside(name):
                    raise DataError(
                        f"{own.path / _LIST} names {name[:200]!r}, which lies outside the folder: something other than "
                        f"megaclass wrote it. Nothing was changed. Choose another folder, or remove this one by hand."
                    )
                listed.append((name, size, time))
            case _:
                return None
    return listed


def _write_list(own: SafeFolder, listed: _List) -> None:
    unfinished = PurePosixPath(f"{_LIST}.partial")
    with own.new_file(unfinished) as file:
        file.write(json.dumps(listed).encode())
    own.rename(unfinished, PurePosixPath(_LIST))
