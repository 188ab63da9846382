"""Splits data into a part to train on and a held-out part, by identities or by images of every identity.

A hash of the seed and of the numbers of identities or images decides which are held out, so `data split` and `data
pairs --holdout` agree. A mark with the ID of the split lies in each part and next to the pairs. By it an evaluation knows that
the identities of a .bin were held out of the data that was trained on, instead of assuming it.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megaclass.data.fingerprint import source_hash
from megaclass.data.pair_file import write_pairs
from megaclass.data.sources.open_source import data_folders
from megaclass.data.sources.source import ImageSource
from megaclass.data.tools.make_pairs import make_pairs, possible_pairs
from megaclass.data.tools.pack import pack
from megaclass.data.tools.synthesize import HOLDOUT_RECORDS
from megaclass.data.tools.verify import SubsetSource
from megaclass.errors import DataError
from megaclass.keyed_random import combine64
from megaclass.progress import OnProgress, continued, no_progress

MARK = "split.json"
_SALT = 0x73706C6974
_MAX_MARK_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class Split:
    """Rule for what is held out of a source."""

    by: str
    """identities or images."""
    share: float
    seed: int = 0

    def __post_init__(self) -> None:
        if self.by not in ("identities", "images"):
            raise DataError(f"Cannot hold out {self.by!r}: expected identities or images.")
        if not 0 < self.share < 1:
            raise DataError(
                f"Cannot hold out a share of {self.share:g}: expected a number between 0 and 1, for example 0.1."
            )

    def is_held_out(self, source: ImageSource) -> NDArray[np.bool_]:
        """Returns whether each image is held out: at least one identity, or a share of each identity's images but never all."""
        labels = np.asarray(source.labels)
        if self.by == "identities":
            identities = np.unique(labels)
            if len(identities) < 2:
                raise DataError(f"Cannot hold out identities of {source.describe()}: it has only one with images.")
            num_held_out = min(max(1, round(self.share * len(identities))), len(identities) - 1)
            order = np.argsort(combine64(self.seed, _SALT, identities.astype(np.uint64)), kind="stable")
            return np.isin(labels, identities[order[:num_held_out]])
        # Within each identity, images are ordered by their hashes, and the first ones are held out.
        order = np.lexsort((combine64(self.seed, _SALT, np.arange(len(labels), dtype=np.uint64)), labels))
        _, starts, counts = np.unique(labels[order], return_index=True, return_counts=True)
        place = np.arange(len(labels)) - np.repeat(starts, counts)
        num_held_out_N = np.repeat(np.minimum(np.round(self.share * counts), counts - 1), counts)
        held_out = np.zeros(len(labels), dtype=bool)
        held_out[order] = place < num_held_out_N
        if not held_out.any():
            raise DataError(
                f"Cannot hold out {self.share:g} of the images of each identity of {source.describe()}: none has "
                f"enough. Choose a larger share, or hold out identities."
            )
        return held_out

    def id_for(self, source: ImageSource) -> str:
        """Returns an ID that is equal for equal splits of equal data."""
        told = f"{source_hash(source)} {self.by} {self.share!r} {self.seed}"
        return hashlib.sha256(told.encode()).hexdigest()[:16]


class SplitPart(SubsetSource):
    """Some images of a source; with `renumbers`, the classes that have images are numbered 0, 1, … in their order."""

    def __init__(self, inner: ImageSource, rows: NDArray[np.int64], *, renumbers: bool) -> None:
        super().__init__(inner, rows)
        self.classes: NDArray[np.int64] = np.arange(inner.num_classes)
        """Number of each class of this part in the whole source."""
        if renumbers:
            self.classes, labels = np.unique(self.labels, return_inverse=True)
            self.labels = labels.astype(np.int64)
            self.num_classes = len(self.classes)


def held_out_part(source: ImageSource, split: Split) -> SplitPart:
    return SplitPart(source, np.flatnonzero(split.is_held_out(source)), renumbers=split.by == "identities")


@dataclass(frozen=True)
class SplitResult:
    num_train_images: int
    num_train_classes: int
    num_holdout_images: int
    num_holdout_classes: int
    num_pairs: int
    """Pairs in train/holdout.bin; 0: too few images for any."""
    num_bad: int
    """Images that were left out because they do not decode."""


