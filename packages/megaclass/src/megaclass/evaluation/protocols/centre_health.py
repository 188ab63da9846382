"""Measures the health of class centres: lengths, and pairs of classes that are too close.

Two classes whose centres nearly coincide are most often one person under two names: label noise worth checking.
Letters: C classes, R = C x M rows (the M sub-centres of a class are adjacent), D numbers each.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megaclass.evaluation.centres import ModelCentres
from megaclass.evaluation.embed import OnProgress
from megaclass.evaluation.search import GalleryShard, search, unit_rows_or_zero

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
    closest_pairs: list[tuple[str, str, float]]
    """Two names and their cosine, closest first, each pair once."""
    num_unusable: int
    """Number of centres that are zero or not finite."""
    closest_numbers: list[tuple[int, int]] = field(default_factory=list)
    """The classes of closest_pairs by number."""


def centre_health(
    centres: ModelCentres, *, device: torch.device, on_progress: OnProgress | None = None
) -> CentreHealth:
    """Measures the centres in two passes; in memory are one block and the centres whose neighbours are searched."""
    num_subcentres = centres.rows_per_class
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
