"""Where images come from: what lies at a path decides how it is read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megaclass.data.decode import image_dimensions
from megaclass.data.recordio import MAGIC, MAX_EXACT_LABEL, MAX_PART_BYTES, RecordIndex, RecordReader, read_index
from megaclass.errors import DataError

_PART_HEADER_BYTES = 8
_RECORD_HEADER_BYTES = 24
# Words of a record from its start: mark, length, number of labels, label, id (2), id2 (2), first of several labels.
_NUM_LABELS_WORD, _LABEL_WORD, _FIRST_LABEL_WORD, _NUM_WORDS = 2, 3, 8, 9
_SCAN_BLOCK = 2**18


class ImageSource(Protocol):
    """Numbered encoded images, each with its class."""

    @property
    def num_images(self) -> int: ...
    @property
    def num_classes(self) -> int: ...
    @property
    def labels(self) -> NDArray[np.int64]:
        """Class of every image (N,), each in [0, num_classes)."""
        ...

    @property
    def image_size(self) -> tuple[int, int]:
        """(height, width)"""
        ...

    def read(self, index: int) -> bytes:
        """The encoded image."""
        ...

    def name_of(self, index: int) -> str:
        """How errors call the image."""
        ...

    def describe(self) -> str: ...


def check_source(path: Path) -> None:
    """Says at once what is missing in a folder that `open_source` could not open."""
    if not path.is_dir():
        raise DataError(
            f"Cannot open the data at {path}: there is no such folder. Expected one that holds train.rec and train.idx."
        )
    missing = [name for name in ("train.rec", "train.idx") if not (path / name).is_file()]
    if missing:
        raise DataError(
            f"Cannot open the data at {path}: looked for train.rec and train.idx, "
            f"{' and '.join(missing)} missing; {_list_names(path)}."
        )


def open_source(path: Path) -> RecordSource:
    """An InsightFace folder (`train.rec`, `train.idx`, `property`), with a header record or as im2rec writes it."""
    check_source(path)
    reader = RecordReader(path / "train.rec")
    index = read_index(path / "train.idx")
    scanned = _scan(reader, index)
    is_image, has_header = _find_images(scanned, reader, index)
    labels = _integer_labels(scanned.labels[is_image], index.keys[is_image], reader.path)
    num_classes, image_size = _read_property(path / "property")
    if num_classes is None:
        num_classes = int(labels.max()) + 1
    beyond = np.flatnonzero(labels >= num_classes)
    if len(beyond):
        raise DataError(
            f"The record with key {index.keys[is_image][beyond[0]]} in {reader.path} has label {labels[beyond[0]]}, "
            f"but {path / 'property'} says num_classes = {num_classes}: labels lie in [0, {num_classes}). "
            f"{len(beyond)} records are out of range."
        )
    return RecordSource(
        reader=reader,
        keys=index.keys[is_image],
        offsets=index.offsets[is_image],
        labels=labels,
        num_classes=num_classes,
        known_image_size=image_size,
        has_header=has_header,
    )


@dataclass(frozen=True, eq=False)
class RecordSource:
    """Images of one `.rec` file, ordered by key. Pickles without the file's content."""

    reader: RecordReader
    keys: NDArray[np.int64]
    offsets: NDArray[np.int64]
    labels: NDArray[np.int64]
    num_classes: int
    known_image_size: tuple[int, int] | None
    has_header: bool

    @property
    def num_images(self) -> int:
        return len(self.keys)

    @cached_property
    def image_size(self) -> tuple[int, int]:
        # Without a property file, the first image speaks for all.
        return self.known_image_size or image_dimensions(self.read(0), self.name_of(0))

    def read(self, index: int) -> bytes:
        return self.reader.read(int(self.offsets[index])).payload

    def name_of(self, index: int) -> str:
        return f"{self.reader.path}, key {self.keys[index]}"

    def describe(self) -> str:
        kind = "InsightFace RecordIO" if self.has_header else "RecordIO without a header record (im2rec)"
        height, width = self.image_size
        contents = f"{self.num_images:,} images of {self.num_classes:,} classes, {width} × {height}"
        return f"{kind} at {self.reader.path.parent}: {contents}"


@dataclass(frozen=True)
class _Scan:
    """Header of every record in the index."""

    num_labels: NDArray[np.int64]
    labels: NDArray[np.float32]
    is_empty: NDArray[np.bool_]


