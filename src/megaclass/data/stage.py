"""A copy of the data in memory (`/dev/shm/…`), made once a host and shared by all its ranks.

A copy carries a list of its files, and once it is finished the sizes and times of the originals: it is used again as long
as those are what they were. Nothing but what is in that list is ever removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from megaclass.data.source import CLASSES_FILE, kind_of, split_path
from megaclass.errors import DataError

_LIST = ".staged.json"
_COPY_BYTES = 2**24

Progress = Callable[[int, int], None]


def stage(path: str, folder: Path, on_progress: Progress | None = None) -> str:
    """Copies the data at `path` (see `open_source`) into `folder` unless it is there; returns the path to open instead.

    Of several processes on a host one copies and the others wait. `on_progress` gets bytes done and in all.
    """
    parts = split_path(path)
    if all(kind_of(part) in ("synthetic", "debug") for part in parts):
        return path
    wanted = {
        Path(f"{number}") / file.relative_to(_base(part)): file
        for number, part in enumerate(parts)
        for file in _files(part)
    }
    listed = [[str(name), *_size_and_time(file)] for name, file in sorted(wanted.items())]
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(folder):
            before = _read_list(folder)
            if before != listed:
                _remove_unwanted(before or [], wanted, folder)
                _copy_all(wanted, folder, on_progress)
                _write_list(folder, listed)
            for number, part in enumerate(parts):
                if kind_of(part) == "folders":
                    _match_identities(Path(part), folder / f"{number}")
    except OSError as error:
        raise DataError(f"Cannot stage {path} in {folder}: {error.strerror or error}.") from error
    return ",".join(str(folder / f"{number}" / _inside(part)) for number, part in enumerate(parts))


def unstage(folder: Path) -> int:
    """Removes a staged copy, and nothing that was not copied; returns how many files."""
    listed = _read_list(folder)
    if listed is None:
        raise DataError(f"{folder} holds no staged data: there is no {_LIST} in it, so nothing is removed.")
    for name, *_ in listed:
        (folder / str(name)).unlink(missing_ok=True)
        _partial(folder / str(name)).unlink(missing_ok=True)
    (folder / _LIST).unlink()
    (folder / ".lock").unlink(missing_ok=True)
    for below in sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True):
        _remove_caches(below)
        with contextlib.suppress(OSError):
            below.rmdir()
    with contextlib.suppress(OSError):
        folder.rmdir()
    return len(listed)


def _base(part: str) -> Path:
    return Path(part).parent if Path(part).is_file() else Path(part)


def _inside(part: str) -> str:
    return Path(part).name if Path(part).is_file() else ""


def _files(part: str) -> Iterator[Path]:
    """What has to be copied; caches come along, so that they are not made anew."""
    place, kind = Path(part), kind_of(part)
    base = _base(part)
    if kind in ("folders", "list"):
        yield from (file for file in sorted(base.rglob("*")) if file.is_file())
        return
    if kind == "tar":
        shards = [place] if place.is_file() else sorted(base.glob("*.tar"))
        yield from shards
        names = (base / CLASSES_FILE, base / "shards.cache", Path(f"{shards[0]}.cache"))
        yield from (file for file in names if file.is_file())
        return
    for record_file in [place] if place.is_file() else sorted(base.glob("*.rec")):
        index = record_file.with_suffix(".idx")
        beside = (
            base / "property",
            base / CLASSES_FILE,
            Path(f"{index}.cache"),
            Path(f"{index}.sorted.cache"),
            Path(f"{record_file}.labels"),
        )
        yield from (record_file, index, *(file for file in beside if file.is_file()))


def _remove_unwanted(before: list[list[object]], wanted: dict[Path, Path], folder: Path) -> None:
    """What an earlier copy brought and the data no longer has: it would go on as an image."""
    for name, *_ in before:
        if Path(str(name)) not in wanted:
            (folder / str(name)).unlink(missing_ok=True)


def _match_identities(original: Path, copy: Path) -> None:
    """An identity without images has a label, too: its folder must be there, and one that has gone must not."""
    wanted = {entry.name for entry in os.scandir(original) if entry.is_dir()}
    copy.mkdir(exist_ok=True)
    for name in wanted:
        (copy / name).mkdir(exist_ok=True)
    for path in copy.iterdir():
        if path.is_dir() and path.name not in wanted:
            with contextlib.suppress(OSError):
                path.rmdir()


def _size_and_time(file: Path) -> tuple[int, int]:
    try:
        found = file.stat()
    except OSError as error:
        raise DataError(f"Cannot stage {file}: {error.strerror}.") from error
    return found.st_size, found.st_mtime_ns


def _copy_all(wanted: dict[Path, Path], folder: Path, on_progress: Progress | None) -> None:
    to_copy = {
        name: file
        for name, file in wanted.items()
        if not (folder / name).exists() or _size_and_time(folder / name) != _size_and_time(file)
    }
    total = sum(_size_and_time(file)[0] for file in to_copy.values())
    free = shutil.disk_usage(folder).free
    if total > free:
        raise DataError(
            f"Cannot stage the data in {folder}: it takes {total / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free there. "
            f"Choose another data.stage, or none."
        )
    # Until the copy is finished: what `unstage` may remove.
    _write_list(folder, [[str(name), -1, -1] for name in sorted(wanted)])
    done = 0
    for name, file in to_copy.items():
        partial = _partial(folder / name)
        partial.parent.mkdir(parents=True, exist_ok=True)
        try:
            with file.open("rb") as source, partial.open("wb") as target:
                while block := source.read(_COPY_BYTES):
                    target.write(block)
                    done += len(block)
                    if on_progress is not None:
                        on_progress(done, total)
            # The same times, so that the caches, which know the originals by them, fit the copies.
            shutil.copystat(file, partial)
            partial.replace(folder / name)
        finally:
            partial.unlink(missing_ok=True)


def _partial(file: Path) -> Path:
    return file.with_name(f".{file.name}.partial")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _read_list(folder: Path) -> list[list[object]] | None:
    try:
        found = json.loads((folder / _LIST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, list) else None


def _write_list(folder: Path, listed: list[list[object]]) -> None:
    partial = folder / f"{_LIST}.partial"
    partial.write_text(json.dumps(listed), encoding="utf-8")
    partial.replace(folder / _LIST)


def _remove_caches(folder: Path) -> None:
    """What opening the copy wrote beside it."""
    for pattern in ("*.idx.cache", "*.idx.sorted.cache", "*.rec.labels", "*.tar.cache", "shards.cache"):
        for cache in folder.glob(pattern):
            cache.unlink(missing_ok=True)
