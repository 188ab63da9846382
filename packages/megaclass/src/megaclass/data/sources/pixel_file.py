"""Uncompressed images: nothing is decoded. Written by `megaclass data pack --format pixels`.

A folder with pixels.bin, the images one after another (uint8, H x W x RGB), labels.bin (int64, little-endian) and
pixels.json, which tells the numbers, the size, and the rows whose image could not be read when it was packed.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from megaclass.data.decode import MAX_PIXELS
from megaclass.data.sources.source import CLASSES_FILE, SourceFormat, list_names
from megaclass.errors import DataError
from megaclass_launch.operating_system import read_at

PIXELS_FILE, LABELS_FILE, FACTS_FILE = "pixels.bin", "labels.bin", "pixels.json"
_VERSION = 1
_MAX_FACTS_BYTES = 2**26


@dataclass(frozen=True, eq=False)
class PixelFileSource:
    """Images of one size in one file; `read` wraps them as PPM, for the tools that want encoded images."""

    folder: Path
    labels: NDArray[np.int64]
    num_classes: int
    image_size: tuple[int, int]
    unreadable: NDArray[np.int64]
    """Rows without an image, rising."""
    _file: BinaryIO

    @property
    def num_images(self) -> int:
        return len(self.labels)

    def read(self, index: int) -> bytes:
        if index in self._unreadable:
            raise DataError(f"Cannot read {self.name_of(index)}: the image could not be decoded when it was packed.")
        height, width = self.image_size
        return b"P6 %d %d 255\n" % (width, height) + self._pixels(index)

    def copy_pixels(self, indices: NDArray[np.int64], out_BHW3: NDArray[np.uint8]) -> None:
        """Copies images that have this size and are readable; any other index must not be asked for."""
        for row, index in enumerate(indices.tolist()):
            out_BHW3[row].reshape(-1)[:] = np.frombuffer(self._pixels(index), dtype=np.uint8)

    def has_all(self, indices: NDArray[np.int64]) -> bool:
        """Tells whether all of these images could be read when they were packed."""
        return not len(self.unreadable) or not np.isin(indices, self.unreadable).any()

    def name_of(self, index: int) -> str:
        return f"{self.folder / PIXELS_FILE}, image {index}"

    def describe(self) -> str:
        height, width = self.image_size
        without = f", {len(self.unreadable):,} of them unreadable" if len(self.unreadable) else ""
        return (
            f"pixels at {self.folder}: {self.num_images:,} images of {self.num_classes:,} classes, "
            f"{width} × {height}, uncompressed{without}"
        )

    @cached_property
    def _unreadable(self) -> frozenset[int]:
        return frozenset(self.unreadable.tolist())

    def _pixels(self, index: int) -> bytes:
        # Not mapped: there a disk error, or a file that became shorter, would end the process.
        num_bytes = self.image_size[0] * self.image_size[1] * 3
        try:
            pixels = read_at(self._file.fileno(), num_bytes, index * num_bytes)
        except OSError as error:
            raise DataError(f"Cannot read {self.name_of(index)}: {error.strerror}.") from error
        if len(pixels) != num_bytes:
            raise DataError(
                f"{self.folder / PIXELS_FILE} has become shorter since it was opened. Write a new one instead."
            )
        return pixels


class PixelFormat(SourceFormat):
    """A folder with pixels.bin, labels.bin and pixels.json."""

    contents = "pixels.bin with labels.bin and pixels.json"

    @classmethod
    def matches(cls, path: str) -> bool:
        return (Path(path) / FACTS_FILE).is_file()

    def check(self) -> None:
        missing = [name for name in (PIXELS_FILE, LABELS_FILE) if not (self.place / name).is_file()]
        if missing:
            raise DataError(
                f"Cannot open the data at {self.place}: {' and '.join(missing)} missing; {list_names(self.place)}."
            )

    def open(self) -> PixelFileSource:
        return open_pixels(self.place)

    def files(self) -> Iterator[Path]:
        yield from (self.place / name for name in (FACTS_FILE, LABELS_FILE, PIXELS_FILE))
        if (self.place / CLASSES_FILE).is_file():
            yield self.place / CLASSES_FILE


def open_pixels(folder: Path) -> PixelFileSource:
    """Maps the files; checks that their sizes and numbers agree."""
    facts = _read_facts(folder / FACTS_FILE)
    height, width, num_images, num_classes = (facts[name] for name in ("height", "width", "num_images", "num_classes"))
    try:
        with _opened(folder / LABELS_FILE, 8 * num_images) as file:
            # All processes of a host share one copy.
            labels = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype="<i8")
        pixels = _opened(folder / PIXELS_FILE, num_images * height * width * 3)
    except OSError as error:
        raise DataError(f"Cannot read the pixels at {folder}: {error.strerror}.") from error
    lowest, highest = int(labels.min()), int(labels.max())
    if lowest < 0 or highest >= num_classes:
        raise DataError(
            f"Cannot read {folder / LABELS_FILE}: it has the class {lowest if lowest < 0 else highest}, "
            f"but {FACTS_FILE} tells of {num_classes} classes."
        )
    unreadable = np.array(sorted(facts["unreadable"]), dtype=np.int64)
    return PixelFileSource(folder, labels, num_classes, (height, width), unreadable, pixels)


def write_facts(
    path: Path, *, num_images: int, num_classes: int, image_size: tuple[int, int], unreadable: list[int]
) -> None:
    """Writes pixels.json."""
    facts = {
        "version": _VERSION,
        "num_images": num_images,
        "num_classes": num_classes,
        "height": image_size[0],
        "width": image_size[1],
        "unreadable": unreadable,
    }
    path.write_text(json.dumps(facts) + "\n", encoding="ascii")


def _opened(path: Path, num_bytes: int) -> BinaryIO:
    file = path.open("rb", buffering=0)
    found = os.fstat(file.fileno()).st_size
    if found != num_bytes:
        raise DataError(f"Cannot read {path}: it has {found} bytes; {FACTS_FILE} beside it tells of {num_bytes}.")
    return file


def _read_facts(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            facts = json.loads(file.read(_MAX_FACTS_BYTES))
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"Cannot read {path}: it is not JSON ({error}).") from error
    if not isinstance(facts, dict) or facts.get("version") != _VERSION:
        raise DataError(f"Cannot read {path}: expected a JSON object with version {_VERSION}.")
    for name in ("num_images", "num_classes", "height", "width"):
        if not _is_count(facts.get(name)) or facts[name] < 1:
            raise DataError(f"Cannot read {path}: {name} is {facts.get(name)!r}; expected a positive number.")
    unreadable = facts.get("unreadable")
    is_list = isinstance(unreadable, list) and all(_is_count(n) and n < facts["num_images"] for n in unreadable)
    if facts["height"] * facts["width"] > MAX_PIXELS or not is_list:
        raise DataError(
            f"Cannot read {path}: expected images of at most {MAX_PIXELS:,} pixels, and in `unreadable` a list of rows."
        )
    return facts


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**48
