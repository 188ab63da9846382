"""The class centres of a trained model: of a checkpoint, of centres.safetensors, or in memory.

Letters: C classes, R = C x M rows (the M sub-centres of a class are adjacent), D numbers each.
"""

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megaclass.checkpoint.class_names import ClassList, saved_classes
from megaclass.checkpoint.load import newest_whole
from megaclass.checkpoint.manifest import read_manifest
from megaclass.errors import CheckpointError, DataError
from megaclass.evaluation.search import GalleryShard, rows_of_rank

CENTRES_FILE = "centres.safetensors"
_BLOCK_ROWS = 2**16


@dataclass(frozen=True, kw_only=True, eq=False)
class ClassShard:
    """The classes whose centres this rank holds, and the names of all classes."""

    shard: GalleryShard
    """One entry per class; its labels are the numbers of the classes."""
    classes: ClassList
    num_images_C: NDArray[np.int64] | None = None
    """Number of training images of every class; None if it is not known."""

    @classmethod
    def of(cls, rows_RD: Tensor, first_class: int, classes: ClassList, num_here: int) -> "ClassShard":
        """rows_RD: the centres of `num_here` classes, not normalised."""
        shard = GalleryShard(
            embeddings_ND=rows_RD,
            labels_N=np.arange(first_class, first_class + num_here),
            first=first_class,
            rows_per_entry=max(1, len(rows_RD) // max(1, num_here)),
            is_normalised=False,
        )
        return cls(shard=shard, classes=classes)


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelCentres:
    """Class centres that are read in parts: they need not fit into memory."""

    classes: ClassList
    num_rows: int
    rows: Callable[[int, int], Tensor]
    """Reads the rows [start, stop) as float32."""

    @property
    def num_classes(self) -> int:
        return self.classes.num_classes

    @property
    def rows_per_class(self) -> int:
        return self.num_rows // max(1, self.num_classes)

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Yields (first row, rows) in rising order."""
        for start in range(0, self.num_rows, _BLOCK_ROWS):
            yield start, self.rows(start, min(start + _BLOCK_ROWS, self.num_rows))

    def names_of(self, numbers: Collection[int]) -> dict[int, str]:
        return names_of(self.classes, numbers)

    def names(self) -> list[str]:
        return [name.decode(errors="replace") for name in self.classes.names()]

    def all_rows(self) -> Tensor:
        return self.rows(0, self.num_rows)

    def shard(self, group: dist.ProcessGroup | None = None) -> ClassShard:
        """Reads the centres of this rank's part of the classes."""
        own = rows_of_rank(self.num_classes, group)
        rows_RD = self.rows(own.start * self.rows_per_class, own.stop * self.rows_per_class)
        return ClassShard.of(rows_RD, own.start, self.classes, len(own))


def names_of(classes: ClassList, numbers: Collection[int]) -> dict[int, str]:
    """Returns the names of some classes."""
    # One pass over the list: a hundred million names need not be in memory to show twenty.
    listed = itertools.islice(enumerate(classes.names()), max(numbers, default=-1) + 1)
    return {number: name.decode(errors="replace") for number, name in listed if number in numbers}


def centres_in_memory(weight_RD: Tensor, names: Sequence[str]) -> ModelCentres:
    classes = ClassList.of([name.encode() for name in names], "the centres")
    return ModelCentres(
        classes=classes, num_rows=len(weight_RD), rows=lambda start, stop: weight_RD[start:stop].float()
    )


def read_run_centres(run: Path) -> ModelCentres:
    """Opens the centres of the newest undamaged checkpoint of the run."""
    folder, reasons = newest_whole(run / "checkpoints")
    if folder is None:
        why = f" ({reasons[0]})" if reasons else ""
        raise CheckpointError(f"There is no undamaged checkpoint in {run / 'checkpoints'} to read centres from{why}.")
    from safetensors import SafetensorError, safe_open

    manifest = read_manifest(folder)
    shards = [(one.class_start, name) for name, one in manifest.files.items() if one.class_start < one.class_stop]
    files: list[tuple[Path, int]] = []
    widths = set()
    try:
        for _, name in sorted(shards):
            with safe_open(folder / name, framework="pt") as file:
                num_rows, width = file.get_slice("weight").get_shape()
            files.append((folder / name, num_rows))
            widths.add(width)
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"Cannot read the centres of {folder}: {error}") from error
    total = sum(num_rows for _, num_rows in files)
    if not total or total % manifest.num_classes or len(widths) != 1:
        raise CheckpointError(
            f"The centres of {folder} have {total} rows of {sorted(widths)} numbers, but the manifest says "
            f"{manifest.num_classes} classes."
        )

    def rows(start: int, stop: int) -> Tensor:
        parts, first = [torch.empty(0, *widths)], 0
        for path, num_rows in files:
            here = slice(max(0, start - first), min(num_rows, stop - first))
            if here.start < here.stop:
                with safe_open(path, framework="pt") as file:
                    parts.append(file.get_slice("weight")[here].float())
            first += num_rows
        return parts[1] if len(parts) == 2 else torch.cat(parts)

    return ModelCentres(classes=saved_classes(folder, manifest), num_rows=total, rows=rows)


def read_exported_centres(path: Path) -> ModelCentres:
    """Opens a centres.safetensors: `centres` (C, M, D), `names_utf8` with all names in a row, and `name_ends` (C,)."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            num_classes, per_class, _ = file.get_slice("centres").get_shape()
            text, ends = file.get_tensor("names_utf8").numpy().tobytes(), file.get_tensor("name_ends").tolist()
        named = [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        for name in named:
            name.decode()
        has_names = any(name != b"%d" % number for number, name in enumerate(named))
        classes = ClassList.of(named, str(path)) if has_names else ClassList(len(named))
    except (SafetensorError, OSError, ValueError, TypeError, CheckpointError) as error:
        raise DataError(f"Cannot read {path} as class centres: {error}") from error
    if classes.num_classes != num_classes or not num_classes or not per_class:
        raise DataError(f"Cannot read {path} as class centres: {len(named)} names for {num_classes} classes.")

    def rows(start: int, stop: int) -> Tensor:
        with safe_open(path, framework="pt") as file:
            part = file.get_slice("centres")[start // per_class : -(-stop // per_class)].float().flatten(0, 1)
        first = start - start // per_class * per_class
        rows_RD: Tensor = part[first : first + stop - start]
        return rows_RD

    return ModelCentres(classes=classes, num_rows=num_classes * per_class, rows=rows)
