"""The step in PyTorch operations, on any device.

On a CPU the host may look at values: the list of drawn classes has its exact length, a fault raises at once, and a skipped
step does no work. On a GPU the same operations run without a wait: the list has a fixed, padded length, and faults and
skips are masks.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megaclass.head.kernels.problem import CentreGradient, rows_of_classes, unit_rows
from megaclass.head.margins import Targets
from megaclass.head.row_optimizers import Move
from megaclass.head.sampling import sample_capacity, sample_classes
from megaclass.head.state.centres import Centres
from megaclass.head.step.cross_entropy import (
    GatheredImages,
    LossesAndSlopes,
    LossPart,
    TargetRows,
    finish_losses,
    grad_embeddings,
    grad_norms,
)
from megaclass.head.step.engine import ForBackward, NoteFaults, StepEngine
from megaclass.head.step.faults import find_fault, overflow_fault
from megaclass.head.step.gather_batch import GlobalBatch, gather_batch
from megaclass.head.step.plan import DrawnClasses, StepPlan


class PlainStep(StepEngine):
    """A step in PyTorch operations around a plain kernel."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.never_waits = self.device.type == "cuda"

    def _draw_classes(self, labels_G: Tensor, rate: float, step: int) -> DrawnClasses:
        own, is_corrected = self.store.classes, self.settings.correct_sampling
        # A GPU cannot tell the host how many were drawn without a wait: there the list has a fixed, padded length.
        capacity = sample_capacity(len(own), rate, len(labels_G)) if self.never_waits else None
        sample = sample_classes(labels_G, own.start, len(own), rate, self.settings.seed, step, capacity)
        weight_S = None
        if is_corrected or capacity is not None:
            # A positive takes part with certainty and is not corrected. Padding has weight 0: its exponentials do not count.
            drawn_weight = 1 / rate if is_corrected else 1.0
            weight_S = torch.full_like(sample.classes_S, drawn_weight, dtype=self.store.work_dtype)
            weight_S.masked_fill_(sample.is_positive_S, 1.0).masked_fill_(sample.classes_S >= len(own), 0.0)
        return DrawnClasses(sample.classes_S, weight_S, None, sample.overflowed.double())

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
        images, note_faults = self._gather_images(embeddings_BD, labels_B, step, product_dtype)
        return self._forward_gathered(images, note_faults, planned, step=step, for_backward=for_backward)

    def _gather_images(
        self, embeddings_BD: Tensor, labels_B: Tensor, step: int, product_dtype: torch.dtype
    ) -> tuple[GatheredImages, NoteFaults]:
        """Collective. Gathers the global batch and looks up the images' own centres."""
        word = self.store.seal.control_word(step)
        batch = gather_batch(embeddings_BD, labels_B, step=word, max_batch=self.settings.max_batch, group=self.group)
        # Lengths and unit vectors are formed in the work dtype: half precision would lose digits of the cosines.
        raw_GD = batch.embeddings_GD.to(self.store.work_dtype)
        norms_G = torch.linalg.vector_norm(raw_GD, dim=1)
        fault = find_fault(batch, norms_G, self.settings.num_classes, step)
        # All ranks find the same fault in the same gathered batch, and a CPU raises it here, before any further collective.
        self.faults.note(fault)
        self.faults.look(self.settings.num_classes)
        # All ranks have judged the control words by now, so a change of the centres counts once.
        self.store.seal.renew()
        unit_GD = raw_GD * torch.where(norms_G > 0, 1 / norms_G, 0)[:, None]
        own, local_ids_G = _target_rows(self.store, batch, unit_GD)
        images = GatheredImages(
            unit_GD=unit_GD,
            operand_GD=unit_GD.to(product_dtype),
            norms_G=norms_G,
            cosines_G=(unit_GD * own.unit_GD).sum(1).double(),
            labels_G=batch.labels_G,
            is_image_G=batch.is_image_G,
            own=own,
            local_ids_G=local_ids_G,
            counts_W=batch.counts_W,
            max_batch=batch.max_batch,
        )
        return images, lambda num_overflowed: self.faults.note(overflow_fault(fault, num_overflowed))

    def _find_slots(self, local_ids_G: Tensor, classes_S: Tensor) -> Tensor:
        # classes_S is ascending and contains every positive, so that the search always finds the class itself.
        return torch.where(local_ids_G >= 0, torch.searchsorted(classes_S, local_ids_G), -1)

    def _finish_losses(
        self, targets: Targets, mass_G: Tensor, cosines_G: Tensor, num_images: Tensor
    ) -> LossesAndSlopes:
        return finish_losses(self.margin, targets, mass_G, cosines_G)

    def backward(
        self, plan: StepPlan, part: LossPart, upstream: Tensor, wants_images: bool, dtype: torch.dtype
    ) -> Tensor | None:
        # num_images counts the whole step, also the parts that come later: the parts add up to the mean of one large batch.
        image_weight_G = part.images.is_image_G * (upstream.double() / plan.num_images.clamp_min(1))
        part.weigh(image_weight_G)
        if not wants_images:
            return None
        grad_BD = grad_embeddings(part, self.kernel, self.rank, self.group)
        grad_BD += grad_norms(part, image_weight_G, self.rank)
        return (grad_BD * self.gradient_factor).to(dtype)

    def _move_rows(self, plan: StepPlan, parts: list[LossPart], move: Move) -> None:
        move_rows(self.store, plan, parts, self._centre_gradient(parts), move, self._is_skipped(move))


