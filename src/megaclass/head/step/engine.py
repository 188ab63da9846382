"""The engine of a step: forward, backward and update of one head on one device.

`StepEngine` holds what every device does alike; `PlainStep` (PyTorch operations) and `FusedStep` (Triton programs on a
GPU) fill in the rest. PartialFC chooses one when it is built or moved, calls it, and keeps the state of the open step.

Collectives of a step, in order (sizes in partial_fc.py):

    forward     forward          all-gather of the batch: embeddings, labels, sizes, and a control word per rank
                loss_part        all-reduce of softmax masses and target cosines
    backward    backward         reduce-scatter of the gradient of the unit embeddings
    update      none; an all-reduce of 16 bytes where the step is measured

None of them depends on values that differ between ranks, and a world of one takes the same path.

State that outlives a step: the centres and their optimizer state (`store`, written by `update` alone), the margin's
running values (`margin_state`, likewise), and the first fault (`faults`, written by forward, read by update as a mask and
by the host when it is cheap to look).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megaclass.distributed.collectives import group_rank, group_size
from megaclass.head.counter_random import normals_from_bits, random_bits, stream_keys
from megaclass.head.kernels.problem import CentreGradient, Kernel, Problem
from megaclass.head.margins import Targets
from megaclass.head.row_optimizers import Move
from megaclass.head.settings import HeadSettings
from megaclass.head.state.centres import Centres
from megaclass.head.step.cross_entropy import GatheredImages, LossesAndSlopes, LossPart, loss_part
from megaclass.head.step.faults import FaultWatch
from megaclass.head.step.plan import DrawnClasses, StepPlan
from megaclass.head.step.stats import HeadStats, head_stats
from megaclass.keyed_random import Stream

NoteFaults = Callable[[Tensor], None]
"""Records a fault of a gathered batch on the device, given the number of ranks whose drawn classes did not fit."""


@dataclass(frozen=True, slots=True)
class ForBackward:
    """Demands on a forward that a backward follows."""

    wants_grad_images: bool
    """The embeddings need a gradient."""
    stored_bytes: int
    """Most bytes of exponentials kept; the rest is computed again."""


class StepEngine(ABC):
    """Computes the steps of one head. The step number is the head's and comes with every call."""

    never_waits = True
    """True where the host reads no value of the device within a step: decisions are then masks on the device."""

    def __init__(
        self,
        settings: HeadSettings,
        store: Centres,
        margin_state: dict[str, Tensor],
        kernel: Kernel,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.settings, self.store, self.margin_state, self.kernel = settings, store, margin_state, kernel
        self.margin, self.group, self.rank = settings.margin, group, group_rank(group)
        # DDP divides the summed gradient by W; the loss is a mean over the global batch, not over the ranks' means.
        self.gradient_factor = group_size(group) if settings.gradient_scale == "mean" else 1
        self.device = store.weight_RD.device
        self.faults = FaultWatch(self.device)

    # ---- filled in by the two implementations ------------------------------------------------------------------

    @abstractmethod
    def _draw_classes(self, labels_G: Tensor, rate: float, step: int) -> DrawnClasses:
        """Draws the classes of this rank that take part; labels_G: below 0 for padding."""

    @abstractmethod
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
        """Collective. Gathers the global batch, looks up the images' own centres and calls _forward_gathered.

        planned: the plan of a step opened by begin_step(); None makes one for this batch.
        for_backward: None where no backward follows.
        Returns the step's plan, what backward needs of this part, and the loss.
        """

    @abstractmethod
    def _find_slots(self, local_ids_G: Tensor, classes_S: Tensor) -> Tensor:
        """Returns the place of each local class among classes_S; -1 stays. May overwrite local_ids_G."""

    @abstractmethod
    def _finish_losses(
        self, targets: Targets, mass_G: Tensor, cosines_G: Tensor, num_images: Tensor
    ) -> LossesAndSlopes:
        """Forms losses and slopes from masses and target cosines over all ranks."""

    @abstractmethod
    def backward(
        self, plan: StepPlan, part: LossPart, upstream: Tensor, wants_images: bool, dtype: torch.dtype
    ) -> Tensor | None:
        """Collective where wants_images. Weighs the part's images and returns their (max_batch, D) gradient."""

    @abstractmethod
    def _move_rows(self, plan: StepPlan, parts: list[LossPart], move: Move) -> None:
        """Consumes _centre_gradient chunk by chunk, with the images' pulls on their own centres added."""

    # ---- the same for both -------------------------------------------------------------------------------------

    def plan(self, labels_G: Tensor, counts_W: Tensor, step: int) -> StepPlan:
        """Decides which classes take part. Sends nothing: every rank knows all labels and draws its own classes."""
        rate = self.settings.rates.at(step)
        drawn = DrawnClasses() if rate == 1 else self._draw_classes(labels_G, rate, step)
        return StepPlan(drawn, counts_W.sum(dtype=torch.float64), counts_W, [])

    def _forward_gathered(
        self,
        images: GatheredImages,
        note_faults: NoteFaults,
        planned: StepPlan | None,
        *,
        step: int,
        for_backward: ForBackward | None,
    ) -> tuple[StepPlan, LossPart, Tensor]:
        """Collective. The part of forward behind the all-gather.

        Faults of the batch mask the update but do not leave forward early on a GPU: the collectives stay in step.
        """
        plan = planned if planned is not None else self.plan(images.labels_G, images.counts_W, step)
        drawn, slots_G = plan.drawn, images.local_ids_G
        problem = Problem(
            unit_GD=images.operand_GD,
            weight_RD=self.store.weight_RD,
            classes_S=drawn.classes_S,
            target_slot_G=slots_G if drawn.classes_S is None else self._find_slots(slots_G, drawn.classes_S),
            class_weight_S=drawn.class_weight_S,
            num_drawn=drawn.num_drawn,
            num_subcentres=self.store.num_subcentres,
            scale=self.margin.scale,
            logit_bound=self.margin.logit_bound(),
            filter_above=self.settings.filter_above,
            wants_grad_images=for_backward is not None and for_backward.wants_grad_images,
            stored_bytes=0 if for_backward is None else for_backward.stored_bytes,
        )
        # Bound now: the plan has advanced to the next part by the time a kernel computes logits again for backward.
        plan_now = plan.at_this_part()
        targets = Targets(
            cosines_G=images.cosines_G,
            norms_G=images.norms_G.double(),
            is_image_G=images.is_image_G,
            state=dict(self.margin_state),
            normals=lambda: self._normals(plan_now.places_W(), images.max_batch, step),
        )

        def finish_losses(mass_G: Tensor, cosines_G: Tensor, num_overflowed: Tensor) -> LossesAndSlopes:
            note_faults(num_overflowed)
            return self._finish_losses(targets, mass_G, cosines_G, plan.num_images)

        part = loss_part(
            images,
            problem,
            targets,
            kernel=self.kernel,
            margin=self.margin,
            overflowed=plan.overflowed,
            finish_losses=finish_losses,
            group=self.group,
        )
        return plan, part, self._mean_loss(plan, part.losses)

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
        """Moves the rows that took part, and the margin's running values. Collective where is_measured."""
        # A GPU is not asked whether its centres were overwritten, because the host would wait: there the comparison
        # before each forward must suffice.
        is_overwritten = not self.never_waits and self.store.seal.note_change()
        # A flag on the device is not read by a host that never waits: it becomes a mask of the update.
        device_skip = None
        if isinstance(skip, Tensor) and self.never_waits:
            device_skip, skip = skip.to(self.device), False
        stats = None
        if not skip:
            squares: list[Tensor] | None = [] if is_measured else None
            move = Move(lr, loss_scale, self.faults.first_fault, device_skip, step, squares)
            self._move_rows(plan, parts, move)
            self._move_margin_state(parts, move)
            if squares is not None:
                stats = self._stats(plan, parts, squares)
        # A change by others stays visible to the comparison before the next forward, which raises on every rank.
        if not is_overwritten:
            self.store.seal.renew()
        for part in parts:
            part.problem.stored = None  # the loss may be kept a while; its exponentials are large
        return stats

    def product_dtype(self, embeddings_BD: Tensor) -> torch.dtype:
        """Returns half precision where a GPU's embeddings or autocast ask for it; a CPU multiplies in the work dtype."""
        if self.device.type == "cpu" or self.store.work_dtype == torch.float64:
            return self.store.work_dtype
        if torch.is_autocast_enabled(self.device.type):
            return torch.get_autocast_dtype(self.device.type)
        return embeddings_BD.dtype

    def _centre_gradient(self, parts: list[LossPart]) -> Iterator[CentreGradient]:
        """Forms the gradient of the unit centres from the negatives, chunk by chunk: the whole of it never exists."""
        return self.kernel.grad_centres(
            [part.problem for part in parts], [part.negative_coefficients_G for part in parts]
        )

    def _is_skipped(self, move: Move) -> Tensor | None:
        """Returns a flag on the device that masks the update; None where the host has already decided."""
        if not self.never_waits:
            return None
        has_fault = move.first_fault[0] != 0
        return has_fault if move.skip is None else has_fault | move.skip.bool()

    def _move_margin_state(self, parts: list[LossPart], move: Move) -> None:
        statistics = [part.statistics for part in parts if part.statistics is not None]
        if not statistics:
            return
        is_skipped, state = self._is_skipped(move), self.margin_state
        for name, new in self.margin.next_state(state, torch.stack(statistics).sum(0)).items():
            state[name].copy_(new if is_skipped is None else torch.where(is_skipped, state[name], new))

    def _stats(self, plan: StepPlan, parts: list[LossPart], squares: list[Tensor]) -> HeadStats:
        num_local, classes_S = len(self.store.classes), plan.drawn.classes_S
        num_sampled = torch.full_like(plan.num_images, num_local)
        if classes_S is not None:
            # Entries of num_local and above are the padding of a list of fixed length.
            num_sampled = (classes_S < num_local).sum()
        return head_stats(
            parts,
            squares,
            num_images=plan.num_images,
            num_sampled=num_sampled,
            num_classes=self.settings.num_classes,
            group=self.group,
        )

    def _mean_loss(self, plan: StepPlan, losses: LossesAndSlopes) -> Tensor:
        if losses.mean_loss is not None:
            return losses.mean_loss
        assert losses.loss_sum is not None
        # A step in which no rank brings an image has loss 0, not 0 / 0.
        loss = losses.loss_sum / plan.num_images.clamp_min(1)
        return torch.where(self.faults.first_fault[0] != 0, torch.nan, loss).to(self.store.work_dtype)

    def _normals(self, places_W: Tensor, max_batch: int, step: int) -> Tensor:
        """Draws one number per image, keyed by its place in the step's global batch: padding and parts do not shift it."""
        places_G = (places_W[:, None] + torch.arange(max_batch, device=self.device)).flatten()
        keys = stream_keys(Stream.MARGIN_NOISE, self.settings.seed, step)
        return normals_from_bits(random_bits(keys, places_G), torch.float64)
