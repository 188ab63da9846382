"""The data of a step of a head: what it works on, what it draws, and what its forwards leave for the update.

A step is three calls: forward, backward, update. plain_step.py writes them in PyTorch operations for any device; gpu/step.py
replaces parts of them by Triton programs.

State that outlives a step is in StepContext: the centres and their optimizer state (`store`, written by the update alone), the
margin's running values (`margin_state`, likewise), and the first fault (`faults`, written by forward, read by the update as a
mask and by the host when it is cheap to look).
"""

from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from megaclass.errors import HeadError
from megaclass.head.centres import Centres
from megaclass.head.faults import FaultWatch
from megaclass.head.problem import Problem
from megaclass.head.settings import HeadSettings
from megaclass_launch.ranks.collectives import group_rank, group_size

# ---- what a step works on ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepContext:
    """Everything that stays the same from step to step: settings, this rank's state, and the ranks."""

    settings: HeadSettings
    store: Centres
    margin_state: dict[str, Tensor]
    group: dist.ProcessGroup | None
    faults: FaultWatch
    class_counts_C: Tensor | None = None
    """Images of every class in the training data, float32."""

    @property
    def rank(self) -> int:
        return group_rank(self.group)

    @property
    def device(self) -> torch.device:
        return self.store.weight_RD.device

    @property
    def gradient_factor(self) -> int:
        """Factor of the embeddings' gradient.

        DDP divides the summed gradient by W, but the loss is a mean over the global batch, not over the ranks' means.
        """
        return group_size(self.group) if self.settings.gradient_scale == "mean" else 1

    def product_dtype(self, embeddings_BD: Tensor) -> torch.dtype:
        """Returns half precision if a GPU's embeddings or autocast ask for it; a CPU multiplies in the work dtype."""
        if self.device.type == "cpu" or self.store.work_dtype == torch.float64:
            return self.store.work_dtype
        if torch.is_autocast_enabled(self.device.type):
            return torch.get_autocast_dtype(self.device.type)
        return embeddings_BD.dtype


@dataclass(frozen=True, slots=True)
class ForBackward:
    """Options of a forward pass that will be followed by a backward pass; a forward for evaluation has none."""

    wants_grad_images: bool
    """The embeddings need a gradient. False for a frozen backbone: then the product that forms it is left out."""
    stored_bytes: int
    """Most bytes of exponentials kept until the update; the rest is computed again."""


@dataclass(frozen=True, slots=True)
class Move:
    """How an update moves the rows: the arguments of head.step(), and the masks on the device that may stop it.

    Tensors stay on the device; the host does not read them.
    """

    lr: float | Tensor
    loss_scale: float | Tensor
    step: int
    first_fault: Tensor | None
    """Nothing moves if its first number is not 0. None if the host has looked before, as on a CPU."""
    skip: Tensor | None
    """A flag on the device: nothing moves. None if the host has decided."""
    squares: list[Tensor] | None
    """For a measured step: receives the sum of squares of each chunk's gradient, 0-d float64."""

    def is_skipped(self) -> Tensor | None:
        """Returns both masks as one flag on the device; None if the host has decided."""
        if self.first_fault is None:
            return None
        has_fault = self.first_fault[0] != 0
        return has_fault if self.skip is None else has_fault | self.skip.bool()


# ---- the draw of a step -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DrawnClasses:
    """Classes of this rank that take part in a step; all fields None: all classes."""

    classes_S: Tensor | None = None
    """Local ids, ascending. On a GPU the list has a fixed length, and ids of K and above at its end are padding."""
    class_weight_S: Tensor | None = None
    """Factor of each class's exponential: the sampling correction, and 0 for padding; None: 1 for all."""
    num_drawn: Tensor | None = None
    """0-d int32: how many of classes_S are not padding, if weights do not mark it."""
    overflowed: Tensor | None = None
    """0-d float64: 1 if more classes were drawn than the list holds."""


@dataclass(slots=True)
class StepDraw:
    """Classes that take part and numbers of images, fixed for all forwards of a step.

    Made when the step opens; each forward then appends to counts_before.
    """

    drawn: DrawnClasses
    num_images: Tensor
    """0-d float64: images of all ranks in the whole step."""
    counts_W: Tensor
    """Images of each rank in the whole step."""
    counts_before: list[Tensor] = field(default_factory=list)
    """Images of each rank in every forward of the step so far."""

    @property
    def overflowed(self) -> Tensor:
        return torch.zeros_like(self.num_images) if self.drawn.overflowed is None else self.drawn.overflowed

    def places_W(self) -> Tensor:
        """Returns the place in the step's global batch of each rank's next image."""
        return torch.stack([self.counts_W.cumsum(0) - self.counts_W, *self.counts_before]).sum(0)

    def at_this_part(self) -> "StepDraw":
        """Returns a copy that later forwards do not change."""
        return replace(self, counts_before=list(self.counts_before))


