"""MegaFace's protocol: rank-k of a mate among growing numbers of distractors."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megaclass.errors import DataError
from megaclass.evaluation.gallery import open_gallery
from megaclass.evaluation.protocol import (
    Checks,
    EvaluationProtocol,
    EvaluationSet,
    Evaluator,
    Numbers,
    Row,
    SetResult,
    are_ranks,
    is_count,
    share_cells,
    share_text,
)
from megaclass.evaluation.protocols.identification import RANKS, labels_of
from megaclass.evaluation.search import GalleryShard, search


@dataclass(frozen=True, kw_only=True, slots=True)
class MegaFace:
    """Rank-k among increasing numbers of distractors."""

    num_probes: int
    num_pairs: int
    """Number of ordered pairs of images of one identity: one is the probe, the other its mate in the gallery."""
    rank_k: dict[int, dict[int, float]]
    """Shares, keyed by the number of distractors and then by k."""

    def to_json(self) -> dict[str, Any]:
        by_size = {str(size): {str(k): share for k, share in ranks.items()} for size, ranks in self.rank_k.items()}
        return {"num_probes": self.num_probes, "num_pairs": self.num_pairs, "rank_k": by_size}


def _are_ranks_by_size(value: object) -> bool:
    is_named = isinstance(value, dict) and bool(value) and all(re.fullmatch("[0-9]{1,18}", size) for size in value)
    return isinstance(value, dict) and is_named and all(map(are_ranks, value.values()))


class DistractorProtocol(EvaluationProtocol):
    """Pairs of probe images searched among distractors."""

    kind = "distractors"
    card_name = "MegaFace"
    expected: ClassVar[Checks] = {"num_pairs": is_count, "num_probes": is_count, "rank_k": _are_ranks_by_size}

    def evaluate(self, evaluator: Evaluator, one: EvaluationSet) -> SetResult:
        assert one.probes is not None
        probes = open_gallery(evaluator, one.probes)
        probes_PD = probes.all_rows()
        distractors = open_gallery(evaluator, one.path)
        numbers = rank_among_distractors(
            probes_PD,
            labels_of(probes.identities, {}),
            distractors.shard(probes_PD.shape[1]),
            num_distractors=len(distractors),
            device=evaluator.device,
            group=evaluator.group,
        )
        return SetResult(name=one.name, kind=self.kind, path=str(one.path), numbers=numbers.to_json())

    def quoted(self, numbers: Numbers) -> float | None:
        share: float | None = numbers["rank_k"][_most(numbers)]["1"]
        return share

    def headline(self, numbers: Numbers) -> str:
        return f"rank-1 {share_text(self.quoted(numbers))} of {int(_most(numbers)):,}"

    def lead(self, numbers: Numbers) -> str:
        return f"{numbers['num_pairs']:,} pairs of {numbers['num_probes']:,} probe images among distractors."

    def rows(self, columns: Sequence[Numbers]) -> list[Row]:
        return [
            (
                f"Rank-{k}, {int(size):,} distractors",
                share_cells([n["rank_k"].get(size, {}).get(k) for n in columns]),
            )
            for size, ranks in columns[0]["rank_k"].items()
            for k in ranks
        ]


def _most(numbers: Numbers) -> str:
    """Returns the key of the largest number of distractors."""
    return str(max(numbers["rank_k"], key=int))


def rank_among_distractors(
    probes_PD: NDArray[np.float32],
    labels_P: NDArray[np.int64],
    distractors: GalleryShard,
    *,
    num_distractors: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> MegaFace:
    """Collective. MegaFace's challenge 1: each image in turn joins the distractors and is searched by its identity's others.

    The shard is this rank's part of the distractors in their given order; the first 10, 100, … of all of them are the
    smaller galleries. A pair is a hit at k if fewer than k distractors are at least as close as the mate.
    """
    pairs_M2 = _ordered_pairs(labels_P)
    if not len(pairs_M2):
        raise DataError("No identity has two probe images: MegaFace's protocol needs a probe and a mate per identity.")
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
