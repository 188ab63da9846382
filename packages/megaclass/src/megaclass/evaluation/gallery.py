"""Galleries and probes: the embeddings at a path, with the identity of each row.

A path holds one of four things:

    embeddings.npy      rows that `megaclass embed` wrote, their paths in embeddings.txt
    folder of *.bin     MegaFace's feature files, one vector per file
    folder of images    embedded by the model that is evaluated
    list.txt            lines `path<TAB>identity` of images, relative to the list

In all but the list the folder that directly holds a file names its identity.
"""

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import nn

from megaclass.data.sources.files import read_image_file
from megaclass.distributed.agreement import on_every_rank_for_long, paths_of_main_rank
from megaclass.errors import DataError
from megaclass.evaluation.embed import log_resized
from megaclass.evaluation.images import GivenImages, find_images
from megaclass.evaluation.protocol import EvaluationSet, Evaluator
from megaclass.evaluation.search import GalleryShard, rows_of_rank

Rows = NDArray[np.float32]
_MEGAFACE_HEADER = struct.Struct("<4i")
_MEGAFACE_MARK = (1, 4, 5)


@dataclass(frozen=True, kw_only=True, eq=False)
class Gallery:
    """Rows of embeddings at a path, read or computed when they are needed."""

    evaluator: Evaluator
    path: Path
    kind: Literal["stored", "features", "images"]
    identities: list[str]
    """The identity of each row."""
    files: Sequence[Path] = ()
    """The features or images; none of stored rows."""
    stored_ND: Rows = field(default_factory=lambda: np.empty((0, 0), dtype=np.float32))
    """Mapped, not read: each rank touches only the rows it needs."""

    def __len__(self) -> int:
        return len(self.identities)

    def _images(self) -> GivenImages:
        return GivenImages(images=self.files, image_size=self.evaluator.image_size, fit=self.evaluator.fit)

    def rows(self, part: range) -> Rows:
        """Returns these rows, normalised; nothing is exchanged between ranks. An empty part still has the width D."""
        if self.kind == "stored":
            return _normalised(self.evaluator, self.stored_ND[part.start : part.stop], self.path, part.start)
        # A rank without rows reads one file, or embeds one image, all the same, to learn the width.
        if self.kind == "features":
            rows_ND = read_megaface_features(self.files[part.start : part.stop] or self.files[:1])[: len(part)]
            return _normalised(self.evaluator, rows_ND, self.path, part.start)
        images = self._images()
        rows = self.evaluator.embed_part(images, part or range(1))
        log_resized(len(images.resized), len(part), images.image_size, f"of {self.path}, on this rank")
        return nn.functional.normalize(rows[: len(part), :-1]).cpu().numpy()

    def contents(self, part: range) -> Iterable[bytes]:
        """Returns the bytes that each of these rows was made from."""
        if self.kind == "stored":
            return (row.tobytes() for row in self.stored_ND[part.start : part.stop])
        return (read_image_file(file) for file in self.files[part.start : part.stop])

    def all_rows(self) -> Rows:
        """Collective. Returns all rows, normalised, on every rank, which share the work of embedding."""
        if self.kind == "images":
            return self.evaluator.embed(self._images()).normalised_ND()
        return on_every_rank_for_long(lambda: self.rows(range(len(self))), self.evaluator.device, self.evaluator.group)

    def shard(self, width: int) -> GalleryShard:
        """Collective. Returns this rank's rows: a gallery of millions need not fit into the memory of one rank."""

        def read() -> GalleryShard:
            part = rows_of_rank(len(self), self.evaluator.group)
            rows_ND = self.rows(part)
            if rows_ND.shape[1] != width:
                raise DataError(
                    f"Embeddings of the probes have {width} numbers, but those of the gallery {self.path} have "
                    f"{rows_ND.shape[1]}: they come from different models."
                )
            return GalleryShard(embeddings_ND=rows_ND, first=part.start)

        return on_every_rank_for_long(read, self.evaluator.device, self.evaluator.group)

    def content_keys(self, part: range) -> NDArray[np.int64]:
        """Collective. Returns a digest of the content behind each of these rows: equal digests are the same image."""

        def read() -> list[int]:
            digests = (hashlib.blake2b(content, digest_size=8).digest() for content in self.contents(part))
            return [int.from_bytes(digest, "little", signed=True) for digest in digests]

        return np.array(on_every_rank_for_long(read, self.evaluator.device, self.evaluator.group), dtype=np.int64)


