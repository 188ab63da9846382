"""Search in a gallery: identification (rank-1/5/10 and TPIR at FPIR), and MegaFace's protocol among distractors.

A tie between a mate and another identity counts against the model, so a model that maps all images to one point
identifies no probe.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megaclass.errors import DataError
from megaclass.evaluation.gallery import labels_of, open_gallery, open_searched
from megaclass.evaluation.protocol import (
    EvaluationProtocol,
    EvaluationSet,
    Evaluator,
    Numbers,
    Row,
    SetResult,
    share_rows,
    share_text,
)
from megaclass.evaluation.protocols.intervals import wilson_interval
from megaclass.evaluation.search import GalleryShard, Neighbours, search
from megaclass_launch.ranks.collectives import gather_blocks

RANKS = (1, 5, 10)
FPIR_TARGETS = (1e-1, 1e-2, 1e-3)


class IdentificationProtocol(EvaluationProtocol):
    """Probes against a gallery, as an open-set test."""

    kind = "identification"
    card_name = "1:N"
    quoted_at = ("rank_k", "1")
    headline_form = "rank-1 {quoted}"
    lead_form = "{num_gallery:,} in the gallery; {num_mated:,} probes have a mate there, {num_unmated:,} have none."
    meaning_form = "Searched for among {num_gallery:,} others, the right identity comes first in {share:.1%} of cases."
    shares: ClassVar = {"rank_k": "Rank-{}", "tpir_at_fpir": "TPIR at FPIR {}"}

    def evaluate(self, evaluator: Evaluator, one: EvaluationSet) -> SetResult:
        given = open_searched(evaluator, one)
        found = search(
            given.probes_PD,
            given.shard,
            k=max(RANKS),
            device=evaluator.device,
            probe_labels_P=given.probe_labels_P,
            probe_keys_P=given.probe_keys_P,
            group=evaluator.group,
        )
        numbers = numbers_of(found, num_gallery=len(given.labels_N))
        numbers["num_probes_in_gallery"] = None
        if given.probe_keys_P is not None and given.shard.keys_N is not None:
            is_inside_P = torch.from_numpy(np.isin(given.probe_keys_P, given.shard.keys_N)).to(evaluator.device)
            inside_WP = gather_blocks(is_inside_P.to(torch.int64), evaluator.group)
            numbers["num_probes_in_gallery"] = int(inside_WP.amax(dim=0).sum())
        return self.result(one, numbers)

    def remark(self, numbers: Numbers) -> str:
        num_inside = numbers.get("num_probes_in_gallery", 0)
        if num_inside is None:
            return (
                "Probes that are in the gallery themselves find themselves at rank 1: stored embeddings and images cannot be "
                "compared. Give both as images or both as embeddings."
            )
        if not num_inside:
            return ""
        return f"{num_inside:,} probes are in the gallery themselves: each was compared with the others."


def numbers_of(found: Neighbours, *, num_gallery: int, published_tpir: bool = False) -> dict[str, Any]:
    return numbers_of_scores(
        found.mate_scores_P.double().cpu().numpy(),
        found.other_scores_Pk.double().cpu().numpy()[:, : max(RANKS)],
        num_gallery=num_gallery,
        published_tpir=published_tpir,
    )


def numbers_of_scores(
    mate_scores_P: NDArray[np.float64],
    other_scores_Pk: NDArray[np.float64],
    *,
    num_gallery: int,
    published_tpir: bool = False,
) -> dict[str, Any]:
    """Computes the numbers from the score of each probe's best mate (-inf for none) and its best others, highest first.

    rank_k: share of the mated probes whose best mate is above all but k - 1 others; None without mated probes.
    tpir_at_fpir: share of the mated probes whose mate comes first and above the threshold that this share of unmated probes
    passes; None with fewer than 1 / FPIR unmated probes.
    published_tpir: with the threshold of InsightFace's ijb_evals.py.
    """
    is_mated_P = np.isfinite(mate_scores_P)
    mates, others = mate_scores_P[is_mated_P], other_scores_Pk[is_mated_P]
    num_mated = len(mates)
    # >= and not >: a tie counts against the model.
    num_above = (others >= mates[:, None]).sum(axis=1)
    hits = {str(k): int((num_above < k).sum()) for k in RANKS}
    firsts = mates[num_above == 0]
    impostors = -np.sort(-other_scores_Pk[~is_mated_P, 0]) if not is_mated_P.all() else np.empty(0)
    return {
        "num_gallery": num_gallery,
        "num_mated": num_mated,
        "num_unmated": len(impostors),
        "rank_k": {k: num / num_mated if num_mated else None for k, num in hits.items()},
        "rank_k_95": {k: list(wilson_interval(num, num_mated)) if num_mated else None for k, num in hits.items()},
        "tpir_at_fpir": {
            f"{fpir:g}": _tpir(firsts, impostors, fpir, num_mated, published_tpir) for fpir in FPIR_TARGETS
        },
    }


def _tpir(
    first_mates: NDArray[np.float64], impostors: NDArray[np.float64], fpir: float, num_mated: int, published: bool
) -> float | None:
    """Returns the TPIR at one FPIR. impostors: the best score of each unmated probe, highest first."""
    if num_mated == 0 or len(impostors) == 0 or 1 / len(impostors) > fpir:
        return None
    # The rate allows this many unmated probes to pass; the score of the next one is the threshold.
    num_allowed = int(np.floor(fpir * len(impostors) + 1e-9))
    if published:
        # InsightFace takes the score of the last allowed probe, which its comparison with > does not let pass.
        num_allowed -= 1
    if num_allowed >= len(impostors):
        return len(first_mates) / num_mated
    return float((first_mates > impostors[num_allowed]).sum() / num_mated)


def published_ijb_tpir(
    mate_scores_P: NDArray[np.float64], best_impostors: NDArray[np.float64], fpir: float
) -> float | None:
    """Returns the TPIR of InsightFace's script, whose threshold is the ceil(FPIR x P)-th highest score of all others.

    best_impostors: at least that many of these scores, highest first.
    """
    place = int(np.ceil(fpir * len(mate_scores_P)))
    if len(best_impostors) < place:
        return None
    return float((mate_scores_P > best_impostors[place - 1]).mean())


class DistractorProtocol(EvaluationProtocol):
    """Pairs of probe images searched among distractors."""

    kind = "distractors"
    card_name = "MegaFace"
    lead_form = "{num_pairs:,} pairs of {num_probes:,} probe images among distractors."

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
        return self.result(one, numbers)

    def quoted(self, numbers: Numbers) -> float | None:
        share: float | None = numbers["rank_k"][_most(numbers)]["1"]
        return share

    def headline(self, numbers: Numbers) -> str:
        return f"rank-1 {share_text(self.quoted(numbers))} of {int(_most(numbers)):,}"

    def rows(self, columns: Sequence[Numbers]) -> list[Row]:
        return [
            row
            for size in columns[0]["rank_k"]
            for row in share_rows([n["rank_k"] for n in columns], size, f"Rank-{{}}, {int(size):,} distractors")
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
) -> dict[str, Any]:
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
        rank_k[str(size)] = {str(k): float((num_above_M < k).mean()) for k in RANKS}
    return {"num_probes": len(probes_PD), "num_pairs": len(pairs_M2), "rank_k": rank_k}


def _ordered_pairs(labels_P: NDArray[np.int64]) -> NDArray[np.int64]:
    pairs = []
    order = np.argsort(labels_P, kind="stable")
    for members in np.split(order, np.flatnonzero(np.diff(labels_P[order])) + 1):
        first, second = np.meshgrid(members, members, indexing="ij")
        is_pair = first != second
        pairs.append(np.stack([first[is_pair], second[is_pair]], axis=1))
    return np.concatenate(pairs).astype(np.int64) if pairs else np.empty((0, 2), dtype=np.int64)
