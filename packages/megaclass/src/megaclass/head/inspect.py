"""Looking at the centres of all ranks: those of given classes, the classes closest to one, and those closest to embeddings."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from megaclass.errors import HeadError
from megaclass.head.centres import Centres
from megaclass.head.gather_batch import GlobalBatch, gather_batch
from megaclass.head.problem import rows_of_classes, unit_rows
from megaclass_launch.even_parts import even_part
from megaclass_launch.ranks.collectives import gather_blocks, group_rank, sum_over_ranks_

# Classes that are compared with embeddings at a time.
_BLOCK_CLASSES = 1 << 16


@torch.no_grad()
def centres_of(store: Centres, class_ids: Tensor, num_classes: int, group: dist.ProcessGroup | None) -> Tensor:
    """Collective: PartialFC.centres."""
    outside = class_ids[(class_ids < 0) | (class_ids >= num_classes)]
    if len(outside):
        raise HeadError(f"centres() was asked for class {int(outside[0])}: it must lie in [0, {num_classes}).")
    local_N = class_ids.to(store.weight_RD.device) - store.classes.start
    is_here_N = (local_N >= 0) & (local_N < len(store.classes))
    rows = rows_of_classes(local_N, store.weight_RD, store.num_subcentres)
    centres_NMD = store.weight_RD[rows].to(store.work_dtype).unflatten(0, (-1, store.num_subcentres))
    # Exactly one rank owns a class, so the sum over ranks, zeros elsewhere, is its centre.
    centres_NMD = sum_over_ranks_(centres_NMD * is_here_N[:, None, None], group)
    return centres_NMD[:, 0] if store.num_subcentres == 1 else centres_NMD


@torch.no_grad()
def nearest_to(
    store: Centres, class_id: int, k: int, num_classes: int, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Collective: PartialFC.nearest."""
    if not 1 <= k < num_classes:
        raise HeadError(f"nearest() was asked for k={k}: it must lie in [1, {num_classes - 1}].")
    own = centres_of(store, torch.tensor([class_id]), num_classes, group).reshape(-1, store.weight_RD.shape[1])
    cosines_K = store.cosines_to(unit_rows(own, store.work_dtype)[0])
    if store.classes.start <= class_id < store.classes.stop:
        cosines_K[class_id - store.classes.start] = -torch.inf
    top = cosines_K.topk(min(k, len(cosines_K)))
    # Every rank sends k of them; one that has fewer classes fills up with -inf.
    cosines_k = cosines_K.new_full((k,), -torch.inf)
    ids_k = torch.zeros(k, dtype=torch.int64, device=cosines_K.device)
    cosines_k[: len(top.values)], ids_k[: len(top.values)] = top.values, top.indices + store.classes.start
    cosines, ids = gather_blocks(cosines_k, group).flatten(), gather_blocks(ids_k, group).flatten()
    best = cosines.topk(k)
    return ids[best.indices], best.values


@torch.no_grad()
def cosines_with_all(
    store: Centres, embeddings_BD: Tensor, num_classes: int, group: dist.ProcessGroup | None
) -> Tensor:
    """Collective: PartialFC.logits before its scale. Returns (B, C) for the embeddings of this rank."""
    batch = _all_embeddings(store, embeddings_BD, group)
    counts = batch.counts_W.tolist()
    own_GK = torch.cat([cosines for _, cosines in _cosine_blocks(store, batch.embeddings_GD)], dim=1)
    # Ranks hold ranges of classes that differ by one at most; the shorter ones are filled up for the all-gather.
    longest = -(-num_classes // len(counts))
    own_GK = torch.nn.functional.pad(own_GK, (0, longest - own_GK.shape[1]))
    result = own_GK.new_empty((len(embeddings_BD), num_classes))
    for rank, images in enumerate(own_GK.split(batch.max_batch) if batch.max_batch else ()):
        # One rank's images at a time: gathering those of all ranks would take W times the memory of the result.
        blocks_WBK = gather_blocks(images, group)
        if rank == group_rank(group):
            for owner, block_BK in enumerate(blocks_WBK):
                part = even_part(num_classes, owner, len(counts))
                result[:, part.start : part.stop] = block_BK[: len(result), : part.stop - part.start]
    return result


@torch.no_grad()
def closest_classes(
    store: Centres, embeddings_BD: Tensor, k: int, num_classes: int, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Collective: PartialFC.predict."""
    if not 1 <= k <= num_classes:
        raise HeadError(f"predict() was asked for k={k}: it must lie in [1, {num_classes}].")
    batch = _all_embeddings(store, embeddings_BD, group)
    num_rows = len(batch.embeddings_GD)
    cosines_Gk = batch.embeddings_GD.new_full((num_rows, k), -torch.inf)
    ids_Gk = torch.zeros((num_rows, k), dtype=torch.int64, device=cosines_Gk.device)
    for first, cosines_GS in _cosine_blocks(store, batch.embeddings_GD):
        ids_S = torch.arange(first, first + cosines_GS.shape[1], device=cosines_GS.device).expand_as(cosines_GS)
        cosines_Gk, ids_Gk = _best(torch.cat([cosines_Gk, cosines_GS], 1), torch.cat([ids_Gk, ids_S], 1), k)
    cosines = gather_blocks(cosines_Gk, group).transpose(0, 1).flatten(1)
    ids = gather_blocks(ids_Gk, group).transpose(0, 1).flatten(1)
    start = group_rank(group) * batch.max_batch
    own = slice(start, start + len(embeddings_BD))
    best, best_ids = _best(cosines[own], ids[own], k)
    return best_ids, best


def _best(cosines: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    top = cosines.topk(k, dim=1)
    return top.values, ids.gather(1, top.indices)


def _all_embeddings(store: Centres, embeddings_BD: Tensor, group: dist.ProcessGroup | None) -> GlobalBatch:
    """Collective. Returns the unit embeddings of all ranks."""
    unit_BD = unit_rows(embeddings_BD.detach(), store.work_dtype)[0]
    labels_B = torch.zeros(len(unit_BD), dtype=torch.int64, device=unit_BD.device)
    return gather_batch(unit_BD, labels_B, step=0, max_batch=None, group=group)


def _cosine_blocks(store: Centres, unit_GD: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yields (first class, cosines) with the classes of this rank, a block at a time; the closest sub-centre counts."""
    with torch.autocast(unit_GD.device.type, enabled=False):
        for number, block in enumerate(store.weight_RD.split(_BLOCK_CLASSES * store.num_subcentres)):
            cosines = unit_GD @ unit_rows(block, store.work_dtype)[0].T
            cosines = cosines.unflatten(1, (-1, store.num_subcentres)).amax(2)
            yield store.classes.start + number * _BLOCK_CLASSES, cosines
