"""Finds exact nearest neighbours: every probe is compared with every gallery entry, each rank searching its shard.

Letters: P probes, N gallery entries in total, k neighbours kept per probe. A score is a cosine: the caller normalises the
rows. The P x N scores never exist at once; there is one block of them at a time, of at most `_BLOCK_BYTES`.

An entry with the label of a probe is a *mate* of the probe; all other entries are *others*.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megaclass_launch.even_parts import even_part
from megaclass_launch.ranks.collectives import gather_blocks, group_rank, group_size

NO_LABEL = -1
"""Label of a gallery entry that is not a mate of any probe: a distractor."""
_NOTHING = float("-inf")
_BLOCK_BYTES = {"cpu": 2**26, "cuda": 2**31}
_MAX_GALLERY_BLOCK = 2**16
precision_lock = threading.Lock()
"""Held by threads that search at the same time: a search sets torch's precision of products for the whole process."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Neighbours:
    """The best others and the best mate of each probe."""

    other_scores_Pk: Tensor
    """Scores, highest first; -inf if the gallery has fewer than k others."""
    other_indices_Pk: Tensor
    """Rows of these others in the whole gallery."""
    mate_scores_P: Tensor
    """Score of the best mate; -inf for a probe without one."""
    log_sums_P: Tensor | None = None
    """Logarithm of the sum of exp(scale * score) over all entries, if a scale was given."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GalleryShard:
    """The entries of the gallery that this rank holds, starting with entry `first` of the whole gallery."""

    embeddings_ND: NDArray[np.float32] | Tensor
    labels_N: NDArray[np.int64] | None = None
    first: int = 0
    keys_N: NDArray[np.int64] | None = None
    """Content digest of the image behind each row. A probe with the same digest is that image itself and skips the row."""
    rows_per_entry: int = 1
    """Number of adjacent rows that are one entry, whose score is that of its best row: the sub-centres of a class."""
    is_normalised: bool = True
    """False: rows are normalised block by block, and rows that are zero or not finite have the score 0."""

    def __len__(self) -> int:
        return len(self.embeddings_ND) // self.rows_per_entry


def shard_of_rank(
    embeddings_ND: NDArray[np.float32] | Tensor,
    labels_N: NDArray[np.int64] | None = None,
    group: dist.ProcessGroup | None = None,
) -> GalleryShard:
    """Returns this rank's part of a gallery that every rank holds or has mapped; it may be empty."""
    rows = rows_of_rank(len(embeddings_ND), group)
    here = slice(rows.start, rows.stop)
    labels = None if labels_N is None else labels_N[here]
    return GalleryShard(embeddings_ND=embeddings_ND[here], labels_N=labels, first=rows.start)


def rows_of_rank(num_rows: int, group: dist.ProcessGroup | None = None) -> range:
    """Returns the rows of a gallery that this rank holds; there may be none."""
    return even_part(num_rows, group_rank(group), group_size(group))


