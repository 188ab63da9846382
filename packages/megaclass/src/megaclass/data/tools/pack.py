"""Packs any source into `train.rec` with `train.idx` and `property`, or tar shards; `classes.txt` if classes have names.

The files are written in a hidden folder next to the target and published by one rename. They are a pure function of the
source and the options, so an interrupted run resumes after the last whole record or shard. The hidden folder of a run with
other data or options is cleared.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import logging
import re
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megaclass.data.decode import Fit, decode_image, encode_jpeg, fit_image, image_dimensions, image_suffix
from megaclass.data.order import shuffled
from megaclass.data.sources.recordio import (
    MAX_EXACT_LABEL,
    Record,
    RecordReader,
    RecordWriter,
    image_record,
    require_exact_label,
)
from megaclass.data.sources.records import LABELS_IN_ID2
from megaclass.data.sources.source import CLASSES_FILE, ImageSource
from megaclass.data.threaded_map import ordered_map
from megaclass.errors import DataError
from megaclass.file_lock import locked
from megaclass.image_size import ImageSize, height_and_width
from megaclass_launch.files import flush

_log = logging.getLogger("megaclass.data")

JPEG_QUALITY = 95
_ARGUMENTS_FILE = "pack.json"
_LOCK_FILE = ".lock"
_BLOCK_IMAGES = 64

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class PackOptions:
    layout: Literal["rec", "tar"] = "rec"
    """rec: train.rec, train.idx and property; tar: shards of (jpg, cls)."""
    labels: Literal["auto", "float", "id2"] = "auto"
    """Field of a .rec for classes: float (exact up to 2^24) or id2 (64 bits). auto: id2 only if there are more classes."""
    shuffle_seed: int | None = 0
    """Seed of the order in the file; None keeps images of a class together. Keys are grouped by class in both cases."""
    image_size: ImageSize | None = None
    """Fit images to this size and encode them again; None keeps their bytes."""
    fit: Fit = "squash"
    """How images of another size are fitted."""
    images_per_shard: int = 10_000
    """Images per tar shard."""

    def __post_init__(self) -> None:
        sides = height_and_width(self.image_size) if self.image_size is not None else ()
        if self.images_per_shard < 1 or not all(8 <= side <= 4096 for side in sides):
            raise DataError("Cannot pack: images_per_shard must be at least 1, and the image size in [8, 4096].")


@dataclass(frozen=True)
class PackResult:
    num_images: int
    num_resumed: int
    """Records that an interrupted run had written."""
    labels_in_id2: bool
    num_other_size: int
    """Images written by this run that had another size; with an image_size they were fitted to it."""


def pack(
    source: ImageSource,
    out: Path,
    options: PackOptions | None = None,
    *,
    class_names: bytes = b"",
    num_threads: int = 1,
    on_progress: Progress | None = None,
) -> PackResult:
    """Writes the folder `out`, which appears whole or not at all. `on_progress` gets the images done and their total.

    class_names: one per line, line i for class i; written as classes.txt. Empty: classes have numbers only.
    """
    options = options or PackOptions()
    is_in_id2 = options.labels == "id2" or (options.labels == "auto" and source.num_classes > MAX_EXACT_LABEL)
    if options.layout == "rec" and not is_in_id2:
        require_exact_label(source.num_classes - 1)
    packing = _Packing(source, options, is_in_id2, class_names, num_threads, on_progress)
    # Through JSON, to compare it with the content of a file.
    arguments = json.loads(json.dumps({**asdict(options), "source": packing.fingerprint()}))
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"Cannot write {out}: it exists already. Remove it or choose another folder.")
    partial = out.with_name(f".{out.name}.partial")
    if partial.is_symlink():
        raise DataError(f"Cannot write {out}: {partial}, where it is prepared, is a link. Remove it.")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        with locked(partial / _LOCK_FILE, timeout_s=0) as is_alone:
            if not is_alone:
                raise DataError(f"Another process is writing {out} at this moment.")
            _clear_other_job(partial, arguments)
            write = packing.write_records if options.layout == "rec" else packing.write_shards
            num_resumed = write(partial)
            packing.write_class_names(partial)
            (partial / _LOCK_FILE).unlink()
            for file in partial.iterdir():
                flush(file)
            partial.rename(out)
    except OSError as error:
        raise DataError(f"Cannot write {out}: {error.strerror or error}.") from error
    return PackResult(source.num_images, num_resumed, is_in_id2 and options.layout == "rec", packing.num_other_size)


class _Packing:
    def __init__(
        self,
        source: ImageSource,
        options: PackOptions,
        is_label_in_id2: bool,
        class_names: bytes,
        num_threads: int,
        on_progress: Progress | None,
    ) -> None:
        self.source = source
        self.options = options
        self.is_label_in_id2 = is_label_in_id2
        self.class_names = class_names
        self.num_threads = num_threads
        self.on_progress = on_progress
        self.by_class = np.argsort(source.labels, kind="stable")
        self.image_size = source.image_size if options.image_size is None else height_and_width(options.image_size)
        self.num_other_size = 0

    def fingerprint(self) -> str:
        """Returns a hash by which a resumed run notices that it has another source."""
        digest = hashlib.sha256(np.ascontiguousarray(self.source.labels).data)
        digest.update(f"{self.source.num_images} {self.source.num_classes} {self.source.name_of(0)}".encode())
        digest.update(self.class_names)
        return digest.hexdigest()

    def write_records(self, folder: Path) -> int:
        """Writes the missing records; returns how many were there already."""
        keys, offsets = self._keys(), _recover(folder / "train.rec")
        with RecordWriter(folder / "train.rec", keys[: len(offsets)], offsets) as writer:
            for key, record in zip(keys[len(offsets) :].tolist(), self._records(len(offsets)), strict=True):
                writer.write(key, record)
        height, width = self.image_size
        text = f"{self.source.num_classes},{height},{width}\n" + (f"{LABELS_IN_ID2}\n" if self.is_label_in_id2 else "")
        (folder / "property").write_text(text, encoding="ascii")
        return len(offsets)

    def write_shards(self, folder: Path) -> int:
        per_shard = self.options.images_per_shard
        num_resumed = 0
        for number in range(-(-self.source.num_images // per_shard)):
            shard = folder / f"shard-{number:06d}.tar"
            start = number * per_shard
            stop = min(start + per_shard, self.source.num_images)
            if shard.exists():
                num_resumed += stop - start
                continue
            unfinished = shard.with_suffix(".partial")
            with tarfile.open(unfinished, "w", format=tarfile.USTAR_FORMAT) as tar:
                for key, label, payload in self._images(start, stop):
                    _add(tar, f"{key:010d}{_suffix(payload)}", payload)
                    _add(tar, f"{key:010d}.cls", str(label).encode())
            unfinished.replace(shard)
        return num_resumed

    def write_class_names(self, folder: Path) -> None:
        if not self.class_names:
            return
        # The largest label of shards decides the number of classes: names of empty classes after it would be too many.
        num_classes = int(self.source.labels.max()) + 1 if self.options.layout == "tar" else self.source.num_classes
        with (folder / CLASSES_FILE).open("wb") as file:
            file.writelines(itertools.islice(io.BytesIO(self.class_names), num_classes))

    def _keys(self) -> NDArray[np.int64]:
        """Returns the keys of all records in the order of the file."""
        num_images = self.source.num_images
        images = self._positions(0, num_images) + 1
        if self.is_label_in_id2:
            return images
        identities = num_images + 1 + np.arange(self.source.num_classes)
        return np.concatenate([[0], images, identities])

    def _records(self, num_done: int) -> Iterator[Record]:
        """Yields the records after the first `num_done`. With labels as floats, a header and identities frame the images."""
        num_images = self.source.num_images
        num_before = 0 if self.is_label_in_id2 else 1
        if num_done < num_before:
            yield Record((float(num_images + 1), float(num_images + 1 + self.source.num_classes)), b"")
        for key, label, payload in self._images(max(0, num_done - num_before), num_images):
            yield image_record(label, payload, key, is_label_in_id2=self.is_label_in_id2)
        if not self.is_label_in_id2:
            ends = 1 + np.searchsorted(self.source.labels[self.by_class], np.arange(self.source.num_classes + 1))
            first = max(0, num_done - num_before - num_images)
            for label in range(first, self.source.num_classes):
                key = num_images + 1 + label
                yield Record((float(ends[label]), float(ends[label + 1])), b"", id=key)

    def _images(self, start: int, stop: int) -> Iterator[tuple[int, int, bytes]]:
        """Yields (key, label, encoded) at the positions of the file from `start` to `stop`."""
        blocks = (range(at, min(at + _BLOCK_IMAGES, stop)) for at in range(start, stop, _BLOCK_IMAGES))
        done = start
        for block, num_other_size in ordered_map(self._read_block, blocks, self.num_threads):
            yield from block
            done += len(block)
            self.num_other_size += num_other_size
            if self.on_progress is not None:
                self.on_progress(done, self.source.num_images)

    def _read_block(self, positions: range) -> tuple[list[tuple[int, int, bytes]], int]:
        """Returns (key, label, encoded) of each image, and how many had another size."""
        found, num_other_size = [], 0
        for place in self._positions(positions.start, positions.stop).tolist():
            index = int(self.by_class[place])
            payload = self.source.read(index)
            if not payload:
                raise DataError(f"Cannot pack {self.source.name_of(index)}: it is empty.")
            if self.options.image_size is not None:
                image_HW3 = decode_image(payload, self.source.name_of(index))
                num_other_size += image_HW3.shape[:2] != self.image_size
                payload = encode_jpeg(fit_image(image_HW3, self.image_size, self.options.fit), JPEG_QUALITY)
            else:
                # A broken image is copied unchanged: `verify` finds it, and training skips it.
                with contextlib.suppress(DataError):
                    num_other_size += image_dimensions(payload, self.source.name_of(index)) != self.image_size
            found.append((place + 1, int(self.source.labels[index]), payload))
        return found, num_other_size

    def _positions(self, start: int, stop: int) -> NDArray[np.int64]:
        """Returns the place in the order of classes for each position in the file."""
        places = np.arange(start, stop)
        seed = self.options.shuffle_seed
        return places if seed is None else shuffled(places, self.source.num_images, seed, 0)


def _recover(path: Path) -> NDArray[np.int64]:
    """Returns where whole records start in the file of an interrupted run; truncates the file after them."""
    if not path.exists() or path.stat().st_size == 0:
        return np.empty(0, dtype=np.int64)
    reader = RecordReader(path)
    offsets, offset = [], 0
    with contextlib.suppress(DataError):
        while offset < reader.num_bytes:
            after = reader.next_record(offset)
            if after > reader.num_bytes:
                break
            offsets.append(offset)
            offset = after
    with path.open("r+b") as file:
        file.truncate(offset)
    return np.array(offsets, dtype=np.int64)


def _clear_other_job(partial: Path, arguments: dict[str, object]) -> None:
    """Keeps the files of an interrupted run of the same job, and removes those of another job.

    The caller holds the lock, so no process writes there.
    """
    file = partial / _ARGUMENTS_FILE
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
    except ValueError:
        found = None
    left = [path for path in partial.iterdir() if path.name != _LOCK_FILE]
    if found != arguments and left:
        foreign = [path for path in left if not _is_own(path)]
        if foreign:
            raise DataError(
                f"{partial}, where pack prepares its files, holds {foreign[0].name}, which pack did not write: "
                f"move it away or remove {partial}."
            )
        for path in left:
            path.unlink()
        _log.info("removed what an earlier run with other data or options left in %s", partial)
    file.write_text(json.dumps(arguments, indent=2) + "\n", encoding="utf-8")


def _is_own(path: Path) -> bool:
    is_name = path.name in ("train.rec", "train.idx", "property", CLASSES_FILE, _ARGUMENTS_FILE)
    return (is_name or re.fullmatch(r"shard-[0-9]+\.(tar|partial)", path.name) is not None) and path.is_file()


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


def _suffix(payload: bytes) -> str:
    try:
        return image_suffix(payload, "an image to pack")
    except DataError:
        raise DataError(
            f"Unknown format of an image that starts with {payload[:8]!r}: give a size, so images are encoded again."
        ) from None
