"""Host side of the programs over rows: the update of the centres and the draw of classes, one launch each."""

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from megaclass.head.centres import Centres
from megaclass.head.counter_random import stream_state
from megaclass.head.gpu import image_programs, row_programs
from megaclass.head.gpu.tiling import next_power_of_2
from megaclass.head.problem import CentreGradient
from megaclass.head.row_optimizers import RowAdagrad, RowAdamW, RowOptimizer, RowSGD
from megaclass.head.sampling import draw_threshold
from megaclass.head.step import DrawnClasses
from megaclass.keyed_random import Stream
from megaclass.triton_launch import launch

_DRAW_BLOCK = 4096
_LINK_BLOCK = 256


class StepNumbers:
    """The step's number and the factors of its update, on the device, where the programs read them.

    Learning rate, loss scale and skip flag may be tensors, which the host does not read. The keys of random numbers follow from
    the step's number and a prefix that the seed determines; the programs derive them.

    The host remembers what it has written: a number that stays the same costs no launch.
    """

    def __init__(self, device: torch.device) -> None:
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.factors = torch.zeros(3, device=device)
        """Learning rate, loss scale, and a flag that leaves all rows as they are; float32."""
        self._places = self.factors.split(1)
        self._known_step = 0
        # None if a tensor was given, whose value the host does not know.
        self._known_factors: list[float | None] = [0.0, 0.0, 0.0]

    def set_step(self, step: int) -> None:
        """Writes the number of the step that is computed next. A launch if it differs from the last one."""
        if step != self._known_step:
            self.step.fill_(step)
            self._known_step = step

    def set_factors(self, lr: float | Tensor, loss_scale: float | Tensor, skip: Tensor | None) -> None:
        """Writes the factors of the next update. A launch for each tensor and for each number that differs from the last."""
        given = (lr, loss_scale, 0.0 if skip is None else skip)
        for index, (place, value) in enumerate(zip(self._places, given, strict=True)):
            if isinstance(value, Tensor):
                place.copy_(value)
                self._known_factors[index] = None
            elif float(value) != self._known_factors[index]:
                place.fill_(float(value))
                self._known_factors[index] = float(value)


@dataclass(frozen=True, slots=True)
class Pulls:
    """The images' pulls on their own centres, as a list of images for each row."""

    heads_R: Tensor
    """(S * M,) int32: 1 + the first image of the row's class, 0 if there is none."""
    links_P: Tensor
    images_PD: Tensor
    weights_P: Tensor


