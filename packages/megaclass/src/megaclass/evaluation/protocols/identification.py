"""The identification protocol: probes are searched in a gallery -> rank-1/5/10 and TPIR at FPIR.

A tie between a mate and another identity counts against the model, so a model that maps all images to one point
identifies no probe.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megaclass.evaluation.gallery import open_gallery
from megaclass.evaluation.protocol import (
    Checks,
    EvaluationProtocol,
    EvaluationSet,
    Evaluator,
    Numbers,
    Row,
    SetResult,
    are_intervals,
    are_ranks,
    are_shares,
    is_count,
    share_cells,
    share_text,
)
from megaclass.evaluation.protocols.intervals import Interval, wilson_interval
from megaclass.evaluation.search import GalleryShard, search
from megaclass_launch.ranks.collectives import gather_blocks

RANKS = (1, 5, 10)
FPIR_TARGETS = (1e-1, 1e-2, 1e-3)


@dataclass(frozen=True, kw_only=True, slots=True)
class Identification:
    """The numbers of one model on one gallery."""

    num_gallery: int
    num_mated: int
    """Number of probes whose identity is in the gallery."""
    num_unmated: int
    num_in_gallery: int | None = 0
    """Number of probes that are in the gallery themselves; each was compared with the other entries only. None: not known."""
    rank_k: dict[int, float | None]
    """Share of the mated probes whose best mate is above all but k - 1 others; None without mated probes."""
    rank_intervals: dict[int, Interval | None]
    tpir_at_fpir: dict[float, float | None]
    """Share of the mated probes whose mate comes first and above the threshold that this share of unmated probes passes;
    None with fewer than 1 / FPIR unmated probes."""

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


class IdentificationProtocol(EvaluationProtocol):
    """Probes against a gallery, as an open-set test."""

    kind = "identification"
    card_name = "1:N"
    expected: ClassVar[Checks] = {
        "num_gallery": is_count,
        "num_mated": is_count,
        "num_unmated": is_count,
        "num_probes_in_gallery": lambda value: value is None or is_count(value),
        "rank_k": are_ranks,
        "rank_k_95": are_intervals,
        "tpir_at_fpir": are_shares,
    }
    optional = frozenset({"num_probes_in_gallery", "rank_k_95"})

    def evaluate(self, evaluator: Evaluator, one: EvaluationSet) -> SetResult:
        assert one.probes is not None
        probes = open_gallery(evaluator, one.probes)
        probes_PD = probes.all_rows()
        gallery = open_gallery(evaluator, one.path)
        shard = gallery.shard(probes_PD.shape[1])
        part = range(shard.first, shard.first + len(shard))
        known = {name: number for number, name in enumerate(dict.fromkeys(gallery.identities))}
        labels_N = labels_of(gallery.identities, known)[part.start : part.stop]
        # Every model finds an image by itself at rank 1: a probe that is in the gallery is compared with the others only.
        keys_P = keys_N = num_in_gallery = None
        if probes.is_comparable(gallery):
            keys_P = probes.content_keys(range(len(probes)))
            keys_N = gallery.content_keys(part)
            is_inside_P = torch.from_numpy(np.isin(keys_P, keys_N)).to(evaluator.device)
            num_in_gallery = int(gather_blocks(is_inside_P.to(torch.int64), evaluator.group).amax(dim=0).sum())
        numbers = identify(
            probes_PD,
            labels_of(probes.identities, known),
            replace(shard, labels_N=labels_N, keys_N=keys_N),
            num_gallery=len(gallery),
            probe_keys_P=keys_P,
            num_in_gallery=num_in_gallery,
            device=evaluator.device,
            group=evaluator.group,
        )
        return SetResult(name=one.name, kind=self.kind, path=str(one.path), numbers=numbers.to_json())

    def quoted(self, numbers: Numbers) -> float | None:
        share: float | None = numbers["rank_k"]["1"]
        return share

    def headline(self, numbers: Numbers) -> str:
        return f"rank-1 {share_text(self.quoted(numbers))}"

    def lead(self, numbers: Numbers) -> str:
        return (
            f"{numbers['num_gallery']:,} in the gallery; {numbers['num_mated']:,} probes have a mate there, "
            f"{numbers['num_unmated']:,} have none."
        )

    def meaning(self, numbers: Numbers) -> str:
        share = self.quoted(numbers)
        if share is None:
            return ""
        return f"Searched for among {numbers['num_gallery']:,} others, the right identity comes first in {share:.1%} of cases."

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

    def rows(self, columns: Sequence[Numbers]) -> list[Row]:
        rows: list[Row] = []
        for k in columns[0]["rank_k"]:
            intervals = [n.get("rank_k_95", {}).get(k) for n in columns]
            rows.append((f"Rank-{k}", share_cells([n["rank_k"].get(k) for n in columns], intervals)))
        rows += [
            (f"TPIR at FPIR {fpir}", share_cells([n["tpir_at_fpir"].get(fpir) for n in columns]))
            for fpir in columns[0]["tpir_at_fpir"]
        ]
        return rows


def identify(
    probes_PD: NDArray[np.float32] | Tensor,
    probe_labels_P: NDArray[np.int64],
    gallery: GalleryShard,
    *,
    num_gallery: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    probe_keys_P: NDArray[np.int64] | None = None,
    num_in_gallery: int | None = 0,
    max_block_bytes: int | None = None,
) -> Identification:
    """Collective. Every rank holds all probes and its shard of the gallery, and gets the same numbers.

    probe_keys_P: content digests of the probes, if they may be in the gallery themselves; see `GalleryShard.keys_N`.
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
    )
    numbers = numbers_of_scores(
        found.mate_scores_P.double().cpu().numpy(),
        found.other_scores_Pk.double().cpu().numpy(),
        num_gallery=num_gallery,
    )
    return replace(numbers, num_in_gallery=num_in_gallery)


def numbers_of_scores(
    mate_scores_P: NDArray[np.float64],
    other_scores_Pk: NDArray[np.float64],
    *,
    num_gallery: int,
    published_tpir: bool = False,
) -> Identification:
    """Computes the numbers from the score of each probe's best mate (-inf for none) and its best others, highest first.

    published_tpir: TPIR with the threshold of InsightFace's ijb_evals.py.
    """
    is_mated_P = np.isfinite(mate_scores_P)
    mates, others = mate_scores_P[is_mated_P], other_scores_Pk[is_mated_P]
    num_mated = len(mates)
    # >= and not >: a tie counts against the model.
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
        tpir_at_fpir={
            fpir: _tpir(mates[is_first], impostors, fpir, num_mated, published_tpir) for fpir in FPIR_TARGETS
        },
    )


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


def labels_of(identities: Sequence[str], known: Mapping[str, int]) -> NDArray[np.int64]:
    """Returns the number of each identity; an unknown one gets a number above all known ones."""
    unknown: dict[str, int] = {}
    for name in identities:
        if name not in known:
            unknown.setdefault(name, len(known) + len(unknown))
    return np.array([known[name] if name in known else unknown[name] for name in identities], dtype=np.int64)
