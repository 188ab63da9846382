"""The text index of a `.rec` file: lines of `key<TAB>byte offset`, parsed by array operations and cached as mapped columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from megaclass.data.ordered_map import ordered_map
from megaclass.data.sources.column_cache import cached_columns
from megaclass.errors import DataError

# A block and its intermediate arrays stay in the processor's cache.
_BLOCK_BYTES = 2**19
_MAX_DIGITS = 16
_LINES_AT_ONCE = 2**16
_NUM_THREADS = 2


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

    def build() -> tuple[dict[str, Any], Sequence[NDArray[np.int64]]]:
        index = read_index_lines(path)
        keys, offsets = index.keys, index.offsets
        if not (keys[1:] > keys[:-1]).all():
            order = np.argsort(keys, kind="stable")
            keys, offsets = keys[order], offsets[order]
            _require_unique(path, keys)
        return {}, (keys, offsets)

    columns = cached_columns(f"{path.name}.cache", [path], 2, build)
    keys, offsets = columns.arrays
    return RecordIndex(keys, offsets, columns.why_uncached)


def read_index_lines(path: Path) -> RecordIndex:
    """Returns the lines in the order of the file, with duplicate keys."""
    # Grown in place: arrays that are joined at the end would take twice the memory.
    keys, offsets = bytearray(), bytearray()
    try:
        with path.open("rb") as file:
            for parsed in ordered_map(_parse_block, _blocks_of_lines(file), _NUM_THREADS):
                if parsed is None:
                    raise _explain_bad_index(path)
                keys += parsed[0].data
                offsets += parsed[1].data
    except OSError as error:
        raise DataError(f"Cannot read the index {path}: {error.strerror}.") from error
    if not keys:
        raise DataError(f"The index {path} is empty: expected lines of <key><TAB><byte offset>.")
    return RecordIndex(np.frombuffer(keys, dtype=np.int64), np.frombuffer(offsets, dtype=np.int64))


def write_index(path: Path, index: RecordIndex) -> None:
    with path.open("w", encoding="ascii") as file:
        for start in range(0, len(index.keys), _LINES_AT_ONCE):
            part = slice(start, start + _LINES_AT_ONCE)
            pairs = zip(index.keys[part].tolist(), index.offsets[part].tolist(), strict=True)
            file.write("".join([f"{key}\t{offset}\n" for key, offset in pairs]))


def _blocks_of_lines(file: IO[bytes]) -> Iterator[bytes]:
    while block := file.read(_BLOCK_BYTES):
        # Completes the last line of the block. A line of two numbers is shorter than this.
        yield block + file.readline(64)


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
    characters = np.frombuffer(block, dtype=np.uint8)
    ends = np.flatnonzero((characters - np.uint8(ord("0"))) > 9)
    if len(ends) % 2 or np.any(characters[ends[0::2]] != ord("\t")) or np.any(characters[ends[1::2]] != ord("\n")):
        return None
    num_digits = np.diff(ends, prepend=-1) - 1
    if num_digits.min() < 1 or num_digits.max() > _MAX_DIGITS:
        return None
    numbers = np.fromstring(block, dtype=np.int64, sep=" ").reshape(-1, 2)
    return np.ascontiguousarray(numbers[:, 0]), np.ascontiguousarray(numbers[:, 1])


def _explain_bad_index(path: Path) -> DataError:
    with path.open("rb") as file:
        number = 0
        while line := file.readline(2**16):
            number += 1
            parsed = _parse_block(line)
            if parsed is None or len(parsed[0]) != 1:
                return DataError(f"Cannot read {path}, line {number}: {line[:60]!r}; expected <key><TAB><byte offset>.")
    return DataError(f"The index {path} changed while it was read.")
