"""Images of one `.rec` file, InsightFace's with a header record or im2rec's without.

The images among the records, and their classes, are found once by array operations and cached next to the data.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaclass.data.decode import MAX_PIXELS, first_image_size
from megaclass.data.sources.column_cache import Columns, cached_columns, describe_uncached
from megaclass.data.sources.record_index import RecordIndex, open_index
from megaclass.data.sources.recordio import MAGIC, MAX_EXACT_LABEL, MAX_PART_BYTES, RecordReader
from megaclass.data.sources.source import CLASSES_FILE, SourceFormat, list_names
from megaclass.errors import DataError

LABELS_IN_ID2 = "labels=id2"
"""Second line of a property file whose records have the class in id2, a 64-bit number."""

_PART_HEADER_BYTES = 8
_RECORD_HEADER_BYTES = 24
# Words of a record from its start: mark, length, number of labels, label, id (2), id2 (2), first of several labels.
_NUM_LABELS_WORD, _LABEL_WORD, _ID2_WORD, _FIRST_LABEL_WORD, _NUM_WORDS = 2, 3, 6, 8, 9
_SCAN_BLOCK = 2**18
_NO_IMAGE = -1


@dataclass(frozen=True)
class Property:
    """Content of the file `property`; None if it says nothing."""

    num_classes: int | None = None
    image_size: tuple[int, int] | None = None
    is_label_in_id2: bool = False


@dataclass(frozen=True, eq=False)
class RecordSource:
    """Images of one `.rec` file in the order of their keys. Pickles without the content of the file."""

    reader: RecordReader
    keys: NDArray[np.int64]
    offsets: NDArray[np.int64]
    labels: NDArray[np.int64]
    num_classes: int
    known_image_size: tuple[int, int] | None
    has_header: bool
    why_uncached: str = ""

    @property
    def num_images(self) -> int:
        return len(self.keys)

    @cached_property
    def image_size(self) -> tuple[int, int]:
        # Without a property file, the first image stands for all.
        return self.known_image_size or first_image_size(self)

    def read(self, index: int) -> bytes:
        return self.reader.read_payload(int(self.offsets[index]))

    def name_of(self, index: int) -> str:
        return f"{self.reader.path}, key {self.keys[index]}"

    def describe(self) -> str:
        kind = "InsightFace RecordIO" if self.has_header else "RecordIO without a header record (im2rec)"
        height, width = self.image_size
        contents = f"{self.num_images:,} images of {self.num_classes:,} classes, {width} × {height}"
        return f"{kind} at {self.reader.path.parent}: {contents}{describe_uncached(self.why_uncached)}"


class RecordFormat(SourceFormat):
    """A folder with train.rec or one other *.rec, or the file itself; with its .idx and perhaps `property` next to it."""

    suffix = ".rec"
    contents = "train.rec and train.idx"

    @classmethod
    def matches(cls, path: str) -> bool:
        place = Path(path)
        return (place.is_file() and place.suffix == cls.suffix) or (place.is_dir() and any(place.glob("*.rec")))

    @property
    def record_file(self) -> Path:
        """The `.rec` file that is meant."""
        if self.place.is_file():
            return self.place
        if (self.place / "train.rec").exists():
            return self.place / "train.rec"
        found = sorted(self.place.glob("*.rec"))
        if len(found) != 1:
            raise DataError(
                f"Cannot open the data at {self.place}: it holds {', '.join(path.name for path in found[:5])} and no "
                f"train.rec. Name one of them, or several separated by commas."
            )
        return found[0]

    def check(self) -> None:
        require_index(self.record_file)

    def open(self) -> RecordSource:
        return open_records(self.record_file)

    def files(self) -> Iterator[Path]:
        for record_file in [self.place] if self.place.is_file() else sorted(self.place.glob("*.rec")):
            index = record_file.with_suffix(".idx")
            beside = (
                index,
                self.folder / "property",
                self.folder / CLASSES_FILE,
                Path(f"{index}.cache"),
                Path(f"{record_file}.labels"),
            )
            yield from (record_file, *(file for file in beside if file.is_file()))


def require_index(record_file: Path) -> None:
    """Raises a DataError if a `.rec` file or its `.idx` is missing."""
    names = (record_file.name, record_file.with_suffix(".idx").name)
    missing = [name for name in names if not (record_file.parent / name).is_file()]
    if missing:
        raise DataError(
            f"Cannot open the data at {record_file.parent}: looked for {' and '.join(names)}, "
            f"{' and '.join(missing)} missing; {list_names(record_file.parent)}. "
            f"megaclass data verify --repair finds the records of a .rec without an index and writes both again."
        )


def open_records(path: Path) -> RecordSource:
    """Opens a `.rec` file; its `.idx` lies next to it, and perhaps `property`."""
    reader = RecordReader(path)
    index = open_index(path.with_suffix(".idx"))
    properties = read_property(path.parent / "property")
    made_of = [path, path.with_suffix(".idx"), path.parent / "property"]

    def build() -> tuple[dict[str, Any], Sequence[NDArray[np.int64]]]:
        labels, has_header = _collect_labels(reader, index, properties)
        return {"has_header": has_header}, [labels]

    columns = cached_columns(f"{path.name}.labels", made_of, 1, build)
    return _assemble(reader, index, columns, properties)


def _assemble(reader: RecordReader, index: RecordIndex, columns: Columns, properties: Property) -> RecordSource:
    labels = columns.arrays[0]
    rows = _rows_of_images(labels)
    if len(labels) != len(index.keys) or len(labels[rows]) == 0:
        raise DataError(f"{reader.path} changed while it was opened: its index and its labels no longer match.")
    num_classes = properties.num_classes or int(labels[rows].max()) + 1
    if int(labels[rows].max()) >= num_classes or int(labels[rows].min()) < 0:
        # `_collect_labels` checks labels when it reads the records, so this is a damaged cache.
        raise DataError(f"The cache {reader.path}.labels is damaged: remove it, and it is written again.")
    return RecordSource(
        reader=reader,
        keys=index.keys[rows],
        offsets=index.offsets[rows],
        labels=labels[rows],
        num_classes=num_classes,
        known_image_size=properties.image_size,
        has_header=bool(columns.facts.get("has_header")),
        why_uncached=index.why_uncached or columns.why_uncached,
    )


def _rows_of_images(labels: NDArray[np.int64]) -> slice | NDArray[np.int64]:
    """Returns the rows of images, as a slice if they are contiguous, as in all sets of InsightFace: a slice needs no copy."""
    rows = np.flatnonzero(labels != _NO_IMAGE)
    if len(rows) and rows[-1] - rows[0] + 1 == len(rows):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return rows


def _collect_labels(reader: RecordReader, index: RecordIndex, properties: Property) -> tuple[NDArray[np.int64], bool]:
    """Returns the class of every record in the index, -1 for records without image; and whether record 0 is a header."""
    scanned = _scan(reader, index)
    is_image, has_header = _find_images(scanned, reader, index)
    values = scanned.labels[is_image]
    if properties.is_label_in_id2:
        found = _labels_from_id2(values, scanned.id2[is_image], index.keys[is_image], reader.path)
    else:
        found = _integer_labels(values, index.keys[is_image], reader.path)
    beyond = np.flatnonzero(found >= (properties.num_classes or np.inf))
    if len(beyond):
        raise DataError(
            f"The record with key {index.keys[is_image][beyond[0]]} in {reader.path} has label {found[beyond[0]]}, "
            f"but {reader.path.parent / 'property'} says num_classes = {properties.num_classes}: "
            f"labels lie in [0, {properties.num_classes}). {len(beyond)} records are out of range."
        )
    labels = np.full(len(index.keys), _NO_IMAGE, dtype=np.int64)
    labels[is_image] = found
    return labels, has_header


@dataclass(frozen=True)
class _Scan:
    """Headers of all records in the index."""

    has_several_labels: NDArray[np.bool_]
    labels: NDArray[np.float32]
    is_empty: NDArray[np.bool_]
    id2: NDArray[np.int64]


def _scan(reader: RecordReader, index: RecordIndex) -> _Scan:
    """Gathers headers by array operations, since a loop over 40 million records takes minutes."""
    _require_offsets_inside(reader, index)
    num_records = len(index.keys)
    scanned = _Scan(
        np.empty(num_records, dtype=bool),
        np.empty(num_records, dtype=np.float32),
        np.empty(num_records, dtype=bool),
        np.empty(num_records, dtype=np.int64),
    )
    for block in _blocks(num_records):
        reader.require_unchanged()
        _scan_block(reader, index, block, scanned)
    return scanned


def _blocks(num_records: int) -> Iterator[slice]:
    for start in range(0, num_records, _SCAN_BLOCK):
        yield slice(start, min(start + _SCAN_BLOCK, num_records))


def _scan_block(reader: RecordReader, index: RecordIndex, block: slice, scanned: _Scan) -> None:
    words = reader.words()
    first = index.offsets[block] // 4
    # The last record may be shorter than the words gathered; those beyond the end are never used.
    gathered = words[np.minimum(first[:, None] + np.arange(_NUM_WORDS), len(words) - 1)]
    is_marked = gathered[:, 0] == MAGIC
    if not is_marked.all():
        wrong = block.start + int(np.argmin(is_marked))
        raise DataError(
            f"The index of {reader.path} says that key {index.keys[wrong]} starts at byte {index.offsets[wrong]}, "
            f"but no record starts there. "
            f"Does the index belong to another file?"
        )
    several = gathered[:, _NUM_LABELS_WORD].astype(np.int64)
    value = np.where(several > 0, gathered[:, _FIRST_LABEL_WORD], gathered[:, _LABEL_WORD])
    kind = gathered[:, 1] >> 29
    length = (gathered[:, 1] & np.uint32(MAX_PART_BYTES)).astype(np.int64)
    header_bytes = _RECORD_HEADER_BYTES + 4 * several
    scanned.has_several_labels[block] = several > 0
    scanned.labels[block] = value.astype("<u4").view("<f4")
    scanned.is_empty[block] = (kind == 0) & (length == header_bytes)
    scanned.id2[block] = np.ascontiguousarray(gathered[:, _ID2_WORD : _ID2_WORD + 2]).view("<i8")[:, 0]
    beyond_end = index.offsets[block] + _PART_HEADER_BYTES + length > reader.num_bytes
    # Records that are split inside their header, or damaged: the reader joins the parts or raises.
    for row in np.flatnonzero((length < header_bytes) | beyond_end | (kind > 1)) + block.start:
        record = reader.read(int(index.offsets[row]))
        scanned.has_several_labels[row] = len(record.labels) > 1
        scanned.labels[row] = record.labels[0]
        scanned.is_empty[row] = not record.payload
        scanned.id2[row] = np.uint64(record.id2).astype(np.int64)


def _require_offsets_inside(reader: RecordReader, index: RecordIndex) -> None:
    last = reader.num_bytes - _PART_HEADER_BYTES - _RECORD_HEADER_BYTES
    wrong = np.flatnonzero((index.offsets > last) | (index.offsets % 4 != 0) | (index.offsets < 0))
    if len(wrong):
        raise DataError(
            f"The index of {reader.path} says that key {index.keys[wrong[0]]} starts at byte "
            f"{index.offsets[wrong[0]]}: records start at multiples of 4, and the file has {reader.num_bytes} bytes. "
            f"{len(wrong)} keys are out of place; is the file truncated, or does the index belong to another one?"
        )


def _find_images(scanned: _Scan, reader: RecordReader, index: RecordIndex) -> tuple[NDArray[np.bool_], bool]:
    """Returns which records are images, and whether record 0 is a header, which says where they end."""
    has_header = bool(index.keys[0] == 0 and scanned.has_several_labels[0] and scanned.is_empty[0])
    if not has_header:
        is_image = np.ones(len(index.keys), dtype=bool)
    else:
        is_image = _images_after_header(scanned, reader, index)
    empty = np.flatnonzero(is_image & scanned.is_empty)
    if len(empty):
        raise DataError(
            f"The record with key {index.keys[empty[0]]} in {reader.path} holds no image; {len(empty)} such records. "
            f"megaclass data verify --repair writes a copy without them."
        )
    if not is_image.any():
        raise DataError(
            f"{reader.path} holds no image: {len(index.keys)} records in the index, none of them with an image."
        )
    return is_image, has_header


def _images_after_header(scanned: _Scan, reader: RecordReader, index: RecordIndex) -> NDArray[np.bool_]:
    end_of_images = float(scanned.labels[0])
    if end_of_images >= MAX_EXACT_LABEL:
        # float32 no longer holds the range exactly; identity records are told by their empty payload.
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
            f"but the index has {len(present)} of them; the first missing key is {first_missing}."
        )
    return is_image


def _integer_labels(labels: NDArray[np.float32], keys: NDArray[np.int64], path: Path) -> NDArray[np.int64]:
    with np.errstate(invalid="ignore"):
        is_bad = ~((labels >= 0) & (labels < MAX_EXACT_LABEL) & (np.floor(labels) == labels))
    wrong = np.flatnonzero(is_bad)
    if len(wrong):
        raise DataError(
            f"The record with key {keys[wrong[0]]} in {path} has label {labels[wrong[0]]}: "
            f"expected an integer in [0, {MAX_EXACT_LABEL:,}), the range in which float32, the type of labels, "
            f"is exact. {len(wrong)} records have such labels. For more classes, "
            f"pack the images again with 64-bit labels: megaclass data pack --labels id2."
        )
    return labels.astype(np.int64)


def _labels_from_id2(
    labels: NDArray[np.float32], id2: NDArray[np.int64], keys: NDArray[np.int64], path: Path
) -> NDArray[np.int64]:
    wrong = np.flatnonzero((labels != -1) | (id2 < 0))
    if len(wrong):
        raise DataError(
            f"The record with key {keys[wrong[0]]} in {path} has label {labels[wrong[0]]} and id2 {id2[wrong[0]]}, "
            f"but {path.parent / 'property'} says {LABELS_IN_ID2}: expected label -1 and the class in id2. "
            f"{len(wrong)} records differ, so their class is ambiguous."
        )
    return id2


def read_property(path: Path) -> Property:
    try:
        with path.open("rb") as file:
            text = file.read(4096).decode("utf-8", errors="replace")
    except FileNotFoundError:
        return Property()
    except OSError as error:
        raise DataError(f"Cannot read {path}: {error.strerror}.") from error
    pattern = rf"\s*([1-9][0-9]{{0,17}}),([1-9][0-9]{{0,4}}),([1-9][0-9]{{0,4}})\s*(\n{LABELS_IN_ID2}\s*)?"
    fields = re.fullmatch(pattern, text)
    if fields is None:
        raise DataError(
            f"Cannot read {path}: {text[:60]!r}; expected num_classes,height,width, such as 93431,112,112, "
            f"and a second line {LABELS_IN_ID2} if classes are in id2."
        )
    num_classes, height, width = map(int, fields.groups()[:3])
    if height * width > MAX_PIXELS:
        # Batches of this size are allocated before the first image is decoded.
        raise DataError(
            f"{path} says that images have {width} × {height} pixels: at most {MAX_PIXELS:,} in all are accepted."
        )
    return Property(num_classes, (height, width), fields.group(4) is not None)