def open_gallery(evaluator: Evaluator, path: Path) -> Gallery:
    """Collective. Opens what lies at the path. Rank 0 lists the files of a folder for all ranks."""
    device, group = evaluator.device, evaluator.group
    if path.suffix == ".npy":
        stored_ND, identities = on_every_rank_for_long(lambda: read_embeddings(path), device, group)
        return Gallery(evaluator=evaluator, path=path, kind="stored", identities=identities, stored_ND=stored_ND)

    if path.suffix == ".txt":
        files, identities = on_every_rank_for_long(lambda: _read_list(path), device, group)
        return Gallery(evaluator=evaluator, path=path, kind="images", identities=identities, files=files)

    def listed() -> list[Path]:
        features = sorted(path.rglob("*.bin")) if path.is_dir() else []
        return features or find_images(path)

    files = paths_of_main_rank(listed, device, group)
    identities = [file.parent.name for file in files]
    kind: Literal["features", "images"] = "features" if files[0].suffix == ".bin" else "images"
    return Gallery(evaluator=evaluator, path=path, kind=kind, identities=identities, files=files)


@dataclass(frozen=True, kw_only=True, eq=False)
class Searched:
    """Probes and the gallery in which they are searched, embedded; identities are numbered."""

    shard: GalleryShard
    """This rank's part of the gallery, with labels."""
    labels_N: NDArray[np.int64]
    """Of the whole gallery."""
    probes_PD: Rows
    probe_labels_P: NDArray[np.int64]
    probe_keys_P: NDArray[np.int64] | None
    """Content digests if probes may be in the gallery themselves; None if they cannot be compared with it."""


def open_searched(evaluator: Evaluator, one: EvaluationSet) -> Searched:
    """Collective. Embeds the probes on every rank, and of the gallery at the set's path this rank's part."""
    assert one.probes is not None
    # Both are listed before anything is embedded: a wrong path shows at once.
    probes, gallery = open_gallery(evaluator, one.probes), open_gallery(evaluator, one.path)
    probes_PD = probes.all_rows()
    shard = gallery.shard(probes_PD.shape[1])
    known = {name: number for number, name in enumerate(dict.fromkeys(gallery.identities))}
    labels_N, keys_P, keys_N = labels_of(gallery.identities, known), None, None
    part = range(shard.first, shard.first + len(shard))
    # Every model finds an image by itself at rank 1: a probe that is in the gallery is compared with the others only. Keys of
    # a file and of a stored row of one image differ.
    if probes.kind == gallery.kind:
        keys_P, keys_N = probes.content_keys(range(len(probes))), gallery.content_keys(part)
    return Searched(
        shard=replace(shard, labels_N=labels_N[part.start : part.stop], keys_N=keys_N),
        labels_N=labels_N,
        probes_PD=probes_PD,
        probe_labels_P=labels_of(probes.identities, known),
        probe_keys_P=keys_P,
    )


def labels_of(identities: Sequence[str], known: Mapping[str, int]) -> NDArray[np.int64]:
    """Returns the number of each identity; an unknown one gets a number above all known ones."""
    numbers = dict(known)
    return np.array([numbers.setdefault(name, len(numbers)) for name in identities], dtype=np.int64)


