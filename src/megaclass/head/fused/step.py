"""The step on a GPU: Triton programs around the products, each in place of a dozen PyTorch operations.

Every method does what its namesake in step/plain.py does, in one or two launches. The host waits for nothing within a
step: the list of drawn classes has a fixed, padded length, and faults and skips are read on the device by the program that
moves the rows. The check of the centres (seal.py) is part of the program that packs the batch and costs no launch.

Where starting the launches takes longer than the launches, forward and update become CUDA graphs after a few steps
(step_graphs.py decides, captured_step.py holds them). Such a step runs the same programs on the same numbers. Steps that
differ, by begin_step(), is_measured, a skip on the host or another shape, run theirs one by one, also on what a graph has
left: a GraphedPart is an ordinary part to everything but `update`.
"""

from typing import Any

import torch
from torch import Tensor

from megaclass.distributed.collectives import group_size
from megaclass.gpu.cuda_graphs import Recorder
from megaclass.gpu.triton_launch import is_compiling_only
from megaclass.head.fused import images as fused_images
from megaclass.head.fused import rows as fused_rows
from megaclass.head.fused.captured_step import CapturedStep, GraphedPart, StepShape
from megaclass.head.fused.step_graphs import StepGraphs, can_capture
from megaclass.head.fused.step_numbers import StepNumbers
from megaclass.head.kernels.cut import step_bytes
from megaclass.head.margins import Targets
from megaclass.head.row_optimizers import Move
from megaclass.head.sampling import sample_capacity
from megaclass.head.step.cross_entropy import LossesAndSlopes, LossPart, finish_losses
from megaclass.head.step.engine import ForBackward, StepEngine
from megaclass.head.step.gather_batch import largest_batch
from megaclass.head.step.plain import move_rows
from megaclass.head.step.plan import DrawnClasses, StepPlan
from megaclass.head.step.stats import HeadStats


