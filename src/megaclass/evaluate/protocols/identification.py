"""Who is it? Probes against a gallery -> rank-1/5/10, TPIR at FPIR, and MegaFace's rank-k among distractors.

A tie between a mate and somebody else counts against the model, so one that maps all images to a point identifies
nobody.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megaclass.errors import DataError
from megaclass.evaluate.protocols.intervals import Interval, wilson_interval
from megaclass.evaluate.search import GalleryShard, search

RANKS = (1, 5, 10)
FPIR_TARGETS = (1e-1, 1e-2, 1e-3)
_MEGAFACE_HEADER = struct.Struct("<4i")
_MEGAFACE_MARK = (1, 4, 5)


@dataclass(frozen=True, kw_only=True, slots=True)
class Identification:
    """The numbers of one model on one gallery."""

    num_gallery: int
    num_mated: int
    """Probes whose identity is in the gallery."""
    num_unmated: int
    num_in_gallery: int = 0
    """Probes that are themselves in the gallery; each was compared with the other entries only."""
    rank_k: dict[int, float | None]
    """Share of the mated probes with a mate above all but k - 1 entries of others; None without mated probes."""
    rank_intervals: dict[int, Interval | None]
    tpir_at_fpir: dict[float, float | None]
    """Share of the mated probes found first and above the threshold that lets this share of unmated probes pass; None
    where there are fewer than 1 / FPIR unmated probes."""

    def to_json(self) -> dict[str, Any]:
        return {
            "num_gallery": self.num_gallery,
            "num_mated": self.num_mated,
            "num_unmated": self.num_unmated,
            "num_probes_in_gallery": self.num_in_gallery,
            "rank_k": {str(k): share for k, share in self.rank_k.items()},
            "rank_k_95": {str(k): ends and list(ends) for k, ends in self.rank_intervals.items()},
            "tpir_at_fpir": {f"{fpir:g}": share for fpir, share in self.tpir_at_fpir.items()},
        }


def identify(
    probes_PD: NDArray[np.float32] | Tensor,
    probe_labels_P: NDArray[np.int64],
    gallery: GalleryShard,
    *,
    num_gallery: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    probe_keys_P: NDArray[np.int64] | None = None,
    num_in_gallery: int = 0,
    max_block_bytes: int | None = None,
    with_faiss: bool = False,
) -> Identification:
    """Collective: every rank holds all probes and its shard of the gallery, and gets the same numbers.

    probe_keys_P: where probes may be in the gallery themselves; see `GalleryShard.keys_N`.
    """
    found = search(
        probes_PD,
        gallery,
        k=max(RANKS),
        device=device,
        probe_labels_P=probe_labels_P,
        probe_keys_P=probe_keys_P,
        group=group,
        max_block_bytes=max_block_bytes,
        with_faiss=with_faiss,
    )
    numbers = numbers_of_scores(
        found.mate_scores_P.double().cpu().numpy(),
        found.other_scores_Pk.double().cpu().numpy(),
        num_gallery=num_gallery,
    )
    return replace(numbers, num_in_gallery=num_in_gallery)


def numbers_of_scores(
    mate_scores_P: NDArray[np.float64], other_scores_Pk: NDArray[np.float64], *, num_gallery: int
) -> Identification:
    """From each probe's best mate (-inf: none) and its best others, highest first."""
    is_mated_P = np.isfinite(mate_scores_P)
    mates, others = mate_scores_P[is_mated_P], other_scores_Pk[is_mated_P]
    num_mated = len(mates)
    num_above = (others >= mates[:, None]).sum(axis=1)
    hits = {k: int((num_above < k).sum()) for k in RANKS}
    is_first = num_above == 0
    impostors = -np.sort(-other_scores_Pk[~is_mated_P, 0]) if not is_mated_P.all() else np.empty(0)
    return Identification(
        num_gallery=num_gallery,
        num_mated=num_mated,
        num_unmated=len(impostors),
        rank_k={k: num / num_mated if num_mated else None for k, num in hits.items()},
        rank_intervals={k: wilson_interval(num, num_mated) if num_mated else None for k, num in hits.items()},
        tpir_at_fpir={fpir: _tpir(mates[is_first], impostors, fpir, num_mated) for fpir in FPIR_TARGETS},
    )


def _tpir(
    first_mates: NDArray[np.float64], impostors: NDArray[np.float64], fpir: float, num_mated: int
) -> float | None:
    """impostors: best score of each unmated probe, highest first."""
    if num_mated == 0 or len(impostors) == 0 or 1 / len(impostors) > fpir:
        return None
    # As many unmated probes may pass as the rate allows; the next one's score must not.
    num_allowed = int(np.floor(fpir * len(impostors) + 1e-9))
    if num_allowed >= len(impostors):
        return len(first_mates) / num_mated
    return float((first_mates > impostors[num_allowed]).sum() / num_mated)


