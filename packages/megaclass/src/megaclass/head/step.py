"""The parts that the two steps of a head share: data of a step, and functions over it.

A step is three calls: forward, backward, update. cpu/step.py writes them in PyTorch operations for any device, gpu/step.py in
Triton programs; each is a straight line from top to bottom, and calls the functions below for what both do.

Collectives of a step, in order (sizes in partial_fc.py):

    forward     all-gather of the batch: embeddings, labels, sizes, and a control word per rank
                all-reduce of softmax masses and target cosines (sum_masses)
    backward    reduce-scatter of the gradient of the unit embeddings
    update      none; an all-reduce of 16 bytes if the step is measured (head_stats)

None of them depends on values that differ between ranks, and a world of one takes the same path.

State that outlives a step is in StepContext: the centres and their optimizer state (`store`, written by the update alone), the
margin's running values (`margin_state`, likewise), and the first fault (`faults`, written by forward, read by the update as a
mask and by the host when it is cheap to look).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from megaclass.errors import HeadError
from megaclass.head.centres import Centres
from megaclass.head.counter_random import normals_from_bits, random_bits, stream_keys
from megaclass.head.faults import FaultWatch
from megaclass.head.margins import CurricularFace, Margin, Targets
from megaclass.head.problem import CentreGradient, Kernel, Problem
from megaclass.head.settings import HeadSettings
from megaclass.keyed_random import Stream
from megaclass_launch.ranks.collectives import group_rank, group_size, sum_over_ranks_

# ---- what a step works on ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StepContext:
    """Everything that stays the same from step to step: settings, this rank's state, and the ranks."""

    settings: HeadSettings
    store: Centres
    margin_state: dict[str, Tensor]
    group: dist.ProcessGroup | None
    faults: FaultWatch

    @property
    def margin(self) -> Margin:
        return self.settings.margin

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
    counts_before: list[Tensor]
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


def new_draw(drawn: DrawnClasses, counts_W: Tensor) -> StepDraw:
    """Sends nothing: every rank knows all labels and draws its own classes."""
    return StepDraw(drawn, counts_W.sum(dtype=torch.float64), counts_W, [])


# ---- what a forward leaves for backward and the update -----------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class GatheredImages:
    """The global batch as every rank holds it after the all-gather, matched with the classes of this rank."""

    unit_GD: Tensor
    """Normalised embeddings in the work dtype; padding rows are zero."""
    operand_GD: Tensor
    """unit_GD in the dtype of the products; the GPU kernel fills it up with zeros to whole tiles."""
    norms_G: Tensor
    """Length of each embedding before normalisation."""
    cosines_G: Tensor
    """float64: cosine with the own class; zero if another rank owns it."""
    labels_G: Tensor
    is_image_G: Tensor
    """False for padding."""
    own_rows_G: Tensor
    """Row of each image's class (its closest sub-centre) on this rank, -1 if another rank owns it."""
    own_unit_GD: Tensor
    """That row, normalised; zero if another rank owns it."""
    local_ids_G: Tensor
    """Local id of each image's class, -1 if another rank owns it."""
    counts_W: Tensor
    """Images each rank brought."""
    max_batch: int

    def of_rank(self, rank: int) -> slice:
        """Returns the rows of one rank's images, padding included."""
        return slice(rank * self.max_batch, (rank + 1) * self.max_batch)


@dataclass(frozen=True, slots=True)
class LossesAndSlopes:
    """The losses of the images and their derivatives; G-vectors are float64."""

    log_total_G: Tensor
    """Logarithm of the softmax denominator over all ranks; infinite for padding and for images without negatives."""
    slope_cosine_G: Tensor
    """d loss / d target cosine of each image; 0 for padding."""
    slope_norm_G: Tensor | None
    """d loss / d length of the embedding of each image; None: 0 for all."""
    mean_loss: Tensor
    """Sum over the images of this forward, divided by the images of the step; in the work dtype, NaN after a fault."""


@dataclass(slots=True)
class LossPart:
    """One forward: what backward and the update need of it. G-vectors are float64.

    The coefficients are written by backward, which alone knows the upstream gradient, and read by the update.
    """

    images: GatheredImages
    problem: Problem
    cosines_G: Tensor
    """Cosine with the own class, over all ranks; 0 for padding."""
    losses: LossesAndSlopes
    statistics: Tensor | None
    """Sums from which the margin's running values are updated."""
    negative_coefficients_G: Tensor = field(init=False)
    target_coefficients_G: Tensor = field(init=False)


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


# ---- forward ----------------------------------------------------------------------------------------------------


def new_problem(
    context: StepContext, draw: StepDraw, images: GatheredImages, slots_G: Tensor, for_backward: ForBackward | None
) -> Problem:
    """Returns the problem that the kernel solves. slots_G: place of each image's class among those that take part."""
    drawn, settings = draw.drawn, context.settings
    return Problem(
        unit_GD=images.operand_GD,
        weight_RD=context.store.weight_RD,
        classes_S=drawn.classes_S,
        target_slot_G=slots_G,
        class_weight_S=drawn.class_weight_S,
        num_drawn=drawn.num_drawn,
        num_subcentres=context.store.num_subcentres,
        scale=settings.margin.scale,
        logit_bound=settings.margin.logit_bound(),
        filter_above=settings.filter_above,
        wants_grad_images=for_backward is not None and for_backward.wants_grad_images,
        stored_bytes=0 if for_backward is None else for_backward.stored_bytes,
    )


