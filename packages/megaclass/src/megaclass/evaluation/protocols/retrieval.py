"""The retrieval protocol: queries are searched in a gallery -> CMC, Recall@k, P@k, mAP, MAP@R, mINP, open-set rejection.

All numbers follow from the place of each of a query's mates in the ranking of the whole gallery. The places are counted and
the gallery is never sorted: one pass over blocks of scores finds the scores of the mates, a second one counts how many other
entries lie at or above each. A tie between a mate and another entry counts against the model.

Letters: P queries, R mates of the query that has most, B entries of a block.
"""

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megaclass.errors import DataError
from megaclass.evaluation.gallery import open_searched
from megaclass.evaluation.protocol import (
    EvaluationProtocol,
    EvaluationSet,
    Evaluator,
    Numbers,
    SetResult,
    percent,
)
from megaclass.evaluation.protocols.identification import RANKS, numbers_of_scores
from megaclass.evaluation.search import GalleryShard, score_blocks
from megaclass_launch.ranks.collectives import gather_blocks, sum_over_ranks_

# Places that are in memory at once, over all queries of a chunk and their mates.
_MAX_PLACES = {"cpu": 2**22, "cuda": 2**26}
# With more mates than this, sorting a block is faster than one comparison per mate.
_MAX_COMPARED = 64
_NOTHING = float("-inf")


class RetrievalProtocol(EvaluationProtocol):
    """Queries against a gallery with several entries per identity."""

    kind = "retrieval"
    card_name = "retrieval"
    quoted_at = ("map",)
    lead_form = (
        "{num_queries:,} queries with mates among {num_gallery:,} gallery entries, {num_unmated:,} queries without. A query "
        "that is in the gallery itself is compared with the others."
    )
    shares: ClassVar = {
        "map": "mAP",
        "map_at_r": "MAP@R",
        "minp": "mINP",
        "cmc": "CMC@{}",
        "recall_at_k": "Recall@{}",
        "precision_at_k": "P@{}",
        "tpir_at_fpir": "TPIR at FPIR {}",
    }

    def evaluate(self, evaluator: Evaluator, one: EvaluationSet) -> SetResult:
        given = open_searched(evaluator, one)
        numbers = retrieve(
            given.probes_PD,
            given.probe_labels_P,
            given.shard,
            given.labels_N,
            query_keys_P=given.probe_keys_P,
            device=evaluator.device,
            group=evaluator.group,
        )
        return self.result(one, numbers)

    def headline(self, numbers: Numbers) -> str:
        return f"mAP {percent(numbers['map'])}, CMC@1 {percent(numbers['cmc']['1'])}"


