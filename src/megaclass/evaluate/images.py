"""Numbered images of one size, decoded one at a time: what is embedded, wherever it comes from.

An image of another size than the model's is refused, because a set cut for another model gives numbers that look
plausible and are wrong; `resize` says that scaling is meant.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megaclass.data.decode import decode_image
from megaclass.data.pairs import PairSet
from megaclass.errors import DataError
from megaclass.evaluate.alignment import align

Pixels = NDArray[np.uint8]
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")


class Images(Protocol):
    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """How errors call the image."""
        ...

    def pixels(self, index: int) -> Pixels:
        """(S, S, 3) RGB, or a DataError that names the image."""
        ...


@dataclass(frozen=True, kw_only=True)
class PairImages:
    """The 2N encoded images of a verification set."""

    pair_set: PairSet
    image_size: int
    set_name: str = "the pairs"
    resize: bool = False

    def __len__(self) -> int:
        return len(self.pair_set.images)

    def name(self, index: int) -> str:
        return f"image {index} of {self.set_name} (pair {index // 2})"

    def pixels(self, index: int) -> Pixels:
        name = self.name(index)
        return fitted(decode_image(self.pair_set.images[index], name), self.image_size, name, resize=self.resize)


@dataclass(frozen=True, kw_only=True)
class FileImages:
    """Image files, read when they are needed."""

    paths: Sequence[Path]
    image_size: int
    resize: bool = False

    def __len__(self) -> int:
        return len(self.paths)

    def name(self, index: int) -> str:
        return str(self.paths[index])

    def pixels(self, index: int) -> Pixels:
        name = self.name(index)
        return fitted(decode_image(read_file(self.paths[index]), name), self.image_size, name, resize=self.resize)


@dataclass(frozen=True, kw_only=True)
class AlignedImages:
    """Photos with five landmarks each, turned and scaled onto the standard face."""

    paths: Sequence[Path]
    points_N52: NDArray[np.float64]
    image_size: int

    def __len__(self) -> int:
        return len(self.paths)

    def name(self, index: int) -> str:
        return str(self.paths[index])

    def pixels(self, index: int) -> Pixels:
        photo = decode_image(read_file(self.paths[index]), self.name(index))
        return align(photo, self.points_N52[index], self.image_size, where=self.name(index))


def fitted(image_HW3: Pixels, image_size: int, name: str, *, resize: bool) -> Pixels:
    """The image as it is when it has the model's size, scaled when that is allowed, refused otherwise."""
    height, width = image_HW3.shape[:2]
    if (height, width) == (image_size, image_size):
        return image_HW3
    if not resize:
        raise DataError(
            f"{name} has {width} × {height} pixels, the model takes {image_size} × {image_size}: evaluate a model of that "
            f"input size, or allow scaling with --resize."
        )
    from PIL import Image

    return np.asarray(Image.fromarray(image_HW3).resize((image_size, image_size), Image.Resampling.BILINEAR))


def find_images(folder: Path) -> list[Path]:
    """All image files below the folder, in the order of their names."""
    if not folder.is_dir():
        raise DataError(f"Cannot read the images of {folder}: there is no such folder.")
    found = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    if not found:
        raise DataError(f"{folder} holds no images: looked for {', '.join(SUFFIXES)} in it and below.")
    return found


def read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"Cannot read the image {path}: {error.strerror}.") from error
