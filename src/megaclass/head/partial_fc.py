"""The classifier: embeddings -> loss. Its classes are split over the ranks, and a share of them takes part in each step.

This file is the public class and its step. The arithmetic is in step/engine.py and its two implementations, step/plain.py and
fused/step.py; saving and moving are in head_module.py, questions about the centres in inspected_head.py.

State of a step: `_open_step` (step/open_step.py) holds the plan that begin_step() makes for all forwards, and what the update
needs of each backward. step() and abandon_step() form a new one and advance `step_count`, which every rank counts for
itself and which the all-gather compares. All of it belongs to the thread that trains.

Traffic of a step over W ranks, G = W * max_batch rows in all, embeddings of D numbers of b bytes:

    forward    all-gather       W * (16 + max_batch * (8 + D * b)) bytes: embeddings, labels, sizes, step
               all-reduce       8 * (2 * G + 1) bytes: softmax masses and target cosines
               (two of 8 * G and 8 * (G + 1) where the margin's negatives depend on the target)
    backward   reduce-scatter   4 * G * D bytes: gradient of the unit embeddings
    step       none: each rank holds every image's softmax over its own classes
               (an all-reduce of 16 bytes where it is measured)

Without `max_batch` the ranks first all-gather their batch sizes, 8 bytes per rank, and the host waits for them.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megaclass.distributed.collectives import group_rank, group_size
from megaclass.distributed.gloo_exit import end_gloo_at_exit
from megaclass.errors import HeadError
from megaclass.gpu.cuda_graphs import CudaGraph
from megaclass.head.arguments import (
    HasGroup,
    check_tensors,
    chosen_device,
    chosen_group,
    chosen_margin,
    chosen_optimizer,
)
from megaclass.head.choose_engine import choose_engine
from megaclass.head.inspected_head import InspectedHead
from megaclass.head.margins import Margin
from megaclass.head.row_optimizers import RowOptimizer
from megaclass.head.sampling import SampleRate, rate_schedule
from megaclass.head.settings import HeadSettings, check_batch
from megaclass.head.state.centres import STORAGE_DTYPES, Centres
from megaclass.head.state.shards import class_range
from megaclass.head.state.state_dict import ModuleState
from megaclass.head.step.cross_entropy import LossPart
from megaclass.head.step.engine import ForBackward
from megaclass.head.step.followed_scaler import FollowedScaler, check_unscaled
from megaclass.head.step.gather_batch import gather_batch
from megaclass.head.step.open_step import OpenStep
from megaclass.head.step.plan import StepPlan
from megaclass.head.step.stats import HeadStats
from megaclass.head.stored_memory import default_stored_bytes


class PartialFC(InspectedHead):
    """Sharded, sampled margin softmax.

    >>> loss = head(embeddings_BD, labels_B)   # mean over the global batch, the same number on every rank
    >>> loss.backward()                        # forms the embeddings' gradient, nothing else
    >>> head.step(lr=0.1)                      # forms the centres' gradient and moves the rows that took part

    Ranks may bring different numbers of images, also none. The constructor, forward, backward and the methods
    marked collective must be called by every rank of `group`.
    """

    def __init__(
        self,
        embedding_dim: int,
        num_classes: int,
        *,
        margin: Margin | str | None = None,
        sample_rate: SampleRate = 1.0,
        optimizer: RowOptimizer | str | None = None,
        seed: int = 0,
        group: dist.ProcessGroup | HasGroup | None = None,
        max_batch: int | None = None,
        gradient_scale: Literal["mean", "sum"] = "mean",
        kernel: str = "auto",
        storage: Literal["float32", "float64", "bf16"] = "float32",
        num_subcentres: int = 1,
        filter_above: float | None = None,
        correct_sampling: bool = False,
        stored_bytes: int | None = None,
        cuda_graph: CudaGraph = "auto",
        module_state: ModuleState = "refuse",
        device: torch.device | str | None = None,
    ) -> None:
        """Collective: the ranks compare their settings.

        embedding_dim: D. num_classes: C, over all ranks; at least one per rank.
        margin: ArcFace() by default; a name such as "cosface" stands for the margin with its published values.
        optimizer: RowSGD() by default, or a name: "sgd", "adamw", "adagrad".
        sample_rate: share of the negatives that take part, or [(first step, rate), …].
        seed: determines initial centres, drawn classes and rounding, independently of the number of ranks.
        group: the ranks that share the head; by default all of torch.distributed's. A process set of Horovod's API will do.
        max_batch: largest number of images per rank and forward; with it no step waits for the batch sizes.
        gradient_scale: "mean" where the backbone's gradients are averaged over ranks afterwards (DDP), "sum" where
            they are summed.
        kernel: "auto", "triton_fused", "chunked" or "reference".
        storage: dtype of the centres; "bf16" rounds stochastically.
        num_subcentres: centres per class; an image is compared with the closest one.
        filter_above: negatives with a larger cosine count as cosine 0 (noisy labels).
        correct_sampling: weight drawn negatives by 1 / sample rate, so that the softmax denominator is unbiased.
        stored_bytes: most bytes of exponentials kept for backward; the rest is computed again. By default an eighth of the
            GPU's memory.
        cuda_graph: "auto" replays a step of `triton_fused` as CUDA graphs where starting its launches takes longer than
            running them: on one rank, with ArcFace, CosFace or no margin and a built-in optimizer, when its exponentials
            and unit centres take at most 1 GiB, after three steps of the same shape. That memory stays allocated between
            the steps. "on" lifts the limit of 1 GiB, "off" captures nothing. The results are the same.
        module_state: behaviour of state_dict() of a module around a head on several ranks. "refuse" raises, "whole"
            gathers all classes (collective), "local" holds this rank's classes.
        device: by default the head moves to the device of the first embeddings it is given.
        """
        super().__init__()
        # A script of Lightning or Accelerate may end without destroying its group, which sometimes aborts the process.
        end_gloo_at_exit()
        group = chosen_group(group)
        self.group, self.rank, self.world_size = group, group_rank(group), group_size(group)
        self.settings = HeadSettings(
            embedding_dim=embedding_dim,
            num_classes=num_classes,
            margin=chosen_margin(margin),
            optimizer=chosen_optimizer(optimizer),
            rates=rate_schedule(sample_rate),
            seed=seed,
            max_batch=max_batch,
            gradient_scale=gradient_scale,
            kernel=kernel,
            storage=storage,
            num_subcentres=num_subcentres,
            filter_above=filter_above,
            correct_sampling=correct_sampling,
            stored_bytes=stored_bytes,
            cuda_graph=cuda_graph,
            module_state=module_state,
        )
        self.embedding_dim, self.num_classes = embedding_dim, num_classes
        self.margin, self.optimizer = self.settings.margin, self.settings.optimizer
        self.step_count = 0
        self._default_stored: tuple[torch.device, int] | None = None
        self.classes = class_range(num_classes, self.rank, self.world_size)
        follows_embeddings, device = device is None, chosen_device(device, group)
        if device.type == "meta":
            raise HeadError("PartialFC cannot be built on the meta device, which holds no values: give device=.")
        # What this rank can judge alone comes first. Then the ranks compare, before each of them draws millions of centres.
        chosen = choose_engine(kernel, device, margin=self.margin, dtype=STORAGE_DTYPES[storage])
        self.settings.compare_between_ranks(device, group)
        self.store = Centres(
            self.classes,
            embedding_dim,
            num_subcentres,
            storage=storage,
            optimizer=self.optimizer,
            seed=seed,
            device=device,
            # Ranks hold one class more or less; all of them watch places of their centres that every rank has.
            fewest_classes=num_classes // self.world_size,
        )
        # On the device, where the update moves them: the host never reads them within a step.
        self.margin_state = {
            name: torch.tensor(value, dtype=torch.float64, device=device)
            for name, value in self.margin.initial_state.items()
        }
        self._start_engine(*chosen)
        self._follows_embeddings = follows_embeddings

    # ---- the step ----------------------------------------------------------------------------------------------

    def forward(self, embeddings_BD: Tensor, labels_B: Tensor) -> Tensor:
        """Collective. Returns the mean loss over the global batch, the same on every rank.

        After `begin_step` it is this part's share of the step's mean.

        embeddings_BD: (B, D) floating, not normalised.
        labels_B: (B,) integers in [0, num_classes).
        """
        check_tensors(embeddings=embeddings_BD, labels=labels_B)
        self._settle_on(embeddings_BD.device)
        built_as = self.rank, self.world_size
        check_batch(self.settings, embeddings_BD, labels_B, built_as, self.group, self.device)
        # Both are asked out here, because the block below switches off what they depend on: autocast and gradients.
        product_dtype = self._engine.product_dtype(embeddings_BD)
        for_backward = None
        if torch.is_grad_enabled() and self.training:
            for_backward = ForBackward(embeddings_BD.requires_grad, self._stored_bytes())
        # Autograd would keep the (G, S) logits and their exponentials. The head has a backward of its own, which keeps what
        # stored_bytes allows and computes the rest again.
        with torch.no_grad(), _without_autocast(self.device):
            plan, part, loss = self._engine.forward(
                embeddings_BD.detach(),
                labels_B,
                self._open_step.planned,
                step=self.step_count,
                product_dtype=product_dtype,
                for_backward=for_backward,
            )
        if for_backward is None:
            return loss
        # Random numbers of an image are keyed by its place in the step: those of the next forward come after these.
        plan.counts_before.append(part.images.counts_W)
        result: Tensor = _HeadLoss.apply(embeddings_BD, self._anchor, loss, self, plan, part)  # type: ignore[no-untyped-call]
        return result

    def _stored_bytes(self) -> int:
        if self.settings.stored_bytes is not None:
            return self.settings.stored_bytes
        # Asked once per device: later the step's own memory would count as taken.
        if self._default_stored is None or self._default_stored[0] != self.device:
            self._default_stored = self.device, default_stored_bytes(self.device)
        return self._default_stored[1]

    def begin_step(self, labels: Tensor) -> None:
        """Collective. Opens a step of several forwards (gradient accumulation). Two small all-gathers.

        labels: all labels this rank will bring in the step, in order. The classes that take part and the mean are then
        those of the whole step, so that the parts add up to what one big batch gives.
        """
        self._open_step.check_closed()
        check_tensors(labels=labels)
        # Labels on the CPU say nothing about where the embeddings will be.
        if labels.device.type != "cpu":
            self._settle_on(labels.device)
        with torch.no_grad():
            # The all-gather of forward, with embeddings of no columns. Not with max_batch, which bounds a single forward.
            no_embeddings = torch.zeros((len(labels), 0), device=self.device)
            batch = gather_batch(no_embeddings, labels, step=self.step_count, max_batch=None, group=self.group)
            self._open_step.planned = self._engine.plan(batch.labels_G, batch.counts_W, self.step_count)

    @torch.no_grad()
    def step(
        self,
        lr: float | Tensor,
        *,
        skip: bool | Tensor = False,
        loss_scale: float | Tensor | None = None,
        is_measured: bool = False,
    ) -> HeadStats | None:
        """Forms the centres' gradient, moves the rows that took part, advances the step counter. Sends nothing.

        skip: a flag, on the host or on the device, that leaves everything as it was. It must be the same on all ranks.
        loss_scale: the factor that the loss was multiplied by before backward and that is not meant as a weight. By default
            that of the scaler given to follow_scaler(), whose verdict is then followed, too; without a scaler 1.
        is_measured: returns statistics of the step, for which 16 bytes are all-reduced; None where the host saw skip,
            without meaning where skip masked the update on the device. The same on all ranks.
        """
        plan, parts = self._open_step.for_update()
        if self._scaler is not None:
            if loss_scale is not None:
                raise HeadError(
                    "head.step() was given loss_scale, but the head follows a GradScaler: leave loss_scale out."
                )
            loss_scale, is_skipped = self._scaler.loss_scale(self.device), self._scaler.is_skipped(self.device)
            skip = is_skipped if skip is False else torch.as_tensor(skip, device=self.device).bool() | is_skipped
        elif loss_scale is None:
            loss_scale = 1.0
            # A GPU is asked once, because the host waits for it: a scaler is there from the first step on.
            if self.device.type == "cpu" or not self._is_scale_checked:
                check_unscaled(self._open_step.upstream)
            self._is_scale_checked = True
        stats = self._engine.update(
            plan, parts, lr, skip=skip, loss_scale=loss_scale, step=self.step_count, is_measured=is_measured
        )
        if self._scaler is not None:
            self._engine.faults.forgive_not_finite()
        # Not before: where the update raises, the step stays open, and abandon_step() drops it.
        self._close_step()
        return stats

    def follow_scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        """Makes step() divide by the scale of this GradScaler and skip the steps that it skips; None ends it.

        Once, before the first backward. step() comes after scaler.step(optimizer); scaler.update() before or after it.
        Embeddings that are not finite are then no error: the loss and the gradients are NaN, so the scaler skips the step.
        """
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            raise HeadError(
                f"follow_scaler() was given {type(scaler).__name__}; expected torch.amp.GradScaler or None."
            )
        self._scaler = FollowedScaler(scaler) if scaler is not None and scaler.is_enabled() else None
        self._engine.faults.is_scaled = self._scaler is not None

    def _close_step(self) -> None:
        self.step_count += 1
        self._open_step = OpenStep()

    @property
    def found_inf(self) -> Tensor:
        """0-d float32 on the device, 1 when this step must not count: for optimizers that take `found_inf`."""
        # Formed on the device: an optimizer that takes it skips the same steps as the head, and the host waits for neither.
        return (self._engine.faults.first_fault[0] != 0).float()

    def check(self) -> None:
        """Raises a fault that the host has not seen yet; on a GPU the host waits for the device."""
        self._engine.faults.look_now(self.num_classes)

    def abandon_step(self) -> None:
        """Drops the open step after an error in forward; the step counter advances as if it had been skipped."""
        self._engine.faults.clear()
        # The other ranks close theirs, too: step counters that differ are a fault in the next forward.
        self._close_step()

    def forgive_fault(self) -> None:
        """Clears a fault that masked a step on a GPU, without raising it. The host does not wait."""
        self._engine.faults.clear()

    def extra_repr(self) -> str:
        return (
            f"{self.embedding_dim} -> {self.num_classes} classes, [{self.classes.start}, {self.classes.stop}) on rank "
            f"{self.rank} of {self.world_size}, {self.margin}, rates {self.settings.rates.rates}, {self.optimizer}"
        )


def _without_autocast(device: torch.device) -> AbstractContextManager[object]:
    # Entering torch's context costs 20 microseconds, also where there is nothing to switch off.
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


class _HeadLoss(torch.autograd.Function):
    """Hands the loss, already computed, to autograd; backward asks the engine for the gradient of the embeddings."""

    @staticmethod
    def forward(
        ctx: Any, embeddings_BD: Tensor, anchor: Tensor, loss: Tensor, head: PartialFC, plan: StepPlan, part: LossPart
    ) -> Tensor:
        ctx.head, ctx.plan, ctx.part = head, plan, part
        ctx.num_images, ctx.dtype = len(embeddings_BD), embeddings_BD.dtype
        # A copy: autograd would take an input that is returned as it is for a view of that input.
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        # First: a backward that must not come raises here, on every rank, before any of them enters the reduce-scatter.
        ctx.head._open_step.add(ctx.plan, ctx.part, upstream)
        if ctx.head._scaler is not None:
            ctx.head._scaler.note_backward()
        with _without_autocast(upstream.device):
            grad_BD = ctx.head._engine.backward(ctx.plan, ctx.part, upstream, ctx.needs_input_grad[0], ctx.dtype)
        if grad_BD is not None:
            # The rows behind are padding up to max_batch.
            grad_BD = ctx.head._engine.faults.masked(grad_BD[: ctx.num_images])
        return grad_BD, None, None, None, None, None
