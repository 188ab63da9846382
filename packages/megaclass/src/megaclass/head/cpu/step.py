"""The step in PyTorch operations, on any device.

On a CPU the host may look at values: the list of drawn classes has its exact length, a fault raises at once, and a skipped
step does no work. On a GPU the same operations run without a wait, if the GPU's own step cannot be used: the list has a
fixed, padded length, and faults and skips are masks.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from megaclass.head.centres import Centres
from megaclass.head.faults import find_fault, overflow_fault
from megaclass.head.gather_batch import GlobalBatch, gather_batch
from megaclass.head.problem import Kernel, rows_of_classes, unit_rows
from megaclass.head.sampling import rate_of_negatives, sample_capacity, sample_classes
from megaclass.head.step import (
    DrawnClasses,
    ForBackward,
    GatheredImages,
    HeadStats,
    LossPart,
    Move,
    StepContext,
    StepDraw,
    drop_stored,
    finish_losses,
    head_stats,
    margin_targets,
    move_margin_state,
    move_rows,
    new_draw,
    new_part,
    new_problem,
    sum_masses,
)
from megaclass_launch.ranks.collectives import scatter_sum


class PlainStep:
    """A step in PyTorch operations around a plain kernel. Collectives: step.py. gpu/step.py has the same methods."""

    def __init__(self, context: StepContext, kernel: Kernel) -> None:
        self.context, self.kernel, self.faults = context, kernel, context.faults
        self._never_waits = context.device.type == "cuda"

    def draw(self, labels_G: Tensor, counts_W: Tensor, step: int) -> StepDraw:
        """Decides which classes take part. labels_G: below 0 for padding. Sends nothing."""
        settings, own = self.context.settings, self.context.store.classes
        rate = settings.rates.at(step)
        if rate == 1:
            return new_draw(DrawnClasses(), counts_W)
        # A GPU cannot tell the host how many were drawn without a wait: there the list has a fixed, padded length.
        capacity = sample_capacity(len(own), rate, len(labels_G)) if self._never_waits else None
        drawn_rate: float | Tensor = rate
        if settings.sample_positives:
            drawn_rate = rate_of_negatives(labels_G, settings.num_classes, rate)
            drawn_rate = drawn_rate if self._never_waits else float(drawn_rate)
        sample = sample_classes(labels_G, own.start, len(own), drawn_rate, settings.seed, step, capacity)
        weight_S, is_corrected = None, settings.correct_sampling
        if is_corrected or capacity is not None:
            # A positive takes part with certainty and is not corrected. Padding has weight 0: its exponentials do not count.
            drawn_weight = 1 / rate if is_corrected else 1.0
            weight_S = torch.full_like(sample.classes_S, drawn_weight, dtype=self.context.store.work_dtype)
            weight_S.masked_fill_(sample.is_positive_S, 1.0).masked_fill_(sample.classes_S >= len(own), 0.0)
        return new_draw(DrawnClasses(sample.classes_S, weight_S, None, sample.overflowed.double()), counts_W)

    def forward(
        self,
        embeddings_BD: Tensor,
        labels_B: Tensor,
        opened: StepDraw | None,
        *,
        step: int,
        product_dtype: torch.dtype,
        for_backward: ForBackward | None,
    ) -> tuple[StepDraw, LossPart]:
        """Collective. Gathers the global batch and computes its loss.

        opened: the draw of a step opened by begin_step(); None makes one for this batch.
        for_backward: None if no backward follows.
        Returns the step's draw, and what backward needs of this part; the mean loss is among it.
        """
        context, store = self.context, self.context.store
        word = store.overwrite_check.control_word(step)
        batch = gather_batch(
            embeddings_BD, labels_B, step=word, max_batch=context.settings.max_batch, group=context.group
        )
        # Lengths and unit vectors are formed in the work dtype: half precision would lose digits of the cosines.
        raw_GD = batch.embeddings_GD.to(store.work_dtype)
        norms_G = torch.linalg.vector_norm(raw_GD, dim=1)
        fault = find_fault(batch, norms_G, context.settings.num_classes, step)
        # All ranks find the same fault in the same gathered batch, and a CPU raises it here, before any further collective.
        # On a GPU it masks the update and does not leave forward early: the collectives stay in step.
        self.faults.note(fault)
        self.faults.look(context.settings.num_classes)
        # All ranks have judged the control words by now, so a change of the centres counts once.
        store.overwrite_check.renew()
        unit_GD = raw_GD * torch.where(norms_G > 0, 1 / norms_G, 0)[:, None]
        own_rows_G, own_unit_GD, local_ids_G = _target_rows(store, batch, unit_GD)
        images = GatheredImages(
            unit_GD=unit_GD,
            operand_GD=unit_GD.to(product_dtype),
            norms_G=norms_G,
            cosines_G=(unit_GD * own_unit_GD).sum(1).double(),
            labels_G=batch.labels_G,
            is_image_G=batch.is_image_G,
            own_rows_G=own_rows_G,
            own_unit_GD=own_unit_GD,
            local_ids_G=local_ids_G,
            counts_W=batch.counts_W,
            max_batch=batch.max_batch,
        )
        draw = opened if opened is not None else self.draw(images.labels_G, images.counts_W, step)
        slots_G, classes_S = images.local_ids_G, draw.drawn.classes_S
        if classes_S is not None:
            # classes_S is ascending and contains every positive, so the search always finds the class itself.
            slots_G = torch.where(slots_G >= 0, torch.searchsorted(classes_S, slots_G), -1)
        problem = new_problem(context, draw, images, slots_G, for_backward)
        targets = margin_targets(context, draw, images, step)
        mass_G, cosines_G, num_overflowed = sum_masses(context, problem, targets, self.kernel, draw.overflowed)
        self.faults.note(overflow_fault(fault, num_overflowed))
        losses = finish_losses(context, draw, targets, mass_G, cosines_G)
        return draw, new_part(context, images, problem, targets, cosines_G, losses)

    def backward(
        self, draw: StepDraw, part: LossPart, upstream: Tensor, wants_images: bool, dtype: torch.dtype
    ) -> Tensor | None:
        """Collective if wants_images. Weighs the part's images and returns their (max_batch, D) gradient."""
        images, losses, rank = part.images, part.losses, self.context.rank
        # num_images counts the whole step, also the parts that come later: the parts add up to the mean of one large batch.
        image_weight_G = images.is_image_G * (upstream.double() / draw.num_images.clamp_min(1))
        # exp(-inf) is 0: padding and images without negatives, whose total is infinite, get no coefficient.
        part.negative_coefficients_G = image_weight_G * torch.exp(-losses.log_total_G)
        part.target_coefficients_G = image_weight_G * losses.slope_cosine_G
        if not wants_images:
            return None
        grad_BD = _grad_embeddings(part, self.kernel, rank, self.context.group)
        if losses.slope_norm_G is not None:
            # Through the embeddings' lengths, which some margins read.
            mine = images.of_rank(rank)
            slopes_B = (image_weight_G * losses.slope_norm_G)[mine].to(grad_BD.dtype)
            grad_BD += images.unit_GD[mine] * slopes_B[:, None]
        return (grad_BD * self.context.gradient_factor).to(dtype)

    def update(
        self,
        draw: StepDraw,
        parts: list[LossPart],
        lr: float | Tensor,
        *,
        skip: bool | Tensor,
        loss_scale: float | Tensor,
        step: int,
        is_measured: bool,
    ) -> HeadStats | None:
        """Moves the rows that took part, and the margin's running values. Collective if is_measured."""
        context, store = self.context, self.context.store
        # A GPU is not asked whether its centres were overwritten, because the host would wait: there the comparison
        # before each forward must suffice.
        is_overwritten = not self._never_waits and store.overwrite_check.note_change()
        first_fault = device_skip = None
        if self._never_waits:
            first_fault = self.faults.first_fault
            if isinstance(skip, Tensor):
                # Not read by the host: it becomes a mask of the update.
                device_skip, skip = skip.to(context.device), False
        stats = None
        if not skip:
            squares: list[Tensor] | None = [] if is_measured else None
            move = Move(lr, loss_scale, step, first_fault, device_skip, squares)
            move_rows(store, draw, parts, self.kernel, move)
            move_margin_state(context, parts, move)
            if squares is not None:
                stats = head_stats(context, draw, parts, squares)
        # A change by others stays visible to the comparison before the next forward, which raises on every rank.
        if not is_overwritten:
            store.overwrite_check.renew()
        drop_stored(parts)
        return stats


