"""The step of a head in PyTorch operations, on any device. gpu/step.py inherits it and replaces parts by Triton programs.

Collectives of a step, in order (sizes in partial_fc.py):

    forward     all-gather of the batch: embeddings, labels, sizes, and a control word per rank
                all-reduce of softmax masses and target cosines
    backward    reduce-scatter of the gradient of the unit embeddings
    update      none; an all-reduce of 16 bytes if the step is measured

None of them depends on values that differ between ranks, and a world of one takes the same path.

On a CPU the host may look at values: the list of drawn classes has its exact length, a fault raises at once, and a skipped
step does no work. On a GPU the same operations run without a wait: the list has a fixed, padded length, and faults and skips
are masks.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megaclass.head.centres import Centres
from megaclass.head.counter_random import normals_from_bits, random_bits, stream_keys
from megaclass.head.faults import find_fault, overflow_fault
from megaclass.head.gather_batch import GlobalBatch, gather_batch
from megaclass.head.margins import CurricularFace, Targets
from megaclass.head.problem import CentreGradient, Kernel, Problem, rows_of_classes, unit_rows
from megaclass.head.sampling import rate_of_negatives, sample_capacity, sample_classes
from megaclass.head.step import (
    DrawnClasses,
    ForBackward,
    GatheredImages,
    HeadStats,
    LossesAndSlopes,
    LossPart,
    Move,
    StepContext,
    StepDraw,
)
from megaclass.keyed_random import Stream
from megaclass_launch.ranks.collectives import scatter_sum, sum_over_ranks_


class PlainStep:
    """A step in PyTorch operations around a plain kernel."""

    def __init__(self, context: StepContext, kernel: Kernel) -> None:
        self.context, self.kernel, self.faults = context, kernel, context.faults
        self._never_waits = context.device.type == "cuda"

    # ---- the draw ----------------------------------------------------------------------------------------------

    def draw(self, labels_G: Tensor, counts_W: Tensor, step: int) -> StepDraw:
        """Decides which classes take part. labels_G: below 0 for padding. Sends nothing: every rank knows all labels."""
        settings = self.context.settings
        rate, num_images = settings.rates.at(step), counts_W.sum(dtype=torch.float64)
        if rate == 1:
            return StepDraw(DrawnClasses(), num_images, counts_W)
        # A GPU cannot tell the host how many were drawn without a wait: there the list has a fixed, padded length. It is too
        # short with a probability below 1e-15; that is then a fault, which masks the step.
        capacity = sample_capacity(len(self.context.store.classes), rate, len(labels_G)) if self._never_waits else None
        drawn_rate: float | Tensor = rate
        if settings.sample_positives:
            drawn_rate = rate_of_negatives(labels_G, settings.num_classes, rate)
            drawn_rate = drawn_rate if self._never_waits else float(drawn_rate)
        # A positive takes part with certainty and is not corrected.
        drawn_weight = 1 / rate if settings.correct_sampling else 1.0
        return StepDraw(self._sample(labels_G, drawn_rate, drawn_weight, step, capacity), num_images, counts_W)

    def _sample(
        self, labels_G: Tensor, rate: float | Tensor, drawn_weight: float, step: int, capacity: int | None
    ) -> DrawnClasses:
        own = self.context.store.classes
        sample = sample_classes(labels_G, own.start, len(own), rate, self.context.settings.seed, step, capacity)
        weight_S = None
        if drawn_weight != 1 or capacity is not None:
            weight_S = torch.full_like(sample.classes_S, drawn_weight, dtype=self.context.store.work_dtype)
            # Padding has weight 0: its exponentials do not count.
            weight_S.masked_fill_(sample.is_positive_S, 1.0).masked_fill_(sample.classes_S >= len(own), 0.0)
        return DrawnClasses(sample.classes_S, weight_S, None, sample.overflowed.double())

    # ---- forward -----------------------------------------------------------------------------------------------

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
        images, gathered = self._gather(embeddings_BD, labels_B, step, product_dtype)
        draw = opened if opened is not None else self.draw(images.labels_G, images.counts_W, step)
        slots_G, classes_S = images.local_ids_G, draw.drawn.classes_S
        if classes_S is not None:
            # classes_S is ascending and contains every positive, so the search always finds the class itself.
            slots_G = torch.where(slots_G >= 0, torch.searchsorted(classes_S, slots_G), -1)
        problem = self._new_problem(draw, images, slots_G, for_backward)
        targets = self._targets(draw, images, step)
        mass_G, cosines_G, num_overflowed = self._sum_masses(problem, targets, draw.overflowed)
        # After the all-reduce, which also counts the ranks whose list was too short.
        self._note_overflow(gathered, images, num_overflowed)
        losses = self._losses(draw, targets, mass_G, cosines_G)
        statistics = self.context.margin.statistics(targets.with_cosines(cosines_G))
        return draw, LossPart(images, problem, cosines_G, losses, statistics)

    def _gather(
        self, embeddings_BD: Tensor, labels_B: Tensor, step: int, product_dtype: torch.dtype
    ) -> tuple[GatheredImages, Any]:
        """Collective. Returns the images of all ranks, and what _note_overflow() needs: here the fault that they have."""
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
        return images, fault

    def _new_problem(
        self, draw: StepDraw, images: GatheredImages, slots_G: Tensor, for_backward: ForBackward | None
    ) -> Problem:
        """Returns the problem that the kernel solves. slots_G: place of each image's class among those that take part."""
        drawn, settings, store = draw.drawn, self.context.settings, self.context.store
        return Problem(
            unit_GD=images.operand_GD,
            weight_RD=store.weight_RD,
            classes_S=drawn.classes_S,
            target_slot_G=slots_G,
            class_weight_S=drawn.class_weight_S,
            num_drawn=drawn.num_drawn,
            num_subcentres=store.num_subcentres,
            scale=settings.margin.scale,
            logit_bound=settings.margin.logit_bound(),
            filter_above=settings.filter_above,
            wants_grad_images=for_backward is not None and for_backward.wants_grad_images,
            stored_bytes=0 if for_backward is None else for_backward.stored_bytes,
        )

    def _targets(self, draw: StepDraw, images: GatheredImages, step: int) -> Targets:
        """Returns the images as the margin sees them, with their cosines as this rank knows them."""
        # Bound now: the draw has advanced to the next part by the time a kernel computes logits again for backward.
        draw_now = draw.at_this_part()

        def normals() -> Tensor:
            # Keyed by the image's place in the step's global batch: padding and parts do not shift the numbers.
            places_W = draw_now.places_W()
            places_G = (places_W[:, None] + torch.arange(images.max_batch, device=self.context.device)).flatten()
            keys = stream_keys(Stream.MARGIN_NOISE, self.context.settings.seed, step)
            return normals_from_bits(random_bits(keys, places_G), torch.float64)

        return Targets(
            cosines_G=images.cosines_G,
            norms_G=images.norms_G.double(),
            is_image_G=images.is_image_G,
            state=dict(self.context.margin_state),
            normals=normals,
        )

    def _sum_masses(self, problem: Problem, targets: Targets, overflowed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Collective: all-reduces 2 * G + 1 float64; G, then G + 1, if the margin's negatives depend on the target.

        targets: with cosines_G as this rank knows them: zero if another rank owns the class.
        Returns, over all ranks, the images' softmax masses and target cosines, and the number of ranks that overflowed.
        """
        margin, num_rows, cosines_G = self.context.margin, len(targets.cosines_G), targets.cosines_G
        group = self.context.group
        if margin.touches_only_target:
            # Exactly one rank owns a label, so summing its cosine over ranks, zeros elsewhere, yields it.
            # It travels with the masses to save a round trip.
            sums = sum_over_ranks_(torch.cat([self.kernel.mass(problem), cosines_G, overflowed[None]]), group)
            return sums[:num_rows], sums[num_rows:-1], sums[-1]
        # Here the logits of the negatives depend on the target's cosine: it must be known on all ranks before the masses.
        # The clone keeps images.cosines_G as this rank knows it: the reduction works in place.
        cosines_G = sum_over_ranks_(cosines_G.clone(), group)
        known = targets.with_cosines(cosines_G)
        # Kernels that know the rule of CurricularFace use `curriculum`; all others call the function and differentiate it.
        problem.negative_logits = lambda cosines_GS: margin.negative_logits(cosines_GS, known)
        problem.curriculum = margin.curriculum(known) if isinstance(margin, CurricularFace) else None
        sums = sum_over_ranks_(torch.cat([self.kernel.mass(problem), overflowed[None]]), group)
        return sums[:num_rows], cosines_G, sums[-1]

    def _note_overflow(self, gathered: Any, images: GatheredImages, num_overflowed: Tensor) -> None:
        self.faults.note(overflow_fault(gathered, num_overflowed))

    def _losses(self, draw: StepDraw, targets: Targets, mass_G: Tensor, cosines_G: Tensor) -> LossesAndSlopes:
        """Computes the losses from the softmax mass of the negatives and the target cosine; slopes by autograd."""
        margin, is_image_G = self.context.margin, targets.is_image_G
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
            mean_loss=torch.where(self.faults.first_fault[0] != 0, torch.nan, mean).to(self.context.store.work_dtype),
        )

    # ---- backward ----------------------------------------------------------------------------------------------

    def backward(
        self, draw: StepDraw, part: LossPart, upstream: Tensor, wants_images: bool, dtype: torch.dtype
    ) -> Tensor | None:
        """Collective if wants_images. Weighs the part's images and returns their (max_batch, D) gradient."""
        images, losses = part.images, part.losses
        # num_images counts the whole step, also the parts that come later: the parts add up to the mean of one large batch.
        image_weight_G = images.is_image_G * (upstream.double() / draw.num_images.clamp_min(1))
        # exp(-inf) is 0: padding and images without negatives, whose total is infinite, get no coefficient.
        part.negative_coefficients_G = image_weight_G * torch.exp(-losses.log_total_G)
        part.target_coefficients_G = image_weight_G * losses.slope_cosine_G
        if not wants_images:
            return None
        grad_BD = self._grad_embeddings(part)
        if losses.slope_norm_G is not None:
            # Through the embeddings' lengths, which some margins read.
            mine = images.of_rank(self.context.rank)
            slopes_B = (image_weight_G * losses.slope_norm_G)[mine].to(grad_BD.dtype)
            grad_BD += images.unit_GD[mine] * slopes_B[:, None]
        return (grad_BD * self.context.gradient_factor).to(dtype)

    def _grad_embeddings(self, part: LossPart) -> Tensor:
        """Collective. Returns the (B, D) gradient of this rank's embeddings through their directions.

        Reduce-scatter of G * D numbers: every rank forms the gradient of all G unit embeddings from its own classes; each
        gets the sum for its own images.
        """
        images = part.images
        grad_GD = self.kernel.grad_images(part.problem, part.negative_coefficients_G)
        # Only the rank that owns the class has a unit vector here; the rows of the others are zero, so the sum counts it once.
        grad_GD.addcmul_(images.own_unit_GD, part.target_coefficients_G.to(images.unit_GD.dtype)[:, None])
        grad_BD = scatter_sum(grad_GD.unflatten(0, (-1, images.max_batch)), self.context.group)

        mine = images.of_rank(self.context.rank)
        unit_BD, norms_B = images.unit_GD[mine], images.norms_G[mine]
        # Through the normalisation; an embedding of length zero has no direction and gets no gradient.
        inverse_B = torch.where(norms_B > 0, 1 / norms_B, 0)
        along_B = (unit_BD * grad_BD).sum(1, keepdim=True)
        return (grad_BD - unit_BD * along_B) * inverse_B[:, None]

    # ---- update ------------------------------------------------------------------------------------------------

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
        check = self.context.store.overwrite_check
        # A GPU is not asked whether its centres were overwritten, because the host would wait: there the comparison
        # before each forward must suffice.
        is_overwritten = not self._never_waits and check.note_change()
        first_fault = device_skip = None
        if self._never_waits:
            first_fault = self.faults.first_fault
            if isinstance(skip, Tensor):
                # Not read by the host: it becomes a mask of the update.
                device_skip, skip = skip.to(self.context.device), False
        stats = None
        if not skip:
            squares: list[Tensor] | None = [] if is_measured else None
            move = Move(lr, loss_scale, step, first_fault, device_skip, squares)
            self._move_rows(draw, parts, move)
            self._move_margin_state(parts, move)
            if squares is not None:
                stats = self._stats(draw, parts, squares)
        # A change by others stays visible to the comparison before the next forward, which raises on every rank.
        if not is_overwritten:
            check.renew()
        for part in parts:
            # The exponentials are large, and the user may keep the loss, and with it the parts, for a while.
            part.problem.stored = None
        return stats

    def _move_rows(self, draw: StepDraw, parts: list[LossPart], move: Move) -> None:
        """Moves the rows that took part, with any optimizer, chunk by chunk: the whole gradient never exists."""
        store, is_skipped = self.context.store, move.is_skipped()
        # A tensor is never compared with 1: the host would wait for it.
        is_scaled = isinstance(move.loss_scale, Tensor) or move.loss_scale != 1
        for chunk in self._centre_gradient(parts):
            won_R = _add_targets_(chunk, parts, store.num_subcentres)
            mask_R = _mask(store, draw, chunk, won_R, is_skipped)
            grad_RD = chunk.grad_RD / move.loss_scale if is_scaled else chunk.grad_RD
            rows = parts[0].problem.rows_of(chunk.start, chunk.stop)
            store.update_(rows, grad_RD, mask_R, move.lr, move.step, move.squares)

    def _centre_gradient(self, parts: list[LossPart]) -> Any:
        return self.kernel.grad_centres([part.problem for part in parts], [p.negative_coefficients_G for p in parts])

    def _move_margin_state(self, parts: list[LossPart], move: Move) -> None:
        """Updates the margin's running values, if it has any."""
        statistics = [part.statistics for part in parts if part.statistics is not None]
        if not statistics:
            return
        is_skipped, state = move.is_skipped(), self.context.margin_state
        for name, new in self.context.margin.next_state(state, torch.stack(statistics).sum(0)).items():
            state[name].copy_(new if is_skipped is None else torch.where(is_skipped, state[name], new))

    def _stats(self, draw: StepDraw, parts: Sequence[LossPart], squares: Sequence[Tensor]) -> HeadStats:
        """Collective: an all-reduce of 2 float64. squares: sums of squares of this rank's gradient, chunk by chunk."""
        num_local, classes_S = len(self.context.store.classes), draw.drawn.classes_S
        num_sampled = torch.full_like(draw.num_images, num_local)
        if classes_S is not None:
            # Entries of num_local and above are the padding of a list of fixed length.
            num_sampled = (classes_S < num_local).sum()
        cosines = torch.stack([torch.where(part.images.is_image_G, part.cosines_G, 0).sum() for part in parts]).sum()
        # The zero is for a rank without chunks. Cosines are the same on all ranks already and are not summed over them.
        own = torch.stack([torch.stack([torch.zeros_like(cosines), *squares]).sum(), num_sampled.double()])
        square, num_sampled = sum_over_ranks_(own, self.context.group)
        return HeadStats(
            target_cosine=cosines / draw.num_images.clamp_min(1),
            gradient_norm=square.sqrt(),
            sampled_share=num_sampled / self.context.settings.num_classes,
        )


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
