"""Checks every image of a source: whether it decodes, its label is in range and the index lists it.

A damaged `.rec` is read without trusting its index: records are found by their marks, and after damage by the next mark.
The sound images form a source of their own, from which `--repair` writes a clean copy.
"""

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from megaclass.data.decode import decode_image, first_image_size
from megaclass.data.loading.reader import read_image
from megaclass.data.ordered_map import ordered_map
from megaclass.data.sources.open_source import format_of
from megaclass.data.sources.record_index import read_index_lines
from megaclass.data.sources.recordio import MAX_EXACT_LABEL, Record, RecordReader
from megaclass.data.sources.records import Property, RecordFormat, RecordSource, read_property
from megaclass.data.sources.source import ImageSource
from megaclass.errors import DataError
from megaclass.progress import OnProgress, no_progress

_BLOCK_IMAGES = 128

Result = TypeVar("Result")


@dataclass
class Findings:
    """Defects of a source; a sound one has none."""

    what: str
    num_images: int = 0
    """Images checked, sound or not."""
    bad: list[tuple[str, str]] = field(default_factory=list)
    """(key or name, defect) of every bad image."""
    faults: list[str] = field(default_factory=list)
    """Defects of the file, the index or the header."""
    notes: list[str] = field(default_factory=list)
    """Harmless peculiarities."""

    @property
    def is_sound(self) -> bool:
        return not self.bad and not self.faults


class SubsetSource:
    """Some of the images of a source; classes keep their numbers."""

    def __init__(self, inner: ImageSource, rows: NDArray[np.int64]) -> None:
        self._inner, self._rows = inner, rows
        self.labels: NDArray[np.int64] = inner.labels[rows]
        self.num_classes = inner.num_classes
        self.num_images = len(rows)

    @property
    def image_size(self) -> tuple[int, int]:
        return first_image_size(self)

    def read(self, index: int) -> bytes:
        return self._inner.read(int(self._rows[index]))

    def name_of(self, index: int) -> str:
        return self._inner.name_of(int(self._rows[index]))

    def describe(self) -> str:
        return f"{self.num_images:,} images out of {self._inner.describe()}"


def verify(
    path: Path | str, *, num_threads: int = 1, on_progress: OnProgress = no_progress
) -> tuple[Findings, ImageSource | None]:
    """Returns the defects, and a source of the sound images, if any. `on_progress` gets the records done and their total."""
    found = format_of(path)
    if isinstance(found, RecordFormat):
        # Read without `open`, which refuses a file whose index is missing or damaged: finding that out is the task here.
        return _verify_records(found.record_file, num_threads, on_progress)
    found.check()
    source = found.open()
    findings = Findings(source.describe(), source.num_images)
    is_sound = np.ones(source.num_images, dtype=bool)

    def check(row: int) -> str | None:
        return _fault_of(partial(read_image, source, row), source.name_of(row))

    for row, fault in enumerate(_checked(check, source.num_images, num_threads, on_progress)):
        if fault is not None:
            findings.bad.append((source.name_of(row), fault))
            is_sound[row] = False
    _note_empty_classes(findings, source.labels[is_sound], source.num_classes)
    return findings, SubsetSource(source, np.flatnonzero(is_sound)) if is_sound.any() else None


def _verify_records(path: Path, num_threads: int, on_progress: OnProgress) -> tuple[Findings, ImageSource | None]:
    findings = Findings(f"RecordIO {path}")
    reader = RecordReader(path)
    properties = _property_or_fault(path.parent / "property", findings)
    offsets = _find_records(reader, findings)
    keys = _compare_index(path.with_suffix(".idx"), offsets, findings)
    labels = np.full(len(offsets), -1)

    def check(row: int) -> tuple[int | None, str | None]:
        return _check_record(reader, int(offsets[row]), int(keys[row]), properties)

    for row, (label, fault) in enumerate(_checked(check, len(offsets), num_threads, on_progress)):
        if fault is not None:
            findings.bad.append((f"key {keys[row]}, byte {offsets[row]}", fault))
        elif label is not None:
            labels[row] = label
        findings.num_images += label is not None
    is_good = labels >= 0
    if not is_good.any():
        return findings, None
    good_keys, good_offsets, labels = keys[is_good], offsets[is_good], labels[is_good]
    num_classes = properties.num_classes or int(labels.max()) + 1
    _check_header(reader, offsets, keys, findings)
    _note_empty_classes(findings, labels, num_classes)
    size = properties.image_size
    return findings, RecordSource(reader, good_keys, good_offsets, labels, num_classes, size, has_header=False)


