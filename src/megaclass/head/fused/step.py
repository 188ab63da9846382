"""A head's step on a GPU: the Triton programs around the products, bound to one head's centres and margin."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from megaclass.head.centres import Centres
from megaclass.head.cross_entropy import LossPart, Settled, settle
from megaclass.head.fused import images as fused_images
from megaclass.head.fused import rows as fused_rows
from megaclass.head.fused.images import Gathered, Images
from megaclass.head.gather_batch import largest_batch
from megaclass.head.kernels.problem import CentreGradient
from megaclass.head.margins import Margin, Targets
from megaclass.head.row_optimizers import Move


class FusedStep:
    """Each method does what its namesake in plain PyTorch does, in one or two launches, and waits for nothing."""

    def __init__(
        self, store: Centres, margin: Margin, num_classes: int, rank: int, group: dist.ProcessGroup | None
    ) -> None:
        self._store, self._margin, self._num_classes = store, margin, num_classes
        self._rank, self._group = rank, group
        self._margin_numbers = fused_images.margin_numbers(margin, store.weight_RD.device)
        self.can_update = fused_rows.can_update(store.optimizer)

    def gather(self, embeddings_BD: Tensor, labels_B: Tensor, *, step: int, max_batch: int | None) -> Gathered:
        if max_batch is None:
            max_batch = largest_batch(len(labels_B), labels_B.device, self._group)
        return fused_images.gather(
            embeddings_BD, labels_B, seal=self._store.seal, step=step, max_batch=max_batch, group=self._group
        )

    def prepare(self, gathered: Gathered, product_dtype: torch.dtype) -> Images:
        return fused_images.prepare(gathered, self._store, product_dtype)

    def draw(
        self, labels_G: Tensor, rate: float, seed: int, step: int, capacity: int, drawn_weight: float
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
        return fused_rows.draw(labels_G, self._store.classes, rate, seed, step, capacity, drawn_weight)

    def find_slots_(self, images: Images, classes_S: Tensor | None) -> None:
        if classes_S is not None:
            fused_images.find_slots_(images.slots_G, classes_S)

    def note_faults(
        self, sticky: Tensor, gathered: Gathered, images: Images, num_overflowed: Tensor, step: int
    ) -> None:
        fused_images.note_faults(sticky, gathered, images, num_overflowed, self._num_classes, step)

    def settle(
        self, targets: Targets, mass_G: Tensor, cosines_G: Tensor, num_images: Tensor, sticky: Tensor
    ) -> Settled:
        if self._margin_numbers is None:
            return settle(self._margin, targets, mass_G, cosines_G)
        return fused_images.settle(
            self._margin, self._margin_numbers, mass_G, cosines_G, targets.is_image_G, num_images, sticky
        )

    def grad_embeddings(
        self,
        part: LossPart,
        upstream: Tensor,
        num_images: Tensor,
        wants_images: bool,
        factor: float,
        dtype: torch.dtype,
    ) -> Tensor | None:
        return fused_images.grad_embeddings(
            part,
            upstream,
            num_images,
            wants_images=wants_images,
            rank=self._rank,
            group=self._group,
            factor=factor,
            dtype=dtype,
        )

    def update_(
        self, parts: list[LossPart], chunks: Iterable[CentreGradient], move: Move, squares: list[Tensor] | None
    ) -> None:
        """Consumes the centres' gradient chunk by chunk, the images' pulls on their own centres added."""
        problem, num_subcentres = parts[0].problem, self._store.num_subcentres
        slots, rows, images, weights = (
            values[0] if len(parts) == 1 else torch.cat(values)
            for values in (
                [part.problem.target_slot_G for part in parts],
                [part.own.rows_G for part in parts],
                [part.unit_GD for part in parts],
                [part.target_coefficients_G for part in parts],
            )
        )
        num_rows = problem.num_classes * num_subcentres
        pulls = fused_rows.link_pulls(slots, rows, images, weights, num_rows, num_subcentres)
        for chunk in chunks:
            fused_rows.update_(self._store, problem.classes_S, chunk, pulls, move, squares)
