"""Several sources as one: their images and their classes are numbered one source after another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megaclass.data.sources.source import ImageSource, TensorSource
from megaclass.errors import DataError


class JoinedSource:
    """Concatenation of sources, which never share a class: an identity in two sources counts twice."""

    def __init__(self, parts: Sequence[ImageSource]) -> None:
        self.parts = list(parts)
        if tensors := [part.describe() for part in parts if isinstance(part, TensorSource)]:
            raise DataError(f"Only images can be joined with commas, not {tensors[0]}: concatenate the files.")
        self._first_image = np.cumsum([0, *(part.num_images for part in parts)])
        self._first_class = np.cumsum([0, *(part.num_classes for part in parts)])
        self.labels: NDArray[np.int64] = np.concatenate(
            [part.labels + first for part, first in zip(parts, self._first_class, strict=False)]
        )
        self.image_size = self.parts[0].image_size

    @property
    def num_images(self) -> int:
        return int(self._first_image[-1])

    @property
    def num_classes(self) -> int:
        return int(self._first_class[-1])

    def read(self, index: int) -> bytes:
        part, inner = self._locate(index)
        return part.read(inner)

    def name_of(self, index: int) -> str:
        part, inner = self._locate(index)
        return part.name_of(inner)

    def describe(self) -> str:
        ranges = [
            f"classes {first:,} to {last - 1:,}: {part.describe()}"
            for part, first, last in zip(self.parts, self._first_class, self._first_class[1:], strict=False)
        ]
        return (
            f"{len(self.parts)} sources joined, {self.num_images:,} images of {self.num_classes:,} classes; "
            + "; ".join(ranges)
        )

    def _locate(self, index: int) -> tuple[ImageSource, int]:
        number = int(np.searchsorted(self._first_image, index, side="right")) - 1
        return self.parts[number], index - int(self._first_image[number])