def _check_record(reader: RecordReader, offset: int, key: int, properties: Property) -> tuple[int | None, str | None]:
    """Returns the label of an image, and its defect; the label is None for a header and the range of keys of an identity."""
    try:
        record = reader.read(offset)
    except DataError as error:
        return -1, str(error)
    if not record.payload:
        return (None, None) if len(record.labels) == 2 else (-1, "there is no image in it: 0 bytes")
    label, fault = _label_of(record, properties)
    if fault is None:
        fault = _fault_of(lambda: record.payload, f"{reader.path}, key {key}")
    return label, fault


def _label_of(record: Record, properties: Property) -> tuple[int, str | None]:
    value: float = record.labels[0]
    if properties.is_label_in_id2:
        if value != -1 or record.id2 >= 2**63:
            return -1, f"label {value} and id2 {record.id2}: expected -1 and the class in id2"
        value = record.id2
    elif not (0 <= value < MAX_EXACT_LABEL and float(value).is_integer()):
        return -1, f"label {value}: expected an integer in [0, {MAX_EXACT_LABEL:,}), which float32 holds exactly"
    if properties.num_classes is not None and value >= properties.num_classes:
        return -1, f"label {int(value)}: property says num_classes = {properties.num_classes}"
    return int(value), None


def _fault_of(read: Callable[[], bytes], name: str) -> str | None:
    try:
        decode_image(read(), name)
    except DataError as error:
        return str(error)
    return None


def _property_or_fault(path: Path, findings: Findings) -> Property:
    try:
        return read_property(path)
    except DataError as error:
        findings.faults.append(str(error))
        return Property()


def _find_records(reader: RecordReader, findings: Findings) -> NDArray[np.int64]:
    """Returns where records start, found by their marks; damage in between is skipped and reported."""
    offsets, offset = array("q"), 0
    while offset < reader.num_bytes:
        try:
            after = reader.next_record(offset)
            offsets.append(offset)
        except DataError as error:
            after = reader.find_mark(offset + 4)
            findings.faults.append(f"{error} {after - offset} bytes are skipped.")
        offset = after
    return np.array(offsets, dtype=np.int64)


def _compare_index(path: Path, offsets: NDArray[np.int64], findings: Findings) -> NDArray[np.int64]:
    """Returns the key of every record in the index, or else its number in the file."""
    keys = np.arange(len(offsets))
    try:
        index = read_index_lines(path)
    except DataError as error:
        findings.faults.append(str(error))
        return keys
    values, counts = np.unique(index.keys, return_counts=True)
    findings.faults += [
        f"The index names key {key} {count} times." for key, count in _pairs(values, counts) if count > 1
    ]
    place = np.minimum(np.searchsorted(offsets, index.offsets), max(len(offsets) - 1, 0))
    is_there = offsets[place] == index.offsets if len(offsets) else np.zeros(len(index.keys), dtype=bool)
    findings.faults += [
        f"The index says that key {key} starts at byte {offset}: no whole record starts there."
        for key, offset in _pairs(index.keys[~is_there], index.offsets[~is_there])
    ]
    is_named = np.zeros(len(offsets), dtype=bool)
    is_named[place[is_there]] = True
    # Records that the index leaves out get numbers beyond all of its keys.
    keys = keys + (int(index.keys.max()) + 1 if not is_named.all() else 0)
    keys[place[is_there]] = index.keys[is_there]
    findings.faults += [f"The record at byte {offset} is not in the index." for offset in offsets[~is_named].tolist()]
    return keys


def _check_header(
    reader: RecordReader, offsets: NDArray[np.int64], keys: NDArray[np.int64], findings: Findings
) -> None:
    rows = np.flatnonzero(keys == 0)
    header = reader.read(int(offsets[rows[0]])) if len(rows) else None
    if header is None or header.payload or len(header.labels) != 2:
        return
    announced = header.labels[0] - 1
    if announced < MAX_EXACT_LABEL and announced != findings.num_images:
        findings.faults.append(f"The header record announces {announced:g} images, {findings.num_images} were found.")


def _note_empty_classes(findings: Findings, labels: NDArray[np.int64], num_classes: int) -> None:
    num_empty = num_classes - len(np.unique(labels))
    if num_empty:
        findings.notes.append(f"{num_empty:,} of {num_classes:,} classes have no image.")


def _pairs(first: NDArray[np.int64], second: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    return zip(first.tolist(), second.tolist(), strict=True)


def _checked(
    check: Callable[[int], Result], num_items: int, num_threads: int, on_progress: OnProgress
) -> Iterator[Result]:
    """Yields the result of each item in order; threads check blocks of them."""
    blocks = (range(at, min(at + _BLOCK_IMAGES, num_items)) for at in range(0, num_items, _BLOCK_IMAGES))
    num_done = 0
    for results in ordered_map(lambda block: [check(item) for item in block], blocks, num_threads):
        yield from results
        num_done += len(results)
        on_progress(num_done, num_items)
