"""`megaclass data inspect`: counts and sizes of a source, images per class, a grid of images."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaclass.data.decode import decode_batch, image_dimensions
from megaclass.data.sources.source import ImageSource, TensorSource
from megaclass.errors import DataError
from megaclass.image_size import has_rows, shown_size

_NUM_SIZED = 2000
_NUM_SURVEYED = 1000
_BAR_WIDTH = 50
_GRID_COLUMNS, _GRID_ROWS = 12, 6


@dataclass(frozen=True)
class Inspection:
    what: str
    num_images: int
    num_classes: int
    num_empty_classes: int
    first_label: int
    last_label: int
    images_per_class: dict[str, float]
    """Smallest, median, mean and largest, over the classes that have images."""
    histogram: list[tuple[str, int]]
    """(images per class, number of classes)."""
    sizes: list[tuple[str, int]]
    """(width × height, number) of the images examined, most frequent first."""
    num_sized: int
    num_unreadable: int
    """Number of those that cannot be read."""
    mean_bytes: float

    def to_json(self) -> dict[str, Any]:
        return self.__dict__ | {"histogram": dict(self.histogram), "sizes": dict(self.sizes)}

    def to_text(self) -> str:
        counts = ", ".join(f"{name} {value:,.4g}" for name, value in self.images_per_class.items())
        widest = max(count for _, count in self.histogram)
        bars = [
            f"  {name:>15}  {count:>9,}  {'█' * max(1, round(_BAR_WIDTH * count / widest)) if count else ''}"
            for name, count in self.histogram
        ]
        sizes = ", ".join(f"{size}: {count:,}" for size, count in self.sizes[:5])
        unreadable = f", {self.num_unreadable} unreadable" if self.num_unreadable else ""
        lines = [
            self.what,
            f"images            {self.num_images:,}",
            f"classes           {self.num_classes:,}, {self.num_empty_classes:,} of them without images",
            f"labels            {self.first_label:,} to {self.last_label:,}",
            f"images per class  {counts}",
            f"sizes             {sizes} (of {self.num_sized:,} examined{unreadable}), {self.mean_bytes:,.0f} bytes each",
            "",
            " images per class    classes",
            *bars,
        ]
        return "\n".join(lines)


def inspect_source(source: ImageSource, on_progress: Callable[[int, int], None] | None = None) -> Inspection:
    labels, counts = np.unique(source.labels[source.labels >= 0], return_counts=True)
    looked_at = np.unique(np.linspace(0, source.num_images - 1, _NUM_SIZED).astype(np.int64))
    sizes: Counter[str] = Counter()
    num_bytes = 0
    for number, index in enumerate(looked_at.tolist(), start=1):
        if on_progress is not None:
            on_progress(number, len(looked_at))
        try:
            encoded = source.read(index)
            size = source.image_size
            if not isinstance(source, TensorSource):
                size = image_dimensions(encoded, source.name_of(index))
        except DataError:
            continue
        sizes[shown_size(size) if has_rows(size) else f"{size[1]} × {size[0]}"] += 1
        num_bytes += len(encoded)
    num_readable = sum(sizes.values())
    return Inspection(
        what=source.describe(),
        num_images=source.num_images,
        num_classes=source.num_classes,
        num_empty_classes=source.num_classes - len(labels),
        first_label=int(labels[0]),
        last_label=int(labels[-1]),
        images_per_class={
            "smallest": int(counts.min()),
            "median": float(np.median(counts)),
            "mean": float(counts.mean()),
            "largest": int(counts.max()),
        },
        histogram=_histogram(counts),
        sizes=sizes.most_common(),
        num_sized=len(looked_at),
        num_unreadable=len(looked_at) - num_readable,
        mean_bytes=num_bytes / max(1, num_readable),
    )


@dataclass(frozen=True)
class SizeSurvey:
    """Number of images, among those that can be read, whose size differs from the wanted one."""

    num_looked_at: int
    is_all: bool
    """True if these are all images of the source."""
    num_other_size: int
    num_other_shape: int
    """Number of those whose aspect ratio also differs."""

    def looked_at(self) -> str:
        return f"all {self.num_looked_at:,} images" if self.is_all else f"{self.num_looked_at:,} images examined"


def survey_sizes(source: ImageSource, image_size: tuple[int, int]) -> SizeSurvey:
    """Reads the headers of all images, or of 1,000 spread over them if there are more."""
    looked_at = np.unique(np.linspace(0, source.num_images - 1, _NUM_SURVEYED).astype(np.int64))
    sizes: Counter[tuple[int, int]] = Counter()
    for index in looked_at.tolist():
        with contextlib.suppress(DataError):
            sizes[image_dimensions(source.read(index), source.name_of(index))] += 1
    others = {size: count for size, count in sizes.items() if size != image_size}
    height, width = image_size
    # Within a pixel: 113 x 112 counts as a square.
    shapes = [count for (h, w), count in others.items() if abs(h * width - w * height) > max(h, w, height, width)]
    return SizeSurvey(
        num_looked_at=sizes.total(),
        is_all=sizes.total() == source.num_images,
        num_other_size=sum(others.values()),
        num_other_shape=sum(shapes),
    )


def write_first_images(path: Path, source: ImageSource) -> None:
    """Draws a grid of the first images that can be decoded (.png)."""
    from PIL import Image

    size = min(source.image_size[0], 112)
    grid = np.full((_GRID_ROWS * size, _GRID_COLUMNS * size, 3), 255, dtype=np.uint8)
    place = 0
    for index in range(min(source.num_images, 4 * _GRID_ROWS * _GRID_COLUMNS)):
        try:
            image_HW3 = decode_batch([source.read(index)], (size, size), [source.name_of(index)])[0]
        except DataError:
            continue
        row, column = divmod(place, _GRID_COLUMNS)
        grid[row * size : (row + 1) * size, column * size : (column + 1) * size] = image_HW3
        place += 1
        if place == _GRID_ROWS * _GRID_COLUMNS:
            break
    Image.fromarray(grid).save(path)


def _histogram(counts: NDArray[np.int64]) -> list[tuple[str, int]]:
    """Counts classes by their images, in ranges that double: 1, 2–3, 4–7, …"""
    bins = np.bincount(np.log2(counts).astype(np.int64))
    return [
        (str(2**power) if power == 0 else f"{2**power}–{2 ** (power + 1) - 1}", int(count))
        for power, count in enumerate(bins)
    ]