def margin_targets(context: StepContext, draw: StepDraw, images: GatheredImages, step: int) -> Targets:
    """Returns the images as the margin sees them, with their cosines as this rank knows them."""
    # Bound now: the draw has advanced to the next part by the time a kernel computes logits again for backward.
    draw_now = draw.at_this_part()

    def normals() -> Tensor:
        # Keyed by the image's place in the step's global batch: padding and parts do not shift the numbers.
        places_W = draw_now.places_W()
        places_G = (places_W[:, None] + torch.arange(images.max_batch, device=context.device)).flatten()
        keys = stream_keys(Stream.MARGIN_NOISE, context.settings.seed, step)
        return normals_from_bits(random_bits(keys, places_G), torch.float64)

    return Targets(
        cosines_G=images.cosines_G,
        norms_G=images.norms_G.double(),
        is_image_G=images.is_image_G,
        state=dict(context.margin_state),
        normals=normals,
    )


def sum_masses(
    context: StepContext, problem: Problem, targets: Targets, kernel: Kernel, overflowed: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Collective: all-reduces 2 * G + 1 float64; G, then G + 1, if the margin's negatives depend on the target.

    targets: with cosines_G as this rank knows them: zero if another rank owns the class.
    Returns, over all ranks, the images' softmax masses and target cosines, and the number of ranks that overflowed.
    """
    margin, num_rows, cosines_G = context.margin, len(targets.cosines_G), targets.cosines_G
    if margin.touches_only_target:
        # Exactly one rank owns a label, so summing its cosine over ranks, zeros elsewhere, yields it.
        # It travels with the masses to save a round trip.
        sums = sum_over_ranks_(torch.cat([kernel.mass(problem), cosines_G, overflowed[None]]), context.group)
        return sums[:num_rows], sums[num_rows:-1], sums[-1]
    # Here the logits of the negatives depend on the target's cosine: it must be known on all ranks before the masses.
    # The clone keeps images.cosines_G as this rank knows it: the reduction works in place.
    cosines_G = sum_over_ranks_(cosines_G.clone(), context.group)
    known = targets.with_cosines(cosines_G)
    # Kernels that know the rule of CurricularFace use `curriculum`; all others call the function and differentiate it.
    problem.negative_logits = lambda cosines_GS: margin.negative_logits(cosines_GS, known)
    problem.curriculum = margin.curriculum(known) if isinstance(margin, CurricularFace) else None
    sums = sum_over_ranks_(torch.cat([kernel.mass(problem), overflowed[None]]), context.group)
    return sums[:num_rows], cosines_G, sums[-1]


def finish_losses(
    context: StepContext, draw: StepDraw, targets: Targets, mass_G: Tensor, cosines_G: Tensor
) -> LossesAndSlopes:
    """Computes the losses from the softmax mass of the negatives and the target cosine; slopes by autograd."""
    margin, is_image_G = context.margin, targets.is_image_G
    with torch.enable_grad():
        # Autograd runs over G numbers only, so a margin needs no derivative of its own; the G x S matrix is the kernel's.
        leaf = targets.with_cosines(cosines_G, requires_grad=True)
        logits_G = margin.target_logits(leaf)
        penalty_G = margin.penalty(leaf)
        # In the logarithm: the mass of the negatives may be 0, and exp of a large target logit would overflow.
        log_total_G = torch.logaddexp(mass_G.log(), logits_G)
        losses_G = log_total_G - logits_G
        if penalty_G is not None:
            losses_G = losses_G + penalty_G
        total = torch.where(is_image_G, losses_G, 0).sum()
        slopes = torch.autograd.grad(total, (leaf.cosines_G, leaf.norms_G), allow_unused=True)
    # A margin may return anything for padding, also NaN; and an image without negatives has none to weigh.
    has_negatives_G = is_image_G & (mass_G > 0)
    # A step in which no rank brings an image has loss 0, not 0 / 0.
    mean = total.detach() / draw.num_images.clamp_min(1)
    return LossesAndSlopes(
        log_total_G=torch.where(has_negatives_G, log_total_G.detach(), torch.inf),
        slope_cosine_G=torch.zeros_like(mass_G) if slopes[0] is None else torch.where(is_image_G, slopes[0], 0),
        slope_norm_G=None if slopes[1] is None else torch.where(is_image_G, slopes[1], 0),
        mean_loss=torch.where(context.faults.first_fault[0] != 0, torch.nan, mean).to(context.store.work_dtype),
    )


def new_part(
    context: StepContext,
    images: GatheredImages,
    problem: Problem,
    targets: Targets,
    cosines_G: Tensor,
    losses: LossesAndSlopes,
) -> LossPart:
    """Returns what backward and the update need of a forward."""
    statistics = context.margin.statistics(targets.with_cosines(cosines_G))
    return LossPart(images, problem, cosines_G, losses, statistics)


# ---- update -----------------------------------------------------------------------------------------------------


def centre_gradient(kernel: Kernel, parts: list[LossPart]) -> Iterator[CentreGradient]:
    """Forms the gradient of the unit centres from the negatives, chunk by chunk: the whole of it never exists."""
    return kernel.grad_centres([part.problem for part in parts], [part.negative_coefficients_G for part in parts])


def move_rows(store: Centres, draw: StepDraw, parts: list[LossPart], kernel: Kernel, move: Move) -> None:
    """Moves the rows that took part, with any optimizer, in PyTorch operations."""
    is_skipped = move.is_skipped()
    # A tensor is never compared with 1: the host would wait for it.
    is_scaled = isinstance(move.loss_scale, Tensor) or move.loss_scale != 1
    for chunk in centre_gradient(kernel, parts):
        won_R = _add_targets_(chunk, parts, store.num_subcentres)
        mask_R = _mask(store, draw, chunk, won_R, is_skipped)
        grad_RD = chunk.grad_RD / move.loss_scale if is_scaled else chunk.grad_RD
        rows = parts[0].problem.rows_of(chunk.start, chunk.stop)
        store.update_(rows, grad_RD, mask_R, move.lr, move.step, move.squares)


def _add_targets_(chunk: CentreGradient, parts: list[LossPart], num_subcentres: int) -> Tensor | None:
    """Adds the images' pull on their own centres; returns which rows took part, None if all did."""
    won_R = chunk.won_R
    for part in parts:
        slots_G, unit_GD = part.problem.target_slot_G, part.images.unit_GD
        is_here_G = (slots_G >= chunk.start) & (slots_G < chunk.stop)
        places_G = (slots_G - chunk.start) * num_subcentres + part.images.own_rows_G % num_subcentres
        pulls_GD = unit_GD * part.target_coefficients_G.to(unit_GD.dtype)[:, None]
        # Images whose class is elsewhere add zero to the first row: selecting those that are here would be a wait.
        places_G = torch.where(is_here_G, places_G, 0)
        chunk.grad_RD.index_add_(0, places_G, pulls_GD * is_here_G[:, None])
        if won_R is not None:
            hits_R = torch.zeros(len(won_R), dtype=torch.int32, device=won_R.device)
            won_R = won_R | (hits_R.index_add_(0, places_G, is_here_G.to(torch.int32)) > 0)
    return won_R


def _mask(
    store: Centres, draw: StepDraw, chunk: CentreGradient, won_R: Tensor | None, is_skipped: Tensor | None
) -> Tensor | None:
    """Returns the rows that move: no padding of a fixed-length sample, no losing sub-centre, nothing when skipped."""
    if is_skipped is None:
        return won_R
    # A 0-d mask if all rows share one fate; the last line gives it a length.
    mask_R = ~is_skipped if won_R is None else won_R & ~is_skipped
    if draw.drawn.classes_S is not None:
        is_real_S = draw.drawn.classes_S[chunk.start : chunk.stop] < len(store.classes)
        mask_R = mask_R & is_real_S.repeat_interleave(store.num_subcentres)
    return mask_R.expand(len(chunk.grad_RD))


def move_margin_state(context: StepContext, parts: list[LossPart], move: Move) -> None:
    """Updates the margin's running values, if it has any."""
    statistics = [part.statistics for part in parts if part.statistics is not None]
    if not statistics:
        return
    is_skipped, state = move.is_skipped(), context.margin_state
    for name, new in context.margin.next_state(state, torch.stack(statistics).sum(0)).items():
        state[name].copy_(new if is_skipped is None else torch.where(is_skipped, state[name], new))


def drop_stored(parts: list[LossPart]) -> None:
    """Frees the exponentials, which are large: the user may keep the loss, and with it the parts, for a while."""
    for part in parts:
        part.problem.stored = None


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


def head_stats(context: StepContext, draw: StepDraw, parts: Sequence[LossPart], squares: Sequence[Tensor]) -> HeadStats:
    """Collective: an all-reduce of 2 float64. squares: sums of squares of this rank's gradient, chunk by chunk."""
    num_local, classes_S = len(context.store.classes), draw.drawn.classes_S
    num_sampled = torch.full_like(draw.num_images, num_local)
    if classes_S is not None:
        # Entries of num_local and above are the padding of a list of fixed length.
        num_sampled = (classes_S < num_local).sum()
    cosines = torch.stack([torch.where(part.images.is_image_G, part.cosines_G, 0).sum() for part in parts]).sum()
    # The zero is for a rank without chunks. Cosines are the same on all ranks already and are not summed over them.
    own = torch.stack([torch.stack([torch.zeros_like(cosines), *squares]).sum(), num_sampled.double()])
    square, num_sampled = sum_over_ranks_(own, context.group)
    return HeadStats(
        target_cosine=cosines / draw.num_images.clamp_min(1),
        gradient_norm=square.sqrt(),
        sampled_share=num_sampled / context.settings.num_classes,
    )
