"""A gallery to search in: the embeddings of its images."""

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from megaclass.data.decode import Fit
from megaclass.errors import DataError
from megaclass.evaluation.embed import log_bad_images
from megaclass.evaluation.gallery import read_rows_and_names
from megaclass.evaluation.images import GivenImages, find_images
from megaclass.evaluation.search import GalleryShard, precision_lock, search
from megaclass.image_size import has_rows
from megaclass_launch.files import published_file, write_text

ImageInput = str | Path | bytes | io.IOBase | Image.Image | NDArray[np.uint8] | Tensor
"""One image for embed(), or a batch of images in one array or tensor."""
Comparable = ImageInput | Sequence[ImageInput] | NDArray[np.floating[Any]]
"""Images for embed(), or embeddings as floating numbers of shape (N, D) or (D,)."""


def listed_images(images: object) -> list[Any]:
    """Returns the images one by one: of a list, of a batch in one array or tensor, of a folder, or the only one."""
    if isinstance(images, str | Path) and Path(images).is_dir():
        return list(find_images(Path(images)))
    is_one = isinstance(images, str | Path | bytes | bytearray | io.IOBase | Image.Image)
    if is_one or (isinstance(images, np.ndarray | Tensor) and images.ndim <= 3):
        return [images]
    if isinstance(images, Iterable):
        return list(images)
    raise DataError(
        f"Cannot embed an object of {type(images).__name__}: expected the path of an image or a folder, the bytes of an "
        f"image file, a Pillow image, an array, a tensor, or a list of these."
    )


if TYPE_CHECKING:
    from megaclass.inference.loaded_model import LoadedModel


@dataclass(frozen=True, kw_only=True)
class Neighbour:
    """One image of the gallery, near to a query."""

    path: str
    """Path of the image, or its place in the list that was indexed."""
    similarity: float
    """Cosine of its embedding and that of the query."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageIndex:
    """The embeddings of a gallery, with the path of each; `LoadedModel.index` makes one. Threads may share it."""

    model: "LoadedModel"
    paths: Sequence[str]
    embeddings_ND: NDArray[np.float32]
    """(N, D), normalised."""
    fit: Fit | None = None
    """How queries of another size are fitted."""

    def __len__(self) -> int:
        return len(self.paths)

    def search(self, image: Comparable, k: int = 5) -> list[Neighbour]:
        """Returns the k nearest images of one query, nearest first. An image that is in the gallery finds itself."""
        found = self.search_all(image, k)
        if len(found) != 1:
            raise DataError(f"search() takes one image, but was given {len(found)}: search_all() takes many.")
        return found[0]

    def search_all(self, images: Comparable, k: int = 5) -> list[list[Neighbour]]:
        """Returns the k nearest images of each query. Queries are images, or rows of embeddings."""
        if k < 1:
            raise DataError(f"Cannot search for {k} neighbours: k must be at least 1.")
        rows_PD = self.model.rows(images, fit=self.fit)
        k = min(k, len(self))
        with precision_lock:
            gallery = GalleryShard(embeddings_ND=self.embeddings_ND)
            found = search(rows_PD, gallery, k=k, device=self.model.device, is_alone=True)
        return [
            [Neighbour(path=self.paths[place], similarity=score) for score, place in zip(*row, strict=True)]
            for row in zip(found.other_scores_Pk.tolist(), found.other_indices_Pk.tolist(), strict=True)
        ]

    def save(self, path: str | Path) -> None:
        """Writes the embeddings as .npy and the paths as .txt next to it; `LoadedModel.index` opens them again."""
        path = Path(path)
        if path.suffix != ".npy":
            raise DataError(f"Embeddings are written as .npy, not to {path}.")
        with published_file(path) as unfinished, unfinished.open("wb") as file:
            np.save(file, self.embeddings_ND)
        write_text(path.with_suffix(".txt"), "".join(f"{name}\n" for name in self.paths))


def index_of(model: "LoadedModel", gallery: Any, *, fit: Fit | None, mirror: bool) -> ImageIndex:
    """Makes the index of a folder, a list of images, or an .npy file of `megaclass embed`."""
    paths: Sequence[str]
    if isinstance(gallery, str | Path) and Path(gallery).suffix == ".npy":
        stored_ND, paths = read_rows_and_names(Path(gallery))
        rows_ND = model.checked_rows(stored_ND)
    elif has_rows(model.image_size):
        rows_ND = model.embed(gallery)
        paths = [str(number) for number in range(len(rows_ND))]
    else:
        rows_ND, paths = _embedded(model, listed_images(gallery), fit, mirror)
    if not len(rows_ND):
        raise DataError(f"The gallery {str(gallery)[:80]} holds no image that can be read.")
    return ImageIndex(model=model, paths=paths, embeddings_ND=rows_ND, fit=fit)


def _embedded(
    model: "LoadedModel", images: list[Any], fit: Fit | None, mirror: bool
) -> tuple[NDArray[np.float32], list[str]]:
    source = GivenImages(images=images, image_size=model.image_size, fit=fit)
    if not images:
        raise DataError("The gallery is an empty list: give at least one image.")
    rows_ND = model.embed_source(source, mirror=mirror, on_bad=log_bad_images())
    is_good_N = np.isfinite(rows_ND[:, 0])
    names = [source.name(place) for place in range(len(images))]
    return rows_ND[is_good_N], [name for name, is_good in zip(names, is_good_N, strict=True) if is_good]