def split_data(
    source: ImageSource,
    split: Split,
    out: Path,
    *,
    class_names: bytes = b"",
    num_pairs: int = 6000,
    num_threads: int = 1,
    on_progress: OnProgress = no_progress,
) -> SplitResult:
    """Writes out/train to train on, out/holdout, and train/holdout.bin with pairs of held-out images.

    A run on out/train evaluates holdout.bin automatically, since it lies next to the data. class_names: as for `pack`.
    """
    held_out = split.is_held_out(source)
    by_identities = split.by == "identities"
    train = SplitPart(source, np.flatnonzero(~held_out), renumbers=by_identities)
    holdout = SplitPart(source, np.flatnonzero(held_out), renumbers=by_identities)
    split_id = split.id_for(source)
    num_done, num_bad = 0, {"train": 0, "holdout": 0}
    for name, part in (("train", train), ("holdout", holdout)):
        if _read_mark(out / name / MARK).get("id") != split_id:
            names = _names_of(part, class_names)
            advance = continued(on_progress, num_done, source.num_images)
            packed = pack(part, out / name, class_names=names, num_threads=num_threads, on_progress=advance)
            num_bad[name] = packed.num_bad
            _write_mark(out / name / MARK, split_id, split, part=name)
        num_done += part.num_images
    num_made = _write_holdout_pairs(holdout, out / "train" / "holdout.bin", split, split_id, num_pairs)
    return SplitResult(
        num_train_images=train.num_images - num_bad["train"],
        num_train_classes=len(np.unique(train.labels)),
        num_holdout_images=holdout.num_images - num_bad["holdout"],
        num_holdout_classes=len(np.unique(holdout.labels)),
        num_pairs=num_made,
        num_bad=sum(num_bad.values()),
    )


def _names_of(part: SplitPart, class_names: bytes) -> bytes:
    """Returns the names of the part's classes; if the source has none, the numbers of the classes there."""
    names = class_names.split(b"\n") if class_names else None
    return b"".join((names[number] if names else b"%d" % number) + b"\n" for number in part.classes.tolist())


def _write_holdout_pairs(holdout: SplitPart, path: Path, split: Split, split_id: str, wanted: int) -> int:
    # At most half of all possible pairs, since pairs are drawn at random and none occurs twice.
    num_pairs = min(wanted, *possible_pairs(holdout.labels))
    if num_pairs < 2:
        return 0
    write_pairs(path, make_pairs(holdout, num_pairs, split.seed))
    mark_pairs(path, split, split_id)
    return num_pairs


def mark_pairs(path: Path, split: Split, split_id: str) -> None:
    """Writes next to a .bin of held-out images the split that they belong to, with a digest to notice a replaced file."""
    _write_mark(_pairs_mark(path), split_id, split, pairs=_digest_of(path))


def mark_unseen(pairs: Path, split: Split, split_id: str) -> None:
    """Marks pairs as held out of the data next to them, for a tool that makes both itself."""
    _write_mark(pairs.parent / MARK, split_id, split, part="train")
    mark_pairs(pairs, split, split_id)


def is_unseen(pairs: Path, data_path: str) -> bool:
    """Tells by the marks of a split whether the identities of a .bin were held out of all of the data at `data_path`."""
    said = _read_mark(_pairs_mark(pairs))
    if said.get("by") != "identities" or said.get("pairs") != _digest_of(pairs):
        return False
    marks = [_read_mark(folder / MARK) for folder in data_folders(data_path)]
    # The held-out part has a mark of the same split; older marks do not say which part they lie in.
    return bool(marks) and all(mark.get("id") == said.get("id") and mark.get("part") != "holdout" for mark in marks)


def held_out_images(data_path: str) -> list[Path]:
    """Returns labelled images of the training classes next to the data: a holdout.rec, and the part that `data split
    --images` held out, which their marks tell."""
    found = []
    for folder in data_folders(data_path):
        mark, holdout = _read_mark(folder / MARK), folder.parent / "holdout"
        is_ours = mark.get("by") == "images" and mark.get("part") == "train"
        if is_ours and _read_mark(holdout / MARK) == mark | {"part": "holdout"}:
            found.append(holdout)
        if (folder / HOLDOUT_RECORDS).is_file():
            found.append(folder / HOLDOUT_RECORDS)
    return found


def _pairs_mark(pairs: Path) -> Path:
    return pairs.with_name(f"{pairs.name}.{MARK}")


def _write_mark(path: Path, split_id: str, split: Split, **more: str) -> None:
    try:
        path.write_text(json.dumps({"id": split_id, **asdict(split), **more}) + "\n", encoding="utf-8")
    except OSError as error:
        raise DataError(f"Cannot write {path}: {error.strerror}.") from error


def _read_mark(path: Path) -> dict[str, object]:
    """Returns the content of a mark; empty if it is missing or damaged."""
    try:
        with path.open("rb") as file:
            found = json.loads(file.read(_MAX_MARK_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _digest_of(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""
