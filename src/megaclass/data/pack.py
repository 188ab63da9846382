"""Any source -> `train.rec`, `train.idx`, `property`, or tar shards of (jpg, cls); `classes.txt` where classes have names.

The files are written in a hidden folder beside the target and published by one rename. What is written is a pure function
of the source and the arguments, so a run that was cut off goes on after the last whole record or shard.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import itertools
import json
import os
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megaclass.data.decode import decode_batch
from megaclass.data.order import shuffled
from megaclass.data.parallel import ordered_map
from megaclass.data.record_source import LABELS_IN_ID2
from megaclass.data.recordio import (
    MAX_EXACT_LABEL,
    Record,
    RecordReader,
    RecordWriter,
    image_record,
    require_exact_label,
)
from megaclass.data.source import CLASSES_FILE, ImageSource
from megaclass.errors import DataError

JPEG_QUALITY = 95
_ARGUMENTS_FILE = "pack.json"
_BLOCK_IMAGES = 64
_SUFFIXES = {b"\xff\xd8\xff": "jpg", b"\x89PN": "png", b"RIF": "webp", b"BM": "bmp", b"GIF": "gif"}

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class PackOptions:
    layout: Literal["rec", "tar"] = "rec"
    """rec: train.rec, train.idx and property; tar: shards of (jpg, cls)."""
    labels: Literal["auto", "float", "id2"] = "auto"
    """Where a .rec keeps classes: float32, exact to 2^24, or id2, 64 bits. auto: id2 only where it must be."""
    shuffle_seed: int | None = 0
    """Order in the file; None keeps images of a class together. Keys are grouped by class either way."""
    image_size: int | None = None
    """Images are resized to this square and encoded anew; None keeps their bytes."""
    images_per_shard: int = 10_000
    """Images in a tar shard."""

    def __post_init__(self) -> None:
        if self.images_per_shard < 1 or (self.image_size is not None and not 8 <= self.image_size <= 4096):
            raise DataError("Cannot pack: images_per_shard is at least 1, and the size of images lies in [8, 4096].")


@dataclass(frozen=True)
class Packed:
    num_images: int
    num_resumed: int
    """Records that an earlier run, cut off, had written."""
    labels_in_id2: bool


def pack(
    source: ImageSource,
    out: Path,
    options: PackOptions | None = None,
    *,
    class_names: bytes = b"",
    num_threads: int = 1,
    on_progress: Progress | None = None,
) -> Packed:
    """Writes `out`, which appears whole or not at all. `on_progress` gets images done and in all.

    class_names: one a line, line i for class i; written as classes.txt. Empty: classes have numbers only.
    """
    options = options or PackOptions()
    is_in_id2 = options.labels == "id2" or (options.labels == "auto" and source.num_classes > MAX_EXACT_LABEL)
    if options.layout == "rec" and not is_in_id2:
        require_exact_label(source.num_classes - 1)
    job = _Job(source, options, is_in_id2, class_names, num_threads, on_progress)
    arguments = {**asdict(options), "source": job.fingerprint()}
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"Cannot write {out}: it is there already. Remove it or choose another folder.")
    partial = out.with_name(f".{out.name}.partial")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        with _locked(partial, out):
            _require_same_job(partial, arguments)
            num_resumed = job.write_records(partial) if options.layout == "rec" else job.write_shards(partial)
            job.write_class_names(partial)
            (partial / ".lock").unlink()
            _sync(partial)
            partial.rename(out)
    except OSError as error:
        raise DataError(f"Cannot write {out}: {error.strerror or error}.") from error
    return Packed(source.num_images, num_resumed, is_in_id2 and options.layout == "rec")


class _Job:
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

    def fingerprint(self) -> str:
        """What would make half a file written from one source go on with another."""
        digest = hashlib.sha256(np.ascontiguousarray(self.source.labels).data)
        digest.update(f"{self.source.num_images} {self.source.num_classes} {self.source.name_of(0)}".encode())
        digest.update(self.class_names)
        return digest.hexdigest()

    def write_records(self, folder: Path) -> int:
        """Returns how many records were there already."""
        keys, offsets = self._keys(), _recover(folder / "train.rec")
        with RecordWriter(folder / "train.rec", keys[: len(offsets)], offsets) as writer:
            for key, record in zip(keys[len(offsets) :].tolist(), self._records(len(offsets)), strict=True):
                writer.write(key, record)
        height, width = (self.options.image_size,) * 2 if self.options.image_size else self.source.image_size
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
                    _add(tar, f"{key:010d}.{_suffix(payload)}", payload)
                    _add(tar, f"{key:010d}.cls", str(label).encode())
            unfinished.replace(shard)
        return num_resumed

    def write_class_names(self, folder: Path) -> None:
        if not self.class_names:
            return
        # Shards have as many classes as their largest label says: names of empty classes behind it would be too many.
        num_classes = int(self.source.labels.max()) + 1 if self.options.layout == "tar" else self.source.num_classes
        with (folder / CLASSES_FILE).open("wb") as file:
            file.writelines(itertools.islice(io.BytesIO(self.class_names), num_classes))

    def _keys(self) -> NDArray[np.int64]:
        """Keys of all records in the order of the file."""
        num_images = self.source.num_images
        images = self._positions(0, num_images) + 1
        if self.is_label_in_id2:
            return images
        identities = num_images + 1 + np.arange(self.source.num_classes)
        return np.concatenate([[0], images, identities])

    def _records(self, num_done: int) -> Iterator[Record]:
        """What is left after the first `num_done` records. A header and identities frame the images where labels fit."""
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
        """(key, label, encoded) at the positions of the file from `start` to `stop`."""
        blocks = (range(at, min(at + _BLOCK_IMAGES, stop)) for at in range(start, stop, _BLOCK_IMAGES))
        done = start
        for block in ordered_map(self._read_block, blocks, self.num_threads):
            yield from block
            done += len(block)
            if self.on_progress is not None:
                self.on_progress(done, self.source.num_images)

    def _read_block(self, positions: range) -> list[tuple[int, int, bytes]]:
        found = []
        for place in self._positions(positions.start, positions.stop).tolist():
            index = int(self.by_class[place])
            payload = self.source.read(index)
            if not payload:
                raise DataError(f"Cannot pack {self.source.name_of(index)}: it is empty.")
            if self.options.image_size:
                payload = _encode_anew(payload, self.options.image_size, self.source.name_of(index))
            found.append((place + 1, int(self.source.labels[index]), payload))
        return found

    def _positions(self, start: int, stop: int) -> NDArray[np.int64]:
        """Place in the order of classes of each position in the file."""
        places = np.arange(start, stop)
        seed = self.options.shuffle_seed
        return places if seed is None else shuffled(places, self.source.num_images, seed, 0)


def _recover(path: Path) -> NDArray[np.int64]:
    """Where whole records begin in a file whose writer was cut off; what follows them is removed."""
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


@contextlib.contextmanager
def _locked(partial: Path, out: Path) -> Iterator[None]:
    handle = os.open(partial / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise DataError(f"Another process is writing {out} at this moment.") from None
    finally:
        os.close(handle)


def _require_same_job(partial: Path, arguments: dict[str, object]) -> None:
    file = partial / _ARGUMENTS_FILE
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
    if found is not None and found != arguments:
        raise DataError(
            f"{partial} holds what an earlier run with other data or options left: remove it, or repeat that run."
        )
    file.write_text(json.dumps(arguments, indent=2) + "\n", encoding="utf-8")


def _sync(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


def _suffix(payload: bytes) -> str:
    for beginning, suffix in _SUFFIXES.items():
        if payload.startswith(beginning):
            return suffix
    raise DataError(f"Cannot tell what kind of image begins with {payload[:8]!r}: give a size to encode it anew.")


def _encode_anew(payload: bytes, size: int, name: str) -> bytes:
    import simplejpeg

    image_HW3 = decode_batch([payload], (size, size), [name])[0]
    encoded: bytes = simplejpeg.encode_jpeg(image_HW3, quality=JPEG_QUALITY, colorspace="RGB", colorsubsampling="444")
    return encoded
