"""RecordIO: many encoded images in one `.rec` file, found through a text index `.idx`. Bytes as in docs/formats.md.

The reader maps the file into memory, so ranks and workers on one host share one copy, and opening costs nothing.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from megaclass.errors import DataError

MAGIC = 0xCED7230A
MAX_PART_BYTES = 2**29 - 1
# A label travels as float32: from here on neighbouring integers share one value.
MAX_EXACT_LABEL = 2**24

_MAGIC_BYTES = struct.pack("<I", MAGIC)
_PART_HEADER = struct.Struct("<II")
_RECORD_HEADER = struct.Struct("<IfQQ")
_WHOLE, _FIRST, _MIDDLE, _LAST = range(4)
_INDEX_BLOCK_BYTES = 2**24
_MAX_INDEX_DIGITS = 18


@dataclass(frozen=True)
class Record:
    """What one record holds. An empty payload marks the records that describe others."""

    labels: tuple[float, ...]
    payload: bytes
    id: int = 0
    id2: int = 0


def pack_record(record: Record) -> bytes:
    """The bytes of a record, before they are split into parts."""
    if len(record.labels) == 1:
        return _RECORD_HEADER.pack(0, record.labels[0], record.id, record.id2) + record.payload
    labels = np.asarray(record.labels, dtype="<f4").tobytes()
    return _RECORD_HEADER.pack(len(record.labels), 0.0, record.id, record.id2) + labels + record.payload


def unpack_record(packed: bytes, where: str) -> Record:
    """`where` names the record in errors, for example `train.rec, byte 128`."""
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


@dataclass(frozen=True)
class RecordIndex:
    """Where records begin: `offsets[i]` is the byte of the record with key `keys[i]`; keys ascend."""

    keys: NDArray[np.int64]
    offsets: NDArray[np.int64]


def read_index(path: Path) -> RecordIndex:
    """Parses `key<TAB>offset` lines, whatever their order. Duplicate keys are refused."""
    blocks = []
    try:
        with path.open("rb") as file:
            while block := file.read(_INDEX_BLOCK_BYTES):
                # A block ends with a whole line.
                blocks.append(_parse_index_block(block + file.readline()))
                if blocks[-1] is None:
                    raise _explain_bad_index(path)
    except OSError as error:
        raise DataError(f"Cannot read the index {path}: {error.strerror}.") from error
    pairs = np.concatenate([block for block in blocks if block is not None] or [np.empty((0, 2), np.int64)])
    if len(pairs) == 0:
        raise DataError(f"The index {path} is empty: expected lines of <key><TAB><byte offset>.")
    order = np.argsort(pairs[:, 0], kind="stable")
    keys, offsets = pairs[order, 0], pairs[order, 1]
    repeated = np.flatnonzero(keys[1:] == keys[:-1])
    if len(repeated):
        raise DataError(
            f"The index {path} names key {keys[repeated[0]]} more than once ({len(repeated)} repeated in all): "
            f"each record has one line."
        )
    return RecordIndex(keys, offsets)


def write_index(path: Path, index: RecordIndex) -> None:
    lines = [f"{key}\t{offset}\n" for key, offset in zip(index.keys.tolist(), index.offsets.tolist(), strict=True)]
    path.write_text("".join(lines), encoding="ascii")


def _parse_index_block(block: bytes) -> NDArray[np.int64] | None:
    """(lines, 2) numbers, or None when the block is not all `digits TAB digits NEWLINE`."""
    if b"\r" in block:
        block = block.replace(b"\r\n", b"\n")
    if not block.endswith(b"\n"):
        block += b"\n"
    characters = np.frombuffer(block, dtype=np.uint8)
    separators = np.flatnonzero((characters < ord("0")) | (characters > ord("9")))
    if (
        len(separators) % 2
        or np.any(characters[separators[0::2]] != ord("\t"))
        or np.any(characters[separators[1::2]] != ord("\n"))
    ):
        return None
    starts = np.concatenate([[0], separators[:-1] + 1])
    num_digits = separators - starts
    if num_digits.min() < 1 or num_digits.max() > _MAX_INDEX_DIGITS:
        return None
    # Column by column instead of number by number: at most 18 passes, however many lines.
    numbers = np.zeros(len(starts), dtype=np.int64)
    for place in range(int(num_digits.max())):
        has_digit = num_digits > place
        digit = characters[np.where(has_digit, starts + place, 0)].astype(np.int64) - ord("0")
        numbers = np.where(has_digit, numbers * 10 + digit, numbers)
    return numbers.reshape(-1, 2)


def _explain_bad_index(path: Path) -> DataError:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            parsed = _parse_index_block(line)
            if parsed is None or len(parsed) != 1:
                return DataError(f"Cannot read {path}, line {number}: {line[:60]!r}; expected <key><TAB><byte offset>.")
    return DataError(f"The index {path} changed while it was read.")


class RecordReader:
    """Random access to the records of one `.rec` file. Pickles as its path, so a worker opens its own map."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:
            raise DataError(f"The record file {path} is empty.") from error
        except OSError as error:
            raise DataError(f"Cannot read the record file {path}: {error.strerror}.") from error

    def __reduce__(self) -> tuple[type[RecordReader], tuple[Path]]:
        return RecordReader, (self.path,)

    @property
    def num_bytes(self) -> int:
        return len(self._map)

    def words(self) -> NDArray[np.uint32]:
        """The file as 32-bit words, without a copy: headers of many records are then gathered at once."""
        return np.frombuffer(self._map, dtype="<u4", count=len(self._map) // 4)

    def read(self, offset: int) -> Record:
        packed, _ = self._read_packed(offset)
        return unpack_record(packed, f"{self.path}, byte {offset}")

    def scan(self) -> NDArray[np.int64]:
        """Offsets of all records in file order, found without an index."""
        offsets, offset = [], 0
        while offset < len(self._map):
            offsets.append(offset)
            _, offset = self._read_packed(offset)
        return np.array(offsets, dtype=np.int64)

    def _read_packed(self, offset: int) -> tuple[bytes, int]:
        """The record's bytes and where the next record begins."""
        kind, start, end = self._part(offset)
        if kind == _WHOLE:
            return self._map[start:end], _padded(end)
        if kind != _FIRST:
            raise DataError(
                f"Cannot read {self.path}, byte {offset}: this is a later part of a split record, expected the first."
            )
        parts = [self._map[start:end]]
        while kind != _LAST:
            kind, start, end = self._part(_padded(end))
            if kind not in (_MIDDLE, _LAST):
                raise DataError(
                    f"Cannot read {self.path}, byte {start - 8}: "
                    f"expected a further part of the record that begins at byte {offset}."
                )
            parts.append(self._map[start:end])
        return _MAGIC_BYTES.join(parts), _padded(end)

    def _part(self, offset: int) -> tuple[int, int, int]:
        """(kind, first byte, byte after the last) of the part whose header lies at `offset`."""
        if not 0 <= offset <= len(self._map) - _PART_HEADER.size:
            raise DataError(
                f"Cannot read {self.path}, byte {offset}: expected a record, but the file has {len(self._map)} bytes. "
                f"Is it truncated, or does the index belong to another file?"
            )
        magic, kind_and_length = _PART_HEADER.unpack_from(self._map, offset)
        if magic != MAGIC:
            raise DataError(
                f"Cannot read {self.path}, byte {offset}: expected the record mark 0x{MAGIC:08X}, found 0x{magic:08X}. "
                f"Is it damaged, or does the index belong to another file?"
            )
        start = offset + _PART_HEADER.size
        end = start + (kind_and_length & MAX_PART_BYTES)
        if end > len(self._map):
            raise DataError(
                f"Cannot read {self.path}, byte {offset}: the record needs {end - start} bytes, "
                f"but the file ends after {len(self._map) - start}."
            )
        kind = kind_and_length >> 29
        if kind > _LAST:
            raise DataError(f"Cannot read {self.path}, byte {offset}: unknown kind of part {kind}, expected 0 to 3.")
        return kind, start, end


class RecordWriter:
    """Appends records to a new `.rec` file; on leaving without an error, writes the `.idx` beside it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("wb")
        self._keys: list[int] = []
        self._offsets: list[int] = []

    def __enter__(self) -> RecordWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        if error is None:
            index = RecordIndex(np.array(self._keys, dtype=np.int64), np.array(self._offsets, dtype=np.int64))
            write_index(self.path.with_suffix(".idx"), index)

    def write(self, key: int, record: Record) -> None:
        self._keys.append(key)
        self._offsets.append(self._file.tell())
        self._file.write(_split(pack_record(record), f"the record with key {key} for {self.path}"))


def _split(packed: bytes, what: str) -> bytes:
    """Parts with headers and padding, cut where the bytes could be mistaken for the start of a record."""
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
