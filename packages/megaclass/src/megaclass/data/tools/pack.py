"""Packs any source into `train.rec` with `train.idx` and `property`, or tar shards; `classes.txt` if classes have names.

The folder appears whole or not at all. Its files are a pure function of the source and the options. Images that do not decode
are left out. `unpack` writes a folder of images.
"""

import io
import itertools
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from megaclass.data.decode import Fit, decode_image, encode_jpeg, fit_image, image_suffix
from megaclass.data.loading.reader import BadImages, read_image
from megaclass.data.order import shuffled
from megaclass.data.ordered_map import ordered_map
from megaclass.data.sources.files import has_image_name
from megaclass.data.sources.recordio import MAX_EXACT_LABEL, Record, RecordWriter, image_record, require_exact_label
from megaclass.data.sources.records import LABELS_IN_ID2
from megaclass.data.sources.source import CLASSES_FILE, ImageSource
from megaclass.data.tools.verify import SubsetSource
from megaclass.errors import DataError
from megaclass.image_size import ImageSize, height_and_width
from megaclass.progress import OnProgress, no_progress
from megaclass_launch.files import published_folder

JPEG_QUALITY = 95
_BLOCK_IMAGES = 64


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
    labels_in_id2: bool
    num_other_size: int
    """Images that had another size; with an image_size they were fitted to it."""
    num_bad: int
    """Images that were left out because they do not decode."""


def pack(
    source: ImageSource,
    out: Path,
    options: PackOptions | None = None,
    *,
    class_names: bytes = b"",
    num_threads: int = 1,
    on_progress: OnProgress = no_progress,
) -> PackResult:
    """Writes the folder `out`. `on_progress` gets the images done and their total.

    class_names: one per line, line i for class i; written as classes.txt. Empty: classes have numbers only.
    """
    options = options or PackOptions()
    is_in_id2 = options.labels == "id2" or (options.labels == "auto" and source.num_classes > MAX_EXACT_LABEL)
    if options.layout == "rec" and not is_in_id2:
        require_exact_label(source.num_classes - 1)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"Cannot write {out}: it exists already. Remove it or choose another folder.")
    packing = _Packing(source, options, is_in_id2, num_threads, on_progress)
    try:
        with published_folder(out.resolve()) as unfinished:
            while bad := packing.write(unfinished):
                # Keys have no gaps, and the header states their number: the files are written again without these images.
                packing.source = SubsetSource(
                    packing.source, np.delete(np.arange(packing.source.num_images), sorted(bad))
                )
            packing.write_class_names(unfinished, class_names)
    except OSError as error:
        raise DataError(f"Cannot write {out}: {error.strerror or error}.") from error
    num_images = packing.source.num_images
    return PackResult(
        num_images, is_in_id2 and options.layout == "rec", packing.num_other_size, source.num_images - num_images
    )


