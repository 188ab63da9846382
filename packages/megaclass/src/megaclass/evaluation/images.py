"""Sources of images for embedding: pairs, files and aligned photos, numbered and decoded one at a time.

Photos are aligned by five landmarks (data/align.py). Without a `fit` an image of another size than
the model's is refused, because a set that was cropped for another model gives plausible but wrong
numbers. The fit comes from the model (as it was trained) or from --fit.
"""

import hashlib
import io
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor

from megaclass.data.align import IJB_POINTS, align
from megaclass.data.decode import IMAGE_SUFFIXES, Fit, decode_image, fit_image, pillow_to_rgb
from megaclass.data.pair_file import PairSet
from megaclass.data.sources.files import SkippedFiles, has_image_name, read_image_file
from megaclass.data.sources.source import ImageSource, TensorSource
from megaclass.data.sources.tensors import ReadSamples, collated, given_samples
from megaclass.errors import DataError
from megaclass.image_size import ImageSize, has_rows, height_and_width, shown_size
from megaclass_launch.ranks.collectives import group_rank

_log = logging.getLogger("megaclass.evaluation")
Pixels = NDArray[np.uint8]


class OtherSizeError(DataError):
    """An image of another size. The file is not bad, so it is never skipped: the user must choose how to fit it."""


@dataclass(frozen=True, kw_only=True)
class Images(ABC):
    """Images by number, which are fitted to the size of the model, or refused without a fit."""

    image_size: ImageSize
    fit: Fit | None = None
    resized: set[int] = field(default_factory=set)
    """Numbers of the images decoded so far that had another size."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def name(self, index: int) -> str:
        """Returns the name of the image for error messages."""

    @abstractmethod
    def _decoded(self, index: int) -> Pixels:
        """Returns the image in its own size."""

    def content(self, index: int) -> Hashable:
        """Returns what tells the image from others, of which one is embedded: its number if nothing is known."""
        return index

    def pixels(self, index: int) -> Pixels:
        """Returns (H, W, 3) RGB, or raises a DataError that names the image."""
        if has_rows(self.image_size):
            raise OtherSizeError(
                f"{self.name(index)} is an image, but the model takes samples of {shown_size(self.image_size)}."
            )
        image_HW3 = self._decoded(index)
        size = height_and_width(self.image_size)
        if image_HW3.shape[:2] == size:
            return image_HW3
        if self.fit is None:
            height, width = image_HW3.shape[:2]
            raise OtherSizeError(
                f"{self.name(index)} has {width} × {height} pixels, but the model takes {shown_size(self.image_size)}: use a "
                f"model of that input size, or allow scaling with --resize or with --fit pad, crop or squash (in Python: "
                f'fit="pad").'
            )
        self.resized.add(index)
        return fit_image(image_HW3, size, self.fit)


@dataclass(frozen=True, kw_only=True)
class Samples(Images):
    """Features or sequences, which a network takes as they are; image_size is (1, W) or (0, W)."""

    num_samples: int
    read: ReadSamples
    names: Callable[[int], str] = "sample {}".format

    @classmethod
    def given(cls, given: object, image_size: ImageSize) -> "Samples":
        """Returns what a caller gives: a matrix of features, or a list of sequences."""
        rows = given_samples(given, image_size)
        return cls(
            image_size=image_size,
            num_samples=len(rows),
            read=lambda indices: rows[indices] if isinstance(rows, Tensor) else [rows[index] for index in indices],
        )

    def __len__(self) -> int:
        return self.num_samples

    def name(self, index: int) -> str:
        return self.names(index)

    def _decoded(self, index: int) -> Pixels:
        raise DataError(f"{self.name(index)} is not an image.")

    def inputs(self, indices: Sequence[int]) -> tuple[Tensor, ...]:
        """Returns the arguments of the network for these samples."""
        samples, lengths = collated(self.read, np.asarray(indices, dtype=np.int64), self.name)
        samples = samples.float() if samples.is_floating_point() else samples
        return (samples,) if lengths is None else (samples, lengths)


def images_of_source(source: ImageSource, image_size: ImageSize, fit: Fit | None) -> Images:
    """Returns the images or samples of labelled data, for a model that takes samples of this size."""
    given = source.image_size
    if not isinstance(source, TensorSource) and not has_rows(image_size):
        return SourceImages(source=source, image_size=image_size, fit=fit)
    if not isinstance(source, TensorSource) or given != height_and_width(image_size):
        raise DataError(
            f"The model takes samples of {shown_size(image_size)}, but those of {source.describe()} have {shown_size(given)}."
        )
    return Samples(image_size=image_size, num_samples=source.num_images, read=source.tensors, names=source.name_of)


@dataclass(frozen=True, kw_only=True)
class PairImages(Images):
    """The 2N encoded images of a verification set."""

    pair_set: PairSet
    set_name: str = "the pairs"

    def __len__(self) -> int:
        return len(self.pair_set.images)

    def name(self, index: int) -> str:
        return f"image {index} of {self.set_name} (pair {index // 2})"

    def content(self, index: int) -> Hashable:
        return hashlib.blake2b(self.pair_set.images[index], digest_size=16).digest()

    def _decoded(self, index: int) -> Pixels:
        return decode_image(self.pair_set.images[index], self.name(index))


@dataclass(frozen=True, kw_only=True)
class SourceImages(Images):
    """The images of labelled data, read on access."""

    source: ImageSource

    def __len__(self) -> int:
        return self.source.num_images

    def name(self, index: int) -> str:
        return self.source.name_of(index)

    def _decoded(self, index: int) -> Pixels:
        return decode_image(self.source.read(index), self.name(index))


@dataclass(frozen=True, kw_only=True)
class GivenImages(Images):
    """Images that a caller gives: paths of files, Pillow images, arrays and tensors of bytes, in any mixture."""

    images: Sequence[object]

    def __len__(self) -> int:
        return len(self.images)

    def name(self, index: int) -> str:
        image = self.images[index]
        return str(image) if isinstance(image, str | Path) else f"image {index} ({type(image).__name__})"

    def content(self, index: int) -> Hashable:
        image = self.images[index]
        return str(image) if isinstance(image, str | Path) else index

    def _decoded(self, index: int) -> Pixels:
        return pixels_of(self.images[index], self.name(index))


def pixels_of(image: object, name: str) -> Pixels:
    """Returns (H, W, 3) RGB of a path, the content of an image file, a Pillow image, an array or a tensor.

    Arrays hold RGB bytes (H, W, 3) or (H, W), tensors (3, H, W). Content: bytes or an open file.
    """
    if isinstance(image, str) and image.startswith(("http://", "https://")):
        raise DataError(
            f"Cannot embed {name}: nothing is downloaded. Fetch it and give the bytes: urllib.request.urlopen(url).read()."
        )
    if isinstance(image, io.IOBase):
        if image.seekable():
            image.seek(0)
        image = image.read()
    if isinstance(image, bytes | bytearray):
        return decode_image(bytes(image), name)
    if isinstance(image, str | Path):
        if Path(image).is_dir():
            raise DataError(f"{name} is a folder: give its files, such as sorted(Path({name!r}).glob('*.jpg')).")
        return decode_image(read_image_file(Path(image)), name)
    if isinstance(image, Image.Image):
        return pillow_to_rgb(ImageOps.exif_transpose(image), image, name)
    if isinstance(image, Tensor):
        array = image.detach().cpu().numpy()
        array = array.transpose(1, 2, 0) if array.ndim == 3 and array.shape[0] in (1, 3) else array
    elif isinstance(image, np.ndarray):
        array = image
    else:
        raise DataError(
            f"Cannot embed {name}: expected the path of an image file, its bytes, a Pillow image, an array or a tensor."
        )
    is_plane = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (1, 3))
    if array.dtype != np.uint8 or not is_plane or not array.size:
        raise DataError(
            f"Cannot embed {name} of shape {tuple(image.shape)} and {image.dtype}: expected RGB bytes (uint8), (H, W, 3) in "
            f"an array or (3, H, W) in a tensor. Floating tensors must be the input of the network, (B, 3, H, W) in [-1, 1]."
        )
    grey = array[..., None] if array.ndim == 2 else array
    return np.ascontiguousarray(np.broadcast_to(grey, (*grey.shape[:2], 3)))


@dataclass(frozen=True, kw_only=True)
class AlignedImages(Images):
    """Photos of an IJB set with five landmarks each, rotated and scaled onto the standard face, in the size of the model."""

    paths: Sequence[Path]
    points_N52: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.paths)

    def name(self, index: int) -> str:
        return str(self.paths[index])

    def _decoded(self, index: int) -> Pixels:
        height, width = height_and_width(self.image_size)
        if height != width:
            raise DataError(
                f"Cannot align {self.name(index)}: the model takes {shown_size(self.image_size)}, but the standard face "
                f"of the landmarks is a square."
            )
        photo = decode_image(read_image_file(self.paths[index]), self.name(index))
        return align(photo, self.points_N52[index], height, where=self.name(index), standard_52=IJB_POINTS)


def find_images(folder: Path) -> list[Path]:
    """Returns all image files below the folder, sorted by path; rank 0 logs which files are not images.

    Names that start with a dot are ignored, and links to folders followed, as in folders of training data.
    """
    if not folder.is_dir():
        raise DataError(f"Cannot read the images of {folder}: the folder does not exist.")
    found: list[Path] = []
    skipped_files = SkippedFiles()
    for parent, folders, files in os.walk(folder, followlinks=True, onerror=_refuse_folder):
        folders[:] = sorted(name for name in folders if name[0] != ".")
        for name in [name for name in folders if _leads_upwards(Path(parent, name), folder)]:
            folders.remove(name)
            skipped_files.add(f"{Path(parent, name).relative_to(folder)} (a link to a folder above it)")
        for name in sorted(files):
            if has_image_name(name) and name[0] != ".":
                found.append(Path(parent, name))
            elif name[0] != ".":
                skipped_files.add(str(Path(parent, name).relative_to(folder)))
    if not found:
        others = f" ({skipped_files.describe()})" if skipped_files.num_files else ""
        raise DataError(f"{folder} holds no images: looked for {', '.join(IMAGE_SUFFIXES)} in it and below{others}.")
    if skipped_files.num_files and group_rank(None) == 0:
        _log.info("%s: %s", folder, skipped_files.describe())
    return sorted(found)


def _leads_upwards(path: Path, top: Path) -> bool:
    """Returns whether the folder is a link to one that was entered on the way to it, which would never end."""
    if not path.is_symlink():
        return False
    entered = [above for above in path.parents if above.is_relative_to(top)]
    return path.resolve() in {above.resolve() for above in entered}


def _refuse_folder(error: OSError) -> None:
    raise DataError(f"Cannot read the folder {error.filename}: {error.strerror}.") from error
