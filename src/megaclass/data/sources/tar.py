"""Shards of (jpg, cls): `.tar` files in which a sample is an image and a text file with its class, of one name.

Nothing is ever unpacked: an index of where each image lies is made once and cached, and images are read in place.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaclass.data.decode import IMAGE_SUFFIXES, MAX_ENCODED_BYTES, first_image_size
from megaclass.data.sources.column_cache import ColumnWriter, cached_columns, describe_uncached
from megaclass.data.sources.files import require_plausible_labels
from megaclass.errors import DataError

_BLOCK = 512
# Long names travel in members of their own; one of them is at most this long.
_MAX_NAME_BYTES = 2**16
_REGULAR, _LONG_NAME, _PAX = (b"0", b"\0", b"7"), b"L", b"x"


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
                content = os.pread(file.fileno(), length, int(self.offsets[index]))
        except (OSError, OverflowError) as error:
            raise DataError(
                f"Cannot read {self.name_of(index)}: {getattr(error, 'strerror', None) or error}."
            ) from error
        if len(content) != length:
            raise DataError(
                f"Cannot read {self.name_of(index)}: the shard ends too early; it changed while it was read."
            )
        return content

    def name_of(self, index: int) -> str:
        return f"{self.shards[self.shard_of[index]]}, byte {self.offsets[index]}"

    def describe(self) -> str:
        height, width = self.image_size
        contents = f"{self.num_images:,} images of {self.num_classes:,} classes, {width} × {height}"
        kind = f"{len(self.shards)} tar shards of (jpg, cls)"
        return f"{kind} at {self.shards[0].parent}: {contents}{describe_uncached(self.why_uncached)}"


def open_tars(place: Path) -> TarSource:
    """One `.tar` file, or all in a folder, in the order of their names."""
    shards = [place] if place.is_file() else sorted(place.glob("*.tar"))

    def build(writer: ColumnWriter) -> dict[str, Any]:
        for number, shard in enumerate(shards):
            rows = np.array(list(_samples(shard)), dtype=np.int64).reshape(-1, 3)
            writer.append(np.full(len(rows), number), *rows.T)
        if writer.num_rows == 0:
            raise DataError(f"Cannot open the data at {place}: no sample of (jpg, cls) in it.")
        return {}

    name = f"{place.name}.cache" if place.is_file() else "shards.cache"
    columns = cached_columns(name, shards, 4, build)
    shard_of, offsets, lengths, labels = columns.arrays
    is_sound = shard_of.min() >= 0 and shard_of.max() < len(shards) and labels.min() >= 0 and offsets.min() >= 0
    if not is_sound or lengths.min() < 0 or lengths.max() > MAX_ENCODED_BYTES:
        raise DataError(f"The cache {shards[0].parent / name} is damaged: remove it, and it is made anew.")
    source = TarSource(shards, shard_of, offsets, lengths, labels, columns.why_uncached)
    require_plausible_labels(labels, source.name_of)
    return source


def _samples(shard: Path) -> Iterator[tuple[int, int, int]]:
    """(offset, length, label) of each sample; its members follow each other."""
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
        raise DataError(
            f"The sample {key.lstrip('/')!r} in {shard} has no {missing}: expected a jpg and a cls, side by side."
        )
    return *image, label


def _label(content: bytes, shard: Path, name: str) -> int:
    text = content.strip()
    if not (text.isdigit() and len(text) <= 18):
        raise DataError(f"Cannot read {name!r} in {shard}: {text[:40]!r}; expected a class, a whole number from 0.")
    return int(text)


def _members(shard: Path) -> Iterator[tuple[str, int, int, bytes]]:
    """(name, offset, length, content where it may be a class) of the regular files."""
    try:
        with shard.open("rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            position, long_name = 0, None
            while position + _BLOCK <= num_bytes:
                file.seek(position)
                header = file.read(_BLOCK)
                if not header.strip(b"\0"):
                    return
                length = _number(header[124:136], shard, position)
                _require_sound(header, shard, position, length, num_bytes)
                kind, offset = header[156:157], position + _BLOCK
                if kind in (_LONG_NAME, _PAX):
                    long_name = _long_name(kind, file.read(min(length, _MAX_NAME_BYTES))) or long_name
                else:
                    name = long_name if long_name is not None else _short_name(header)
                    long_name = None
                    if kind in _REGULAR:
                        _require_inside(name, shard)
                        yield name, offset, length, file.read(min(length, 64)) if name.endswith(".cls") else b""
                position = offset + (length + _BLOCK - 1) // _BLOCK * _BLOCK
    except OSError as error:
        raise DataError(f"Cannot read the shard {shard}: {error.strerror}.") from error


def _number(field: bytes, shard: Path, position: int) -> int:
    if field[0] & 0x80:
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
    text = field.strip(b" \0")
    if not all(48 <= character <= 55 for character in text):
        raise DataError(f"Cannot read {shard}, byte {position}: {field!r} is no octal number; is this a tar file?")
    return int(text or b"0", 8)


def _require_sound(header: bytes, shard: Path, position: int, length: int, num_bytes: int) -> None:
    announced = _number(header[148:156], shard, position)
    if announced != sum(header[:148]) + 8 * ord(" ") + sum(header[156:]):
        raise DataError(f"Cannot read {shard}, byte {position}: the header's checksum is wrong; is the shard damaged?")
    if length > num_bytes - position - _BLOCK:
        raise DataError(
            f"Cannot read {shard}, byte {position}: the member needs {length:,} bytes, but the shard ends before; "
            f"is it truncated?"
        )
    if header[156:157] in _REGULAR and length > MAX_ENCODED_BYTES:
        raise DataError(
            f"Cannot read {shard}, byte {position}: a member of {length:,} bytes, at most {MAX_ENCODED_BYTES:,} are accepted."
        )


def _short_name(header: bytes) -> str:
    name, prefix = header[:100].split(b"\0")[0], header[345:500].split(b"\0")[0]
    is_ustar = header[257:262] == b"ustar"
    return os.fsdecode(prefix + b"/" + name if prefix and is_ustar else name)


def _long_name(kind: bytes, content: bytes) -> str | None:
    """GNU: the name itself. pax: lines of `length key=value`, of which `path` counts."""
    if kind == _LONG_NAME:
        return os.fsdecode(content.split(b"\0")[0])
    for line in content.split(b"\n"):
        key, equals, value = line.partition(b" ")[2].partition(b"=")
        if key == b"path" and equals:
            return os.fsdecode(value)
    return None


def _require_inside(name: str, shard: Path) -> None:
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts:
        raise DataError(
            f"{shard} holds a member named {name!r}, which climbs out of its folder. Do not trust this file."
        )