@dataclass
class _Packing:
    source: ImageSource
    options: PackOptions
    is_label_in_id2: bool
    num_threads: int
    on_progress: OnProgress

    def write(self, folder: Path) -> set[int]:
        """Writes the files; returns the images that do not decode, without which they have to be written again."""
        size = self.options.image_size
        self.by_class = np.argsort(self.source.labels, kind="stable")
        self.image_size = self.source.image_size if size is None else height_and_width(size)
        self.bad_images, self.num_other_size = BadImages.of_tool(self.source.num_images), 0
        if self.options.layout == "rec":
            self._write_records(folder)
        else:
            self._write_shards(folder)
        return self.bad_images.indices

    def _write_records(self, folder: Path) -> None:
        with RecordWriter(folder / "train.rec") as writer:
            for key, record in self._records():
                writer.write(key, record)
        height, width = self.image_size
        text = f"{self.source.num_classes},{height},{width}\n" + (f"{LABELS_IN_ID2}\n" if self.is_label_in_id2 else "")
        (folder / "property").write_text(text, encoding="ascii")

    def _write_shards(self, folder: Path) -> None:
        per_shard, num_images = self.options.images_per_shard, self.source.num_images
        for old in folder.iterdir():
            old.unlink()
        for number, start in enumerate(range(0, num_images, per_shard)):
            with tarfile.open(folder / f"shard-{number:06d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
                for key, label, payload in self._images(start, min(start + per_shard, num_images)):
                    _add(tar, f"{key:010d}{image_suffix(payload, 'an image to pack')}", payload)
                    _add(tar, f"{key:010d}.cls", str(label).encode())

    def write_class_names(self, folder: Path, class_names: bytes) -> None:
        if not class_names:
            return
        # The largest label of shards decides the number of classes: names of empty classes after it would be too many.
        num_classes = int(self.source.labels.max()) + 1 if self.options.layout == "tar" else self.source.num_classes
        with (folder / CLASSES_FILE).open("wb") as file:
            file.writelines(itertools.islice(io.BytesIO(class_names), num_classes))

    def _records(self) -> Iterator[tuple[int, Record]]:
        num_images, num_classes = self.source.num_images, self.source.num_classes
        images = self._images(0, num_images)
        if self.is_label_in_id2:
            return ((key, image_record(label, payload, key, is_label_in_id2=True)) for key, label, payload in images)
        first_keys = 1 + np.searchsorted(self.source.labels[self.by_class], np.arange(num_classes + 1))
        return framed_records(images, first_keys)

    def _images(self, start: int, stop: int) -> Iterator[tuple[int, int, bytes]]:
        """Yields (key, label, encoded) at the positions of the file from `start` to `stop`, without images that are bad."""
        blocks = (range(at, min(at + _BLOCK_IMAGES, stop)) for at in range(start, stop, _BLOCK_IMAGES))
        done = start
        for block, num_read, num_other_size in ordered_map(self._read_block, blocks, self.num_threads):
            yield from block
            done += num_read
            self.bad_images.add_read(num_read)
            self.num_other_size += num_other_size
            self.on_progress(done, self.source.num_images)

    def _read_block(self, positions: range) -> tuple[list[tuple[int, int, bytes]], int, int]:
        """Returns (key, label, encoded) of each image that decodes, and how many were read and had another size."""
        found, num_other_size = [], 0
        for place in self._positions(positions.start, positions.stop).tolist():
            index = int(self.by_class[place])
            try:
                payload = read_image(self.source, index)
                image_HW3 = decode_image(payload, self.source.name_of(index))
            except DataError as error:
                self.bad_images.add_bad(index, error)
                continue
            num_other_size += image_HW3.shape[:2] != self.image_size
            if self.options.image_size is not None:
                payload = encode_jpeg(fit_image(image_HW3, self.image_size, self.options.fit), JPEG_QUALITY)
            found.append((place + 1, int(self.source.labels[index]), payload))
        return found, len(positions), num_other_size

    def _positions(self, start: int, stop: int) -> NDArray[np.int64]:
        """Returns the place in the order of classes for each position in the file."""
        places = np.arange(start, stop)
        seed = self.options.shuffle_seed
        return places if seed is None else shuffled(places, self.source.num_images, seed, 0)


def framed_records(
    images: Iterable[tuple[int, int, bytes]], first_keys: NDArray[np.int64]
) -> Iterator[tuple[int, Record]]:
    """Yields InsightFace's layout: a header, the images (key, label, encoded), then a record per identity with its keys.

    first_keys: of each identity, and one after the last key of an image.
    """
    end, num_classes = int(first_keys[-1]), len(first_keys) - 1
    yield 0, Record((float(end), float(end + num_classes)), b"")
    for key, label, encoded in images:
        yield key, image_record(label, encoded, key, is_label_in_id2=False)
    for label in range(num_classes):
        yield end + label, Record((float(first_keys[label]), float(first_keys[label + 1])), b"", id=end + label)


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


# ---- the way back ----


def unpack(
    source: ImageSource,
    out: Path,
    *,
    class_names: Sequence[bytes] | None = None,
    on_progress: OnProgress = no_progress,
) -> int:
    """Writes `out`/NAME/FILE with the bytes of the source; the folder appears whole or not at all.

    NAME is the name of the class if the data has names, otherwise its number; FILE is the name of the image's file, or its
    number. Images that do not decode are left out; returns their number.
    """
    if out.exists():
        raise DataError(f"{out} exists already: choose a folder that does not exist.")
    width = len(str(max(0, source.num_classes - 1)))
    named = distinct_names([_folder_name(name) for name in class_names]) if class_names is not None else None
    bad = BadImages.of_tool(source.num_images)
    try:
        with published_folder(out.resolve()) as unfinished:
            for index in range(source.num_images):
                label = int(source.labels[index])
                folder = unfinished / (named[label] if named is not None else f"{label:0{width}d}")
                folder.mkdir(parents=True, exist_ok=True)
                try:
                    content = read_image(source, index)
                    decode_image(content, source.name_of(index))
                    (folder / _file_name(source, index, content, folder)).write_bytes(content)
                except DataError as error:
                    bad.add_bad(index, error)
                bad.add_read(1)
                on_progress(index + 1, source.num_images)
    except OSError as error:
        raise DataError(f"Cannot write {out}: {error.strerror or error}.") from error
    return len(bad.indices)


def distinct_names(names: Sequence[str]) -> list[str]:
    """Returns the names, with a number behind each that an earlier one has already: `name`, `name (2)`, …"""
    given, taken = set(names), set[str]()
    found = []
    for name in names:
        unique, number = name, 1
        while unique in taken or (number > 1 and unique in given):
            number += 1
            unique = f"{name} ({number})"
        taken.add(unique)
        found.append(unique)
    return found


def _file_name(source: ImageSource, index: int, content: bytes, folder: Path) -> str:
    """Returns the name of the image's own file; a number if it has none, or if another image has taken its name."""
    own = Path(source.name_of(index)).name
    if has_image_name(own) and not (folder / own).exists():
        return own
    return f"{index:08d}{image_suffix(content, own)}"


def _folder_name(name: bytes) -> str:
    """Returns the name as one folder's name: it must not lead anywhere else, nor be hidden."""
    text = name.decode("utf-8", errors="replace").replace("/", "_").replace("\\", "_").replace("\x00", "_")
    return f"_{text}" if text.startswith(".") or not text else text
