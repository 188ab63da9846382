"""A file or folder that appears whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megaclass.errors import ExportError


@contextmanager
def published_file(path: Path) -> Iterator[Path]:
    """Yields a path to write and check; when the block ends without an error the file there becomes `path`.

    On an error nothing new is left behind, and what stood at `path` before still stands. The unfinished file lies
    beside the finished one because a rename is atomic only within a file system.
    """
    if not path.parent.is_dir():
        raise ExportError(f"Cannot write {path}: the folder {path.parent} does not exist.")
    # The suffix stays last: onnx chooses how to write by it.
    unfinished = path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")
    try:
        yield unfinished
        # safetensors keeps its files to their owner; a model is for everyone the umask lets in.
        unfinished.chmod(0o666 & ~_umask())
        _flush(unfinished)
        unfinished.replace(path)
        _flush(path.parent)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def published_folder(path: Path) -> Iterator[Path]:
    """Yields a folder to fill and check; when the block ends without an error it becomes `path`.

    On an error nothing new is left behind, and what stood at `path` before still stands.
    """
    if path.exists() and not path.is_dir():
        raise ExportError(f"Cannot write the folder {path}: a file stands there.")
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    replaced = path.with_name(f".{path.name}.{os.getpid()}.old")
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        for file in unfinished.iterdir():
            _flush(file)
        _flush(unfinished)
        if path.exists():
            # A folder cannot be renamed onto another: for a moment there is none, and never half of one.
            path.rename(replaced)
        unfinished.rename(path)
        _flush(path.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
        if replaced.exists() and not path.exists():
            replaced.rename(path)
        shutil.rmtree(replaced, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _flush(path: Path) -> None:
    """A rename may reach the disk before the content it names; without this a power cut could leave half a file."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
