"""The step on a GPU: Triton programs around the products, each in place of a dozen PyTorch operations.

    forward     pack          this rank's block: control word, labels, embeddings (and the check for foreign writes)
                all-gather
                prepare       unpack, normalise, cosine with the own class
                draw          the classes that take part (five launches)
                find slots    place of each image's class among them
                mass          the kernel: exponentials and their products with the centres, chunk by chunk
                all-reduce
                faults        the first fault is recorded
                losses        losses and slopes
    backward    weigh         factor of each image; gradient of the unit embeddings
                reduce-scatter
                gradients     through the normalisation
    update      list          the images of each row, by one sort
                move          per chunk: the centres' product, then one program that moves its rows

The host waits for nothing within a step: the list of drawn classes has a fixed, padded length, and faults and skips are read
on the device by the program that moves the rows. What changes from step to step is read on the device, too (StepNumbers).
"""

import torch
from torch import Tensor

from megaclass.head.gather_batch import largest_batch
from megaclass.head.gpu import images as gpu_images
from megaclass.head.gpu import rows as gpu_rows
from megaclass.head.gpu.rows import StepNumbers
from megaclass.head.problem import Kernel
from megaclass.head.sampling import rate_of_negatives, sample_capacity
from megaclass.head.step import (
    DrawnClasses,
    ForBackward,
    HeadStats,
    LossPart,
    Move,
    StepContext,
    StepDraw,
    centre_gradient,
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


class FusedStep:
    """A step in Triton programs around the fused kernel. What its methods promise: cpu/step.py. Collectives: step.py."""

    def __init__(self, context: StepContext, kernel: Kernel) -> None:
        self.context, self.kernel, self.faults = context, kernel, context.faults
        # None if the margin's derivative is not written out in a program: autograd forms it then.
        self._margin_numbers = gpu_images.margin_numbers(context.margin, context.device)
        self._can_update = gpu_rows.can_update(context.store.optimizer)
        self._numbers = StepNumbers(context.device)

    def draw(self, labels_G: Tensor, counts_W: Tensor, step: int) -> StepDraw:
        settings, classes = self.context.settings, self.context.store.classes
        rate = settings.rates.at(step)
        if rate == 1:
            return new_draw(DrawnClasses(), counts_W)
        # Only the device knows how many classes were drawn, so the length of their list follows from shapes alone. It is too
        # short with a probability below 1e-15; that is then a fault, which masks the step.
        capacity = sample_capacity(len(classes), rate, len(labels_G))
        drawn_weight = 1 / rate if settings.correct_sampling else 1.0
        self._numbers.set_step(step)
        negatives = rate_of_negatives(labels_G, settings.num_classes, rate) if settings.sample_positives else rate
        drawn = gpu_rows.draw(labels_G, classes, negatives, settings.seed, self._numbers.step, capacity, drawn_weight)
        return new_draw(drawn, counts_W)

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
        context, settings = self.context, self.context.settings
        max_batch = settings.max_batch
        if max_batch is None:
            # The only wait of this step: the gathered buffer cannot be allocated without the size.
            max_batch = largest_batch(len(labels_B), labels_B.device, context.group)
        self._numbers.set_step(step)
        # Also compares and renews the watched numbers of the centres, so a change counts once.
        gathered = gpu_images.gather(
            embeddings_BD,
            labels_B,
            max_batch,
            check=context.store.overwrite_check,
            step=self._numbers.step,
            group=context.group,
        )
        images = gpu_images.prepare(gathered, context.store, product_dtype)
        draw = opened if opened is not None else self.draw(images.labels_G, images.counts_W, step)
        slots_G = images.local_ids_G
        if draw.drawn.classes_S is not None:
            # In place: no later step needs the local ids.
            gpu_images.find_slots_(slots_G, draw.drawn.classes_S)
        problem = new_problem(context, draw, images, slots_G, for_backward)
        targets = margin_targets(context, draw, images, step)
        mass_G, cosines_G, num_overflowed = sum_masses(context, problem, targets, self.kernel, draw.overflowed)
        # After the all-reduce, which also counts the ranks whose list was too short: one launch records the first fault.
        first_fault = self.faults.first_fault
        gpu_images.note_faults(first_fault, gathered, images, num_overflowed, settings.num_classes, self._numbers.step)
        if self._margin_numbers is None:
            losses = finish_losses(context, draw, targets, mass_G, cosines_G)
        else:
            losses = gpu_images.finish_losses(
                context.margin,
                self._margin_numbers,
                mass_G,
                cosines_G,
                images.is_image_G,
                draw.num_images,
                first_fault,
            )
        # Looks at a copy of some forwards ago, which has arrived by now, and starts the next copy.
        self.faults.look(settings.num_classes)
        return draw, new_part(context, images, problem, targets, cosines_G, losses)

    def backward(
        self, draw: StepDraw, part: LossPart, upstream: Tensor, wants_images: bool, dtype: torch.dtype
    ) -> Tensor | None:
        # Forward has already multiplied the exponentials by the centres, before the denominators were known: they are a factor
        # of each image's row, which is all that is left to apply. The weighted images are kept for the update.
        return gpu_images.grad_embeddings(
            part,
            upstream,
            draw.num_images,
            wants_images=wants_images,
            rank=self.context.rank,
            group=self.context.group,
            factor=self.context.gradient_factor,
            dtype=dtype,
        )

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
        # A flag on the device is not read by the host: it becomes a mask of the update.
        device_skip = skip.to(self.context.device) if isinstance(skip, Tensor) else None
        is_skipped = device_skip is None and bool(skip)
        self._numbers.set_step(step)
        if self._can_update:
            self._numbers.set_factors(lr, loss_scale, device_skip)
        stats = None
        if not is_skipped:
            squares: list[Tensor] | None = [] if is_measured else None
            move = Move(lr, loss_scale, step, self.faults.first_fault, device_skip, squares)
            if self._can_update:
                self._update_rows(parts, squares)
            else:
                move_rows(self.context.store, draw, parts, self.kernel, move)
            move_margin_state(self.context, parts, move)
            if squares is not None:
                stats = head_stats(self.context, draw, parts, squares)
        self.context.store.overwrite_check.renew()
        drop_stored(parts)
        return stats

    def _update_rows(self, parts: list[LossPart], squares: list[Tensor] | None) -> None:
        """Moves the rows by the factors that self._numbers holds."""
        # All parts of a step share the drawn classes, so slots of the first one's problem are those of all.
        problem, num_subcentres = parts[0].problem, self.context.store.num_subcentres
        slots, rows, images, weights = (
            values[0] if len(parts) == 1 else torch.cat(values)
            for values in (
                [part.problem.target_slot_G for part in parts],
                [part.images.own_rows_G for part in parts],
                [part.images.unit_GD for part in parts],
                [part.target_coefficients_G for part in parts],
            )
        )
        num_rows = problem.num_classes * num_subcentres
        # Each row's images as a list in the order of the batch: atomic additions would give other last bits in every run.
        pulls = gpu_rows.link_pulls(slots, rows, images, weights, num_rows, num_subcentres)
        # Each chunk is consumed before the next one is asked for: the kernel writes them into the same buffer.
        for chunk in centre_gradient(self.kernel, parts):
            gpu_rows.update_(
                self.context.store,
                problem.classes_S,
                chunk,
                pulls,
                numbers=self._numbers,
                first_fault=self.faults.first_fault,
                squares=squares,
            )
