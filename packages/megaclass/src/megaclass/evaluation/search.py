"""Finds exact nearest neighbours: every probe is compared with every gallery entry, each rank searching its shard.

Letters: P probes, N gallery entries in total, k neighbours kept per probe. A score is a cosine: the caller normalises the
rows. The P x N scores never exist at once; there is one block of them at a time, of at most `max_block_bytes`.

An entry with the label of a probe is a *mate* of the probe; all other entries are *others*.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megaclass.errors import DataError
from megaclass_launch.even_parts import even_part
from megaclass_launch.ranks.collectives import gather_blocks, group_rank, group_size

NO_LABEL = -1
"""Label of a gallery entry that is not a mate of any probe: a distractor."""
_NOTHING = float("-inf")
_BLOCK_BYTES = {"cpu": 2**26, "cuda": 2**31}
_MAX_GALLERY_BLOCK = 2**16


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Neighbours:
    """The best others and the best mate of each probe."""

    other_scores_Pk: Tensor
    """Scores, highest first; -inf if the gallery has fewer than k others."""
    other_indices_Pk: Tensor
    """Rows of these others in the whole gallery."""
    mate_scores_P: Tensor
    """Score of the best mate; -inf for a probe without one."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class GalleryShard:
    """The rows of the gallery that this rank holds, starting with row `first` of the whole gallery."""

    embeddings_ND: NDArray[np.float32] | Tensor
    labels_N: NDArray[np.int64] | None = None
    first: int = 0
    keys_N: NDArray[np.int64] | None = None
    """Content digest of the image behind each row. A probe with the same digest is that image itself and skips the row."""

    def __len__(self) -> int:
        return len(self.embeddings_ND)


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


def search(
    probes_PD: NDArray[np.float32] | Tensor,
    gallery: GalleryShard,
    *,
    k: int,
    device: torch.device,
    probe_labels_P: NDArray[np.int64] | None = None,
    probe_keys_P: NDArray[np.int64] | None = None,
    group: dist.ProcessGroup | None = None,
    max_block_bytes: int | None = None,
    with_faiss: bool = False,
) -> Neighbours:
    """Collective. Returns the k best others and the best mate of each probe; the same on every rank.

    Every rank holds all probes and its own shard. Each gallery block moves to the device once; the probes stay there.
    Traffic per rank: one all-gather of P x k scores, one of P x k row numbers, one of P scores.
    """
    probes = torch.as_tensor(probes_PD, device=device).float()
    if len(gallery) and gallery.embeddings_ND.shape[1] != probes.shape[1]:
        raise DataError(
            f"Embeddings of the probes have {probes.shape[1]} numbers, those of the gallery "
            f"{gallery.embeddings_ND.shape[1]}: they come from different models."
        )
    if with_faiss:
        own = _search_shard_with_faiss(probes, gallery, k, probe_labels_P, probe_keys_P)
    else:
        own = search_shard(probes, gallery, k, device, probe_labels_P, probe_keys_P, max_block_bytes)
    # Each rank has the best of its shard; the best of all are among them.
    scores_WPk = gather_blocks(own.other_scores_Pk.to(device), group)
    indices_WPk = gather_blocks(own.other_indices_Pk.to(device), group)
    scores_Pk, indices_Pk = best(scores_WPk.transpose(0, 1).flatten(1), indices_WPk.transpose(0, 1).flatten(1), k)
    mates_P = gather_blocks(own.mate_scores_P.to(device), group).amax(dim=0)
    return Neighbours(other_scores_Pk=scores_Pk, other_indices_Pk=indices_Pk, mate_scores_P=mates_P)


