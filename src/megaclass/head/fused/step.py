"""The step on a GPU: Triton programs around the products, each in place of a dozen PyTorch operations.

Every method does what its namesake in step/plain.py does, in one or two launches. The host waits for nothing within a
step: the list of drawn classes has a fixed, padded length, and faults and skips are read on the device by the program that
moves the rows. The check of the centres (seal.py) is part of the program that packs the batch and costs no launch.
"""

from typing import Any

import torch
from torch import Tensor

from megaclass.head.fused import images as fused_images
from megaclass.head.fused import rows as fused_rows
from megaclass.head.margins import Targets
from megaclass.head.row_optimizers import Move
from megaclass.head.sampling import sample_capacity
from megaclass.head.step.cross_entropy import GatheredImages, LossesAndSlopes, LossPart, finish_losses
from megaclass.head.step.engine import NoteFaults, StepEngine
from megaclass.head.step.gather_batch import largest_batch
from megaclass.head.step.plain import move_rows
from megaclass.head.step.plan import DrawnClasses, StepPlan


class FusedStep(StepEngine):
    """A step in Triton programs around the fused kernel."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # None where the margin's derivative is not written out in a program: autograd forms it then.
        self._margin_numbers = fused_images.margin_numbers(self.margin, self.device)
        self._can_update = fused_rows.can_update(self.store.optimizer)

    def _draw_classes(self, labels_G: Tensor, rate: float, step: int) -> DrawnClasses:
        # Only the device knows how many classes were drawn, so the length of their list follows from shapes alone. It is too
        # short with a probability below 1e-15; that is then a fault, which masks the step.
        capacity = sample_capacity(len(self.store.classes), rate, len(labels_G))
        drawn_weight = 1 / rate if self.settings.correct_sampling else 1.0
        return fused_rows.draw(labels_G, self.store.classes, rate, self.settings.seed, step, capacity, drawn_weight)

    def _gather_images(
        self, embeddings_BD: Tensor, labels_B: Tensor, step: int, product_dtype: torch.dtype
    ) -> tuple[GatheredImages, NoteFaults]:
        max_batch, num_classes = self.settings.max_batch, self.settings.num_classes
        if max_batch is None:
            # The only wait of this engine: the gathered buffer cannot be allocated without the size.
            max_batch = largest_batch(len(labels_B), labels_B.device, self.group)
        # The launch that packs the block also compares and renews the seal, so that a change of the centres counts once.
        gathered = fused_images.gather(
            embeddings_BD, labels_B, seal=self.store.seal, step=step, max_batch=max_batch, group=self.group
        )
        images = fused_images.prepare(gathered, self.store, product_dtype)

        def note_faults(num_overflowed: Tensor) -> None:
            # After the all-reduce, which also counts the ranks whose list was too short: one launch records the first fault.
            first_fault = self.faults.first_fault
            fused_images.note_faults(first_fault, gathered, images, num_overflowed, num_classes, step)
            # Looks at a copy of some forwards ago, which has arrived by now, and starts the next copy.
            self.faults.look(num_classes)

        return images, note_faults

    def _find_slots(self, local_ids_G: Tensor, classes_S: Tensor) -> Tensor:
        # In place: no later step needs the local ids.
        fused_images.find_slots_(local_ids_G, classes_S)
        return local_ids_G

    def _finish_losses(
        self, targets: Targets, mass_G: Tensor, cosines_G: Tensor, num_images: Tensor
    ) -> LossesAndSlopes:
        if self._margin_numbers is None:
            return finish_losses(self.margin, targets, mass_G, cosines_G)
        return fused_images.finish_losses(
            self.margin,
            self._margin_numbers,
            mass_G,
            cosines_G,
            targets.is_image_G,
            num_images,
            self.faults.first_fault,
        )

    def backward(
        self, plan: StepPlan, part: LossPart, upstream: Tensor, wants_images: bool, dtype: torch.dtype
    ) -> Tensor | None:
        # Forward has already multiplied the exponentials by the centres, before the denominators were known: they are a factor
        # of each image's row, which is all that is left to apply. The weighted images are kept for the update.
        return fused_images.grad_embeddings(
            part,
            upstream,
            plan.num_images,
            wants_images=wants_images,
            rank=self.rank,
            group=self.group,
            factor=self.gradient_factor,
            dtype=dtype,
        )

    def _move_rows(self, plan: StepPlan, parts: list[LossPart], move: Move) -> None:
        if not self._can_update:
            move_rows(self.store, plan, parts, self._centre_gradient(parts), move, self._is_skipped(move))
            return
        # All parts of a step share the drawn classes, so that slots of the first one's problem are those of all.
        problem, num_subcentres = parts[0].problem, self.store.num_subcentres
        slots, rows, images, weights = (
            values[0] if len(parts) == 1 else torch.cat(values)
            for values in (
                [part.problem.target_slot_G for part in parts],
                [part.images.own.rows_G for part in parts],
                [part.images.unit_GD for part in parts],
                [part.target_coefficients_G for part in parts],
            )
        )
        num_rows = problem.num_classes * num_subcentres
        # Each row's images as a list in the order of the batch: atomic additions would give other last bits in every run.
        pulls = fused_rows.link_pulls(slots, rows, images, weights, num_rows, num_subcentres)
        # Each chunk is consumed before the next one is formed: the kernel writes all of them into one buffer.
        for chunk in self._centre_gradient(parts):
            fused_rows.update_(self.store, problem.classes_S, chunk, pulls, move)
