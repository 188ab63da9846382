"""A copy of the data in memory (`/dev/shm`), made once per host and shared by all its ranks.

Places in memory are shared by all users, so a copy lies in a folder that only its user may enter: megaclass-UID-HASH with
mode 0700, where HASH stands for the path of the data. It is made by this user or refused, and others can then neither put
links into it nor replace it. In it the copy is a folder that appears whole; its name stands for the sizes and times of the
originals, so it is used again as long as they are unchanged. A process holds a shared lock on the copy that it has staged: if
the data changes, a copy that a running job uses stays.
"""

import contextlib
import hashlib
import json
import logging
import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path

from megaclass.data.loading.reader import BadImages
from megaclass.data.sources.files import has_image_name
from megaclass.data.sources.open_source import format_of
from megaclass.errors import DataError
from megaclass.file_lock import locked
from megaclass.progress import OnProgress, no_progress
from megaclass_launch.files import free_bytes, published_folder

_logger = logging.getLogger("megaclass.data")
_LOCK = ".lock"
_COPY_BYTES = 2**24
_held: dict[Path, int] = {}
"""Handle of the copy in each folder that this process uses; its lock ends with the process."""


def stage(path: str, place: Path, on_progress: OnProgress = no_progress) -> str:
    """Copies the data at `path` (see `open_source`) into a folder in `place` unless it is there; returns the path to open.

    If several processes of a host stage the same data, one copies and the others wait. `on_progress` gets the bytes done and
    their total.
    """
    # Not on Windows, whose training imports this module as well.
    import fcntl

    found = format_of(path)
    found.check()
    parts = list(enumerate(found.parts()))
    wanted = {f"{number}/{file.relative_to(part.folder)}": file for number, part in parts for file in part.files()}
    if not wanted:
        return path
    wanted = _readable(wanted)
    # An identity without images has a label as well, so its folder is part of the copy.
    folders = sorted(f"{number}/{name}" for number, part in parts for name in part.folders())
    listed = [folders, [(name, *_size_and_time(file)) for name, file in sorted(wanted.items())]]
    folder = place / f"{_prefix()}{_hash([str(Path(part.path).resolve()) for _, part in parts])}"
    copy = folder / _hash(listed)
    try:
        place.mkdir(parents=True, exist_ok=True)
        _make_private(folder)
        with locked(folder / _LOCK):
            if folder in _held:
                os.close(_held.pop(folder))
            if not copy.is_dir():
                # Copies of the data as it was, and what killed processes have left.
                for old in folder.iterdir():
                    if old.name != _LOCK and not _is_in_use(old):
                        shutil.rmtree(old) if old.is_dir() else old.unlink()
                with published_folder(copy) as unfinished:
                    for name in folders:
                        (unfinished / name).mkdir(parents=True, exist_ok=True)
                    _copy(wanted, unfinished, place, on_progress)
            _held[folder] = os.open(copy, os.O_RDONLY)
            fcntl.flock(_held[folder], fcntl.LOCK_SH)
    except OSError as error:
        raise DataError(f"Cannot stage {path} in {folder}: {error.strerror or error}.") from error
    copies = {name.partition("/")[0] for name in wanted}
    return ",".join(
        str(copy / f"{number}" / part.place.relative_to(part.folder)) if f"{number}" in copies else part.path
        for number, part in parts
    )


def _is_in_use(copy: Path) -> bool:
    import fcntl

    handle = os.open(copy, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        _logger.info("%s stays: a running job uses this copy of the data as it was", copy)
        return True
    finally:
        os.close(handle)
    return False


def _readable(wanted: Mapping[str, Path]) -> dict[str, Path]:
    """Leaves out files that cannot be read, such as links that lead nowhere: by the rule of all tools for bad images."""
    images = {name for name in wanted if has_image_name(name)}
    bad = BadImages.of_tool(len(images))
    bad.add_read(len(images))
    unreadable = {name for name, file in wanted.items() if not os.access(file, os.R_OK)}
    for number, name in enumerate(sorted(unreadable)):
        if name not in images:
            raise DataError(f"Cannot stage {wanted[name]}: it cannot be read.")
        bad.add_bad(number, DataError(f"Cannot read {wanted[name]}: {_reason(wanted[name])}."))
    if unreadable:
        _logger.warning("%s of %s images cannot be read and are left out", f"{len(unreadable):,}", f"{len(images):,}")
    return {name: file for name, file in wanted.items() if name not in unreadable}


def _reason(file: Path) -> str:
    return (
        "the link leads to a file that does not exist" if file.is_symlink() and not file.exists() else "no permission"
    )


def unstage(place: Path) -> int:
    """Removes this user's copies in `place`, and nothing else; returns the number of files."""
    folders = [folder for folder in sorted(place.glob(f"{_prefix()}*")) if (folder / _LOCK).exists()]
    if not folders:
        raise DataError(
            f"{place} holds no staged data of yours: there is no {_prefix()}… in it, so nothing is removed."
        )
    num_files = 0
    for folder in folders:
        _make_private(folder)
        num_files += sum(len(files) for _, _, files in os.walk(folder))
        try:
            shutil.rmtree(folder)
        except OSError as error:
            raise DataError(f"Cannot remove the copy in {folder}: {error.strerror or error}.") from error
    with contextlib.suppress(OSError):
        place.rmdir()
    return num_files


def _prefix() -> str:
    return f"megaclass-{os.geteuid()}-"


def _make_private(folder: Path) -> None:
    """Makes the folder, or checks that an existing one belongs to this user alone."""
    for above in folder.absolute().parents:
        mode = above.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise DataError(
                f"{folder} lies in {above}, where every user may replace it by another folder: choose a place that keeps "
                f"users apart (as /dev/shm and /tmp do, mode 1777), or chmod o-w {above}."
            )
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise DataError(
            f"{folder} is not a folder that only you may enter ({stat.filemode(found.st_mode)}, user {found.st_uid}; you are "
            f"{os.geteuid()}): another user could put files and links there. Remove it, or choose another data.stage."
        )


def _copy(wanted: Mapping[str, Path], folder: Path, place: Path, on_progress: OnProgress) -> None:
    total, free = sum(_size_and_time(file)[0] for file in wanted.values()), free_bytes(folder)
    if total > free:
        raise DataError(
            f"Cannot stage the data in {place}: it takes {total / 2**30:.1f} GiB and {free / 2**30:.1f} GiB are free there. "
            f"Choose another data.stage, leave it empty, or remove earlier copies: megaclass data stage --remove --to {place}"
        )
    done = 0
    for name, file in wanted.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with file.open("rb") as source, (folder / name).open("wb") as target:
            while block := source.read(_COPY_BYTES):
                target.write(block)
                done += len(block)
                on_progress(done, total)
        # With equal times, the caches, which check them, are valid for the copies.
        found = file.stat()
        os.utime(folder / name, ns=(found.st_atime_ns, found.st_mtime_ns))


def _size_and_time(file: Path) -> list[int]:
    try:
        found = file.stat()
    except OSError as error:
        raise DataError(f"Cannot stage {file}: {error.strerror}.") from error
    return [found.st_size, found.st_mtime_ns]


def _hash(content: object) -> str:
    return hashlib.sha256(json.dumps(content).encode(errors="surrogateescape")).hexdigest()[:12]
