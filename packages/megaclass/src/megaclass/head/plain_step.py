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

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megaclass.head.centres import Centres
from megaclass.head.chunked import hardest
from megaclass.head.counter_random import normals_from_bits, random_bits, stream_keys
from megaclass.head.faults import LOGIT, find_fault, overflow_fault
from megaclass.head.gather_batch import PADDING, gather_batch
from megaclass.head.labels import default_weights, read_words
from megaclass.head.losses import LOSSES, NegativeSums
from megaclass.head.margins import CurricularFace, Margin, Targets
from megaclass.head.problem import CentreGradient, Kernel, Problem, rows_of_classes
from megaclass.head.sampling import (
    in_batch_probability,
    rate_of_negatives,
    rates_by_frequency,
    sample_capacity,
    sample_classes,
)
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
from megaclass_launch.ranks.collectives import gather_blocks, scatter_sum, sum_over_ranks_

# Logit in place of a label that is not there: no softmax notices it, and unlike -inf its derivatives are numbers.
_NO_LOGIT = -1e30


class PlainStep:
    """A step in PyTorch operations around a plain kernel."""

    largest_inner_sum = math.inf
    """Sums of exponentials of inner products from this size on are a fault."""

    def __init__(self, context: StepContext, kernel: Kernel) -> None:
        self.context, self.kernel, self.faults = context, kernel, context.faults
        self._never_waits = context.device.type == "cuda"
        # Written once per rate of the schedule.
        self._rates: dict[float, tuple[Tensor, int]] = {}

    # ---- the draw ----------------------------------------------------------------------------------------------

    def draw(self, labels_N: Tensor, counts_W: Tensor, step: int) -> StepDraw:
        """Decides which classes take part. labels_N: below 0 for padding. Sends nothing: every rank knows all labels."""
        settings = self.context.settings
        rate, num_images = settings.rates.at(step), counts_W.sum(dtype=torch.float64)
        if rate == 1:
            return StepDraw(DrawnClasses(), num_images, counts_W)
        # A GPU cannot tell the host how many were drawn without a wait: there the list has a fixed, padded length. It is too
        # short with a probability below 1e-15; that is then a fault, which masks the step.
        capacity = sample_capacity(len(self.context.store.classes), rate, len(labels_N)) if self._never_waits else None
        if settings.negatives != "uniform":
            return StepDraw(self._sample_by_frequency(labels_N, rate, step), num_images, counts_W)
        drawn_rate: float | Tensor = rate
        if settings.sample_positives:
            drawn_rate = rate_of_negatives(labels_N, settings.num_classes, rate)
            drawn_rate = drawn_rate if self._never_waits else float(drawn_rate)
        # A positive takes part with certainty and is not corrected.
        drawn_weight = 1 / rate if settings.correct_sampling else 1.0
        return StepDraw(self._sample(labels_N, drawn_rate, drawn_weight, step, capacity), num_images, counts_W)

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

    def _sample_by_frequency(self, labels_G: Tensor, rate: float, step: int) -> DrawnClasses:
        """Draws in proportion to the class counts; or uniformly, and also counts the labels of the batch as drawn.

        Every class is weighted by the inverse of its probability to take part, which makes the sums over the negatives
        unbiased: the logQ correction. By frequency the batch is taken as given, so positives have weight 1.
        """
        settings, own = self.context.settings, self.context.store.classes
        rates_K, capacity = self._class_rates(rate)
        is_in_batch = settings.negatives == "in-batch"
        sample = sample_classes(
            labels_G,
            own.start,
            len(own),
            rate if is_in_batch else rates_K,
            settings.seed,
            step,
            capacity + len(labels_G) if self._never_waits else None,
        )
        local_S = sample.classes_S.clamp_max(len(own) - 1)
        if is_in_batch:
            chances_S = in_batch_probability(rates_K[local_S], rate, (labels_G >= 0).sum() - 1)
            # 0 if the step has a single label: no image has its class as a negative, but padding must not meet infinity.
            weight_S = torch.where(chances_S > 0, 1 / chances_S, 1)
        else:
            weight_S = torch.where(sample.is_positive_S, 1, 1 / rates_K[local_S])
        weight_S = weight_S.masked_fill(sample.classes_S >= len(own), 0).to(self.context.store.work_dtype)
        return DrawnClasses(sample.classes_S, weight_S, None, sample.overflowed.double())

    def _class_rates(self, rate: float) -> tuple[Tensor, int]:
        """Returns the rate of each class here, or its share of all labels for in-batch negatives; and the longest list."""
        if rate not in self._rates:
            counts_C, own = self.context.class_counts_C, self.context.store.classes
            assert counts_C is not None, "the settings ask for them"
            here = slice(own.start, own.stop)
            if self.context.settings.negatives == "in-batch":
                shares_K = counts_C[here].double() / counts_C.sum(dtype=torch.float64)
                self._rates[rate] = shares_K, sample_capacity(len(own), rate, 0)
            else:
                rates_K = rates_by_frequency(counts_C, rate)[here].clone()
                # The variance of a sum of unequal draws is at most that of equal ones.
                self._rates[rate] = rates_K, sample_capacity(len(own), float(rates_K.mean()), 0)
        return self._rates[rate]

    # ---- forward -----------------------------------------------------------------------------------------------

    def forward(
        self,
        embeddings_BD: Tensor,
        words_B: Tensor,
        opened: StepDraw | None,
        *,
        step: int,
        product_dtype: torch.dtype,
        for_backward: ForBackward | None,
    ) -> tuple[StepDraw, LossPart]:
        """Collective. Gathers the global batch and computes its loss.

        words_B: labels of the images, and weights (labels.py).
        opened: the draw of a step opened by begin_step(); None makes one for this batch.
        for_backward: None if no backward follows.
        Returns the step's draw, and what backward needs of this part; the mean loss is among it.
        """
        margin = self.context.settings.margin_at(step)
        images, gathered = self._gather(embeddings_BD, words_B, step, product_dtype)
        draw = opened if opened is not None else self.draw(images.labels_N, images.counts_W, step)
        slots_N, classes_S, overflowed = images.local_ids_N, draw.drawn.classes_S, draw.overflowed
        if classes_S is not None:
            # classes_S is ascending and contains every positive, so the search finds the class itself.
            is_here_N, places_N = slots_N >= 0, torch.searchsorted(classes_S, slots_N)
            if opened is not None:
                # Unless begin_step() was not given this label: a fault, because its class may take no part.
                is_found_N = torch.searchsorted(classes_S, slots_N, right=True) > places_N
                overflowed = torch.maximum(overflowed, (is_here_N & ~is_found_N).any().to(overflowed.dtype))
                is_here_N &= is_found_N
            slots_N = torch.where(is_here_N, places_N, -1)
        problem = self._new_problem(draw, images, slots_N, margin, for_backward)
        targets = self._targets(draw, images, step)
        sums, cosines_N, num_overflowed = self._sum_negatives(draw, overflowed, images, problem, targets, margin)
        # After the all-reduce, which also counts the ranks whose list was too short.
        self._note_overflow(gathered, images, sums, num_overflowed)
        losses = self._losses(draw, images, targets, sums, cosines_N, margin)
        statistics = margin.statistics(targets.with_cosines(cosines_N))
        if losses.bias_gradient is not None:
            statistics = torch.stack([images.is_image_G.sum().double(), losses.bias_gradient])
        return draw, LossPart(images, problem, cosines_N, losses, statistics)

    def _gather(
        self, embeddings_BD: Tensor, words_B: Tensor, step: int, product_dtype: torch.dtype
    ) -> tuple[GatheredImages, Any]:
        """Collective. Returns the images of all ranks, and what _note_overflow() needs: here the fault that they have."""
        context, store, settings = self.context, self.context.store, self.context.settings
        word = store.overwrite_check.control_word(step)
        batch = gather_batch(embeddings_BD, words_B, step=word, max_batch=settings.max_batch, group=context.group)
        labels_GP, weights_GP = read_words(batch.labels_G, settings.max_labels)
        # Lengths and unit vectors are formed in the work dtype: half precision would lose digits of the cosines.
        raw_GD = batch.embeddings_GD.to(store.work_dtype)
        norms_G = torch.linalg.vector_norm(raw_GD, dim=1)
        fault = find_fault(
            batch, labels_GP, weights_GP, norms_G, settings.num_classes, step, class_counts_C=context.class_counts_C
        )
        # All ranks find the same fault in the same gathered batch, and a CPU raises it here, before any further collective.
        # On a GPU it masks the update and does not leave forward early: the collectives stay in step.
        self.faults.note(fault)
        self.faults.look(settings.num_classes)
        # All ranks have judged the control words by now, so a change of the centres counts once.
        store.overwrite_check.renew()
        unit_GD = raw_GD
        if settings.is_cosine:
            unit_GD = raw_GD * torch.where(norms_G > 0, 1 / norms_G, 0)[:, None]
        labels_N, is_label_N = labels_GP.flatten(), batch.is_image_G
        if settings.max_labels > 1:
            is_label_N = (batch.is_image_G[:, None] & (labels_GP != PADDING)).flatten()
        if weights_GP is not None:
            # Padding of the gathered block has no weights, but the bits of -1.
            weights_GP = weights_GP.where(is_label_N.view(labels_GP.shape), 0)
        elif settings.max_labels > 1 or settings.label_smoothing:
            is_shared = settings.loss != "sigmoid"
            weights_GP = default_weights(is_label_N.view(labels_GP.shape), is_shared=is_shared)
        unit_ND = of_labels(unit_GD, settings.max_labels)
        own_rows_N, own_unit_ND, local_ids_N = _target_rows(store, labels_N, is_label_N, unit_ND)
        images = GatheredImages(
            unit_GD=unit_GD,
            operand_GD=unit_GD.to(product_dtype),
            norms_G=norms_G,
            is_image_G=batch.is_image_G,
            labels_N=labels_N,
            is_label_N=is_label_N,
            cosines_N=(unit_ND * own_unit_ND).sum(1).double(),
            own_rows_N=own_rows_N,
            own_unit_ND=own_unit_ND,
            local_ids_N=local_ids_N,
            weights_GP=weights_GP,
            counts_W=batch.counts_W,
            max_batch=batch.max_batch,
        )
        return images, fault

    def _new_problem(
        self,
        draw: StepDraw,
        images: GatheredImages,
        slots_N: Tensor,
        margin: Margin,
        for_backward: ForBackward | None,
    ) -> Problem:
        """Returns the problem that the kernel solves. slots_N: place of each label's class among those that take part."""
        drawn, settings, store = draw.drawn, self.context.settings, self.context.store
        return Problem(
            unit_GD=images.operand_GD,
            weight_RD=store.weight_RD,
            classes_S=drawn.classes_S,
            target_slots_N=slots_N,
            class_weight_S=drawn.class_weight_S,
            num_drawn=drawn.num_drawn,
            num_subcentres=store.num_subcentres,
            scale=margin.scale,
            logit_bound=margin.logit_bound() if settings.is_cosine else math.inf,
            filter_above=settings.filter_above,
            wants_grad_images=for_backward is not None and for_backward.wants_grad_images,
            stored_bytes=0 if for_backward is None else for_backward.stored_bytes,
            max_labels=settings.max_labels,
            is_cosine=settings.is_cosine,
            is_sigmoid=settings.loss == "sigmoid",
            second="slope" if margin.learns_bias else "logit" if settings.label_smoothing else None,
        )

    def _targets(self, draw: StepDraw, images: GatheredImages, step: int) -> Targets:
        """Returns the images as the margin sees them, with their cosines as this rank knows them."""
        # Bound now: the draw has advanced to the next part by the time a kernel computes logits again for backward.
        draw_now, max_labels = draw.at_this_part(), self.context.settings.max_labels

        def normals() -> Tensor:
            # Keyed by the image's place in the step's global batch: padding and parts do not shift the numbers.
            places_W = draw_now.places_W()
            # And by the place of the label among those of its image.
            places_W, num_rows = places_W * max_labels, images.max_batch * max_labels
            places_G = (places_W[:, None] + torch.arange(num_rows, device=self.context.device)).flatten()
            keys = stream_keys(Stream.MARGIN_NOISE, self.context.settings.seed, step)
            return normals_from_bits(random_bits(keys, places_G), torch.float64)

        counts_C, counts_G = self.context.class_counts_C, None
        if counts_C is not None:
            counts_G = counts_C[images.labels_N.clamp(0, len(counts_C) - 1)].double().where(images.is_label_N, 1)
        return Targets(
            cosines_G=images.cosines_N,
            norms_G=of_labels(images.norms_G.double(), max_labels),
            is_image_G=images.is_label_N,
            state=dict(self.context.margin_state),
            normals=normals,
            classes_G=images.labels_N,
            class_counts_G=counts_G,
            is_cosine=self.context.settings.is_cosine,
        )

    def _sum_negatives(
        self,
        draw: StepDraw,
        overflowed: Tensor,
        images: GatheredImages,
        problem: Problem,
        targets: Targets,
        margin: Margin,
    ) -> tuple[NegativeSums, Tensor, Tensor]:
        """Collective: all-reduces G + N + 1 float64; N, then G + 1, if the margin's negatives depend on the target.

        G more for a margin with a bias, G + 1 more for label smoothing. For a margin with num_hardest, k numbers per image
        and rank are all-gathered before.

        overflowed: above 0 if this rank's list of drawn classes lacks a class that takes part.
        targets: with cosines_G as this rank knows them: zero if another rank owns the class.
        Returns, over all ranks, the sums over the images' negatives, the target cosines, and the number of such ranks.
        """
        cosines_N, group, settings = targets.cosines_G, self.context.group, self.context.settings
        if margin.num_hardest:
            best_GK = gather_blocks(hardest(problem, margin.num_hardest), group).transpose(0, 1).flatten(1)
            targets = replace(targets, hardest_G=best_GK.topk(margin.num_hardest, dim=1).values[:, -1])
        # Exactly one rank owns a label, so summing its cosine over ranks, zeros elsewhere, yields it. It travels with the
        # masses to save a round trip, unless the logits of the negatives depend on it.
        reads_targets = not margin.touches_only_target and margin.negatives_read_targets
        if reads_targets:
            # The clone keeps images.cosines_N as this rank knows it: the reduction works in place.
            cosines_N = sum_over_ranks_(cosines_N.clone(), group)
            targets = targets.with_cosines(cosines_N)
        if not margin.touches_only_target:
            # Kernels that know the rule of CurricularFace use `curriculum`; all others call the function and differentiate it.
            problem.negative_logits = lambda cosines_GS: margin.negative_logits(cosines_GS, targets)
            problem.curriculum = margin.curriculum(targets) if isinstance(margin, CurricularFace) else None
        mass = self.kernel.mass(problem)
        own = [mass.flatten(), *([] if reads_targets else [cosines_N]), overflowed[None]]
        if settings.label_smoothing:
            weight_S = draw.drawn.class_weight_S
            num_classes = torch.full_like(draw.num_images, problem.num_classes)
            own.append((num_classes if weight_S is None else weight_S.double().sum())[None])
        masses, *others = sum_over_ranks_(torch.cat(own), group).split([len(part) for part in own])
        if not reads_targets:
            cosines_N, *others = others
        sum_G, second_G = masses.view(mass.shape) if mass.ndim == 2 else (masses, None)
        sums = NegativeSums(
            sum_G=sum_G,
            is_label_GP=None if images.weights_GP is None else images.is_label_N.view(images.weights_GP.shape),
            second_G=second_G,
            num_classes=others[1][0] if settings.label_smoothing else None,
            smoothing=settings.label_smoothing,
            factors=margin.loss_factors,
        )
        return sums, cosines_N, others[0][0]

    def _note_overflow(self, gathered: Any, images: GatheredImages, sums: NegativeSums, num_overflowed: Tensor) -> None:
        fault = overflow_fault(gathered, num_overflowed)
        if not self.context.settings.is_cosine:
            # Inner products are not bounded. All ranks have the same sums.
            num_infinite = (images.is_image_G & ~(sums.sum_G < self.largest_inner_sum)).sum()
            fault = overflow_fault(fault, num_infinite, LOGIT)
        self.faults.note(fault)
        if self.context.device.type == "cpu":
            self.faults.look(self.context.settings.num_classes)

    def _losses(
        self,
        draw: StepDraw,
        images: GatheredImages,
        targets: Targets,
        sums: NegativeSums,
        cosines_N: Tensor,
        margin: Margin,
    ) -> LossesAndSlopes:
        """Computes the losses from the sums over the negatives and the target cosines; slopes by autograd."""
        is_image_G, is_label_N, weights_GP = images.is_image_G, images.is_label_N, images.weights_GP
        with torch.enable_grad():
            # Autograd runs over N numbers only, so a margin needs no derivative of its own; the G x S matrix is the kernel's.
            leaf = targets.with_cosines(cosines_N, requires_grad=True)
            leaves = [leaf.cosines_G, leaf.norms_G]
            if margin.learns_bias:
                leaves.append(leaf.state["bias"].detach().clone().requires_grad_())
                leaf = replace(leaf, state={**leaf.state, "bias": leaves[-1]})
            logits_N, penalty_N = margin.target_logits(leaf), margin.penalty(leaf)
            if weights_GP is not None:
                logits_N = torch.where(is_label_N, logits_N, _NO_LOGIT)
            logits_GP = logits_N.view(len(is_image_G), self.context.settings.max_labels)
            losses_G, slope_mass_G = LOSSES[self.context.settings.loss](logits_GP, weights_GP, sums)
            if penalty_N is not None:
                penalty_GP = penalty_N.view(logits_GP.shape)
                losses_G = losses_G + (penalty_N if weights_GP is None else (weights_GP * penalty_GP).sum(1))
            total = torch.where(is_image_G, losses_G, 0).sum()
            slopes = torch.autograd.grad(total, leaves, allow_unused=True)
        # A margin may return anything for padding, also NaN; and an image without negatives has none to weigh.
        slope_mass_G = torch.where(is_image_G & (sums.sum_G > 0), slope_mass_G, 0)
        bias_gradient = slope_logits_G = slope_norm_G = None
        if slopes[1] is not None:
            slope_norm_N = torch.where(is_label_N, slopes[1], 0)
            slope_norm_G = slope_norm_N if weights_GP is None else slope_norm_N.view(logits_GP.shape).sum(1)
        if sums.second_G is not None and margin.learns_bias:
            bias_gradient = slopes[2] + (slope_mass_G * sums.second_G).sum()
        elif sums.second_G is not None:
            assert weights_GP is not None and sums.num_classes is not None
            slope_logits_G = -sums.smoothing * weights_GP.sum(1) / sums.num_classes
        # A step in which no rank brings an image has loss 0, not 0 / 0.
        mean = total.detach() / draw.num_images.clamp_min(1)
        return LossesAndSlopes(
            slope_mass_G=slope_mass_G,
            slope_cosine_N=torch.zeros_like(cosines_N) if slopes[0] is None else torch.where(is_label_N, slopes[0], 0),
            slope_norm_G=slope_norm_G,
            mean_loss=torch.where(self.faults.first_fault[0] != 0, torch.nan, mean).to(self.context.store.work_dtype),
            slope_logits_G=slope_logits_G,
            bias_gradient=bias_gradient,
        )

    # ---- backward ----------------------------------------------------------------------------------------------

    def backward(
        self, draw: StepDraw, part: LossPart, upstream: Tensor, wants_images: bool, dtype: torch.dtype
    ) -> Tensor | None:
        """Collective if wants_images. Weighs the part's images and returns their (max_batch, D) gradient."""
        images, losses = part.images, part.losses
        # num_images counts the whole step, also the parts that come later: the parts add up to the mean of one large batch.
        image_weight_G = images.is_image_G * (upstream.double() / draw.num_images.clamp_min(1))
        part.negative_coefficients_G = image_weight_G * losses.slope_mass_G
        if losses.slope_logits_G is not None:
            both = [part.negative_coefficients_G, image_weight_G * losses.slope_logits_G]
            part.negative_coefficients_G = torch.stack(both)
        part.target_coefficients_N = of_labels(image_weight_G, part.problem.max_labels) * losses.slope_cosine_N
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
        coefficients_N1 = part.target_coefficients_N.to(images.unit_GD.dtype)[:, None]
        if part.problem.max_labels == 1:
            grad_GD.addcmul_(images.own_unit_ND, coefficients_N1)
        else:
            grad_GD += (images.own_unit_ND * coefficients_N1).unflatten(0, (-1, part.problem.max_labels)).sum(1)
        grad_BD = scatter_sum(images.by_rank(grad_GD), self.context.group)

        if not self.context.settings.is_cosine:
            return grad_BD
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
            for part in parts:
                self.context.store.count_wins_(part.images.own_rows_N)
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
        for name, new in self.context.settings.margin.next_state(state, torch.stack(statistics).sum(0)).items():
            state[name].copy_(new if is_skipped is None else torch.where(is_skipped, state[name], new))

    def _stats(self, draw: StepDraw, parts: Sequence[LossPart], squares: Sequence[Tensor]) -> HeadStats:
        """Collective: an all-reduce of 2 float64. squares: sums of squares of this rank's gradient, chunk by chunk."""
        num_local, classes_S = len(self.context.store.classes), draw.drawn.classes_S
        num_sampled = torch.full_like(draw.num_images, num_local)
        if classes_S is not None:
            # Entries of num_local and above are the padding of a list of fixed length.
            num_sampled = (classes_S < num_local).sum()
        cosines = torch.stack([_mean_over_labels(part).sum() for part in parts]).sum()
        # The zero is for a rank without chunks. Cosines are the same on all ranks already and are not summed over them.
        own = torch.stack([torch.stack([torch.zeros_like(cosines), *squares]).sum(), num_sampled.double()])
        square, num_sampled = sum_over_ranks_(own, self.context.group)
        return HeadStats(
            target_cosine=cosines / draw.num_images.clamp_min(1),
            gradient_norm=square.sqrt(),
            sampled_share=num_sampled / self.context.settings.num_classes,
        )