def _scan(reader: RecordReader, index: RecordIndex) -> _Scan:
    """Gathers headers by whole arrays, since a loop over 40 million records takes minutes."""
    _require_offsets_inside(reader, index)
    num_records = len(index.keys)
    num_labels = np.empty(num_records, dtype=np.int64)
    labels = np.empty(num_records, dtype=np.float32)
    is_empty = np.empty(num_records, dtype=bool)
    words = reader.words()
    for start in range(0, num_records, _SCAN_BLOCK):
        block = slice(start, start + _SCAN_BLOCK)
        first = index.offsets[block] // 4
        # The last record may be shorter than what is gathered; the words clipped there are never used.
        gathered = words[np.minimum(first[:, None] + np.arange(_NUM_WORDS), len(words) - 1)]
        is_marked = gathered[:, 0] == MAGIC
        if not is_marked.all():
            wrong = start + int(np.argmin(is_marked))
            raise DataError(
                f"The index of {reader.path} says that key {index.keys[wrong]} begins at byte {index.offsets[wrong]}, "
                f"but no record begins there. "
                f"Does the index belong to another file?"
            )
        several = gathered[:, _NUM_LABELS_WORD].astype(np.int64)
        num_labels[block] = several
        value = np.where(several > 0, gathered[:, _FIRST_LABEL_WORD], gathered[:, _LABEL_WORD])
        labels[block] = value.astype("<u4").view("<f4")
        kind = gathered[:, 1] >> 29
        length = (gathered[:, 1] & np.uint32(MAX_PART_BYTES)).astype(np.int64)
        header_bytes = _RECORD_HEADER_BYTES + 4 * several
        is_empty[block] = (kind == 0) & (length == header_bytes)
        beyond_end = index.offsets[block] + _PART_HEADER_BYTES + length > reader.num_bytes
        # Split inside the header, or broken: the reader puts it together, or says what is wrong.
        for row in np.flatnonzero((length < header_bytes) | beyond_end | (kind > 1)):
            record = reader.read(int(index.offsets[start + row]))
            num_labels[start + row] = len(record.labels) if len(record.labels) > 1 else 0
            labels[start + row] = record.labels[0]
            is_empty[start + row] = not record.payload
    return _Scan(num_labels, labels, is_empty)


def _require_offsets_inside(reader: RecordReader, index: RecordIndex) -> None:
    last = reader.num_bytes - _PART_HEADER_BYTES - _RECORD_HEADER_BYTES
    wrong = np.flatnonzero((index.offsets > last) | (index.offsets % 4 != 0))
    if len(wrong):
        raise DataError(
            f"The index of {reader.path} says that key {index.keys[wrong[0]]} begins at byte "
            f"{index.offsets[wrong[0]]}: records begin at multiples of 4, and the file has {reader.num_bytes} bytes. "
            f"{len(wrong)} keys are out of place; is the file truncated, or does the index belong to another one?"
        )


def _find_images(scanned: _Scan, reader: RecordReader, index: RecordIndex) -> tuple[NDArray[np.bool_], bool]:
    """Which records are images, and whether record 0 is a header that says so."""
    has_header = bool(index.keys[0] == 0 and scanned.num_labels[0] > 0 and scanned.is_empty[0])
    if not has_header:
        is_image = np.ones(len(index.keys), dtype=bool)
    else:
        is_image = _images_after_header(scanned, reader, index)
    empty = np.flatnonzero(is_image & scanned.is_empty)
    if len(empty):
        raise DataError(
            f"The record with key {index.keys[empty[0]]} in {reader.path} holds no image; {len(empty)} such records."
        )
    if not is_image.any():
        raise DataError(
            f"{reader.path} holds no image: {len(index.keys)} records in the index, none of them with an image."
        )
    return is_image, has_header


def _images_after_header(scanned: _Scan, reader: RecordReader, index: RecordIndex) -> NDArray[np.bool_]:
    end_of_images = float(scanned.labels[0])
    if end_of_images >= MAX_EXACT_LABEL:
        # float32 no longer holds the range exactly; identity records have no payload, which tells them apart.
        return ~scanned.is_empty
    if not (end_of_images.is_integer() and end_of_images >= 1):
        raise DataError(
            f"The header record of {reader.path} says that images end before key {end_of_images}: "
            f"expected an integer from 1."
        )
    is_image = (index.keys >= 1) & (index.keys < end_of_images)
    num_expected = int(end_of_images) - 1
    if int(is_image.sum()) != num_expected:
        present = index.keys[is_image]
        expected = np.arange(1, len(present) + 1)
        gap = np.flatnonzero(present != expected)
        first_missing = int(expected[gap[0]]) if len(gap) else len(present) + 1
        raise DataError(
            f"The header record of {reader.path} announces {num_expected} images, keys 1 to {num_expected}, "
            f"but the index has {len(present)} of them; key {first_missing} is the first one missing."
        )
    return is_image


def _integer_labels(labels: NDArray[np.float32], keys: NDArray[np.int64], path: Path) -> NDArray[np.int64]:
    with np.errstate(invalid="ignore"):
        is_bad = ~((labels >= 0) & (labels < MAX_EXACT_LABEL) & (np.floor(labels) == labels))
    wrong = np.flatnonzero(is_bad)
    if len(wrong):
        raise DataError(
            f"The record with key {keys[wrong[0]]} in {path} has label {labels[wrong[0]]}: "
            f"expected an integer in [0, {MAX_EXACT_LABEL:,}), the range that float32, the type of labels here, "
            f"holds exactly. {len(wrong)} records have such labels."
        )
    return labels.astype(np.int64)


def _read_property(path: Path) -> tuple[int | None, tuple[int, int] | None]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None, None
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror}.") from error
    fields = re.fullmatch(r"\s*([1-9][0-9]{0,9}),([1-9][0-9]{0,4}),([1-9][0-9]{0,4})\s*", text)
    if fields is None:
        raise DataError(f"Cannot read {path}: {text[:60]!r}; expected num_classes,height,width, such as 93431,112,112.")
    num_classes, height, width = map(int, fields.groups())
    return num_classes, (height, width)


def _list_names(path: Path) -> str:
    names = sorted(entry.name for entry in path.iterdir())
    if not names:
        return "the folder is empty"
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"found {', '.join(names[:5])}{more}"
