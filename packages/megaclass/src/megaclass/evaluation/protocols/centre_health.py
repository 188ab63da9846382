"""Reads the class centres of a checkpoint and measures their health: lengths, and pairs of classes that are too close.

Two classes whose centres nearly coincide are most often one person under two names: label noise worth checking.
Letters: C classes, R = C x M rows (the M sub-centres of a class are adjacent), D numbers each.
"""

import functools
import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megaclass.checkpoint.class_names import ClassList, saved_classes
from megaclass.checkpoint.load import newest_whole
from megaclass.checkpoint.manifest import Manifest, read_manifest
from megaclass.errors import CheckpointError
from megaclass.evaluation.embed import OnProgress
from megaclass.evaluation.search import GalleryShard, search, unit_rows_or_zero

_NEAREST_SHOWN = 20
_BLOCK_ROWS = 2**16
# Comparing every class with every other takes R x R x D multiplications: 10^12 take ten seconds on two cores.
_MAX_MULTIPLICATIONS = {"cpu": 10**12, "cuda": 10**16}
_MIN_CHECKED = 100


class CentreReader(Protocol):
    """Class centres, which need not fit into memory."""

    @property
    def num_classes(self) -> int: ...
    @property
    def num_rows(self) -> int: ...

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Yields (first row, rows) in rising order, float32."""
        ...

    def names_of(self, numbers: Collection[int]) -> dict[int, str]:
        """Returns the names of these classes."""
        ...


@dataclass(frozen=True, kw_only=True, eq=False)
class ClassCentres:
    """Centres in memory."""

    weight_RD: Tensor
    names: list[str]

    @property
    def num_classes(self) -> int:
        return len(self.names)

    @property
    def num_rows(self) -> int:
        return len(self.weight_RD)

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        for start in range(0, self.num_rows, _BLOCK_ROWS):
            yield start, self.weight_RD[start : start + _BLOCK_ROWS].float()

    def names_of(self, numbers: Collection[int]) -> dict[int, str]:
        return {number: self.names[number] for number in numbers}


@dataclass(frozen=True, kw_only=True, eq=False)
class SavedCentres:
    """Centres of a checkpoint, read block by block."""

    folder: Path
    manifest: Manifest
    classes: ClassList

    @property
    def num_classes(self) -> int:
        return self.manifest.num_classes

    @property
    def num_rows(self) -> int:
        return sum(shape[0] for _, shape in self._files)

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        for start in range(0, self.num_rows, _BLOCK_ROWS):
            yield start, self.rows(start, min(start + _BLOCK_ROWS, self.num_rows))

    def rows(self, start: int, stop: int) -> Tensor:
        """Reads the rows [start, stop), which may lie in several shards."""
        from safetensors import safe_open

        parts, first = [], 0
        for path, (num_rows, _) in self._files:
            here = slice(max(0, start - first), min(num_rows, stop - first))
            if here.start < here.stop:
                with safe_open(path, framework="pt") as file:
                    parts.append(file.get_slice("weight")[here].float())
            first += num_rows
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def names_of(self, numbers: Collection[int]) -> dict[int, str]:
        # One pass over the list: a hundred million names need not be in memory to show twenty.
        listed = itertools.islice(enumerate(self.classes.names()), max(numbers, default=-1) + 1)
        return {number: name.decode(errors="replace") for number, name in listed if number in numbers}

    def check(self) -> None:
        """Refuses shards without centres, or with other centres than the manifest says."""
        from safetensors import SafetensorError

        try:
            shapes = [shape for _, shape in self._files]
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"Cannot read the centres of {self.folder}: {error}") from error
        num_rows = sum(shape[0] for shape in shapes)
        if not num_rows or num_rows % self.num_classes or len({shape[1] for shape in shapes}) != 1:
            raise CheckpointError(
                f"The centres of {self.folder} have the shapes {shapes[:3]}, but the manifest says {self.num_classes} classes."
            )

    def in_memory(self) -> ClassCentres:
        names = [name.decode(errors="replace") for name in self.classes.names()]
        return ClassCentres(weight_RD=torch.cat([rows for _, rows in self.blocks()]), names=names)

    @functools.cached_property
    def _files(self) -> list[tuple[Path, tuple[int, int]]]:
        """Returns the shards in the order of their classes, with the shape of their centres."""
        from safetensors import safe_open

        found = []
        shards = [
            (one.class_start, name) for name, one in self.manifest.files.items() if one.class_start < one.class_stop
        ]
        for _, name in sorted(shards):
            with safe_open(self.folder / name, framework="pt") as file:
                num_rows, width = file.get_slice("weight").get_shape()
                found.append((self.folder / name, (num_rows, width)))
        return found


@dataclass(frozen=True, kw_only=True, eq=False)
class CentreHealth:
    """Statistics of the class centres of one model."""

    num_classes: int
    num_checked: int
    """Number of classes whose nearest other class was searched; a sample if there are too many for this device."""
    norms: NDArray[np.float32]
    """Length of every centre."""
    nearest: NDArray[np.float32]
    """Cosine between each checked centre and the nearest centre of another class."""
    closest_pairs: list[tuple[str, str, float]]
    """Two names and their cosine, closest first, each pair once."""
    num_unusable: int
    """Number of centres that are zero or not finite."""
    closest_numbers: list[tuple[int, int]] = field(default_factory=list)
    """The classes of closest_pairs by number."""


def read_run_centres(run: Path) -> SavedCentres:
    """Opens the centres of the newest undamaged checkpoint of the run."""
    folder, reasons = newest_whole(run / "checkpoints")
    if folder is None:
        why = f" ({reasons[0]})" if reasons else ""
        raise CheckpointError(f"There is no undamaged checkpoint in {run / 'checkpoints'} to read centres from{why}.")
    manifest = read_manifest(folder)
    centres = SavedCentres(folder=folder, manifest=manifest, classes=saved_classes(folder, manifest))
    centres.check()
    return centres


def centre_health(
    centres: CentreReader, *, device: torch.device, on_progress: OnProgress | None = None
) -> CentreHealth:
    """Measures the centres in two passes; in memory are one block and the centres whose neighbours are searched."""
    num_subcentres = centres.num_rows // max(1, centres.num_classes)
    probes_PD, rows_P, norms_R = _first_pass(centres, device)
    is_usable_R = np.isfinite(norms_R) & (norms_R > 0)
    classes_P = rows_P // num_subcentres
    scores_P = np.full(len(rows_P), -np.inf, dtype=np.float32)
    nearest_P = np.zeros(len(rows_P), dtype=np.int64)
    # Second pass: every block is searched for neighbours of the sampled rows. Rows of the same class are mates of a probe
    # and do not count as neighbours.
    for first, rows in centres.blocks():
        stop = first + len(rows)
        classes_B = np.arange(first, stop) // num_subcentres
        block = GalleryShard(embeddings_ND=unit_rows_or_zero(rows), labels_N=classes_B, first=first)
        found = search(probes_PD, block, k=1, device=device, probe_labels_P=classes_P)
        scores = found.other_scores_Pk[:, 0].cpu().numpy()
        is_closer_P = scores > scores_P
        scores_P = np.where(is_closer_P, scores, scores_P)
        nearest_P = np.where(is_closer_P, found.other_indices_Pk[:, 0].cpu().numpy() // num_subcentres, nearest_P)
        if on_progress is not None:
            on_progress(stop, centres.num_rows)
    pairs = _closest(scores_P, classes_P, nearest_P)
    names = centres.names_of({number for pair in pairs for number in pair})
    return CentreHealth(
        num_classes=centres.num_classes,
        num_checked=len(np.unique(classes_P)),
        norms=norms_R[is_usable_R],
        nearest=scores_P[np.isfinite(scores_P)],
        closest_pairs=[(names[low], names[high], score) for (low, high), score in pairs.items()],
        num_unusable=int((~is_usable_R).sum()),
        closest_numbers=list(pairs),
    )


def _first_pass(centres: CentreReader, device: torch.device) -> tuple[Tensor, NDArray[np.int64], NDArray[np.float32]]:
    """Returns the normalised rows whose neighbours are searched, their row numbers, and the length of every row."""
    num_rows = centres.num_rows
    norms_R = np.empty(num_rows, dtype=np.float32)
    probes: list[Tensor] = []
    chosen: list[NDArray[np.int64]] = []
    wanted = np.empty(0, dtype=np.int64)
    for first, rows in centres.blocks():
        if first == 0:
            most = _MAX_MULTIPLICATIONS[device.type] // (num_rows * rows.shape[1])
            # A sample spread evenly over all classes, the same one every time.
            num_checked = min(num_rows, max(_MIN_CHECKED, most))
            wanted = np.unique(np.linspace(0, num_rows - 1, num_checked).astype(np.int64))
        norms = rows.norm(dim=1).numpy()
        norms_R[first : first + len(rows)] = norms
        here = wanted[(wanted >= first) & (wanted < first + len(rows))] - first
        here = here[np.isfinite(norms[here]) & (norms[here] > 0)]
        probes.append(unit_rows_or_zero(rows[torch.from_numpy(here)]))
        chosen.append(here + first)
    return torch.cat(probes), np.concatenate(chosen), norms_R


def _closest(
    scores_P: NDArray[np.float32], first_P: NDArray[np.int64], second_P: NDArray[np.int64]
) -> dict[tuple[int, int], float]:
    pairs: dict[tuple[int, int], float] = {}
    for place in np.argsort(-scores_P, kind="stable").tolist():
        if not np.isfinite(scores_P[place]) or len(pairs) == _NEAREST_SHOWN:
            break
        low, high = sorted((int(first_P[place]), int(second_P[place])))
        pairs.setdefault((low, high), float(scores_P[place]))
    return pairs