@torch.no_grad()
def search(
    probes_PD: NDArray[np.float32] | Tensor,
    gallery: GalleryShard,
    *,
    k: int,
    device: torch.device,
    probe_labels_P: NDArray[np.int64] | None = None,
    probe_keys_P: NDArray[np.int64] | None = None,
    group: dist.ProcessGroup | None = None,
    scale: float | None = None,
    is_alone: bool = False,
) -> Neighbours:
    """Collective. Returns the k best others and the best mate of each probe; the same on every rank.

    Every rank holds all probes and its own shard. Each gallery block moves to the device once; the probes stay there.
    Traffic per rank: one all-gather of P x k scores, one of P x k row numbers, one of P scores, with `scale` one more.

    scale: also return the logarithm of each probe's sum of exp(scale * score) over all entries. is_alone: search the rows of
    this process; nothing is exchanged with other ranks.
    """
    probes = torch.as_tensor(probes_PD, device=device).float()
    scores_Pk = torch.full((len(probes), k), _NOTHING, device=device)
    indices_Pk = torch.zeros((len(probes), k), dtype=torch.int64, device=device)
    mates_P = torch.full((len(probes),), _NOTHING, device=device)
    log_sums_P = None if scale is None else torch.full((len(probes),), _NOTHING, device=device)
    labels_P = None if probe_labels_P is None else torch.as_tensor(probe_labels_P, device=device)
    for here, first, block_PB in score_blocks(probes, gallery, device, probe_keys_P):
        if log_sums_P is not None and scale is not None:
            log_sums_P[here] = torch.logaddexp(log_sums_P[here], torch.logsumexp(scale * block_PB, dim=1))
        if labels_P is not None and gallery.labels_N is not None:
            labels_B = torch.as_tensor(gallery.labels_N[first : first + block_PB.shape[1]], device=device)
            is_mate_PB = (labels_P[here, None] == labels_B) & (labels_B != NO_LABEL)
            mates = block_PB.masked_fill(~is_mate_PB, _NOTHING).amax(dim=1)
            mates_P[here] = torch.maximum(mates_P[here], mates)
            block_PB.masked_fill_(is_mate_PB, _NOTHING)
        # Merged with the best so far: k scores per probe are all that is kept between blocks.
        found, places = torch.topk(block_PB, min(k, block_PB.shape[1]), dim=1)
        scores_Pk[here], indices_Pk[here] = best(
            torch.cat([scores_Pk[here], found], dim=1),
            torch.cat([indices_Pk[here], places + (gallery.first + first)], dim=1),
            k,
        )
    if not is_alone:
        # Each rank has the best of its shard; the best of all are among them.
        scores_WPk, indices_WPk = gather_blocks(scores_Pk, group), gather_blocks(indices_Pk, group)
        scores_Pk, indices_Pk = best(scores_WPk.transpose(0, 1).flatten(1), indices_WPk.transpose(0, 1).flatten(1), k)
        mates_P = gather_blocks(mates_P, group).amax(dim=0)
        log_sums_P = None if log_sums_P is None else gather_blocks(log_sums_P, group).logsumexp(dim=0)
    return Neighbours(
        other_scores_Pk=scores_Pk, other_indices_Pk=indices_Pk, mate_scores_P=mates_P, log_sums_P=log_sums_P
    )


def score_blocks(
    probes_PD: Tensor,
    gallery: GalleryShard,
    device: torch.device,
    probe_keys_P: NDArray[np.int64] | None = None,
) -> Iterator[tuple[slice, int, Tensor]]:
    """Yields (probes, first entry in the shard, scores of the probes with the entries from there on).

    A probe's own image has the score -inf, so it counts neither as a mate nor as another. Blocks of the gallery are the
    outer loop: each is copied to the device once, whatever the number of probes.
    """
    keys_P = None if probe_keys_P is None else torch.as_tensor(probe_keys_P, device=device)
    per_entry = gallery.rows_per_entry
    gallery_block = min(max(1, _MAX_GALLERY_BLOCK // per_entry), max(1, len(gallery)))
    probe_block = max(1, _BLOCK_BYTES[device.type] // (4 * gallery_block * per_entry))
    with full_precision():
        for first in range(0, len(gallery), gallery_block):
            entries = slice(first, first + gallery_block)
            rows = gallery.embeddings_ND[first * per_entry : entries.stop * per_entry]
            rows_BD = torch.as_tensor(rows).to(device).float()
            rows_BD = rows_BD if gallery.is_normalised else unit_rows_or_zero(rows_BD)
            keys_B = None
            if keys_P is not None and gallery.keys_N is not None:
                keys_B = torch.as_tensor(gallery.keys_N[entries], device=device)
            for start in range(0, len(probes_PD), probe_block):
                here = slice(start, start + probe_block)
                block_PB = probes_PD[here] @ rows_BD.T
                if per_entry > 1:
                    block_PB = block_PB.unflatten(1, (-1, per_entry)).amax(dim=2)
                if keys_P is not None and keys_B is not None:
                    block_PB.masked_fill_(keys_P[here, None] == keys_B, _NOTHING)
                yield here, first, block_PB


def best(scores: Tensor, indices: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Returns the k highest scores and their entries, highest first; of equal scores the earlier entry comes first.

    Sorting by entry first makes the result independent of how the gallery is split over blocks and ranks.
    """
    by_index = indices.argsort(dim=1, stable=True)
    scores, indices = scores.gather(1, by_index), indices.gather(1, by_index)
    order = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
    return scores.gather(1, order), indices.gather(1, order)


def unit_rows_or_zero(rows_BD: Tensor) -> Tensor:
    """Normalises rows; a row that is zero or not finite becomes zeros, whose cosine with every row is 0."""
    norms_B1 = rows_BD.norm(dim=1, keepdim=True)
    is_usable_B1 = torch.isfinite(norms_B1) & (norms_B1 > 0)
    return torch.where(is_usable_B1, rows_BD / norms_B1.clamp_min(1e-30), 0.0)


@contextmanager
def full_precision() -> Iterator[None]:
    """Turns TF32 off: ten bits per score are enough to train, but not to rank a million neighbours."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