def link_pulls(
    slots_P: Tensor, rows_P: Tensor, images_PD: Tensor, weights_P: Tensor, num_rows: int, num_subcentres: int
) -> Pulls:
    """Lists the images of each row by one sort of their keys; G * log(G) operations for G images.

    slots_P: place of each image's class among those that take part, -1 for none here. rows_P: its row.
    """
    num_pulls, device = slots_P.shape[0], slots_P.device
    heads_R = torch.zeros(num_rows, dtype=torch.int32, device=device)
    links_P = torch.empty(num_pulls, dtype=torch.int32, device=device)
    if num_pulls:
        num_programs = -(-num_pulls // _LINK_BLOCK)
        keys_P = torch.empty(num_pulls, dtype=torch.int64, device=device)
        launch(
            image_programs.key_pulls,
            num_programs,
            slots_P,
            rows_P,
            keys_P,
            num_pulls,
            M=num_subcentres,
            BLOCK=_LINK_BLOCK,
        )
        # Each key contains its image's number, so no two are equal and the order is the same in every run.
        keys_P = keys_P.sort().values
        launch(image_programs.link_pulls, num_programs, keys_P, heads_R, links_P, num_pulls, BLOCK=_LINK_BLOCK)
    return Pulls(heads_R, links_P, images_PD, weights_P)


def can_update(optimizer: RowOptimizer) -> bool:
    """Returns True for the built-in optimizers; a user's own optimizer runs in plain PyTorch."""
    return type(optimizer) in (RowSGD, RowAdamW, RowAdagrad)


def update_(
    store: Centres,
    classes_S: Tensor | None,
    chunk: CentreGradient,
    pulls: Pulls,
    *,
    numbers: StepNumbers,
    first_fault: Tensor,
    squares: list[Tensor] | None,
) -> None:
    """Adds the pulls to the chunk's gradient and moves its rows: one launch, every row read and written once.

    squares: as in Move. If it is None another program runs, which does not form them.
    """
    rows, optimizer = store.rows(), store.optimizer
    width, num_rows = rows["weight"].shape[1], chunk.grad_RD.shape[0]
    beta1 = float(getattr(optimizer, "momentum", getattr(optimizer, "beta1", 0.0)))
    beta2 = float(getattr(optimizer, "beta2", 0.0))
    block_d = next_power_of_2(width)
    # Small programs; larger ones are equally fast (docs/decisions/head-gpu.md).
    block_r = max(1, 512 // block_d)
    assert chunk.grad_RD.stride(1) == 1, "the numbers of a row are contiguous"
    num_programs = -(-num_rows // block_r)
    squares_P = None if squares is None else torch.zeros(num_programs, device=chunk.grad_RD.device)
    launch(
        row_programs.update_rows,
        num_programs,
        rows["weight"],
        rows.get("momentum", rows.get("mean", rows.get("square"))),
        rows.get("square"),
        rows.get("count"),
        chunk.grad_RD,
        classes_S,
        chunk.won_R,
        pulls.heads_R,
        pulls.links_P,
        pulls.images_PD,
        pulls.weights_P,
        squares_P,
        first_fault,
        numbers.step,
        numbers.factors,
        _key_prefix(Stream.ROUND_WEIGHTS, store.seed),
        chunk.start * store.num_subcentres,
        num_rows,
        NUM_LOCAL=len(store.classes),
        FIRST_ID=store.classes.start * store.num_subcentres,
        D=width,
        GRAD_STRIDE=chunk.grad_RD.stride(0),
        M=store.num_subcentres,
        IS_COSINE=store.is_cosine,
        KIND=_kind(optimizer),
        WEIGHT_DECAY=float(optimizer.weight_decay),
        CLIP_VALUE=optimizer.clip_value,
        CLIP_ROW_NORM=optimizer.clip_row_norm,
        BETA_1=beta1,
        BETA_2=beta2,
        LOG2_BETA_1=math.log2(max(beta1, 1e-30)),
        LOG2_BETA_2=math.log2(max(beta2, 1e-30)),
        EPS=float(getattr(optimizer, "eps", 0.0)),
        BLOCK_R=block_r,
        BLOCK_D=block_d,
        num_warps=2,
    )
    if squares is not None and squares_P is not None:
        squares.append(squares_P.sum(dtype=torch.float64))


def _kind(optimizer: RowOptimizer) -> str:
    if isinstance(optimizer, RowSGD):
        return ("nesterov" if optimizer.nesterov else "sgd") if optimizer.momentum else "plain"
    return "adamw" if isinstance(optimizer, RowAdamW) else "adagrad"


@cache
def _key_prefix(purpose: Stream, seed: int) -> int:
    """Returns the part of a program's random key that stays the same over the steps, as a signed number of 64 bits."""
    state = stream_state(purpose, seed)
    return state - (1 << 64) if state >= 1 << 63 else state


def draw(
    labels_G: Tensor,
    local_classes: range,
    rate: float | Tensor,
    seed: int,
    step: Tensor,
    capacity: int,
    drawn_weight: float,
) -> DrawnClasses:
    """sampling.sample_classes with a capacity. Reads num_local bytes twice in five launches; nothing waits.

    step: (1,) int64, on the device, as a rate that is a tensor.
    """
    device_threshold = draw_threshold(rate) if isinstance(rate, Tensor) else None
    threshold = 0 if isinstance(rate, Tensor) else round(rate * 2**32) - 2**31
    device, start, num_local = labels_G.device, local_classes.start, len(local_classes)
    is_positive = torch.zeros(num_local, dtype=torch.uint8, device=device)
    if labels_G.shape[0]:
        launch(
            row_programs.mark_positives,
            -(-labels_G.shape[0] // 256),
            labels_G,
            is_positive,
            start,
            num_local,
            labels_G.shape[0],
            BLOCK=256,
        )
    classes_S = torch.empty(capacity, dtype=torch.int64, device=device)
    weights_S = torch.empty(capacity, device=device) if drawn_weight != 1 else None
    overflowed = torch.empty((), dtype=torch.float64, device=device)
    num_blocks = -(-num_local // _DRAW_BLOCK)
    counts = torch.empty(num_blocks, dtype=torch.int32, device=device)
    for counts_only in (True, False):
        launch(
            row_programs.draw_classes,
            num_blocks,
            is_positive,
            counts,
            classes_S,
            weights_S,
            overflowed,
            step,
            _key_prefix(Stream.DRAW_NEGATIVES, seed),
            start,
            num_local,
            threshold,
            device_threshold,
            capacity,
            float(drawn_weight),
            COUNTS_ONLY=counts_only,
            BLOCK=_DRAW_BLOCK,
            num_warps=8,
        )
        if counts_only:
            counts = counts.cumsum(0, dtype=torch.int32)
    return DrawnClasses(classes_S, weights_S, counts[-1], overflowed)
