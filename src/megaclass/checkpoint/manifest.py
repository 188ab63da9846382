"""The manifest of a checkpoint: which files belong to it, their sizes and digests, and the classes they hold."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from megaclass.errors import CheckpointError

FORMAT = 1
NAME = "manifest.json"


@dataclass(frozen=True, kw_only=True)
class SavedFile:
    """One file of a checkpoint; class_start and class_stop are equal for files without centres."""

    num_bytes: int
    sha256: str
    class_start: int = 0
    class_stop: int = 0


@dataclass(frozen=True, kw_only=True)
class Manifest:
    step: int
    num_classes: int
    world_size: int
    config: str
    """The run's settings as TOML."""
    files: Mapping[str, SavedFile]

    def write(self, folder: Path) -> None:
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=1)
        path = folder / NAME
        path.write_text(text, encoding="utf-8")
        flush(path)


def read_manifest(folder: Path) -> Manifest:
    path = folder / NAME
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values.pop("format") != FORMAT:
            raise CheckpointError(f"{path} has another format than {FORMAT}: it was written by another version.")
        files = {str(name): SavedFile(**entry) for name, entry in values.pop("files").items()}
        return Manifest(files=files, **values)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a manifest: {error}") from error


def check_files(folder: Path, manifest: Manifest) -> None:
    """Every file is there, whole and unaltered, or a CheckpointError that names it."""
    for name, saved in manifest.files.items():
        path = folder / name
        if Path(name).name != name or not path.is_file():
            raise CheckpointError(f"{path} is missing, though {NAME} lists it.")
        found = describe_file(path)
        if found.num_bytes != saved.num_bytes:
            raise CheckpointError(f"{path} has {found.num_bytes} bytes, {NAME} says {saved.num_bytes}.")
        if found.sha256 != saved.sha256:
            raise CheckpointError(f"{path} is damaged: its SHA-256 is not the one in {NAME}.")


def describe_file(path: Path, class_start: int = 0, class_stop: int = 0) -> SavedFile:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return SavedFile(num_bytes=path.stat().st_size, sha256=digest, class_start=class_start, class_stop=class_stop)


def flush(path: Path) -> None:
    """Waits until the file, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
