"""Packs a source as uncompressed pixels (`data/sources/pixel_file.py`), in the order of a packed .rec: grouped by class.

An interrupted run resumes after the last whole image. An image that cannot be decoded leaves a black row, which is listed
as unreadable: training replaces it as it would replace the damaged image.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megaclass.data.decode import Fit, decode_image, fit_image
from megaclass.data.sources.pixel_file import FACTS_FILE, LABELS_FILE, PIXELS_FILE, write_facts
from megaclass.data.sources.source import ImageSource
from megaclass.data.threaded_map import ordered_map
from megaclass.errors import DataError

UNREADABLE_FILE = "unreadable.txt"
"""Rows without an image, while a run is not finished; part of pixels.json afterwards."""
_BLOCK_IMAGES = 64


def write_pixels(
    folder: Path,
    source: ImageSource,
    order: NDArray[np.int64],
    image_size: tuple[int, int],
    fit: Fit,
    num_threads: int,
    on_images: Callable[[int, int], None],
) -> int:
    """Writes the files; returns how many images an interrupted run had written.

    order: the image of each row. on_images: called after each block with its images and how many had another size.
    """
    height, width = image_size
    row_bytes = height * width * 3
    pixels, notes = folder / PIXELS_FILE, folder / UNREADABLE_FILE
    num_done = (pixels.stat().st_size if pixels.exists() else 0) // row_bytes
    unreadable = [row for row in _read_rows(notes) if row < num_done]
    notes.write_text("".join(f"{row}\n" for row in unreadable), encoding="ascii")
    blocks = (order[start : start + _BLOCK_IMAGES] for start in range(num_done, len(order), _BLOCK_IMAGES))

    def read(indices: NDArray[np.int64]) -> tuple[NDArray[np.uint8], list[int], int]:
        images_BHW3 = np.zeros((len(indices), height, width, 3), dtype=np.uint8)
        bad, num_other_size = [], 0
        for row, index in enumerate(indices.tolist()):
            try:
                image_HW3 = decode_image(source.read(index), source.name_of(index))
            except DataError:
                bad.append(row)
                continue
            num_other_size += image_HW3.shape[:2] != image_size
            images_BHW3[row] = fit_image(image_HW3, image_size, fit)
        return images_BHW3, bad, num_other_size

    with pixels.open("ab") as file, notes.open("a", encoding="ascii") as noted:
        file.truncate(num_done * row_bytes)
        at = num_done
        for images_BHW3, bad, num_other_size in ordered_map(read, blocks, num_threads):
            # First: a row must never be there without its note.
            noted.writelines(f"{at + row}\n" for row in bad)
            noted.flush()
            file.write(images_BHW3.data)
            unreadable += [at + row for row in bad]
            at += len(images_BHW3)
            on_images(len(images_BHW3), num_other_size)
    (folder / LABELS_FILE).write_bytes(np.ascontiguousarray(source.labels[order], dtype="<i8").tobytes())
    write_facts(
        folder / FACTS_FILE,
        num_images=len(order),
        num_classes=source.num_classes,
        image_size=image_size,
        unreadable=unreadable,
    )
    notes.unlink()
    return num_done


def _read_rows(path: Path) -> list[int]:
    """Returns the rows that an interrupted run noted; its last line may be cut off."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="ascii", errors="replace").split("\n")[:-1]
    return [int(line) for line in lines if line.isdigit()]
