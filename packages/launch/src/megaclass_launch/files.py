"""Files that appear whole or not at all, files that only their owner may read, and locks between processes.

A writer that dies in the middle must never leave half a file under the final name. Every writer of the package therefore
goes through this module: write next to the target, flush to the disk, rename. A rename is atomic within one file system,
which is why the unfinished file lies in the folder of the finished one.

Private files and folders (logs, metrics, results: whatever may reveal something about the data) have mode 0600 or 0700,
further restricted by the umask. SECURITY.md lists which kinds of files are private and which follow the umask.
"""

import errno
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from megaclass_launch.errors import UserError
from megaclass_launch.operating_system import open_flags

_IS_WINDOWS = os.name == "nt"
_PRIVATE_FILE_MODE = 0o600
_PRIVATE_FOLDER_MODE = 0o700


@contextmanager
def published_file(path: Path, *, is_private: bool = False) -> Iterator[Path]:
    """Yields the path of an empty file to write and check; when the block ends without an error, that file becomes `path`.

    After an error nothing new is left behind, and what was at `path` before is unchanged.
    is_private: only the owner may read the file, at any moment of its writing.
    """
    if not path.parent.is_dir():
        raise UserError(f"Cannot write {path}: the folder {path.parent} does not exist.")
    # The suffix stays last, because some writers (onnx) choose the format by it.
    unfinished = path.with_name(f".{unique_name(path.stem)}.tmp{path.suffix}")
    mode = (_PRIVATE_FILE_MODE if is_private else 0o666) & ~_umask()
    # Created here, because most writers create files that everyone may read, and follow a symbolic link that another user
    # of the folder has put under this name. O_EXCL follows none. Before the `try`: another's file is not removed.
    os.close(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
    try:
        yield unfinished
        # Some writers (safetensors) create files for their owner only; the result follows the user's umask.
        unfinished.chmod(mode)
        flush(unfinished)
        unfinished.replace(path)
        flush(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def published_folder(path: Path) -> Iterator[Path]:
    """Yields a folder to fill and check; when the block ends without an error, it becomes `path`.

    After an error nothing new is left behind, and what was at `path` before is unchanged.
    """
    if path.exists() and not path.is_dir():
        raise UserError(f"Cannot write the folder {path}: a file with that name exists.")
    unique = unique_name(path.name)
    unfinished, replaced = path.with_name(f".{unique}.tmp"), path.with_name(f".{unique}.old")
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        for file in unfinished.iterdir():
            flush(file)
        flush(unfinished)
        if path.exists():
            # A folder cannot be renamed onto another: for a moment there is none, but never a partial one.
            path.rename(replaced)
        unfinished.rename(path)
        flush(path.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        if replaced.exists() and not path.exists():
            replaced.rename(path)
        shutil.rmtree(replaced, ignore_errors=True)


def write_text(path: Path, text: str, *, is_private: bool = False) -> None:
    """Writes a text file that appears whole or not at all."""
    with published_file(path, is_private=is_private) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def folder_bytes(folder: Path) -> int:
    """Returns the bytes of the files in the folder itself."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def free_bytes(folder: Path) -> int:
    """Returns the bytes that this user may still write to the disk of the folder, which need not exist yet."""
    existing = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.is_dir())
    return shutil.disk_usage(existing).free


def unique_name(name: str) -> str:
    """Returns a file name that no other writer uses: with the host, the process and a random part.

    The process number alone is not enough: hosts share folders, and two containers of one host often have the same number.
    """
    # Cut: names of files have at most 255 bytes.
    return f"{name[:32]}.{socket.gethostname()[:32]}.{os.getpid()}.{os.urandom(4).hex()}"


def flush(path: Path) -> None:
    """Waits until the content of a file, or the entries of a folder, are on the disk.

    A rename may reach the disk before the content it names; without this a power cut could leave an empty file.
    """
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        if not (path.is_dir() and _is_unsupported_for_folders(error)):
            raise


def _is_unsupported_for_folders(error: OSError) -> bool:
    """Tells whether the system cannot flush folders at all: some FUSE file systems, and Windows, which does not open them.

    The files themselves are flushed there as well; after a power cut a rename may be missing, but is never half done.
    """
    return error.errno in (errno.EINVAL, errno.ENOTSUP) or (_IS_WINDOWS and error.errno == errno.EACCES)


def open_private(path: Path, mode: str, *, follows_links: bool = True, **options: Any) -> IO[Any]:
    """Opens a file for writing, like `path.open`; only the owner can read a file that this call creates.

    follows_links: False refuses a symbolic link at `path`, which another user may have put there.
    """
    return open(path, mode, opener=partial(_open_private, follows_links), **options)


def write_private(path: Path, text: str) -> None:
    """Writes a private text file in UTF-8, replacing its content; refuses to write through a symbolic link."""
    with open_private(path, "w", follows_links=False, encoding="utf-8") as file:
        file.write(text)


def read_json_lines(path: Path, is_record: Callable[[dict[str, Any]], bool]) -> tuple[list[dict[str, Any]], int]:
    """Returns the objects of a file with one JSON object per line, and the number of lines that hold no record.

    A crash can cut off the last line, and a power cut can leave other bytes in place of lines; neither stops a reader.
    A file that does not exist has no records. A last line without its newline is still being written and is not counted.
    """
    if not path.is_file():
        return [], 0
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    records = [record for record in map(_json_object, lines) if record is not None and is_record(record)]
    return records, len(lines) - len(records)


def make_private_folder(path: Path) -> None:
    """Creates a private folder if it does not exist; existing folders and new parents keep the user's mode."""
    path.mkdir(mode=_PRIVATE_FOLDER_MODE, parents=True, exist_ok=True)


def _json_object(line: str) -> dict[str, Any] | None:
    """Returns the JSON object in a line; None if there is none, or if one of its whole numbers has more than 64 bits."""
    try:
        value = json.loads(line, parse_int=_whole_number)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _whole_number(digits: str) -> int:
    # Larger ones cannot be numbers of a run, and most arithmetic raises OverflowError on them.
    if abs(number := int(digits)) >= 2**63:
        raise ValueError(f"{digits[:20]}… is too large")
    return number


def _umask() -> int:
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").splitlines()
        return int(next(line for line in lines if line.startswith("Umask:")).split()[1], 8)
    # Elsewhere it can only be read by setting it. What another thread creates in this moment is too private.
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _open_private(follows_links: bool, path: str, flags: int) -> int:
    more = open_flags("O_CLOEXEC") if follows_links else open_flags("O_CLOEXEC", "O_NOFOLLOW")
    return os.open(path, flags | more, _PRIVATE_FILE_MODE)