def _target_rows(store: Centres, batch: GlobalBatch, unit_GD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns rows and unit vectors of the images' own centres, and the local ids of their classes.

    If another rank owns the class, they are -1, zero and -1.
    """
    local_G = batch.labels_G - store.classes.start
    is_here_G = batch.is_image_G & (local_G >= 0) & (local_G < len(store.classes))
    # Labels of other ranks look up class 0; is_here_G then discards the result. A selection would have a length to wait for.
    rows_GM = rows_of_classes(torch.where(is_here_G, local_G, 0), store.weight_RD, store.num_subcentres)
    unit_GMD = unit_rows(store.weight_RD[rows_GM], store.work_dtype)[0].unflatten(0, (-1, store.num_subcentres))
    # An image belongs to the closest of its class's sub-centres; the others neither pull nor are pulled.
    winner_G = torch.einsum("gd,gmd->gm", unit_GD, unit_GMD).argmax(1)
    picked = torch.arange(len(winner_G), device=winner_G.device)
    target_GD = unit_GMD[picked, winner_G] * is_here_G[:, None]
    rows_G = torch.where(is_here_G, rows_GM.unflatten(0, (-1, store.num_subcentres))[picked, winner_G], -1)
    return rows_G, target_GD, torch.where(is_here_G, local_G, -1)


def _grad_embeddings(part: LossPart, kernel: Kernel, rank: int, group: dist.ProcessGroup | None) -> Tensor:
    """Collective. Returns the (B, D) gradient of this rank's embeddings through their directions.

    Reduce-scatter of G * D numbers: every rank forms the gradient of all G unit embeddings from its own classes; each
    gets the sum for its own images.
    """
    images = part.images
    grad_GD = kernel.grad_images(part.problem, part.negative_coefficients_G)
    # Only the rank that owns the class has a unit vector here; the rows of the others are zero, so the sum counts it once.
    grad_GD.addcmul_(images.own_unit_GD, part.target_coefficients_G.to(images.unit_GD.dtype)[:, None])
    grad_BD = scatter_sum(grad_GD.unflatten(0, (-1, images.max_batch)), group)

    unit_BD, norms_B = images.unit_GD[images.of_rank(rank)], images.norms_G[images.of_rank(rank)]
    # Through the normalisation; an embedding of length zero has no direction and gets no gradient.
    inverse_B = torch.where(norms_B > 0, 1 / norms_B, 0)
    along_B = (unit_BD * grad_BD).sum(1, keepdim=True)
    return (grad_BD - unit_BD * along_B) * inverse_B[:, None]