class FusedStep(StepEngine):
    """A step in Triton programs around the fused kernel."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # None where the margin's derivative is not written out in a program: autograd forms it then.
        self._margin_numbers = fused_images.margin_numbers(self.margin, self.device)
        self._can_update = fused_rows.can_update(self.store.optimizer)
        self._numbers = StepNumbers(self.device)
        is_possible = can_capture(
            self.device,
            group_size(self.group),
            has_margin_program=self._margin_numbers is not None,
            has_update_program=self._can_update,
        )
        self._graphs = StepGraphs(self.settings.cuda_graph, is_possible=is_possible)

    def _draw_classes(self, labels_G: Tensor, rate: float, step: int) -> DrawnClasses:
        # Only the device knows how many classes were drawn, so the length of their list follows from shapes alone. It is too
        # short with a probability below 1e-15; that is then a fault, which masks the step.
        capacity = sample_capacity(len(self.store.classes), rate, len(labels_G))
        drawn_weight = 1 / rate if self.settings.correct_sampling else 1.0
        self._numbers.set_step(step)
        return fused_rows.draw(
            labels_G, self.store.classes, rate, self.settings.seed, self._numbers.step, capacity, drawn_weight
        )

    def forward(
        self,
        embeddings_BD: Tensor,
        labels_B: Tensor,
        planned: StepPlan | None,
        *,
        step: int,
        product_dtype: torch.dtype,
        for_backward: ForBackward | None,
    ) -> tuple[StepPlan, LossPart, Tensor]:
        max_batch = self.settings.max_batch
        if max_batch is None:
            # The only wait of this engine: the gathered buffer cannot be allocated without the size.
            max_batch = largest_batch(len(labels_B), labels_B.device, self.group)
        self._numbers.set_step(step)
        captured = None
        # Programs that are only compiled and not run would not be part of a graph either.
        if for_backward is not None and planned is None and not is_compiling_only():
            rate = self.settings.rates.at(step)
            shape = StepShape(max_batch, embeddings_BD.dtype, product_dtype, rate, for_backward, self.store.seal)
            captured = self._graphs.find(shape, self._num_bytes(shape), lambda shape: self._capture(shape, step))
        # The launch that packs the block also compares and renews the seal, so that a change of the centres counts once.
        block = captured.block if captured is not None else self._new_block(max_batch, embeddings_BD.dtype)
        fused_images.pack_(block, embeddings_BD, labels_B, seal=self.store.seal, step=self._numbers.step)
        outcome: tuple[StepPlan, LossPart, Tensor]
        if captured is not None:
            outcome = captured.forward()
        else:
            outcome = self._forward_packed(
                block, planned, step=step, product_dtype=product_dtype, for_backward=for_backward
            )
        # Looks at a copy of some forwards ago, which has arrived by now, and starts the next copy.
        self.faults.look(self.settings.num_classes)
        return outcome

    def _new_block(self, max_batch: int, dtype: torch.dtype) -> fused_images.Block:
        return fused_images.new_block(max_batch, self.settings.embedding_dim, dtype, self.device)

    def _num_bytes(self, shape: StepShape) -> int:
        num_local, num_images = len(self.store.classes), shape.max_batch
        num_classes = num_local if shape.rate == 1 else sample_capacity(num_local, shape.rate, num_images)
        return step_bytes(
            num_classes * self.store.num_subcentres,
            num_images,
            self.settings.embedding_dim,
            shape.product_dtype.itemsize,
        )

    def _capture(self, shape: StepShape, step: int) -> CapturedStep:
        """Captures forward and update; runs nothing."""
        block = self._new_block(shape.max_batch, shape.embeddings_dtype)

        def forward() -> tuple[StepPlan, LossPart, Tensor]:
            return self._forward_packed(
                block, None, step=step, product_dtype=shape.product_dtype, for_backward=shape.for_backward
            )

        def update(part: LossPart) -> None:
            self._update_rows([part], None)
            self.store.seal.renew()

        return CapturedStep(shape, Recorder(self.device), block, forward, update)

    def _forward_packed(
        self,
        block: fused_images.Block,
        planned: StepPlan | None,
        *,
        step: int,
        product_dtype: torch.dtype,
        for_backward: ForBackward | None,
    ) -> tuple[StepPlan, LossPart, Tensor]:
        """Collective. The part of forward that reads the embeddings from the packed block."""
        gathered = fused_images.gather(block, self.group)
        images = fused_images.prepare(gathered, self.store, product_dtype)

        def note_faults(num_overflowed: Tensor) -> None:
            # After the all-reduce, which also counts the ranks whose list was too short: one launch records the first fault.
            fused_images.note_faults(
                self.faults.first_fault, gathered, images, num_overflowed, self.settings.num_classes, self._numbers.step
            )

        plan, part, loss = self._forward_gathered(images, note_faults, planned, step=step, for_backward=for_backward)
        if for_backward is not None:
            fused_images.make_room_for_weights(part)
        return plan, part, loss

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

    def update(
        self,
        plan: StepPlan,
        parts: list[LossPart],
        lr: float | Tensor,
        *,
        skip: bool | Tensor,
        loss_scale: float | Tensor,
        step: int,
        is_measured: bool,
    ) -> HeadStats | None:
        self._numbers.set_step(step)
        if self._can_update:
            self._numbers.set_factors(lr, loss_scale, skip if isinstance(skip, Tensor) else None)
        part, is_skipped = parts[0], not isinstance(skip, Tensor) and skip
        if isinstance(part, GraphedPart) and len(parts) == 1 and not is_measured and not is_skipped:
            part.captured.update(part)
            return None
        return super().update(plan, parts, lr, skip=skip, loss_scale=loss_scale, step=step, is_measured=is_measured)

    def _move_rows(self, plan: StepPlan, parts: list[LossPart], move: Move) -> None:
        if self._can_update:
            self._update_rows(parts, move.squares)
        else:
            move_rows(self.store, plan, parts, self._centre_gradient(parts), move, self._is_skipped(move))

    def _update_rows(self, parts: list[LossPart], squares: list[Tensor] | None) -> None:
        """Moves the rows by the factors that self._numbers holds."""
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
        # Each chunk is consumed before the next one is asked for: the kernel writes them into the same buffers.
        for chunk in self._centre_gradient(parts):
            fused_rows.update_(
                self.store,
                problem.classes_S,
                chunk,
                pulls,
                numbers=self._numbers,
                first_fault=self.faults.first_fault,
                squares=squares,
            )
