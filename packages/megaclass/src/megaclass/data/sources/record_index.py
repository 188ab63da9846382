"""The text index of a `.rec` file: lines of `key<TAB>byte offset`, parsed by array operations and cached as mapped columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from megaclass.data.ordered_map import ordered_map
from megaclass.data.sources.column_cache import ColumnWriter, cached_columns
from megaclass.errors import DataError

# A block and its intermediate arrays stay in the processor's cache.
_BLOCK_BYTES = 2**19
_MAX_DIGITS = 16
_LINES_AT_ONCE = 2**16
_NUM_THREADS = 2
# Masks that keep the lower half of the last n of eight characters, which is the value of a digit.
_LAST_DIGITS = np.array([0x0F0F0F0F0F0F0F0F >> 8 * (8 - n) << 8 * (8 - n) for n in range(9)], dtype=np.uint64)
_PAIRS_FOURS_EIGHT = [
    (np.uint64(10 << 8 | 1), np.uint64(8), np.uint64(0x00FF00FF00FF00FF)),
    (np.uint64(100 << 16 | 1), np.uint64(16), np.uint64(0x0000FFFF0000FFFF)),
    (np.uint64(10000 << 32 | 1), np.uint64(32), np.uint64(0x00000000FFFFFFFF)),
]


@dataclass(frozen=True)
class RecordIndex:
    """Start of every record: the one with key `keys[i]` starts at byte `offsets[i]`. Keys ascend."""

    keys: NDArray[np.int64]
    offsets: NDArray[np.int64]
    why_uncached: str = ""
    """See `Columns`."""


def open_index(path: Path) -> RecordIndex:
    """Parses `key<TAB>offset` lines in any order; `<name>.idx.cache` keeps the result, and is written if it is missing or old.

    Raises a DataError for duplicate keys.
    """

    def build(writer: ColumnWriter) -> dict[str, Any]:
        return {"is_sorted": _parse(path, writer)}

    def build_sorted(writer: ColumnWriter) -> dict[str, Any]:
        keys, offsets = columns.arrays
        index = _sorted(RecordIndex(keys, offsets))
        _require_unique(path, index.keys)
        writer.append(index.keys, index.offsets)
        return {"is_sorted": True}

    columns = cached_columns(f"{path.name}.cache", [path], 2, build)
    if not columns.facts.get("is_sorted"):
        # Rare, but cached as well: sorted arrays in memory would be one copy per rank.
        columns = cached_columns(f"{path.name}.sorted.cache", [path], 2, build_sorted)
    keys, offsets = columns.arrays
    return RecordIndex(keys, offsets, columns.why_uncached)


def read_index_lines(path: Path) -> RecordIndex:
    """Returns the lines in the order of the file, with duplicate keys."""
    blocks: list[tuple[NDArray[np.int64], ...]] = []

    class Collect(ColumnWriter):
        def append(self, *columns: NDArray[np.int64]) -> None:
            blocks.append(columns)

    _parse(path, Collect([]))
    return RecordIndex(np.concatenate([keys for keys, _ in blocks]), np.concatenate([offsets for _, offsets in blocks]))


def write_index(path: Path, index: RecordIndex) -> None:
    with path.open("w", encoding="ascii") as file:
        for start in range(0, len(index.keys), _LINES_AT_ONCE):
            part = slice(start, start + _LINES_AT_ONCE)
            pairs = zip(index.keys[part].tolist(), index.offsets[part].tolist(), strict=True)
            file.write("".join([f"{key}\t{offset}\n" for key, offset in pairs]))


def _parse(path: Path, writer: ColumnWriter) -> bool:
    """Appends keys and offsets block by block. Returns whether the keys ascend without repetition."""
    last, is_sorted, num_lines = -1, True, 0
    try:
        with path.open("rb") as file:
            for parsed in ordered_map(_parse_block, _blocks_of_lines(file), _NUM_THREADS):
                if parsed is None:
                    raise _explain_bad_index(path)
                keys, offsets = parsed
                is_sorted = is_sorted and bool(keys[0] > last) and bool((keys[1:] > keys[:-1]).all())
                last = int(keys[-1])
                num_lines += len(keys)
                writer.append(keys, offsets)
    except OSError as error:
        raise DataError(f"Cannot read the index {path}: {error.strerror}.") from error
    if num_lines == 0:
        raise DataError(f"The index {path} is empty: expected lines of <key><TAB><byte offset>.")
    return is_sorted


def _blocks_of_lines(file: IO[bytes]) -> Iterator[bytes]:
    while block := file.read(_BLOCK_BYTES):
        # Completes the last line of the block. A line of two numbers is shorter than this.
        yield block + file.readline(64)


def _sorted(index: RecordIndex) -> RecordIndex:
    order = np.argsort(index.keys, kind="stable")
    return RecordIndex(index.keys[order], index.offsets[order])


def _require_unique(path: Path, keys: NDArray[np.int64]) -> None:
    repeated = np.flatnonzero(keys[1:] == keys[:-1])
    if len(repeated):
        raise DataError(
            f"The index {path} names key {keys[repeated[0]]} more than once ({len(repeated)} repeated in all): "
            f"each record has one line. "
            f"megaclass data verify --repair writes a clean copy."
        )


def _parse_block(block: bytes) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """Returns keys and offsets; None unless the block is all `digits TAB digits NEWLINE`."""
    if b"\r" in block:
        block = block.replace(b"\r\n", b"\n")
    if not block.endswith(b"\n"):
        block += b"\n"
    # Sixteen zeros in front, so the first number is read like the others, together with the bytes before it.
    padded = np.frombuffer(bytes(_MAX_DIGITS) + block, dtype=np.uint8)
    characters = padded[_MAX_DIGITS:]
    ends = np.flatnonzero((characters - np.uint8(ord("0"))) > 9)
    if len(ends) % 2 or np.any(characters[ends[0::2]] != ord("\t")) or np.any(characters[ends[1::2]] != ord("\n")):
        return None
    num_digits = np.diff(ends, prepend=-1) - 1
    if num_digits.min() < 1 or num_digits.max() > _MAX_DIGITS:
        return None
    # An overlapping view: the eight bytes that start at every byte of the block, without a copy.
    words: NDArray[np.uint64] = np.ndarray(len(padded) - 7, dtype="<u8", buffer=padded, strides=(1,))
    return _numbers(words, ends[0::2], num_digits[0::2]), _numbers(words, ends[1::2], num_digits[1::2])


def _numbers(words: NDArray[np.uint64], ends: NDArray[np.int64], num_digits: NDArray[np.int64]) -> NDArray[np.int64]:
    numbers = _eight_digits(words[ends + 8], num_digits)
    if num_digits.max() > 8:
        numbers += _eight_digits(words[ends], num_digits - 8) * np.uint64(10**8)
    return numbers.view(np.int64)


def _eight_digits(words: NDArray[np.uint64], num_digits: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Returns the number in the last `num_digits` (at most 8) of eight characters, by combining pairs, fours, then all eight.

    Works in place on `words`, which is a copy, because memory traffic is the only cost.
    """
    words &= _LAST_DIGITS[np.minimum(np.maximum(num_digits, 0), 8)]
    for factor, shift, mask in _PAIRS_FOURS_EIGHT:
        words *= factor
        words >>= shift
        words &= mask
    return words


def _explain_bad_index(path: Path) -> DataError:
    with path.open("rb") as file:
        number = 0
        while line := file.readline(2**16):
            number += 1
            parsed = _parse_block(line)
            if parsed is None or len(parsed[0]) != 1:
                return DataError(f"Cannot read {path}, line {number}: {line[:60]!r}; expected <key><TAB><byte offset>.")
    return DataError(f"The index {path} changed while it was read.")