def _read_list(path: Path) -> tuple[list[Path], list[str]]:
    """Reads lines `path<TAB>identity`; paths are relative to the list."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"Cannot read the list {path}: {error}") from error
    fields = [line.split("\t") for line in lines]
    for number, one in enumerate(fields, start=1):
        if len(one) != 2 or not all(one):
            raise DataError(f"Line {number} of {path} is {lines[number - 1][:80]!r}: expected `path<TAB>identity`.")
    if not fields:
        raise DataError(f"{path} lists no images: expected lines `path<TAB>identity`.")
    return [path.parent / name for name, _ in fields], [identity for _, identity in fields]


def read_embeddings(path: Path) -> tuple[Rows, list[str]]:
    """Returns the rows of `embeddings.npy`, and the identity of each: the name of the folder that holds its image."""
    rows_ND, names = read_rows_and_names(path)
    return rows_ND, [Path(name).parent.name for name in names]


def read_rows_and_names(path: Path) -> tuple[Rows, list[str]]:
    """Reads `embeddings.npy`, and the paths from `embeddings.txt` next to it, as `megaclass embed` writes them."""
    listing = path.with_suffix(".txt")
    try:
        rows_ND = np.load(path, mmap_mode="r", allow_pickle=False)
        lines = listing.read_text(encoding="utf-8").splitlines()
    # NumPy's header parser raises a dozen types of exceptions on damaged bytes.
    except Exception as error:
        raise DataError(
            f"Cannot read the embeddings {path} and their list {listing}: {error or type(error).__name__}"
        ) from error
    if rows_ND.ndim != 2 or rows_ND.dtype != np.float32 or len(rows_ND) != len(lines):
        raise DataError(
            f"{path} holds {rows_ND.dtype} of shape {rows_ND.shape} and {listing} {len(lines)} lines: expected float32 of "
            f"shape (N, D) and N lines."
        )
    return rows_ND, lines


def read_megaface_features(paths: Sequence[Path]) -> NDArray[np.float32]:
    """Reads (N, D) from MegaFace's feature files, one vector per file: int32 x 4 (length, 1, 4, 5), then float32."""
    rows: list[NDArray[np.float32]] = []
    for path in paths:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(f"Cannot read the features {path}: {error.strerror}.") from error
        head = _MEGAFACE_HEADER.unpack_from(content) if len(content) >= _MEGAFACE_HEADER.size else (0, 0, 0, 0)
        vector = np.frombuffer(content[_MEGAFACE_HEADER.size :], dtype="<f4") if len(content) % 4 == 0 else np.empty(0)
        if head[1:] != _MEGAFACE_MARK or head[0] != len(vector) or not len(vector):
            raise DataError(
                f"{path} is not a MegaFace feature file: expected int32 (length, 1, 4, 5) and that many float32, found "
                f"{head} and {len(content)} bytes."
            )
        if rows and len(vector) != len(rows[0]):
            raise DataError(f"{path} holds {len(vector)} numbers, {paths[0]} {len(rows[0])}: different models.")
        rows.append(vector.astype(np.float32))
    return np.stack(rows)


def _normalised(evaluator: Evaluator, rows_ND: Rows, path: Path, first: int) -> Rows:
    """Normalises rows that were read from a file. first: number of the first row, for errors."""
    if evaluator.embedding_dim is not None and rows_ND.shape[1] != evaluator.embedding_dim:
        raise DataError(
            f"Embeddings in {path} have {rows_ND.shape[1]} numbers, but the model gives {evaluator.embedding_dim}: they "
            f"come from another model."
        )
    norms_N = np.linalg.norm(rows_ND, axis=1)
    is_usable_N = np.isfinite(norms_N) & (norms_N > 0)
    if not is_usable_N.all():
        row = first + int(np.flatnonzero(~is_usable_N)[0])
        raise DataError(f"Row {row} of {path} is all zeros or not finite: it is not an embedding.")
    return np.asarray(rows_ND / norms_N[:, None], dtype=np.float32)
