"""A folder in a shared place such as /dev/shm, used safely even if other users attack it with links.

The folder is opened once. All names are resolved relative to that handle, component by component, and a symbolic link
anywhere on the way is an error (ELOOP). So nothing outside the folder is read, written or removed, even if another user
replaces a folder by a link in the meantime. This is why staging cannot use `published_file`, which works on paths.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import IO

from megaclass.errors import DataError
from megaclass_launch.operating_system import open_flags

# Flags that Windows lacks are 0 there, so that the module can be imported; staging itself is for Linux.
_FOLDER = os.O_RDONLY | open_flags("O_DIRECTORY", "O_NOFOLLOW", "O_CLOEXEC")


def is_inside(name: str) -> bool:
    """Tells whether a relative name stays below its folder, and is one that the file system can have."""
    pure = PurePosixPath(name)
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        return False
    return bool(pure.parts) and not pure.is_absolute() and ".." not in pure.parts and "\0" not in name


class SafeFolder:
    """An existing folder that belongs to this user; names are relative to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.is_symlink():
            raise DataError(
                f"{path} is a symbolic link: name the folder itself, so that the link cannot be changed meanwhile."
            )
        self.handle = os.open(path, _FOLDER)
        try:
            self._require_own(self.handle)
        except DataError:
            os.close(self.handle)
            raise

    def __enter__(self) -> SafeFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self.handle)

    def _require_own(self, handle: int) -> None:
        found = os.fstat(handle)
        if found.st_uid != os.geteuid():
            raise DataError(
                f"{self.path} belongs to user {found.st_uid} (you are {os.geteuid()}), not to you: choose a folder of your "
                f"own. Another user could put files and links there."
            )
        if found.st_mode & stat.S_IWOTH:
            raise DataError(
                f"{self.path} is world-writable: every user may write to it. Choose a folder of your own below it, for "
                f"example {self.path / 'faces'}, or chmod o-w it."
            )
        for above in self.path.resolve().parents:
            mode = above.stat().st_mode
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                raise DataError(
                    f"{self.path} lies in {above}, where every user may replace it by another folder: choose a place that "
                    f"keeps users apart (as /dev/shm and /tmp do, mode 1777), or chmod o-w {above}."
                )

    def path_of(self, name: str) -> Path:
        """Returns a path to a file in the folder through the open handle, which a renamed folder does not change."""
        return Path(f"/proc/self/fd/{self.handle}") / name

    @contextlib.contextmanager
    def opened(self, folder: PurePosixPath, *, create: bool = False) -> Iterator[int]:
        """Yields a handle of a folder below; with `create`, missing folders are made."""
        assert folder == PurePosixPath() or is_inside(str(folder)), folder
        handle = os.dup(self.handle)
        try:
            for part in folder.parts:
                if create:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, 0o700, dir_fd=handle)
                handle, above = _open_folder(part, handle), handle
                os.close(above)
            yield handle
        finally:
            os.close(handle)

    @contextlib.contextmanager
    def new_file(self, name: PurePosixPath) -> Iterator[IO[bytes]]:
        """Yields a new file that only this user can read. It replaces an existing file or link, which is not followed."""
        with self.opened(name.parent, create=True) as folder:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name.name, dir_fd=folder)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(name.name, flags, 0o600, dir_fd=folder), "wb") as file:
                yield file

    @contextlib.contextmanager
    def existing_file(self, name: PurePosixPath) -> Iterator[IO[bytes]]:
        with self.opened(name.parent) as folder:
            # Do not block on a pipe in place of the file.
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            with os.fdopen(os.open(name.name, flags, dir_fd=folder), "rb") as file:
                yield file

    def size_and_time(self, name: PurePosixPath) -> tuple[int, int] | None:
        """Returns size and modification time of a regular file; None if there is none."""
        try:
            with self.opened(name.parent) as folder:
                found = os.stat(name.name, dir_fd=folder, follow_symlinks=False)
        except FileNotFoundError:
            return None
        return (found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else None

    def rename(self, name: PurePosixPath, new: PurePosixPath) -> None:
        """Renames a file within one folder."""
        assert name.parent == new.parent
        with self.opened(name.parent) as folder:
            os.replace(name.name, new.name, src_dir_fd=folder, dst_dir_fd=folder)

    def remove(self, name: PurePosixPath) -> None:
        """Removes a file, or a link without its target, if it exists."""
        with contextlib.suppress(FileNotFoundError), self.opened(name.parent) as folder:
            os.unlink(name.name, dir_fd=folder)

    def remove_empty_folders(self, is_removed: Callable[[str], bool]) -> None:
        """Removes files whose names match `is_removed`, then all folders below that are empty."""
        for _, folders, files, handle in os.fwalk(".", topdown=False, follow_symlinks=False, dir_fd=self.handle):
            for name in filter(is_removed, files):
                os.unlink(name, dir_fd=handle)
            for name in folders:
                with contextlib.suppress(OSError):
                    os.rmdir(name, dir_fd=handle)


def _open_folder(name: str, above: int) -> int:
    try:
        return os.open(name, _FOLDER, dir_fd=above)
    except NotADirectoryError:
        # Linux reports a link in place of a folder like this, too.
        if stat.S_ISLNK(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
            raise OSError(errno.ELOOP, f"{name} is a symbolic link, which is not followed") from None
        raise