def published_ijb_tpir(
    mate_scores_P: NDArray[np.float64], best_impostors: NDArray[np.float64], fpir: float
) -> float | None:
    """As InsightFace's script has it: the threshold is the ceil(FPIR x P)-th highest of all scores of other entries.

    best_impostors: at least that many of them, highest first.
    """
    place = int(np.ceil(fpir * len(mate_scores_P)))
    if len(best_impostors) < place:
        return None
    return float((mate_scores_P > best_impostors[place - 1]).mean())


@dataclass(frozen=True, kw_only=True, slots=True)
class MegaFace:
    """Rank-k among growing numbers of distractors."""

    num_probes: int
    num_pairs: int
    """Ordered pairs of images of one identity: one is the probe, the other its mate in the gallery."""
    rank_k: dict[int, dict[int, float]]
    """By number of distractors, then k."""

    def to_json(self) -> dict[str, Any]:
        by_size = {str(size): {str(k): share for k, share in ranks.items()} for size, ranks in self.rank_k.items()}
        return {"num_probes": self.num_probes, "num_pairs": self.num_pairs, "rank_k": by_size}


def rank_among_distractors(
    probes_PD: NDArray[np.float32],
    labels_P: NDArray[np.int64],
    distractors: GalleryShard,
    *,
    num_distractors: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> MegaFace:
    """MegaFace's challenge 1: every image of an identity in turn joins the distractors, its other images look for it.

    Collective. The shard is this rank's part of the distractors in their given order; the first 10, 100, … of all are
    the smaller galleries. A pair is a hit at k when fewer than k distractors are at least as close as the mate.
    """
    pairs_M2 = _ordered_pairs(labels_P)
    if not len(pairs_M2):
        raise DataError("No identity has two probe images: MegaFace's protocol needs a probe and a mate of each.")
    mates_M = np.einsum("md,md->m", probes_PD[pairs_M2[:, 0]], probes_PD[pairs_M2[:, 1]], dtype=np.float64)
    sizes = [10**power for power in range(1, 20) if 10**power < num_distractors] + [num_distractors]
    rank_k = {}
    for size in sizes:
        stop = min(max(size - distractors.first, 0), len(distractors))
        part = GalleryShard(embeddings_ND=distractors.embeddings_ND[:stop], first=distractors.first)
        found = search(probes_PD, part, k=max(RANKS), device=device, group=group)
        others_Mk = found.other_scores_Pk.double().cpu().numpy()[pairs_M2[:, 0]]
        num_above_M = (others_Mk >= mates_M[:, None]).sum(axis=1)
        rank_k[size] = {k: float((num_above_M < k).mean()) for k in RANKS}
    return MegaFace(num_probes=len(probes_PD), num_pairs=len(pairs_M2), rank_k=rank_k)


def _ordered_pairs(labels_P: NDArray[np.int64]) -> NDArray[np.int64]:
    pairs = []
    order = np.argsort(labels_P, kind="stable")
    for members in np.split(order, np.flatnonzero(np.diff(labels_P[order])) + 1):
        first, second = np.meshgrid(members, members, indexing="ij")
        is_pair = first != second
        pairs.append(np.stack([first[is_pair], second[is_pair]], axis=1))
    return np.concatenate(pairs).astype(np.int64) if pairs else np.empty((0, 2), dtype=np.int64)


def read_megaface_features(paths: Sequence[Path]) -> NDArray[np.float32]:
    """(N, D) from MegaFace's feature files, one vector a file: int32 x 4 (length, 1, 4, 5), then float32."""
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
                f"{path} is no MegaFace feature file: expected int32 (length, 1, 4, 5) and that many float32, found "
                f"{head} and {len(content)} bytes."
            )
        if rows and len(vector) != len(rows[0]):
            raise DataError(f"{path} holds {len(vector)} numbers, {paths[0]} {len(rows[0])}: different models.")
        rows.append(vector.astype(np.float32))
    return np.stack(rows)


def labels_of(identities: Sequence[str], known: Mapping[str, int]) -> NDArray[np.int64]:
    """Numbers of the identities; one that is not known gets a number beyond all known ones."""
    unknown: dict[str, int] = {}
    for name in identities:
        if name not in known:
            unknown.setdefault(name, len(known) + len(unknown))
    return np.array([known[name] if name in known else unknown[name] for name in identities], dtype=np.int64)
