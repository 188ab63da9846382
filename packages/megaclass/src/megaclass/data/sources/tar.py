"""Tar shards of (jpg, cls): a sample is an image and a text file with its class, which share a name.

Nothing is unpacked: an index of all images is made once and cached, and images are read in place.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaclass.data.decode import IMAGE_SUFFIXES, MAX_ENCODED_BYTES, first_image_size
from megaclass.data.sources.column_cache import cached_columns, describe_uncached
from megaclass.data.sources.files import require_plausible_labels
from megaclass.data.sources.source import CLASSES_FILE, SourceFormat
from megaclass.errors import DataError
from megaclass_launch.operating_system import read_at

# Names of members are in headers of any length; no sound one is longer than this.
_MAX_READ_BYTES = 2**20
# What TarFile raises on damaged bytes: its own errors, numbers that cannot be, and headers nested without end.
_BAD_TAR = (tarfile.TarError, OSError, ValueError, OverflowError, RecursionError)


@dataclass(frozen=True, eq=False)
class TarSource:
    shards: list[Path]
    shard_of: NDArray[np.int64]
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    labels: NDArray[np.int64]
    why_uncached: str = ""

    @property
    def num_images(self) -> int:
        return len(self.labels)

    @cached_property
    def num_classes(self) -> int:
        return int(self.labels.max()) + 1

    @cached_property
    def image_size(self) -> tuple[int, int]:
        return first_image_size(self)

    def read(self, index: int) -> bytes:
        shard, length = self.shards[self.shard_of[index]], int(self.lengths[index])
        try:
            with shard.open("rb", buffering=0) as file:
                content = read_at(file.fileno(), length, int(self.offsets[index]))
        except (OSError, OverflowError) as error:
            raise DataError(
                f"Cannot read {self.name_of(index)}: {getattr(error, 'strerror', None) or error}."
            ) from error
        if len(content) != length:
            raise DataError(f"Cannot read {self.name_of(index)}: the shard became shorter since it was opened.")
        return content

    def name_of(self, index: int) -> str:
        return f"{self.shards[self.shard_of[index]]}, byte {self.offsets[index]}"

    def describe(self) -> str:
        height, width = self.image_size
        contents = f"{self.num_images:,} images of {self.num_classes:,} classes, {width} × {height}"
        kind = f"{len(self.shards)} tar shards of (jpg, cls)"
        return f"{kind} at {self.shards[0].parent}: {contents}{describe_uncached(self.why_uncached)}"


class TarFormat(SourceFormat):
    """One `.tar` file, or all in a folder, in the order of their names."""

    suffix = ".tar"
    contents = "*.tar"

    @classmethod
    def matches(cls, path: str) -> bool:
        place = Path(path)
        return (place.is_file() and place.suffix == cls.suffix) or (place.is_dir() and any(place.glob("*.tar")))

    def shards(self) -> list[Path]:
        return [self.place] if self.place.is_file() else sorted(self.place.glob("*.tar"))

    def open(self) -> TarSource:
        shards = self.shards()

        def build() -> tuple[dict[str, Any], Sequence[NDArray[np.int64]]]:
            samples = [np.array(list(_samples(shard)), dtype=np.int64).reshape(-1, 3) for shard in shards]
            if not any(map(len, samples)):
                raise DataError(f"Cannot open the data at {self.place}: no sample of (jpg, cls) in it.")
            return {}, (np.repeat(np.arange(len(shards)), [*map(len, samples)]), *np.concatenate(samples).T)

        name = f"{self.place.name}.cache" if self.place.is_file() else "shards.cache"
        columns = cached_columns(name, shards, 4, build)
        shard_of, offsets, lengths, labels = columns.arrays
        is_sound = shard_of.min() >= 0 and shard_of.max() < len(shards) and labels.min() >= 0 and offsets.min() >= 0
        if not is_sound or lengths.min() < 0 or lengths.max() > MAX_ENCODED_BYTES:
            raise DataError(f"The cache {shards[0].parent / name} is damaged: remove it, and it is written again.")
        source = TarSource(shards, shard_of, offsets, lengths, labels, columns.why_uncached)
        require_plausible_labels(labels, source.name_of)
        return source

    def files(self) -> list[Path]:
        shards = self.shards()
        beside = (self.folder / CLASSES_FILE, self.folder / "shards.cache", Path(f"{shards[0]}.cache"))
        return shards + [file for file in beside if file.is_file()]


def _samples(shard: Path) -> Iterator[tuple[int, int, int]]:
    """Yields (offset, length, label) of each sample, whose members follow each other."""
    key, image, label = "", None, None
    for name, offset, length, content in _members(shard):
        stem, _, suffix = name.rpartition("/")[2].partition(".")
        member_key = f"{name.rpartition('/')[0]}/{stem}"
        if member_key != key:
            if key:
                yield _whole(shard, key, image, label)
            key, image, label = member_key, None, None
        if f".{suffix}".lower() in IMAGE_SUFFIXES:
            image = (offset, length)
        elif suffix == "cls":
            label = _label(content, shard, name)
    if key:
        yield _whole(shard, key, image, label)


def _whole(shard: Path, key: str, image: tuple[int, int] | None, label: int | None) -> tuple[int, int, int]:
    if image is None or label is None:
        missing = "image" if image is None else "class (.cls)"
        hint = (
            f" If this is a folder that was archived, extract it (tar -xf {shard}) and name the folder."
            if image
            else ""
        )
        raise DataError(
            f"The sample {key.lstrip('/')!r} in {shard} has no {missing}: expected a jpg and a cls, side by side.{hint}"
        )
    return *image, label


def _label(content: bytes, shard: Path, name: str) -> int:
    text = content.strip()
    if not (text.isdigit() and len(text) <= 18):
        raise DataError(f"Cannot read {name!r} in {shard}: {text[:40]!r}; expected a class, an integer of 0 or more.")
    return int(text)


class _ShortReads(io.BufferedReader):
    """A file that never returns more than a header may hold: a damaged length must not reserve gigabytes of memory."""

    def read(self, size: int | None = -1) -> bytes:
        return super().read(_MAX_READ_BYTES if size is None or size < 0 else min(size, _MAX_READ_BYTES))


def _members(shard: Path) -> Iterator[tuple[str, int, int, bytes]]:
    """Yields (name, offset, length, content if it may be a class) of the regular files."""
    try:
        with _ShortReads(io.FileIO(shard)) as file, tarfile.open(fileobj=file, mode="r:") as archive:
            while (member := archive.next()) is not None:
                # TarFile would keep every member, which takes gigabytes for millions of them.
                archive.members = []  # type: ignore[attr-defined]
                where = f"{shard}, byte {member.offset}"
                if archive.offset <= member.offset:
                    raise DataError(f"Cannot read {where}: a member of {member.size} bytes; is the shard damaged?")
                if member.isreg() and not member.issparse():
                    if member.size > MAX_ENCODED_BYTES:
                        allowed = f"at most {MAX_ENCODED_BYTES:,} are accepted"
                        raise DataError(f"Cannot read {where}: a member of {member.size:,} bytes, {allowed}.")
                    _require_inside(member.name, shard)
                    content = b""
                    if member.name.endswith(".cls"):
                        file.seek(member.offset_data)
                        content = file.read(min(member.size, 64))
                    yield member.name, member.offset_data, member.size, content
            # TarFile takes a damaged header for the end of the archive. The real end is a block of zeros, or of the file.
            file.seek(archive.offset)
            if file.read(tarfile.BLOCKSIZE).strip(b"\0"):
                raise DataError(f"Cannot read {shard}, byte {archive.offset}: no sound header; is the shard damaged?")
    except _BAD_TAR as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"Cannot read the shard {shard}: {reason}; is it truncated or damaged?") from error


def _require_inside(name: str, shard: Path) -> None:
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts:
        raise DataError(
            f"{shard} holds a member named {name!r}, whose path leads out of its folder. Do not trust this file."
        )