def move_rows(
    store: Centres,
    plan: StepPlan,
    parts: list[LossPart],
    chunks: Iterator[CentreGradient],
    move: Move,
    is_skipped: Tensor | None,
) -> None:
    """StepEngine._move_rows for any optimizer. is_skipped: a mask on the device; None: the step counts."""
    # A tensor is never compared with 1: the host would wait for it.
    is_scaled = isinstance(move.loss_scale, Tensor) or move.loss_scale != 1
    for chunk in chunks:
        won_R = _add_targets_(chunk, parts, store.num_subcentres)
        mask_R = _mask(store, plan, chunk, won_R, is_skipped)
        grad_RD = chunk.grad_RD / move.loss_scale if is_scaled else chunk.grad_RD
        rows = parts[0].problem.rows_of(chunk.start, chunk.stop)
        store.update_(rows, grad_RD, mask_R, move.lr, move.step, move.squares)


def _target_rows(store: Centres, batch: GlobalBatch, unit_GD: Tensor) -> tuple[TargetRows, Tensor]:
    """Returns the images' own centres and the local ids of their classes; -1 where another rank owns the class."""
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
    return TargetRows(rows_G, target_GD), torch.where(is_here_G, local_G, -1)


def _add_targets_(chunk: CentreGradient, parts: list[LossPart], num_subcentres: int) -> Tensor | None:
    """Adds the images' pull on their own centres; returns which rows took part where not all did."""
    won_R = chunk.won_R
    for part in parts:
        slots_G, unit_GD = part.problem.target_slot_G, part.images.unit_GD
        is_here_G = (slots_G >= chunk.start) & (slots_G < chunk.stop)
        places_G = (slots_G - chunk.start) * num_subcentres + part.images.own.rows_G % num_subcentres
        pulls_GD = unit_GD * part.target_coefficients_G.to(unit_GD.dtype)[:, None]
        # Images whose class is elsewhere add zero to the first row: selecting those that are here would be a wait.
        places_G = torch.where(is_here_G, places_G, 0)
        chunk.grad_RD.index_add_(0, places_G, pulls_GD * is_here_G[:, None])
        if won_R is not None:
            hits_R = torch.zeros(len(won_R), dtype=torch.int32, device=won_R.device)
            won_R = won_R | (hits_R.index_add_(0, places_G, is_here_G.to(torch.int32)) > 0)
    return won_R


def _mask(
    store: Centres, plan: StepPlan, chunk: CentreGradient, won_R: Tensor | None, is_skipped: Tensor | None
) -> Tensor | None:
    """Returns the rows that move: no padding of a fixed-length sample, no losing sub-centre, nothing when skipped."""
    if is_skipped is None:
        return won_R
    # A 0-d mask where all rows share one fate; the last line gives it a length.
    mask_R = ~is_skipped if won_R is None else won_R & ~is_skipped
    if plan.drawn.classes_S is not None:
        is_real_S = plan.drawn.classes_S[chunk.start : chunk.stop] < len(store.classes)
        mask_R = mask_R & is_real_S.repeat_interleave(store.num_subcentres)
    return mask_R.expand(len(chunk.grad_RD))