@torch.no_grad()
def retrieve(
    queries_PD: NDArray[np.float32] | Tensor,
    labels_P: NDArray[np.int64],
    gallery: GalleryShard,
    labels_N: NDArray[np.int64],
    *,
    query_keys_P: NDArray[np.int64] | None = None,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Collective. Every rank holds all queries, its shard of the gallery, and the labels of the whole gallery.

    Traffic per rank and chunk of queries: an all-gather of P x R scores, an all-reduce of P x R counts and one of P scores.

    query_keys_P: content digests of the queries, if they may be in the gallery themselves; see `GalleryShard.keys_N`.
    """
    queries = torch.as_tensor(queries_PD, device=device).float()
    # The entries of each label in a row: entry n is number slots_N[n] of its label.
    order = np.argsort(labels_N, kind="stable")
    _, starts, counts = np.unique(labels_N[order], return_index=True, return_counts=True)
    slots_N = np.empty(len(labels_N), dtype=np.int64)
    slots_N[order] = np.arange(len(order)) - np.repeat(starts, counts)
    is_mated_P = np.isin(labels_P, labels_N)
    if not is_mated_P.any():
        raise DataError("No query has a mate in the gallery: their identities have no name in common.")
    num_slots = int(counts[np.isin(labels_N[order][starts], labels_P)].max())
    here = slice(gallery.first, gallery.first + len(gallery))
    own = replace(gallery, labels_N=labels_N[here])
    chunk = max(1, _MAX_PLACES[device.type] // num_slots)
    sums: dict[str, float] = {}
    num_queries = 0
    mates, others = [], []
    for start in range(0, len(queries), chunk):
        some = slice(start, start + chunk)
        keys = None if query_keys_P is None else query_keys_P[some]
        labels = torch.as_tensor(labels_P[some], device=device)
        blocks = _Blocks(queries[some], labels, own, keys)
        scores_PR = blocks.mate_scores(torch.as_tensor(slots_N[here], device=device), num_slots)
        scores_PR = gather_blocks(scores_PR, group).amax(dim=0).sort(dim=1, descending=True).values
        counts_PR, best_P = blocks.others_above(scores_PR)
        sum_over_ranks_(counts_PR, group)
        best_P = gather_blocks(best_P, group).amax(dim=0)
        mates.append(scores_PR[:, 0].double().cpu().numpy())
        others.append(best_P.double().cpu().numpy())
        for name, value in _sums_of(scores_PR.isfinite().cpu().numpy(), counts_PR.cpu().numpy()).items():
            sums[name] = sums.get(name, 0.0) + value
        num_queries += int(scores_PR[:, 0].isfinite().sum())
    if not num_queries:
        raise DataError("No query has a mate in the gallery but itself.")
    found = numbers_of_scores(np.concatenate(mates), np.concatenate(others)[:, None], num_gallery=len(labels_N))
    means = {name: value / num_queries for name, value in sums.items()}
    return {
        "num_gallery": len(labels_N),
        "num_queries": num_queries,
        "num_unmated": len(queries) - num_queries,
        **{name: means[name] for name in ("map", "map_at_r", "minp")},
        **{name: {str(k): means[f"{name} {k}"] for k in RANKS} for name in ("cmc", "recall_at_k", "precision_at_k")},
        "tpir_at_fpir": found["tpir_at_fpir"],
    }


class _Blocks:
    """The scores of some queries with this rank's part of the gallery, block by block, in two passes."""

    def __init__(
        self, queries_PD: Tensor, labels_P: Tensor, gallery: GalleryShard, keys_P: NDArray[np.int64] | None
    ) -> None:
        self.queries_PD, self.labels_P, self.gallery, self.keys_P = queries_PD, labels_P, gallery, keys_P
        self.device = queries_PD.device
        assert gallery.labels_N is not None
        self.labels_N = torch.as_tensor(gallery.labels_N, device=self.device)

    def _blocks(self) -> Any:
        for here, first, block_PB in score_blocks(self.queries_PD, self.gallery, self.device, self.keys_P):
            labels_B = self.labels_N[first : first + block_PB.shape[1]]
            yield here, first, block_PB, self.labels_P[here, None] == labels_B

    def mate_scores(self, slots_N: Tensor, num_slots: int) -> Tensor:
        """Returns (P, R) the score of every mate at its number among the entries of its label; -inf for none here."""
        scores_PR = torch.full((len(self.queries_PD), num_slots), _NOTHING, device=self.device)
        for here, first, block_PB, is_mate_PB in self._blocks():
            rows, columns = is_mate_PB.nonzero(as_tuple=True)
            scores_PR[rows + here.start, slots_N[first + columns]] = block_PB[rows, columns]
        return scores_PR

    def others_above(self, scores_PR: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (P, R) how many others here are at or above each mate, whose scores fall; and (P,) the best other."""
        counts_PR = torch.zeros(scores_PR.shape, dtype=torch.int64, device=self.device)
        best_P = torch.full((len(scores_PR),), _NOTHING, device=self.device)
        for here, _, block_PB, is_mate_PB in self._blocks():
            block_PB.masked_fill_(is_mate_PB, _NOTHING)
            best_P[here] = torch.maximum(best_P[here], block_PB.amax(dim=1))
            mates = scores_PR[here]
            if mates.shape[1] <= _MAX_COMPARED:
                for place in range(mates.shape[1]):
                    counts_PR[here, place] += (block_PB >= mates[:, place, None]).sum(dim=1)
            else:
                rising = block_PB.sort(dim=1).values
                counts_PR[here] += rising.shape[1] - torch.searchsorted(rising, mates.contiguous())
        return counts_PR, best_P


def _sums_of(is_mate_PR: NDArray[np.bool_], above_PR: NDArray[np.int64]) -> dict[str, float]:
    """Returns the sums over queries of every number. Mates come first in each row, closest first."""
    is_mated_P = is_mate_PR[:, 0]
    is_mate_PR, above_PR = is_mate_PR[is_mated_P], above_PR[is_mated_P]
    numbers_R = np.arange(1, is_mate_PR.shape[1] + 1)
    num_mates_P = is_mate_PR.sum(axis=1)
    # Among the first places_PR entries are numbers_R mates. Missing mates have no place.
    places_PR = np.where(is_mate_PR, numbers_R + above_PR, np.inf)
    precision_PR = numbers_R / places_PR
    last_P = places_PR[np.arange(len(places_PR)), num_mates_P - 1]
    sums = {
        "map": (precision_PR.sum(axis=1) / num_mates_P).sum(),
        "map_at_r": ((precision_PR * (places_PR <= num_mates_P[:, None])).sum(axis=1) / num_mates_P).sum(),
        "minp": (num_mates_P / last_P).sum(),
    }
    for k in RANKS:
        num_found_P = (places_PR <= k).sum(axis=1)
        sums[f"cmc {k}"] = (num_found_P > 0).sum()
        sums[f"recall_at_k {k}"] = (num_found_P / num_mates_P).sum()
        sums[f"precision_at_k {k}"] = (num_found_P / k).sum()
    return {name: float(value) for name, value in sums.items()}