def of_labels(values_G: Tensor, max_labels: int) -> Tensor:
    """Returns a value per label from one per image."""
    return values_G if max_labels == 1 else values_G.repeat_interleave(max_labels, 0)


def _mean_over_labels(part: LossPart) -> Tensor:
    """Returns the mean cosine of each image with the classes of its labels, (G,)."""
    cosines_N, max_labels = torch.where(part.images.is_label_N, part.cosines_N, 0), part.problem.max_labels
    if max_labels == 1:
        return cosines_N
    num_labels_G = part.images.is_label_N.view(-1, max_labels).sum(1)
    return cosines_N.view(-1, max_labels).sum(1) / num_labels_G.clamp_min(1)


def _target_rows(
    store: Centres, labels_N: Tensor, is_label_N: Tensor, unit_ND: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns rows and unit vectors of the labels' own centres, and the local ids of their classes.

    If another rank owns the class, they are -1, zero and -1.
    """
    local_N = labels_N - store.classes.start
    is_here_N = is_label_N & (local_N >= 0) & (local_N < len(store.classes))
    # Labels of other ranks look up class 0; is_here_N then discards the result. A selection would have a length to wait for.
    rows_NM = rows_of_classes(torch.where(is_here_N, local_N, 0), store.weight_RD, store.num_subcentres)
    unit_NMD = store.directions(store.weight_RD[rows_NM])[0].unflatten(0, (-1, store.num_subcentres))
    # An image belongs to the closest of its class's sub-centres; the others neither pull nor are pulled.
    winner_N = torch.einsum("gd,gmd->gm", unit_ND, unit_NMD).argmax(1)
    picked = torch.arange(len(winner_N), device=winner_N.device)
    target_ND = unit_NMD[picked, winner_N] * is_here_N[:, None]
    rows_N = torch.where(is_here_N, rows_NM.unflatten(0, (-1, store.num_subcentres))[picked, winner_N], -1)
    return rows_N, target_ND, torch.where(is_here_N, local_N, -1)


def _add_targets_(chunk: CentreGradient, parts: list[LossPart], num_subcentres: int) -> Tensor | None:
    """Adds the images' pull on their own centres; returns which rows took part, None if all did."""
    won_R = chunk.won_R
    for part in parts:
        slots_N, unit_GD = part.problem.target_slots_N, part.images.unit_GD
        is_here_N = (slots_N >= chunk.start) & (slots_N < chunk.stop)
        places_N = (slots_N - chunk.start) * num_subcentres + part.images.own_rows_N % num_subcentres
        unit_ND = of_labels(unit_GD, part.problem.max_labels)
        pulls_ND = unit_ND * part.target_coefficients_N.to(unit_GD.dtype)[:, None]
        # Images whose class is elsewhere add zero to the first row: selecting those that are here would be a wait.
        places_N = torch.where(is_here_N, places_N, 0)
        chunk.grad_RD.index_add_(0, places_N, pulls_ND * is_here_N[:, None])
        if won_R is not None:
            hits_R = torch.zeros(len(won_R), dtype=torch.int32, device=won_R.device)
            won_R = won_R | (hits_R.index_add_(0, places_N, is_here_N.to(torch.int32)) > 0)
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
