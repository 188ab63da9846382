"""The two interfaces of data: an opened source of images, and a format, which knows how data lies at a path.

A new format is one file with a subclass of `SourceFormat` and one line in the table of `open_source.py`. Everything else
(training, `data stage`, `data verify`, names of classes) asks the format and never looks at paths itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from megaclass.errors import DataError

CLASSES_FILE = "classes.txt"
"""Next to any data: names of its classes, one per line, line i for class i."""


@runtime_checkable
class ImageSource(Protocol):
    """Numbered encoded images, each with its class."""

    @property
    def num_images(self) -> int: ...
    @property
    def num_classes(self) -> int: ...
    @property
    def labels(self) -> NDArray[np.int64]:
        """Class of every image (N,), each in [0, num_classes).

        A TensorSource may have several labels per sample: (N, K), the first one in [0, num_classes), -1 after the last one.
        """
        ...

    @property
    def image_size(self) -> tuple[int, int]:
        """(height, width)"""
        ...

    def read(self, index: int) -> bytes:
        """Returns the encoded image."""
        ...

    def name_of(self, index: int) -> str:
        """Returns the name of the image in errors."""
        ...

    def describe(self) -> str:
        """Returns format, place, and numbers of images and classes, for people to read."""
        ...


@runtime_checkable
class PixelSource(Protocol):
    """A source whose images need no decoding."""

    def pixels(self, indices: NDArray[np.int64], image_size: tuple[int, int]) -> NDArray[np.uint8]:
        """Returns (B, H, W, 3)."""
        ...


@runtime_checkable
class TensorSource(Protocol):
    """A source of features or sequences, which need no decoding. Its image_size is (1, W) or (0, W); see image_size.py.

    `read` returns any bytes that tell a sample from others, for fingerprints.
    """

    def tensors(self, indices: NDArray[np.int64]) -> torch.Tensor | Sequence[torch.Tensor]:
        """Returns features as (B, W), or one tensor (T, ...) per sequence; a batch of these is padded to the longest."""


def first_labels(source: ImageSource) -> NDArray[np.int64]:
    """Returns one label per image (N,), the first one if there are several."""
    return source.labels if source.labels.ndim == 1 else source.labels[:, 0]


def require_one_label(source: ImageSource, purpose: str) -> None:
    """Raises a DataError if samples have several labels."""
    if source.labels.ndim > 1:
        raise DataError(f"{purpose} needs one label per sample, but those of {source.describe()} have several.")


class SourceFormat(ABC):
    """One format, applied to one path. Nothing is read before `open`, apart from names of files."""

    suffix: ClassVar[str] = ""
    """Suffix of a file that is data of this format by itself; empty: there is no such file."""
    contents: ClassVar[str] = ""
    """Content of a folder of this format, for error messages; empty: the format is not a folder."""
    notation: ClassVar[str] = ""
    """How a path is written that names no file, for error messages."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.place = Path(path)

    @classmethod
    @abstractmethod
    def matches(cls, path: str) -> bool:
        """Tells whether the data at the path is meant to have this format, even if files are missing."""

    @abstractmethod
    def open(self) -> ImageSource:
        """Opens the data; `check` has found nothing missing."""

    def check(self) -> None:  # noqa: B027 - nothing to check is a fine answer
        """Raises a DataError if a file that `open` needs is missing. Reads no file."""

    @property
    def folder(self) -> Path:
        """Folder in which the data lies."""
        return self.place.parent if self.place.is_file() else self.place

    def parts(self) -> list[SourceFormat]:
        """Returns the sources that this one joins; only itself unless it joins several."""
        return [self]

    def files(self) -> Iterable[Path]:
        """Returns the files that a copy of the data needs, all below `folder`; none: the data is not in files."""
        return ()

    def folders(self) -> Iterable[str]:
        """Returns names of folders below `folder` that a copy needs even if they are empty."""
        return ()

    def class_names(self) -> list[bytes] | None:
        """Returns the names of the classes in order; None: they have numbers only."""
        file = self.folder / CLASSES_FILE
        if not file.is_file():
            return None
        try:
            lines = file.read_bytes().split(b"\n")
        except OSError as error:
            raise DataError(f"Cannot read the names of classes in {file}: {error.strerror}.") from error
        return [line.rstrip(b"\r") for line in (lines if lines[-1] else lines[:-1])]


def list_names(folder: Path) -> str:
    """Returns the first names in a folder, for error messages."""
    names = sorted(entry.name for entry in folder.iterdir())
    if not names:
        return "the folder is empty"
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"found {', '.join(names[:5])}{more}"
