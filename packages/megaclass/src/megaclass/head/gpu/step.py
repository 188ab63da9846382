"""The step on a GPU: Triton programs around the products, each in place of a dozen PyTorch operations.

    forward     pack          this rank's block: control word, labels, embeddings (and the check for foreign writes)
                all-gather
                prepare       unpack, normalise, cosine with the own class
                draw          the classes that take part (five launches)
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

import math

import torch
from torch import Tensor

from megaclass.head.gather_batch import largest_batch
from megaclass.head.gpu import images as gpu_images
from megaclass.head.gpu import rows as gpu_rows
from megaclass.head.gpu.kernel import MAX_INNER_LOGIT
from megaclass.head.gpu.rows import StepNumbers
from megaclass.head.losses import NegativeSums
from megaclass.head.margins import Margin, Targets
from megaclass.head.plain_step import PlainStep, of_labels
from megaclass.head.problem import Kernel
from megaclass.head.step import DrawnClasses, GatheredImages, LossesAndSlopes, LossPart, Move, StepContext, StepDraw


class FusedStep(PlainStep):
    """The fused kernel and the programs over rows, in a step whose work over the images is plain PyTorch.

    For several labels, weights and inner products. It costs some two hundred small launches, which a large step hides.
    """

    largest_inner_sum = math.exp(MAX_INNER_LOGIT)

    def __init__(self, context: StepContext, kernel: Kernel) -> None:
        super().__init__(context, kernel)
        # Not even under Triton's interpreter, which runs on a CPU.
        self._never_waits = True
        self._numbers = StepNumbers(context.device)

    def _sample(
        self, labels_G: Tensor, rate: float | Tensor, drawn_weight: float, step: int, capacity: int | None
    ) -> DrawnClasses:
        assert capacity is not None, "this step never waits"
        self._numbers.set_step(step)
        classes, seed = self.context.store.classes, self.context.settings.seed
        return gpu_rows.draw(labels_G, classes, rate, seed, self._numbers.step, capacity, drawn_weight)

    def _move_rows(self, draw: StepDraw, parts: list[LossPart], move: Move) -> None:
        store = self.context.store
        if not gpu_rows.can_update(store.optimizer):
            super()._move_rows(draw, parts, move)
            return
        self._numbers.set_step(move.step)
        self._numbers.set_factors(move.lr, move.loss_scale, move.skip)
        # All parts of a step share the drawn classes, so slots of the first one's problem are those of all.
        problem = parts[0].problem
        slots, rows, images, weights = (
            values[0] if len(parts) == 1 else torch.cat(values)
            for values in (
                [part.problem.target_slots_N for part in parts],
                [part.images.own_rows_N for part in parts],
                [of_labels(part.images.unit_GD, problem.max_labels) for part in parts],
                [part.target_coefficients_N.float() for part in parts],
            )
        )
        num_rows = problem.num_classes * store.num_subcentres
        # Each row's images as a list in the order of the batch: atomic additions would give other last bits in every run.
        pulls = gpu_rows.link_pulls(slots, rows, images, weights, num_rows, store.num_subcentres)
        # Each chunk is consumed before the next one is asked for: the kernel writes them into the same buffer.
        for chunk in self._centre_gradient(parts):
            gpu_rows.update_(
                store,
                problem.classes_S,
                chunk,
                pulls,
                numbers=self._numbers,
                first_fault=self.faults.first_fault,
                squares=move.squares,
            )


class FusedImagesStep(FusedStep):
    """The step of one label per image, compared by cosines: all of it in Triton programs."""

    def __init__(self, context: StepContext, kernel: Kernel) -> None:
        super().__init__(context, kernel)
        # None if the margin's derivative is not written out in a program: autograd forms it then.
        self._margin_now = context.settings.margin
        self._margin_numbers = gpu_images.margin_numbers(self._margin_now, context.device)

    def _gather(
        self, embeddings_BD: Tensor, words_B: Tensor, step: int, product_dtype: torch.dtype
    ) -> tuple[GatheredImages, gpu_images.Gathered]:
        context, max_batch = self.context, self.context.settings.max_batch
        if max_batch is None:
            # The only wait of this step: the gathered buffer cannot be allocated without the size.
            max_batch = largest_batch(len(words_B), words_B.device, context.group)
        self._numbers.set_step(step)
        # Also compares and renews the watched numbers of the centres, so a change counts once.
        gathered = gpu_images.gather(
            embeddings_BD,
            words_B,
            max_batch,
            check=context.store.overwrite_check,
            step=self._numbers.step,
            group=context.group,
        )
        return gpu_images.prepare(gathered, context.store, product_dtype), gathered

    def _note_overflow(
        self, gathered: gpu_images.Gathered, images: GatheredImages, sums: NegativeSums, num_overflowed: Tensor
    ) -> None:
        """Records the first fault of any kind in one launch, and looks at the copy of some forwards ago."""
        first_fault, num_classes = self.faults.first_fault, self.context.settings.num_classes
        gpu_images.note_faults(first_fault, gathered, images, num_overflowed, num_classes, self._numbers.step)
        self.faults.look(num_classes)

    def _losses(
        self,
        draw: StepDraw,
        images: GatheredImages,
        targets: Targets,
        sums: NegativeSums,
        cosines_N: Tensor,
        margin: Margin,
    ) -> LossesAndSlopes:
        if self._margin_numbers is None:
            return super()._losses(draw, images, targets, sums, cosines_N, margin)
        if margin != self._margin_now:
            gpu_images.write_margin_(margin, self._margin_numbers)
            self._margin_now = margin
        return gpu_images.finish_losses(
            margin,
            self._margin_numbers,
            sums.sum_G,
            cosines_N,
            images.is_image_G,
            draw.num_images,
            self.faults.first_fault,
        )

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
