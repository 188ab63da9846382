"""The class centres of a trained model: of a checkpoint, of centres.safetensors, or in memory.

Letters: C classes, R = C x M rows (the M sub-centres of a class are adjacent), D numbers each.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
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
from megaclass.evaluation.search import GalleryShard, rows_of_rank, search, unit_rows_or_zero
from megaclass.progress import OnProgress, no_progress

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
    def of(
        cls, rows_RD: Tensor, first_class: int, classes: ClassList, num_here: int, *, is_cosine: bool = True
    ) -> "ClassShard":
        """rows_RD: the centres of `num_here` classes, not normalised. is_cosine: False for inner products."""
        shard = GalleryShard(
            embeddings_ND=rows_RD,
            labels_N=np.arange(first_class, first_class + num_here),
            first=first_class,
            rows_per_entry=max(1, len(rows_RD) // max(1, num_here)),
            # Rows that are compared as they are.
            is_normalised=not is_cosine,
        )
        return cls(shard=shard, classes=classes)

    @property
    def is_cosine(self) -> bool:
        return not self.shard.is_normalised

    def probes(self, embeddings_ND: NDArray[np.float32]) -> NDArray[np.float32]:
        """Returns what is compared with the centres: unit embeddings; for inner products as they are, and a 1 for the bias."""
        if self.is_cosine:
            norms_N1 = np.linalg.norm(embeddings_ND, axis=1, keepdims=True)
            return np.asarray(embeddings_ND / norms_N1, dtype=np.float32)
        missing = self.shard.embeddings_ND.shape[1] - embeddings_ND.shape[1]
        return np.pad(embeddings_ND, ((0, 0), (0, missing)), constant_values=1.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelCentres:
    """Class centres that are read in parts: they need not fit into memory."""

    classes: ClassList
    num_rows: int
    rows: Callable[[int, int], Tensor]
    """Reads the rows [start, stop) as float32."""
    is_cosine: bool = True
    """False: images are compared by inner products, and a number more than an embedding has is a bias."""

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

    def names(self) -> list[str]:
        return [name.decode(errors="replace") for name in self.classes.names()]

    def all_rows(self) -> Tensor:
        return self.rows(0, self.num_rows)

    def shard(self, group: dist.ProcessGroup | None = None) -> ClassShard:
        """Reads the centres of this rank's part of the classes."""
        own = rows_of_rank(self.num_classes, group)
        rows_RD = self.rows(own.start * self.rows_per_class, own.stop * self.rows_per_class)
        return ClassShard.of(rows_RD, own.start, self.classes, len(own), is_cosine=self.is_cosine)


def compared_with_centres(
    unit_PD: Tensor,
    labels_P: NDArray[np.int64],
    centres: ModelCentres,
    device: torch.device,
    on_progress: OnProgress = no_progress,
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64]]:
    """Compares unit rows with all centres, one block of centres at a time, in this process alone.

    Returns (P,) the cosine with the own class, the highest cosine with another class, and the number of that class.
    """
    own_P, other_P = np.full((2, len(labels_P)), -np.inf, dtype=np.float32)
    others_P = np.zeros(len(labels_P), dtype=np.int64)
    for first, rows in centres.blocks():
        stop = first + len(rows)
        classes_B = np.arange(first, stop) // centres.rows_per_class
        block = GalleryShard(embeddings_ND=rows, labels_N=classes_B, first=first, is_normalised=False)
        found = search(unit_PD, block, k=1, device=device, probe_labels_P=labels_P, is_alone=True)
        own_P = np.maximum(own_P, found.mate_scores_P.cpu().numpy())
        scores_P = found.other_scores_Pk[:, 0].cpu().numpy()
        classes_P = found.other_indices_Pk[:, 0].cpu().numpy() // centres.rows_per_class
        others_P = np.where(scores_P > other_P, classes_P, others_P)
        other_P = np.maximum(other_P, scores_P)
        on_progress(stop, centres.num_rows)
    return own_P, other_P, others_P


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

    is_cosine = manifest.settings.get("head", {}).get("similarity") != "inner"
    return ModelCentres(classes=saved_classes(folder, manifest), num_rows=total, rows=rows, is_cosine=is_cosine)


def read_exported_centres(path: Path) -> ModelCentres:
    """Opens a centres.safetensors: `centres` (C, M, D), `names_utf8` with all names in a row, and `name_ends` (C,).

    Its metadata has the similarity if that is not the cosine.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            num_classes, per_class, _ = file.get_slice("centres").get_shape()
            is_cosine = (file.metadata() or {}).get("similarity") != "inner"
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

    return ModelCentres(classes=classes, num_rows=num_classes * per_class, rows=rows, is_cosine=is_cosine)


# ---- health: lengths, and pairs of classes that are too close -------------------------------------------------------------
#
# Two classes whose centres nearly coincide are most often one person under two names: label noise worth checking.

_NEAREST_SHOWN = 20
# Comparing every class with every other takes R x R x D multiplications: 10^12 take ten seconds on two cores.
_MAX_MULTIPLICATIONS = {"cpu": 10**12, "cuda": 10**16}
_MIN_CHECKED = 100


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
    closest_pairs: Mapping[tuple[int, int], float]
    """Two classes and the cosine of their centres, closest first, each pair once."""
    names: Mapping[int, str]
    """Of these classes."""
    num_unusable: int
    """Number of centres that are zero or not finite."""


def centre_health(
    centres: ModelCentres, *, device: torch.device, on_progress: OnProgress = no_progress
) -> CentreHealth:
    """Measures the centres in two passes; in memory are one block and the centres whose neighbours are searched."""
    num_subcentres = centres.rows_per_class
    probes_PD, rows_P, norms_R = _first_pass(centres, device)
    is_usable_R = np.isfinite(norms_R) & (norms_R > 0)
    classes_P = rows_P // num_subcentres
    _, scores_P, nearest_P = compared_with_centres(probes_PD, classes_P, centres, device, on_progress)
    pairs = _closest(scores_P, classes_P, nearest_P)
    return CentreHealth(
        num_classes=centres.num_classes,
        num_checked=len(np.unique(classes_P)),
        norms=norms_R[is_usable_R],
        nearest=scores_P[np.isfinite(scores_P)],
        closest_pairs=pairs,
        names=centres.classes.names_of({number for pair in pairs for number in pair}),
        num_unusable=int((~is_usable_R).sum()),
    )


def _first_pass(centres: ModelCentres, device: torch.device) -> tuple[Tensor, NDArray[np.int64], NDArray[np.float32]]:
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
