"""The manifest of a checkpoint lists its files with their sizes, digests and classes."""

import hashlib
import json
import os
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megaclass.checkpoint.class_ranges import whole_up_to
from megaclass.data.fingerprint import DataFingerprint
from megaclass.errors import CheckpointError

FORMAT = 1
NAME = "manifest.json"
SHARED = "shared.safetensors"
CLASSES = "classes.txt"
# Prefix of tensors in a shard that belong to the rank that wrote it, not to its classes.
RANK_PREFIX = "rank."
# One thread hashes 0.5 to 2 GB per second; local NVMe and parallel file systems deliver several.
_NUM_HASHERS = 8


@dataclass(frozen=True, kw_only=True)
class SavedFile:
    """One file of a checkpoint; class_start equals class_stop for files without centres."""

    num_bytes: int
    sha256: str
    class_start: int = 0
    class_stop: int = 0


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of manifest.json."""

    step: int
    num_classes: int
    world_size: int
    config: str
    """The run's settings as TOML."""
    files: Mapping[str, SavedFile]
    metrics: Mapping[str, float] = field(default_factory=dict)
    """`loss`, and `verification_accuracy` if it was evaluated, at this step."""
    data: DataFingerprint = field(default_factory=DataFingerprint)
    """Fingerprint of the training data; empty in older checkpoints."""

    def digest(self) -> str:
        """Returns a digest by which ranks compare the manifests that they read."""
        return _digest({"format": FORMAT, **asdict(self)})

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """The run's settings by section. `read_manifest` has checked that they can be read."""
        return tomllib.loads(self.config)

    def write(self, folder: Path) -> None:
        values = {"format": FORMAT, **asdict(self)}
        # write_file refuses to replace a file, and an earlier attempt may have left one.
        (folder / NAME).unlink(missing_ok=True)
        write_file(folder / NAME, [json.dumps({**values, "sha256": _digest(values)}, indent=1).encode()])


def read_manifest(folder: Path) -> Manifest:
    path = folder / NAME
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has format {values['format']!r}, not {FORMAT}: it was written by another version."
            )
        # The digest covers everything else in the file, so it is taken out before the rest is hashed.
        if values.pop("sha256") != _digest(values):
            raise CheckpointError(f"{path} is damaged: its SHA-256 is not the one it states.")
        del values["format"]
        files = {str(name): SavedFile(**entry) for name, entry in values.pop("files").items()}
        data = DataFingerprint(**values.pop("data", {}))
        manifest = Manifest(files=files, data=data, **values)
        _check_types(manifest)
        return manifest
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing: the folder is not a checkpoint, or its save never finished."
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a manifest: {type(error).__name__}: {error}") from error


def _check_types(manifest: Manifest) -> None:
    """Checks every field before it is used: the digest proves nothing, because a forger can also compute it."""

    def require(field_name: str, value: object, is_right: bool, expected: str) -> None:
        if not is_right:
            raise TypeError(f"{field_name} is {str(value)[:60]!r}, expected {expected}")

    for name, least in (("step", 0), ("num_classes", 1), ("world_size", 1)):
        value = getattr(manifest, name)
        require(name, value, _is_count(value) and value >= least, f"a whole number from {least}")
    require("config", manifest.config, isinstance(manifest.config, str), "text")
    sections = tomllib.loads(manifest.config)
    require("config", sections, all(isinstance(section, dict) for section in sections.values()), "sections of settings")
    for name, saved in manifest.files.items():
        for key in ("num_bytes", "class_start", "class_stop"):
            value = getattr(saved, key)
            require(f"{key} of {name[:60]!r}", value, _is_count(value), "a whole number from 0")
        require(f"sha256 of {name[:60]!r}", saved.sha256, isinstance(saved.sha256, str), "text")
    metrics, data = manifest.metrics, manifest.data
    # A loss may be infinite or NaN.
    is_right = isinstance(metrics, dict) and all(
        isinstance(value, float) or _is_count(value) or _is_count(-1 * value) for value in metrics.values()
    )
    require("metrics", metrics, is_right, "names with numbers")
    require("fingerprint of data", data.fingerprint, isinstance(data.fingerprint, str), "text")
    is_right = isinstance(data.class_images, dict) and all(
        re.fullmatch("[0-9]{1,18}", label) is not None
        and isinstance(digests, list)
        and all(isinstance(digest, str) for digest in digests)
        for label, digests in data.class_images.items()
    )
    require("class_images of data", data.class_images, is_right, "class numbers with lists of digests")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def check_files(folder: Path, manifest: Manifest) -> None:
    """Raises a CheckpointError unless every file is complete and unaltered and every class has its centre."""
    # Sizes first, because checking them costs nothing.
    check_sizes(folder, manifest)
    check_digests(folder, manifest, manifest.files)


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Does the part of `check_files` that reads no file."""
    _check_classes(folder, manifest)
    for name, saved in manifest.files.items():
        path = folder / name
        if Path(name).name != name:
            raise CheckpointError(f"{folder / NAME} lists {name!r}, which is not the name of a file next to it.")
        if not path.is_file():
            raise CheckpointError(f"{path} is missing, though {NAME} lists it.")
        if path.stat().st_size != saved.num_bytes:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes, but {NAME} says {saved.num_bytes}.")


def check_digests(folder: Path, manifest: Manifest, names: Collection[str]) -> None:
    """Compares the digests of these files. Hashing releases the GIL, so other threads run."""
    with ThreadPoolExecutor(_NUM_HASHERS) as hashers:
        digests = hashers.map(lambda name: _file_digest(folder / name), names)
        for name, digest in zip(names, digests, strict=True):
            if digest != manifest.files[name].sha256:
                raise CheckpointError(f"{folder / name} is damaged: its SHA-256 is not the one in {NAME}.")


def _check_classes(folder: Path, manifest: Manifest) -> None:
    next_class = whole_up_to((saved.class_start, saved.class_stop) for saved in manifest.files.values())
    if next_class != manifest.num_classes or SHARED not in manifest.files:
        raise CheckpointError(
            f"{folder / NAME} lists centres up to class {next_class} of {manifest.num_classes} without a gap, "
            f"and {'the' if SHARED in manifest.files else 'no'} file {SHARED}: it is not complete."
        )


def _file_digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error


def write_file(
    path: Path, chunks: Iterable[bytes | memoryview], class_start: int = 0, class_stop: int = 0
) -> SavedFile:
    """Writes and flushes a new file with these bytes, and returns its entry for the manifest."""
    digest, num_bytes = hashlib.sha256(), 0
    # O_EXCL: a second writer, such as a process that outlived its job, gets an error instead of mixing its bytes with ours.
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        for chunk in chunks:
            # Both hashing and writing release the GIL for a chunk of this size: the training loop runs meanwhile.
            digest.update(chunk)
            num_bytes += len(chunk)
            # One write call takes at most 2 GiB and may take less.
            left = memoryview(chunk)
            while left:
                left = left[os.write(handle, left) :]
        os.fsync(handle)
    finally:
        os.close(handle)
    return SavedFile(num_bytes=num_bytes, sha256=digest.hexdigest(), class_start=class_start, class_stop=class_stop)
