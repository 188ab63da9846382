"""Looking at the centres of all ranks: those of given classes, and the classes closest to one."""

import torch
import torch.distributed as dist
from torch import Tensor

from megaclass.distributed.collectives import gather_blocks, sum_over_ranks_
from megaclass.errors import HeadError
from megaclass.head.kernels.problem import rows_of_classes, unit_rows
from megaclass.head.state.centres import Centres


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
