"""The classifier: embeddings -> loss. Its classes are split over the ranks, and a share of them takes part in each step.

This file is the public class and the state of an open step; the arithmetic is in step_engine.py and its two
implementations, saving and moving in head_module.py.

State of a step: `_planned` is written by begin_step() and holds the plan for all its forwards. Backward appends to
`_parts` the plan and what the update needs of each forward; step() and abandon_step() clear both and advance `step_count`,
which every rank counts for itself and which the all-gather compares. All of it belongs to the thread that trains.

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
from megaclass.head.arguments import check_tensors, chosen_device, chosen_margin, chosen_optimizer
from megaclass.head.choose_engine import choose_engine
from megaclass.head.head_module import HeadModule
from megaclass.head.inspect import centres_of, closest_classes, cosines_with_all, nearest_to
from megaclass.head.margins import Margin
from megaclass.head.row_optimizers import RowOptimizer
from megaclass.head.sampling import SampleRate, rate_schedule
from megaclass.head.settings import HeadSettings, check_batch, check_embeddings
from megaclass.head.state.centres import STORAGE_DTYPES, Centres
from megaclass.head.state.shards import class_range
from megaclass.head.state.state_dict import ModuleState
from megaclass.head.step.cross_entropy import LossPart
from megaclass.head.step.gather_batch import gather_batch
from megaclass.head.step.plan import StepPlan
from megaclass.head.step.stats import HeadStats
from megaclass.head.stored_memory import default_stored_bytes


class PartialFC(HeadModule):
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
        group: dist.ProcessGroup | None = None,
        max_batch: int | None = None,
        gradient_scale: Literal["mean", "sum"] = "mean",
        kernel: str = "auto",
        storage: Literal["float32", "float64", "bf16"] = "float32",
        num_subcentres: int = 1,
        filter_above: float | None = None,
        correct_sampling: bool = False,
        stored_bytes: int | None = None,
        module_state: ModuleState = "refuse",
        device: torch.device | str | None = None,
    ) -> None:
        """Collective: the ranks compare their settings.

        embedding_dim: D. num_classes: C, over all ranks; at least one per rank.
        margin: ArcFace() by default; a name such as "cosface" stands for the margin with its published values.
        optimizer: RowSGD() by default, or a name: "sgd", "adamw", "adagrad".
        sample_rate: share of the negatives that take part, or [(first step, rate), …].
        seed: determines initial centres, drawn classes and rounding, independently of the number of ranks.
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
        module_state: behaviour of state_dict() of a module around a head on several ranks. "refuse" raises, "whole"
            gathers all classes (collective), "local" holds this rank's classes.
        device: by default the head moves to the device of the first embeddings it is given.
        """
        super().__init__()
        # A script of Lightning or Accelerate may end without destroying its group, which sometimes aborts the process.
        end_gloo_at_exit()
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
            fewest_classes=num_classes // self.world_size,
        )
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
        product_dtype = self._engine.product_dtype(embeddings_BD)
        is_training = torch.is_grad_enabled() and self.training
        with torch.no_grad(), _without_autocast(self.device):
            plan, part, loss = self._engine.forward(
                embeddings_BD.detach(),
                labels_B,
                self._planned,
                step=self.step_count,
                product_dtype=product_dtype,
                wants_grad_images=is_training and embeddings_BD.requires_grad,
                stored_bytes=self._stored_bytes() if is_training else 0,
            )
        if not is_training:
            return loss
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
        if self._planned is not None or self._parts:
            raise HeadError("begin_step() was called inside an open step: call step() first.")
        check_tensors(labels=labels)
        if labels.device.type != "cpu":
            self._settle_on(labels.device)
        with torch.no_grad():
            no_embeddings = torch.zeros((len(labels), 0), device=self.device)
            batch = gather_batch(no_embeddings, labels, step=self.step_count, max_batch=None, group=self.group)
            self._planned = self._engine.plan(batch.labels_G, batch.counts_W, self.step_count)

    @torch.no_grad()
    def step(
        self,
        lr: float | Tensor,
        *,
        skip: bool | Tensor = False,
        loss_scale: float | Tensor = 1.0,
        is_measured: bool = False,
    ) -> HeadStats | None:
        """Forms the centres' gradient, moves the rows that took part, advances the step counter. Sends nothing.

        skip: a flag, on the host or on the device, that leaves everything as it was. It must be the same on all ranks.
        loss_scale: the factor that the loss was multiplied by before backward.
        is_measured: returns statistics of the step, for which 16 bytes are all-reduced; None where the host saw skip,
            without meaning where skip masked the update on the device. The same on all ranks.
        """
        if not self._parts:
            raise HeadError("step() was called without a forward and a backward before it.")
        plan, parts = self._parts[0][0], [part for _, part in self._parts]
        stats = self._engine.update(
            plan, parts, lr, skip=skip, loss_scale=loss_scale, step=self.step_count, is_measured=is_measured
        )
        self._close_step()
        return stats

    def _settle_on(self, device: torch.device) -> None:
        """Moves a head that was built without `device` to that of the first tensors it is given."""
        if self._follows_embeddings and self._planned is None and not self._parts and self.device != device:
            self.to(device)
        self._follows_embeddings = False

    def _close_step(self) -> None:
        self.step_count += 1
        self._planned, self._parts = None, []

    def _add_part(self, plan: StepPlan, part: LossPart) -> None:
        """Called by backward: the part takes part in the next step()."""
        if self._parts and self._parts[0][0] is not plan:
            raise HeadError(
                "backward() came a second time before step(): for gradient accumulation hand all labels of the step to "
                "begin_step() first. Lightning's accumulate_grad_batches and Accelerate's accumulate() cannot do that: set "
                "them to 1, load the whole batch at once, and split it in the training step as the page "
                '"Use it in your own loop" (docs/own-loop.md) shows.'
            )
        self._parts.append((plan, part))

    @property
    def found_inf(self) -> Tensor:
        """0-d float32 on the device, 1 when this step must not count: for optimizers that take `found_inf`."""
        return (self._engine.faults.first_fault[0] != 0).float()

    def check(self) -> None:
        """Raises a fault that the host has not seen yet; on a GPU the host waits for the device."""
        self._engine.faults.look_now(self.num_classes)

    def abandon_step(self) -> None:
        """Drops the open step after an error in forward; the step counter advances as if it had been skipped."""
        self._engine.faults.clear()
        self._close_step()

    def forgive_fault(self) -> None:
        """Clears a fault that masked a step on a GPU, without raising it. The host does not wait."""
        self._engine.faults.clear()

    # ---- inspection and state ----------------------------------------------------------------------------------

    def centres(self, class_ids: Tensor) -> Tensor:
        """Collective. Returns the (N, D) centres of these classes on every rank; (N, M, D) with sub-centres.

        class_ids: (N,), the same on every rank. An all-reduce of N * M * D numbers.
        """
        return centres_of(self.store, class_ids, self.num_classes, self.group)

    def nearest(self, class_id: int, k: int = 10) -> tuple[Tensor, Tensor]:
        """Collective. Returns the k classes most similar to this one, best first: ids and cosines, the same on every rank.

        With sub-centres two classes are as similar as their closest pair. An all-reduce of M * D numbers, two
        all-gathers of W * k.
        """
        return nearest_to(self.store, class_id, k, self.num_classes, self.group)

    def logits(self, embeddings_BD: Tensor) -> Tensor:
        """Collective. Returns scale * cosine of these embeddings with all classes, (B, C), without margin and gradient.

        For the accuracy on a batch: `(head.logits(embeddings).argmax(1) == labels).float().mean()`. With sub-centres the
        closest one of a class counts. Each rank holds B * C numbers afterwards; predict() needs less memory. An all-gather
        of the embeddings, and one of B * C numbers per rank.
        """
        self._settle_on(embeddings_BD.device)
        check_embeddings(self.settings, embeddings_BD, self.rank, self.device)
        return cosines_with_all(self.store, embeddings_BD, self.num_classes, self.group).mul_(self.margin.scale)

    def predict(self, embeddings_BD: Tensor, k: int = 1) -> tuple[Tensor, Tensor]:
        """Collective. Returns the k classes closest to each embedding, best first: ids and cosines, both (B, k).

        Memory for 65,536 classes at a time. An all-gather of the embeddings, and two of W * G * k numbers.
        """
        self._settle_on(embeddings_BD.device)
        check_embeddings(self.settings, embeddings_BD, self.rank, self.device)
        return closest_classes(self.store, embeddings_BD, k, self.num_classes, self.group)

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
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        ctx.head._add_part(ctx.plan, ctx.part)
        with _without_autocast(upstream.device):
            grad_BD = ctx.head._engine.backward(ctx.plan, ctx.part, upstream, ctx.needs_input_grad[0], ctx.dtype)
        if grad_BD is not None:
            grad_BD = grad_BD[: ctx.num_images]
        return grad_BD, None, None, None, None, None