# ---- what a forward leaves for backward and the update -----------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class GatheredImages:
    """The global batch as every rank holds it after the all-gather, matched with the classes of this rank.

    N = G * P pairs of an image and one of its labels, image by image; N = G with one label per image.
    """

    unit_GD: Tensor
    """Normalised embeddings in the work dtype; padding rows are zero."""
    operand_GD: Tensor
    """unit_GD in the dtype of the products; the GPU kernel fills it up with zeros to whole tiles."""
    norms_G: Tensor
    """Length of each embedding before normalisation."""
    is_image_G: Tensor
    """False for padding."""
    labels_N: Tensor
    """Classes; below 0 for padding."""
    is_label_N: Tensor
    """False for padding, of images and of labels."""
    cosines_N: Tensor
    """float64: cosine with the own class; zero if another rank owns it."""
    own_rows_N: Tensor
    """Row of each label's class (its closest sub-centre) on this rank, -1 if another rank owns it."""
    own_unit_ND: Tensor
    """That row, normalised; zero if another rank owns it."""
    local_ids_N: Tensor
    """Local id of each label's class, -1 if another rank owns it."""
    weights_GP: Tensor | None = None
    """Weight of each label, float64; None: one label per image, all of weight 1."""
    counts_W: Tensor
    """Images each rank brought."""
    max_batch: int

    def of_rank(self, rank: int) -> slice:
        """Returns the rows of one rank's images, padding included."""
        return slice(rank * self.max_batch, (rank + 1) * self.max_batch)

    def by_rank(self, rows_GD: Tensor) -> Tensor:
        """Returns the rows as (W, max_batch, D). Both sizes are given: without an image on any rank neither follows."""
        blocks_WBD: Tensor = rows_GD.unflatten(0, (len(self.counts_W), self.max_batch))
        return blocks_WBD


@dataclass(frozen=True, slots=True)
class LossesAndSlopes:
    """The losses of the images and their derivatives, float64."""

    slope_mass_G: Tensor
    """d loss / d sum over the negatives, 1 / softmax denominator; 0 for padding and for images without negatives."""
    slope_cosine_N: Tensor
    """d loss / d cosine with each label's class; 0 for padding."""
    slope_norm_G: Tensor | None
    """d loss / d length of the embedding of each image; None: 0 for all."""
    mean_loss: Tensor
    """Sum over the images of this forward, divided by the images of the step; in the work dtype, NaN after a fault."""
    slope_logits_G: Tensor | None = None
    """d loss / d sum of the negatives' logits, with label smoothing."""
    bias_gradient: Tensor | None = None
    """0-d: sum over the images of d loss / d bias, for a margin that learns one."""


@dataclass(slots=True)
class LossPart:
    """One forward: what backward and the update need of it. Vectors are float64.

    The coefficients are written by backward, which alone knows the upstream gradient, and read by the update.
    """

    images: GatheredImages
    problem: Problem
    cosines_N: Tensor
    """Cosine with each label's class, over all ranks; 0 for padding."""
    losses: LossesAndSlopes
    statistics: Tensor | None
    """Sums from which the margin's running values are updated."""
    negative_coefficients_G: Tensor = field(init=False)
    """(2, G) with label smoothing."""
    target_coefficients_N: Tensor = field(init=False)


class OpenStep:
    """The open step of a head: what its forwards and backwards leave for the update.

                 begin_step()                  backward                  step(), abandon_step(): a new object
        closed --------------> opened is set -----------> parts ------------------------------------------> closed
           |                                                 ^
           +-------------------------------------------------+
                 backward of a step that has one forward

    One thread at a time uses it: backward may run on a thread of autograd, but the caller of backward() waits for that.
    """

    def __init__(self) -> None:
        self.opened: StepDraw | None = None
        """The draw for all forwards of a step that begin_step() has opened; else None, and each forward makes its own."""
        self._parts: list[tuple[StepDraw, LossPart]] = []
        self.upstream: Tensor
        """Gradient of the loss that reached the last backward: 1, times what the loss was multiplied by."""

    @property
    def is_open(self) -> bool:
        return self.opened is not None or bool(self._parts)

    def check_closed(self) -> None:
        """Refuses to open a step inside another one."""
        if self.is_open:
            raise HeadError("begin_step() was called inside an open step: call step() first.")

    def add(self, draw: StepDraw, part: LossPart, upstream: Tensor) -> None:
        """Called by backward: the part takes part in the next step()."""
        # Parts of one update share their drawn classes and their mean, and therefore the draw.
        if self._parts and self._parts[0][0] is not draw:
            raise HeadError(
                "backward() came a second time before step(): for gradient accumulation hand all labels of the step to "
                "begin_step() first. Lightning's accumulate_grad_batches and Accelerate's accumulate() cannot do that: set "
                "them to 1, load the whole batch at once, and split it in the training step as the page "
                '"Use it in your own loop" (docs/own-loop.md) shows.'
            )
        self._parts.append((draw, part))
        self.upstream = upstream

    def for_update(self) -> tuple[StepDraw, list[LossPart]]:
        """Returns the draw of the step and its parts, of which there is at least one."""
        if not self._parts:
            raise HeadError("step() was called without a forward and a backward before it.")
        return self._parts[0][0], [part for _, part in self._parts]


# ---- statistics -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HeadStats:
    """Statistics of a step, on the device; the host may read them later. 0-d float64, the same on every rank."""

    target_cosine: Tensor
    """Mean over the images of the cosine with the (closest) centre of their own class: before the update, no margin."""
    gradient_norm: Tensor
    """Length of the centres' gradient over all ranks: loss scale taken out, before clipping and decay."""
    sampled_share: Tensor
    """Share of the classes that took part."""
