"""RecordIO: many encoded images in one `.rec` file with a text index `.idx`. docs/formats.md describes the bytes.

Records are read with pread: a disk error is an OSError then, which the loader retries. In mapped memory it would be a SIGBUS,
which ends the process. Only `words`, which gathers the headers of millions of records once, maps the file.
"""

from __future__ import annotations

import mmap
import os
import struct
from array import array
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from megaclass.data.sources.record_index import RecordIndex, write_index
from megaclass.errors import DataError
from megaclass_launch.operating_system import read_at

MAGIC = 0xCED7230A
MAX_PART_BYTES = 2**29 - 1
# Labels are float32, in which neighbouring integers share one value from here on.
MAX_EXACT_LABEL = 2**24

_MAGIC_BYTES = struct.pack("<I", MAGIC)
_PART_HEADER = struct.Struct("<II")
_RECORD_HEADER = struct.Struct("<IfQQ")
_WHOLE_HEADER = struct.Struct("<III")
_WHOLE, _FIRST, _MIDDLE, _LAST = range(4)
# Most faces of 112 x 112 pixels are shorter, so one call reads header and image.
_FIRST_READ_BYTES = 2**14
_SEARCH_BYTES = 2**20


@dataclass(frozen=True)
class Record:
    """Content of one record. Records that describe others have an empty payload."""

    labels: tuple[float, ...]
    payload: bytes
    id: int = 0
    id2: int = 0


def image_record(label: int, payload: bytes, key: int, *, is_label_in_id2: bool) -> Record:
    """Returns the record of a labelled image. With the class in id2 the float is -1, which other readers refuse."""
    if is_label_in_id2:
        return Record((-1.0,), payload, id=key, id2=label)
    require_exact_label(label)
    return Record((float(label),), payload, id=key)


def require_exact_label(label: int) -> None:
    if not 0 <= label < MAX_EXACT_LABEL:
        raise DataError(
            f"Cannot write label {label} as float32, which is exact only below {MAX_EXACT_LABEL:,}: "
            f"pack with 64-bit labels (megaclass data pack --labels id2)."
        )


def pack_record(record: Record) -> bytes:
    """Returns the bytes of a record before they are split into parts."""
    if len(record.labels) == 1:
        return _RECORD_HEADER.pack(0, record.labels[0], record.id, record.id2) + record.payload
    labels = np.asarray(record.labels, dtype="<f4").tobytes()
    return _RECORD_HEADER.pack(len(record.labels), 0.0, record.id, record.id2) + labels + record.payload


def unpack_record(packed: bytes, where: str) -> Record:
    """Parses the bytes of a record. `where` names it in errors, for example `train.rec, byte 128`."""
    if len(packed) < _RECORD_HEADER.size:
        raise DataError(
            f"Cannot read {where}: the record has {len(packed)} bytes, "
            f"expected at least the {_RECORD_HEADER.size} of its header."
        )
    num_labels, label, id_, id2 = _RECORD_HEADER.unpack_from(packed)
    if num_labels == 0:
        return Record((label,), packed[_RECORD_HEADER.size :], id_, id2)
    end = _RECORD_HEADER.size + 4 * num_labels
    if len(packed) < end:
        raise DataError(
            f"Cannot read {where}: its header announces {num_labels} labels, which takes {end} bytes, "
            f"but the record has {len(packed)}."
        )
    labels = np.frombuffer(packed, dtype="<f4", count=num_labels, offset=_RECORD_HEADER.size)
    return Record(tuple(labels.tolist()), packed[end:], id_, id2)


