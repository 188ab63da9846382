"""What a GPU does to rows beside the products: the update of the centres and the draw of classes, a launch each."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from megaclass.head.centres import Centres
from megaclass.head.counter_random import DRAW_NEGATIVES, ROUND_WEIGHTS, stream_keys
from megaclass.head.kernels import triton_rows
from megaclass.head.kernels.problem import CentreGradient
from megaclass.head.row_optimizers import RowAdagrad, RowAdamW, RowOptimizer, RowSGD

_DRAW_BLOCK = 4096


@dataclass(frozen=True, slots=True)
class Pulls:
    """The images' pulls on their own centres, sorted by row."""

    heads_R: Tensor
    """(S * M,) int32: 1 + place of the row's first pull, 0 where no image is of that class."""
    rows_P: Tensor
    order_P: Tensor
    images_PD: Tensor
    weights_P: Tensor


def sort_pulls(rows_P: Tensor, images_PD: Tensor, weights_P: Tensor, num_rows: int) -> Pulls:
    """rows_P: row among the num_rows that take part, -1 where the class is on another rank. Nothing waits."""
    sorted_P, order_P = rows_P.sort(stable=True)
    places_P = torch.arange(1, len(rows_P) + 1, dtype=torch.int32, device=rows_P.device)
    is_head_P = torch.ones_like(sorted_P, dtype=torch.bool)
    torch.ne(sorted_P[1:], sorted_P[:-1], out=is_head_P[1:])
    heads_R = torch.zeros(num_rows + 1, dtype=torch.int32, device=rows_P.device)
    # Whatever is not the first pull of a row lands in a scratch entry.
    heads_R.scatter_(0, torch.where(is_head_P & (sorted_P >= 0), sorted_P, num_rows), places_P)
    return Pulls(heads_R, sorted_P, order_P, images_PD, weights_P.float())


def can_update(optimizer: RowOptimizer) -> bool:
    """A user's own optimizer runs in plain PyTorch."""
    return type(optimizer) in (RowSGD, RowAdamW, RowAdagrad)


def update_(
    store: Centres, classes_S: Tensor | None, chunk: CentreGradient, pulls: Pulls, scalars: Tensor, step: int
) -> None:
    """Adds the pulls to the chunk's gradient and moves its rows; scalars: lr, 1 / loss scale, skip (float32)."""
    rows, num_subcentres, optimizer = store.rows(), store.num_subcentres, store.optimizer
    keys = [key for place in range(3) for key in stream_keys(ROUND_WEIGHTS, store.seed, step, place)]
    width, num_rows = rows["weight"].shape[1], len(chunk.grad_RD)
    block_d = triton.next_power_of_2(width)
    block_r = max(1, 2048 // block_d)
    assert chunk.grad_RD.stride(1) == 1, "rows of the gradient lie in memory number by number"
    triton_rows.update_rows[(-(-num_rows // block_r),)](
        rows["weight"],
        rows.get("momentum", rows.get("mean", rows.get("square"))),
        rows.get("square"),
        rows.get("count"),
        chunk.grad_RD,
        classes_S,
        chunk.won_R,
        pulls.heads_R,
        pulls.rows_P,
        pulls.order_P,
        pulls.images_PD,
        pulls.weights_P,
        scalars,
        chunk.start * num_subcentres,
        num_rows,
        len(store.classes),
        store.classes.start * num_subcentres,
        len(pulls.rows_P),
        *keys,
        float(optimizer.weight_decay),
        float(optimizer.clip_value or 0.0),
        float(optimizer.clip_row_norm or 0.0),
        float(getattr(optimizer, "momentum", getattr(optimizer, "beta1", 0.0))),
        float(getattr(optimizer, "beta2", 0.0)),
        float(getattr(optimizer, "eps", 0.0)),
        D=width,
        GRAD_STRIDE=chunk.grad_RD.stride(0),
        M=num_subcentres,
        KIND=_kind(optimizer),
        CLIPS_VALUE=optimizer.clip_value is not None,
        CLIPS_ROW=optimizer.clip_row_norm is not None,
        IS_SAMPLED=classes_S is not None,
        HAS_WON=chunk.won_R is not None,
        BLOCK_R=block_r,
        BLOCK_D=block_d,
        num_warps=4,
    )


def _kind(optimizer: RowOptimizer) -> str:
    if isinstance(optimizer, RowSGD):
        return ("nesterov" if optimizer.nesterov else "sgd") if optimizer.momentum else "plain"
    return "adamw" if isinstance(optimizer, RowAdamW) else "adagrad"


def draw(
    labels_G: Tensor,
    start: int,
    num_local: int,
    rate: float,
    seed: int,
    step: int,
    capacity: int,
    drawn_weight: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """As sampling.sample_classes with a capacity: classes_S, their weights (0 for padding), whether it overflowed."""
    device = labels_G.device
    local_G = labels_G - start
    is_positive = torch.zeros(num_local + 1, dtype=torch.uint8, device=device)
    # Labels of other ranks land in a scratch entry behind the last class.
    is_positive.index_fill_(0, torch.where((local_G >= 0) & (local_G < num_local), local_G, num_local), 1)
    classes_S = torch.full((capacity,), num_local, dtype=torch.int64, device=device)
    weights_S = torch.zeros(capacity, device=device)
    num_blocks = -(-num_local // _DRAW_BLOCK)
    counts = torch.empty(num_blocks, dtype=torch.int32, device=device)
    threshold = round(rate * 2**32) - 2**31
    keys = stream_keys(DRAW_NEGATIVES, seed, step)
    for counts_only in (True, False):
        triton_rows.draw_classes[(num_blocks,)](
            is_positive,
            counts,
            classes_S,
            weights_S,
            start,
            num_local,
            threshold,
            *keys,
            capacity,
            float(drawn_weight),
            COUNTS_ONLY=counts_only,
            BLOCK=_DRAW_BLOCK,
            num_warps=8,
        )
        if counts_only:
            counts = counts.cumsum(0, dtype=torch.int32)
    return classes_S, weights_S, counts[-1] > capacity