@torch.no_grad()
def search_shard(
    probes_PD: Tensor,
    gallery: GalleryShard,
    k: int,
    device: torch.device,
    probe_labels_P: NDArray[np.int64] | None = None,
    probe_keys_P: NDArray[np.int64] | None = None,
    max_block_bytes: int | None = None,
) -> Neighbours:
    """Searches the rows of this process; nothing is exchanged with other ranks."""
    num_probes = len(probes_PD)
    scores_Pk = torch.full((num_probes, k), _NOTHING, device=device)
    indices_Pk = torch.zeros((num_probes, k), dtype=torch.int64, device=device)
    mates_P = torch.full((num_probes,), _NOTHING, device=device)
    labels_P = None if probe_labels_P is None else torch.as_tensor(probe_labels_P, device=device)
    keys_P = None if probe_keys_P is None else torch.as_tensor(probe_keys_P, device=device)
    # Blocks of the gallery are the outer loop: each is copied to the device once, whatever the number of probes.
    gallery_block = min(_MAX_GALLERY_BLOCK, max(1, len(gallery)))
    probe_block = max(1, (max_block_bytes or _BLOCK_BYTES[device.type]) // (4 * gallery_block))
    with full_precision():
        for start in range(0, len(gallery), gallery_block):
            rows_BD = torch.as_tensor(gallery.embeddings_ND[start : start + gallery_block]).to(device).float()
            labels_B = None
            if labels_P is not None and gallery.labels_N is not None:
                labels_B = torch.as_tensor(gallery.labels_N[start : start + gallery_block]).to(device)
            keys_B = None
            if keys_P is not None and gallery.keys_N is not None:
                keys_B = torch.as_tensor(gallery.keys_N[start : start + gallery_block]).to(device)
            for first in range(0, num_probes, probe_block):
                here = slice(first, first + probe_block)
                block_PB = probes_PD[here] @ rows_BD.T
                # First the probe's own image is removed, so it counts neither as a mate nor as another.
                if keys_P is not None and keys_B is not None:
                    block_PB.masked_fill_(keys_P[here, None] == keys_B, _NOTHING)
                if labels_P is not None and labels_B is not None:
                    is_mate_PB = (labels_P[here, None] == labels_B) & (labels_B != NO_LABEL)
                    mates = block_PB.masked_fill(~is_mate_PB, _NOTHING).amax(dim=1)
                    mates_P[here] = torch.maximum(mates_P[here], mates)
                    block_PB.masked_fill_(is_mate_PB, _NOTHING)
                # Merged with the best so far: k scores per probe are all that is kept between blocks.
                found, places = torch.topk(block_PB, min(k, block_PB.shape[1]), dim=1)
                scores_Pk[here], indices_Pk[here] = best(
                    torch.cat([scores_Pk[here], found], dim=1),
                    torch.cat([indices_Pk[here], places + (gallery.first + start)], dim=1),
                    k,
                )
    return Neighbours(other_scores_Pk=scores_Pk, other_indices_Pk=indices_Pk, mate_scores_P=mates_P)


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


def _search_shard_with_faiss(
    probes_PD: Tensor,
    gallery: GalleryShard,
    k: int,
    probe_labels_P: NDArray[np.int64] | None,
    probe_keys_P: NDArray[np.int64] | None,
) -> Neighbours:
    """Searches the shard with faiss's exact index on the CPU.

    faiss ignores labels. Enough neighbours are requested that k remain after mates and the probe's own image are
    removed.
    """
    try:
        import faiss
    except ImportError:
        raise DataError("Searching with faiss needs the package faiss: pip install 'megaclass[retrieval]'") from None
    num_probes = len(probes_PD)
    rows_ND = np.ascontiguousarray(torch.as_tensor(gallery.embeddings_ND).float().cpu().numpy())
    labels_N = gallery.labels_N if probe_labels_P is not None and len(rows_ND) else None
    keys_N = gallery.keys_N if probe_keys_P is not None and len(rows_ND) else None
    # The largest number of entries that can be removed for one probe.
    most_mates = sum(int(np.unique(one, return_counts=True)[1].max()) for one in (labels_N, keys_N) if one is not None)
    index = faiss.IndexFlatIP(probes_PD.shape[1])
    index.add(rows_ND)
    scores, places = index.search(probes_PD.cpu().numpy(), max(1, min(k + most_mates, len(rows_ND))))
    # For an empty shard faiss returns -1.
    scores = np.where(places < 0, np.float32(_NOTHING), scores)
    if probe_keys_P is not None and keys_N is not None:
        scores = np.where(keys_N[places] == probe_keys_P[:, None], np.float32(_NOTHING), scores)
    mates_P = np.full(num_probes, _NOTHING, dtype=np.float32)
    if probe_labels_P is not None and labels_N is not None:
        found = labels_N[places]
        is_mate = (found == probe_labels_P[:, None]) & (found != NO_LABEL)
        mates_P = np.where(is_mate, scores, np.float32(_NOTHING)).max(axis=1)
        _add_far_mates(mates_P, probes_PD, rows_ND, probe_labels_P, labels_N, probe_keys_P, keys_N)
        scores = np.where(is_mate, np.float32(_NOTHING), scores)
    missing = max(0, k - scores.shape[1])
    scores_Pk, indices_Pk = best(
        torch.from_numpy(np.pad(scores, ((0, 0), (0, missing)), constant_values=_NOTHING)),
        torch.from_numpy(np.pad(np.maximum(places, 0), ((0, 0), (0, missing))) + gallery.first),
        k,
    )
    return Neighbours(other_scores_Pk=scores_Pk, other_indices_Pk=indices_Pk, mate_scores_P=torch.from_numpy(mates_P))


def _add_far_mates(
    mates_P: NDArray[np.float32],
    probes_PD: Tensor,
    rows_ND: NDArray[np.float32],
    probe_labels_P: NDArray[np.int64],
    labels_N: NDArray[np.int64],
    probe_keys_P: NDArray[np.int64] | None,
    keys_N: NDArray[np.int64] | None,
) -> None:
    """Computes the best mate of probes whose mates are all farther away than the neighbours that faiss returned."""
    for probe in np.flatnonzero(np.isneginf(mates_P) & np.isin(probe_labels_P, labels_N[labels_N != NO_LABEL])):
        is_mate_N = labels_N == probe_labels_P[probe]
        if probe_keys_P is not None and keys_N is not None:
            is_mate_N &= keys_N != probe_keys_P[probe]
        if is_mate_N.any():
            mates_P[probe] = float((rows_ND[is_mate_N] @ probes_PD[probe].cpu().numpy()).max())