class RecordReader:
    """Random access to the records of one `.rec` file. Pickles as its path, so another process opens the file itself."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("rb", buffering=0)
            self.num_bytes = os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise DataError(f"Cannot read the record file {path}: {error.strerror}.") from error
        if not self.num_bytes:
            raise DataError(f"The record file {path} is empty.")

    def __reduce__(self) -> tuple[type[RecordReader], tuple[Path]]:
        return RecordReader, (self.path,)

    def words(self) -> NDArray[np.uint32]:
        """Returns the file as 32-bit words without a copy, to gather the headers of many records at once."""
        mapped = mmap.mmap(self._file.fileno(), self.num_bytes, access=mmap.ACCESS_READ)
        return np.frombuffer(mapped, dtype="<u4", count=self.num_bytes // 4)

    def require_unchanged(self) -> None:
        """Raises a DataError if the file has become shorter since it was opened."""
        if os.fstat(self._file.fileno()).st_size < self.num_bytes:
            raise self._shorter()

    def read(self, offset: int) -> Record:
        return unpack_record(self._read_packed(offset), f"{self.path}, byte {offset}")

    def read_payload(self, offset: int) -> bytes:
        """Returns the encoded image alone, by a fast path for records of one part, which nearly all are."""
        if 0 <= offset <= self.num_bytes - _WHOLE_HEADER.size:
            first = self._bytes(offset, min(offset + _FIRST_READ_BYTES, self.num_bytes))
            magic, kind_and_length, num_labels = _WHOLE_HEADER.unpack_from(first)
            length = _PART_HEADER.size + kind_and_length
            start = _PART_HEADER.size + _RECORD_HEADER.size + 4 * num_labels
            # A record of one part has kind 0, so the word is its length.
            is_whole = magic == MAGIC and kind_and_length <= MAX_PART_BYTES
            if is_whole and start <= length <= self.num_bytes - offset:
                if length <= len(first):
                    return first[start:length]
                return first[start:] + self._bytes(offset + max(start, len(first)), offset + length)
        return self.read(offset).payload

    def next_record(self, offset: int) -> int:
        """Returns where the record after the one at `offset` starts, without copying content."""
        kind, _, end = self._part(offset)
        if kind in (_MIDDLE, _LAST):
            raise self._later_part(offset)
        while kind in (_FIRST, _MIDDLE):
            kind, _, end = self._further_part(_padded(end), offset)
        return _padded(end)

    def find_mark(self, offset: int) -> int:
        """Returns the first byte from `offset` on at which a record may start, to continue after damage."""
        at = _padded(offset)
        while at < self.num_bytes:
            # Whole words: a mark starts at a multiple of 4, so none lies across two blocks.
            block = self._bytes(at, min(at + _SEARCH_BYTES, self.num_bytes))
            found = block.find(_MAGIC_BYTES)
            while found >= 0 and found % 4:
                found = block.find(_MAGIC_BYTES, found + 1)
            if found >= 0:
                return at + found
            at += _SEARCH_BYTES
        return self.num_bytes

    def _read_packed(self, offset: int) -> bytes:
        """Returns the bytes of a record, its parts joined."""
        kind, start, end = self._part(offset)
        if kind == _WHOLE:
            return self._bytes(start, end)
        if kind != _FIRST:
            raise self._later_part(offset)
        parts = [self._bytes(start, end)]
        while kind != _LAST:
            kind, start, end = self._further_part(_padded(end), offset)
            parts.append(self._bytes(start, end))
        return _MAGIC_BYTES.join(parts)

    def _further_part(self, at: int, offset: int) -> tuple[int, int, int]:
        kind, start, end = self._part(at)
        if kind not in (_MIDDLE, _LAST):
            raise DataError(
                f"Cannot read {self.path}, byte {at}: "
                f"expected a further part of the record that starts at byte {offset}."
            )
        return kind, start, end

    def _later_part(self, offset: int) -> DataError:
        return DataError(
            f"Cannot read {self.path}, byte {offset}: this is a later part of a split record, expected the first."
        )

    def _part(self, offset: int) -> tuple[int, int, int]:
        """Returns (kind, first byte, byte after the last) of the part whose header is at `offset`."""
        if not 0 <= offset <= self.num_bytes - _PART_HEADER.size:
            raise DataError(
                f"Cannot read {self.path}, byte {offset}: expected a record, but the file has {self.num_bytes} bytes. "
                f"Is it truncated, or does the index belong to another file?"
            )
        magic, kind_and_length = _PART_HEADER.unpack(self._bytes(offset, offset + _PART_HEADER.size))
        if magic != MAGIC:
            raise DataError(
                f"Cannot read {self.path}, byte {offset}: expected the record mark 0x{MAGIC:08X}, found 0x{magic:08X}. "
                f"Is it damaged, or does the index belong to another file?"
            )
        start = offset + _PART_HEADER.size
        end = start + (kind_and_length & MAX_PART_BYTES)
        if end > self.num_bytes:
            raise DataError(
                f"Cannot read {self.path}, byte {offset}: the record needs {end - start} bytes, "
                f"but the file ends after {self.num_bytes - start}."
            )
        kind = kind_and_length >> 29
        if kind > _LAST:
            raise DataError(f"Cannot read {self.path}, byte {offset}: unknown kind of part {kind}, expected 0 to 3.")
        return kind, start, end

    def _bytes(self, start: int, end: int) -> bytes:
        """Returns these bytes of the file, all of them."""
        try:
            content = read_at(self._file.fileno(), end - start, start)
        except OSError as error:
            raise DataError(f"Cannot read {self.path}, byte {start}: {error.strerror}.") from error
        if len(content) < end - start:
            raise self._shorter()
        return content

    def _shorter(self) -> DataError:
        return DataError(
            f"{self.path} became shorter than the {self.num_bytes} bytes that it had when it was opened. "
            f"Write a new file and rename it instead of rewriting one that is in use."
        )


class RecordWriter:
    """Writes records to a new `.rec` file, and the `.idx` next to it when the block ends without an error."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("wb")
        # Arrays of 8 bytes per number: lists of 40 million Python integers would take gigabytes.
        self._keys, self._offsets = array("q"), array("q")

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if error is None:
            keys, offsets = np.array(self._keys, dtype=np.int64), np.array(self._offsets, dtype=np.int64)
            # Sorted by key, so readers need not sort.
            order = np.argsort(keys, kind="stable")
            write_index(self.path.with_suffix(".idx"), RecordIndex(keys[order], offsets[order]))

    def write(self, key: int, record: Record) -> None:
        self._keys.append(key)
        self._offsets.append(self._file.tell())
        self._file.write(_split(pack_record(record), f"the record with key {key} for {self.path}"))


def _split(packed: bytes, what: str) -> bytes:
    """Returns parts with headers and padding, split where the bytes could be mistaken for the start of a record."""
    whole_words = np.frombuffer(packed, dtype="<u4", count=len(packed) // 4)
    cuts = (np.flatnonzero(whole_words == MAGIC) * 4).tolist()
    starts, ends = [0, *(cut + 4 for cut in cuts)], [*cuts, len(packed)]
    parts = []
    for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if end - start > MAX_PART_BYTES:
            raise DataError(f"Cannot write {what}: {end - start} bytes in one part, at most {MAX_PART_BYTES} fit.")
        kind = _WHOLE if not cuts else _FIRST if number == 0 else _LAST if number == len(cuts) else _MIDDLE
        padding = b"\0" * (_padded(end - start) - (end - start))
        parts.append(_PART_HEADER.pack(MAGIC, kind << 29 | (end - start)) + packed[start:end] + padding)
    return b"".join(parts)


def _padded(length: int) -> int:
    return (length + 3) // 4 * 4
