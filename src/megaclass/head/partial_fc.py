"""The classifier: embeddings -> loss, its classes cut over the ranks, only a share of them taking part in a step.

Traffic of a step over W ranks, G = W * max_batch rows in all, embeddings of D numbers of b bytes:

    forward    all-gather       W * (16 + max_batch * (8 + D * b)) bytes: embeddings, labels, sizes, step
               all-reduce       8 * (2 * G + 1) bytes: softmax masses and target cosines
               (two of 8 * G and 8 * (G + 1) where the margin's negatives depend on the target)
    backward   reduce-scatter   4 * G * D bytes: gradient of the unit embeddings
    step       none: each rank holds every image's softmax over its own classes
               (an all-reduce of 16 bytes where it is measured)

Without `max_batch` the sizes are exchanged first: 8 bytes a rank, and the host waits for them.
"""

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megaclass.distributed.collectives import gather_blocks, group_rank, group_size, sum_over_ranks_
from megaclass.errors import HeadError
from megaclass.head.centres import STORAGE_DTYPES, Centres
from megaclass.head.counter_random import normals_from_bits, random_bits, stream_keys
from megaclass.head.cross_entropy import (
    LossPart,
    Settled,
    TargetRows,
    grad_embeddings,
    grad_norms,
    loss_part,
    settle,
)
from megaclass.head.faults import FaultWatch, find_fault, overflow_fault
from megaclass.head.gather_batch import GlobalBatch, gather_batch
from megaclass.head.head_state import (
    EXTRA,
    MODULE_STATES,
    ModuleState,
    StateHeader,
    gather_whole_rows,
    margin_state_in,
    name_tensors,
    refuse_part,
    rows_in,
)
from megaclass.head.kernels import choose_kernel, is_fused
from megaclass.head.kernels.problem import CentreGradient, Problem, rows_of_classes, unit_rows
from megaclass.head.margins import ArcFace, Margin, Targets
from megaclass.head.row_optimizers import Move, RowOptimizer, RowSGD
from megaclass.head.sampling import SampleRate, rate_schedule, sample_capacity, sample_classes
from megaclass.head.shards import ClassRange, class_range
from megaclass.head.step_stats import HeadMeasures, measure
from megaclass.keyed_random import Stream

if TYPE_CHECKING:
    from megaclass.head.fused.step import FusedStep

# The settings that ranks compare travel as text of this many bytes.
_SETTINGS_BYTES = 8192


@dataclass(slots=True)
class _StepPlan:
    """What is fixed for all forwards of a step: the classes that take part, and how many images there are."""

    classes_S: Tensor | None
    class_weight_S: Tensor | None
    num_drawn: Tensor | None
    overflowed: Tensor
    num_images: Tensor
    counts_W: Tensor
    """Images of each rank in the whole step."""
    counts_before: list[Tensor]
    """Images of each rank in the parts of the step already seen."""

    def places_W(self) -> Tensor:
        """Place in the step's global batch of each rank's next image."""
        return torch.stack([self.counts_W.cumsum(0) - self.counts_W, *self.counts_before]).sum(0)


class PartialFC(nn.Module):
    """Sharded, sampled margin softmax.

    >>> loss = head(embeddings_BD, labels_B)   # mean over the global batch, the same number on every rank
    >>> loss.backward()                        # forms the embeddings' gradient, nothing else
    >>> head.step(lr=0.1)                      # forms the centres' gradient and moves the rows that took part

    Ranks may bring different numbers of images, none included. The constructor, forward, backward and the methods
    marked collective must be called by every rank of `group`.
    """

    def __init__(
        self,
        embedding_dim: int,
        num_classes: int,
        *,
        margin: Margin | None = None,
        sample_rate: SampleRate = 1.0,
        optimizer: RowOptimizer | None = None,
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
        max_batch: int | None = None,
        gradient_scale: Literal["mean", "sum"] = "mean",
        kernel: str = "auto",
        storage: Literal["float32", "float64", "bf16"] = "float32",
        num_subcentres: int = 1,
        filter_above: float | None = None,
        correct_sampling: bool = False,
        stored_bytes: int = 4 << 30,
        module_state: ModuleState = "refuse",
        device: torch.device | str | None = None,
    ) -> None:
        """Collective (the ranks compare their settings).

        embedding_dim: D. num_classes: C, over all ranks; at least one a rank.
        margin: ArcFace() by default. optimizer: RowSGD() by default.
        sample_rate: share of the negatives that take part, or [(first step, rate), …].
        seed: fixes initial centres, draws and roundings, whatever the number of ranks.
        max_batch: most images a rank ever brings to a forward; lets a step run without waiting for sizes.
        gradient_scale: "mean" where the backbone's gradients are averaged over ranks afterwards (DDP), "sum" where
            they are summed.
        kernel: "auto", "triton_fused", "chunked" or "reference".
        storage: dtype of the centres; "bf16" rounds stochastically.
        num_subcentres: centres a class; an image counts for the closest one.
        filter_above: negatives with a larger cosine count as cosine 0 (noisy labels).
        correct_sampling: weigh the drawn negatives by 1 / sample rate, so that the denominator is right on average.
        stored_bytes: exponentials kept for backward; the rest is computed again.
        module_state: what state_dict() of a module around a head on several ranks does. "refuse" raises, "whole"
            gathers all classes (collective), "local" holds this rank's classes.
        """
        super().__init__()
        self.group, self.rank, self.world_size = group, group_rank(group), group_size(group)
        self.embedding_dim, self.num_classes, self.seed = embedding_dim, num_classes, seed
        self.margin = margin if margin is not None else ArcFace()
        self.optimizer = optimizer if optimizer is not None else RowSGD()
        self.rates = rate_schedule(sample_rate)
        self.max_batch, self.gradient_scale, self.stored_bytes = max_batch, gradient_scale, stored_bytes
        self.filter_above, self.correct_sampling = filter_above, correct_sampling
        self.module_state = module_state
        self.step_count = 0
        self._check_settings(storage, num_subcentres)
        self.classes = class_range(num_classes, self.rank, self.world_size)
        device = torch.device(device) if device is not None else torch.get_default_device()
        if device.type == "meta":
            raise HeadError("PartialFC cannot be built on the meta device, which holds no values: give device=.")
        self._kernel_name = kernel
        self.kernel = choose_kernel(kernel, device, margin=self.margin, storage=storage)
        self._check_agreement(storage, num_subcentres, device)
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
        self._bind()

    def _bind(self) -> None:
        """Forms what depends on the device and dtype of the centres, and on nothing else."""
        device = self.device
        self._fused: FusedStep | None = None
        if is_fused(self.kernel):
            from megaclass.head.fused import step as fused_step

            self._fused = fused_step.FusedStep(self.store, self.margin, self.num_classes, self.rank, self.group)
        # A device that may run behind the host is asked nothing within a step.
        self._never_waits = device.type == "cuda" or self._fused is not None
        # Lets loss.backward() reach the centres when the embeddings themselves are frozen.
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self._planned: _StepPlan | None = None
        self._parts: list[tuple[_StepPlan, LossPart]] = []
        self._faults = FaultWatch(device)

    # ---- the step ----------------------------------------------------------------------------------------------

    def forward(self, embeddings_BD: Tensor, labels_B: Tensor) -> Tensor:
        """Mean loss over the global batch (after `begin_step`: this part's share of it); the same on every rank.

        embeddings_BD: (B, D) floating, not normalised. labels_B: (B,) integers in [0, num_classes).
        """
        self._check_batch(embeddings_BD, labels_B)
        product_dtype = self._product_dtype(embeddings_BD)
        is_training = torch.is_grad_enabled() and self.training
        wants_grad_images = is_training and embeddings_BD.requires_grad
        forward = self._forward_fused if self._fused is not None else self._forward_plain
        with torch.no_grad(), torch.autocast(self.device.type, enabled=False):
            plan, part, loss = forward(
                embeddings_BD.detach(),
                labels_B,
                product_dtype=product_dtype,
                wants_grad_images=wants_grad_images,
                stored_bytes=self.stored_bytes if is_training else 0,
            )
        if not is_training:
            return loss
        plan.counts_before.append(part.counts_W)
        result: Tensor = _HeadLoss.apply(embeddings_BD, self._anchor, loss, self, plan, part)  # type: ignore[no-untyped-call]
        return result

    def begin_step(self, labels: Tensor) -> None:
        """Collective. Opens a step of several forwards (gradient accumulation).

        labels: all labels this rank will bring in the step, in order. The classes that take part and the mean are then
        those of the whole step, so that the parts add up to what one big batch gives. Two small all-gathers.
        """
        if self._planned is not None or self._parts:
            raise HeadError("begin_step() was called inside an open step: call step() first.")
        with torch.no_grad():
            nothing = torch.zeros((len(labels), 0), device=self.device)
            batch = gather_batch(nothing, labels, step=self.step_count, max_batch=None, group=self.group)
            self._planned = self._plan(batch.labels_G, batch.counts_W)

    @torch.no_grad()
    def step(
        self,
        lr: float | Tensor,
        *,
        skip: bool | Tensor = False,
        loss_scale: float | Tensor = 1.0,
        is_measured: bool = False,
    ) -> HeadMeasures | None:
        """Forms the centres' gradient, moves the rows that took part, advances the step counter. Sends nothing.

        skip: a flag, on the host or on the device, that leaves everything as it was. It must be the same on all ranks.
        loss_scale: what the loss was multiplied by before backward.
        is_measured: returns what the step was like, for which 16 bytes travel; None where skip was seen from the host,
            without meaning where it masked the update on the device. The same on all ranks.
        """
        if not self._parts:
            raise HeadError("step() was called without a forward and a backward before it.")
        # Only a flag that is on the host can be looked at; on a GPU one that is on the device masks the update there.
        # A GPU is not asked, because the host would wait: it compares before each forward only.
        is_overwritten = not self._never_waits and self.store.seal.note_change()
        if isinstance(skip, Tensor) and self._never_waits:
            squares = self._move(lr, skip.to(self.device), loss_scale, is_measured)
        elif not skip:
            squares = self._move(lr, None, loss_scale, is_measured)
        else:
            squares = None
        if not is_overwritten:
            self.store.seal.renew()
        measures = None if squares is None else self._measure(squares)
        for _, part in self._parts:
            part.problem.stored.clear()  # the loss may be kept a while; its exponentials are large
        self.step_count += 1
        self._planned, self._parts = None, []
        return measures

    @property
    def device(self) -> torch.device:
        return self.store.weight_RD.device

    @property
    def found_inf(self) -> Tensor:
        """0-d float32 on the device, 1 when this step must not count: for optimizers that take `found_inf`."""
        return (self._faults.sticky[0] != 0).float()

    def check(self) -> None:
        """Raises a fault that is still on its way; on a GPU the host waits for the device."""
        self._faults.look_now(self.num_classes)

    def abandon_step(self) -> None:
        """After an error in forward: drops the step under way; the step counter advances as if it had been skipped."""
        self._faults.clear()
        self.step_count += 1
        self._planned, self._parts = None, []

    def forgive_fault(self) -> None:
        """After a step that a fault masked on a GPU: goes on without raising it. The host does not wait."""
        self._faults.clear()

    # ---- inspection and state ----------------------------------------------------------------------------------

    @torch.no_grad()
    def centres(self, class_ids: Tensor) -> Tensor:
        """Collective. (N, D) centres of these classes on every rank; (N, M, D) with sub-centres.

        class_ids: (N,), the same on every rank. An all-reduce of N * M * D numbers.
        """
        outside = class_ids[(class_ids < 0) | (class_ids >= self.num_classes)]
        if len(outside):
            raise HeadError(f"centres() was asked for class {int(outside[0])}: it must lie in [0, {self.num_classes}).")
        local_N = class_ids.to(self.device) - self.classes.start
        is_here_N = (local_N >= 0) & (local_N < len(self.classes))
        rows = rows_of_classes(local_N, self.store.weight_RD, self.store.num_subcentres)
        centres_NMD = self.store.weight_RD[rows].to(self.store.work_dtype).unflatten(0, (-1, self.store.num_subcentres))
        centres_NMD = sum_over_ranks_(centres_NMD * is_here_N[:, None, None], self.group)
        return centres_NMD[:, 0] if self.store.num_subcentres == 1 else centres_NMD

    @torch.no_grad()
    def nearest(self, class_id: int, k: int = 10) -> tuple[Tensor, Tensor]:
        """Collective. The k classes most similar to this one, best first: ids and cosines, the same on every rank.

        With sub-centres two classes are as similar as their closest pair. An all-reduce of M * D numbers, two
        all-gathers of W * k.
        """
        if not 1 <= k < self.num_classes:
            raise HeadError(f"nearest() was asked for k={k}: it must lie in [1, {self.num_classes - 1}].")
        own = self.centres(torch.tensor([class_id])).reshape(-1, self.embedding_dim)
        cosines_K = self.store.cosines_to(unit_rows(own, self.store.work_dtype)[0])
        if self.classes.start <= class_id < self.classes.stop:
            cosines_K[class_id - self.classes.start] = -torch.inf
        top = cosines_K.topk(min(k, len(cosines_K)))
        # Every rank sends k of them; one that has fewer classes fills up with -inf.
        cosines_k = cosines_K.new_full((k,), -torch.inf)
        ids_k = torch.zeros(k, dtype=torch.int64, device=self.device)
        cosines_k[: len(top.values)], ids_k[: len(top.values)] = top.values, top.indices + self.classes.start
        cosines, ids = gather_blocks(cosines_k, self.group).flatten(), gather_blocks(ids_k, self.group).flatten()
        best = cosines.topk(k)
        return ids[best.indices], best.values

    def rows(self) -> dict[str, Tensor]:
        """This rank's centres and optimizer state, row for row: `weight`, and one entry per state tensor.

        They are the head's own tensors. Change them with load_rows(), or call accept_rows() afterwards.
        """
        return self.store.rows()

    def accept_rows(self) -> None:
        """Declares that a write to rows() was meant; without it the next forward may take it for an accident."""
        self.store.seal.renew()

    def load_rows(self, first_class: int, tensors: dict[str, Tensor]) -> None:
        """Copies what lies on this rank of rows saved by any rank of any world; first_class: the class of their row 0."""
        self.store.load_rows(first_class, tensors)

    def whole_state_dict(self) -> dict[str, Tensor]:
        """Collective. What state_dict() of this head would be on one rank: all classes, in host memory on every rank.

        load_state_dict() takes it on any number of ranks.
        """
        rows = gather_whole_rows(self.store, self.num_classes, self.group)
        return name_tensors(rows, self.margin_state, self._header(ClassRange(0, self.num_classes)))

    def get_extra_state(self) -> Tensor:
        return self._header(self.classes).to_tensor()

    def set_extra_state(self, state: Tensor | Mapping[str, int]) -> None:
        header, own = StateHeader.read(state), self.classes
        saved = header.classes
        if header.num_classes != self.num_classes or not saved.start <= own.start < own.stop <= saved.stop:
            raise HeadError(
                f"The state holds classes [{saved.start}, {saved.stop}) of {header.num_classes}, but rank {self.rank} of "
                f"{self.world_size} holds [{own.start}, {own.stop}) of {self.num_classes}: cut it anew with load_rows(), "
                f"or save with whole_state_dict(), which loads on any number of ranks."
            )
        self.step_count = header.step_count

    def _header(self, classes: ClassRange) -> StateHeader:
        return StateHeader(self.step_count, classes, self.num_classes)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        # A head that is asked by name (no prefix) answers with its own shard; a module around it may not know of shards.
        is_part = self.world_size > 1 and bool(prefix)
        if is_part and self.module_state == "refuse":
            what = f"state_dict() of the module that contains this head as {prefix.removesuffix('.')!r}"
            raise refuse_part(what, self.classes, self.num_classes, self.rank, self.world_size)
        if is_part and self.module_state == "whole":
            named = self.whole_state_dict()
        else:
            named = name_tensors(self.rows(), self.margin_state, self._header(self.classes))
        destination.update({prefix + name: tensor for name, tensor in named.items()})

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        for hook in self._load_state_dict_pre_hooks.values():
            hook(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        given = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
        known = name_tensors(self.rows(), self.margin_state, self._header(self.classes))
        missing_keys += [prefix + name for name in known if name not in given]
        unexpected_keys += [prefix + name for name in given if name not in known]
        given = {name: value for name, value in given.items() if name in known}
        rows = rows_in(given)
        if EXTRA in given:
            self.set_extra_state(given[EXTRA])
        elif rows and self.world_size > 1:
            raise HeadError(
                f"The state has centres but no {prefix}{EXTRA}, which says of which classes they are: on {self.world_size} "
                f"ranks it cannot be loaded. Keep that entry, or use load_rows()."
            )
        first_class = StateHeader.read(given[EXTRA]).classes.start if EXTRA in given else 0
        with torch.no_grad():
            self.store.load_some_rows(first_class, rows)
            for name, value in margin_state_in(given).items():
                self.margin_state[name].copy_(value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PartialFC":
        """`.to()`, `.cuda()`, `.double()` and their like: as for buffers, the margin's values staying float64."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        old = self.store.weight_RD
        probe = fn(old.new_empty(0))
        storage = next((name for name, dtype in STORAGE_DTYPES.items() if dtype == probe.dtype), None)
        if storage is None:
            raise HeadError(
                f"The head's centres cannot become {probe.dtype}: they are stored as one of {', '.join(STORAGE_DTYPES)} "
                f"(.float(), .double(), .bfloat16()). Convert the other parts of the model only: embeddings may be of any "
                f"floating dtype, and autocast leaves the head as it is."
            )
        is_moved = (probe.dtype, probe.device) != (old.dtype, old.device)
        if is_moved and (self._parts or self._planned is not None):
            raise HeadError("The head was moved or converted inside an open step: call step() first.")
        kernel = choose_kernel(self._kernel_name, probe.device, margin=self.margin, storage=storage)
        self.store.apply_(fn)
        for name, value in self.margin_state.items():
            moved = fn(value)
            self.margin_state[name] = moved if moved.dtype == value.dtype else value.to(moved.device)
        if is_moved:
            self.kernel = kernel
            self._bind()
        return self

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: everything but the step under way and what _bind() and the kernel's choice form anew."""
        formed = ("kernel", "_fused", "_never_waits", "_anchor", "_planned", "_parts", "_faults")
        return {name: value for name, value in vars(self).items() if name not in formed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.store.apply_(lambda tensor: tensor)
        storage = next(name for name, dtype in STORAGE_DTYPES.items() if dtype == self.store.weight_RD.dtype)
        self.kernel = choose_kernel(self._kernel_name, self.device, margin=self.margin, storage=storage)
        self._bind()

    def __deepcopy__(self, memo: dict[int, Any]) -> "PartialFC":
        # The copy belongs to the same ranks; a process group cannot be copied.
        memo[id(self.group)] = self.group
        other: PartialFC = self.__class__.__new__(self.__class__)
        memo[id(self)] = other
        other.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return other

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickling (torch.save of a module, a process that is handed one)."""
        if self.world_size > 1 and self.module_state != "local":
            raise refuse_part("A pickled head", self.classes, self.num_classes, self.rank, self.world_size)
        return super().__reduce_ex__(protocol)

    def extra_repr(self) -> str:
        return (
            f"{self.embedding_dim} -> {self.num_classes} classes, [{self.classes.start}, {self.classes.stop}) on rank "
            f"{self.rank} of {self.world_size}, {self.margin}, rates {self.rates.rates}, {self.optimizer}"
        )

    # ---- forward -----------------------------------------------------------------------------------------------

    def _plan(self, labels_G: Tensor, counts_W: Tensor) -> _StepPlan:
        """Which classes take part. Sends nothing: every rank knows all labels and draws its own classes.

        labels_G: below 0 for padding.
        """
        rate = self.rates.at(self.step_count)
        num_images = counts_W.sum(dtype=torch.float64)
        if rate == 1:
            return _StepPlan(None, None, None, torch.zeros_like(num_images), num_images, counts_W, [])
        # A GPU cannot say how many were drawn without a wait: there the list has a fixed, padded length.
        capacity = sample_capacity(len(self.classes), rate, len(labels_G)) if self._never_waits else None
        drawn_weight = 1 / rate if self.correct_sampling else 1.0
        if self._fused is not None:
            assert capacity is not None, "a fused step never waits"
            drawn = self._fused.draw(labels_G, rate, self.seed, self.step_count, capacity, drawn_weight)
            return _StepPlan(*drawn, num_images, counts_W, [])
        sample = sample_classes(
            labels_G, self.classes.start, len(self.classes), rate, self.seed, self.step_count, capacity
        )
        weight_S = None
        if self.correct_sampling or capacity is not None:
            weight_S = torch.full_like(sample.classes_S, drawn_weight, dtype=self.store.work_dtype)
            weight_S.masked_fill_(sample.is_positive_S, 1.0).masked_fill_(sample.classes_S >= len(self.classes), 0.0)
        return _StepPlan(sample.classes_S, weight_S, None, sample.overflowed.double(), num_images, counts_W, [])

    def _forward_plain(
        self,
        embeddings_BD: Tensor,
        labels_B: Tensor,
        *,
        product_dtype: torch.dtype,
        wants_grad_images: bool,
        stored_bytes: int,
    ) -> tuple[_StepPlan, LossPart, Tensor]:
        word = self.store.seal.control_word(self.step_count)
        batch = gather_batch(embeddings_BD, labels_B, step=word, max_batch=self.max_batch, group=self.group)
        plan = self._planned if self._planned is not None else self._plan(batch.labels_G, batch.counts_W)
        raw_GD = batch.embeddings_GD.to(self.store.work_dtype)
        norms_G = torch.linalg.vector_norm(raw_GD, dim=1)
        fault = find_fault(batch, norms_G, self.num_classes, self.step_count)
        self._faults.note(fault)
        self._faults.look(self.num_classes)
        self.store.seal.renew()
        unit_GD = raw_GD * torch.where(norms_G > 0, 1 / norms_G, 0)[:, None]
        own, slots_G = self._target_rows(batch, plan, unit_GD)
        problem = self._problem(plan, unit_GD.to(product_dtype), slots_G, wants_grad_images, stored_bytes)
        cosines_G = (unit_GD * own.unit_GD).sum(1).double()
        targets = self._targets(plan, cosines_G, norms_G.double(), batch.is_image_G, batch.max_batch)
        part = loss_part(
            batch.max_batch,
            problem,
            unit_GD,
            norms_G,
            own,
            kernel=self.kernel,
            margin=self.margin,
            targets=targets,
            overflowed=plan.overflowed,
            settle=lambda mass_G, cosines_G, _: settle(self.margin, targets, mass_G, cosines_G),
            counts_W=batch.counts_W,
            group=self.group,
        )
        self._faults.note(overflow_fault(fault, part.num_overflowed))
        return plan, part, self._mean_loss(plan, part.settled)

    def _forward_fused(
        self,
        embeddings_BD: Tensor,
        labels_B: Tensor,
        *,
        product_dtype: torch.dtype,
        wants_grad_images: bool,
        stored_bytes: int,
    ) -> tuple[_StepPlan, LossPart, Tensor]:
        """The same in a handful of launches."""
        fused, sticky = self._fused, self._faults.sticky
        assert fused is not None
        gathered = fused.gather(embeddings_BD, labels_B, step=self.step_count, max_batch=self.max_batch)
        images = fused.prepare(gathered, product_dtype)
        plan = self._planned if self._planned is not None else self._plan(images.labels_G, gathered.counts_W)
        fused.find_slots_(images, plan.classes_S)
        problem = self._problem(plan, images.operand_GD, images.slots_G, wants_grad_images, stored_bytes)
        max_batch = gathered.layout.max_batch
        targets = self._targets(plan, images.cosines_G, images.norms_G, images.is_image_G, max_batch)

        def settle_fused(mass_G: Tensor, cosines_G: Tensor, num_overflowed: Tensor) -> Settled:
            fused.note_faults(sticky, gathered, images, num_overflowed, self.step_count)
            return fused.settle(targets, mass_G, cosines_G, plan.num_images, sticky)

        part = loss_part(
            max_batch,
            problem,
            images.unit_GD,
            images.norms_G,
            images.own,
            kernel=self.kernel,
            margin=self.margin,
            targets=targets,
            overflowed=plan.overflowed,
            settle=settle_fused,
            counts_W=gathered.counts_W,
            group=self.group,
        )
        self._faults.look(self.num_classes)
        return plan, part, self._mean_loss(plan, part.settled)

    def _problem(
        self, plan: _StepPlan, unit_GD: Tensor, slots_G: Tensor, wants_grad_images: bool, stored_bytes: int
    ) -> Problem:
        return Problem(
            unit_GD=unit_GD,
            weight_RD=self.store.weight_RD,
            classes_S=plan.classes_S,
            target_slot_G=slots_G,
            class_weight_S=plan.class_weight_S,
            num_drawn=plan.num_drawn,
            num_subcentres=self.store.num_subcentres,
            scale=self.margin.scale,
            logit_bound=self.margin.logit_bound(),
            filter_above=self.filter_above,
            negative_logits=None,
            curriculum=None,
            wants_grad_images=wants_grad_images,
            stored_bytes=stored_bytes,
        )

    def _targets(
        self, plan: _StepPlan, cosines_G: Tensor, norms_G: Tensor, is_image_G: Tensor, max_batch: int
    ) -> Targets:
        # Bound now: the plan has moved on to the next part by the time a kernel computes logits again for backward.
        before = replace(plan, counts_before=list(plan.counts_before))
        return Targets(
            cosines_G=cosines_G,
            norms_G=norms_G,
            is_image_G=is_image_G,
            state=dict(self.margin_state),
            normals=lambda: self._normals(before.places_W(), max_batch),
        )

    def _mean_loss(self, plan: _StepPlan, settled: Settled) -> Tensor:
        if settled.mean_loss is not None:
            return settled.mean_loss
        assert settled.loss_sum is not None
        loss = settled.loss_sum / plan.num_images.clamp_min(1)
        return torch.where(self._faults.sticky[0] != 0, torch.nan, loss).to(self.store.work_dtype)

    def _target_rows(self, batch: GlobalBatch, plan: _StepPlan, unit_GD: Tensor) -> tuple[TargetRows, Tensor]:
        """The images' own centres, and the slot of their class among those that take part; -1 where not on this rank."""
        store, num_local = self.store, len(self.classes)
        local_G = batch.labels_G - self.classes.start
        is_here_G = batch.is_image_G & (local_G >= 0) & (local_G < num_local)
        rows_GM = rows_of_classes(torch.where(is_here_G, local_G, 0), store.weight_RD, store.num_subcentres)
        unit_GMD = unit_rows(store.weight_RD[rows_GM], store.work_dtype)[0].unflatten(0, (-1, store.num_subcentres))
        winner_G = torch.einsum("gd,gmd->gm", unit_GD, unit_GMD).argmax(1)
        picked = torch.arange(len(winner_G), device=winner_G.device)
        target_GD = unit_GMD[picked, winner_G] * is_here_G[:, None]
        rows_G = torch.where(is_here_G, rows_GM.unflatten(0, (-1, store.num_subcentres))[picked, winner_G], -1)
        slots_G = local_G if plan.classes_S is None else torch.searchsorted(plan.classes_S, local_G)
        return TargetRows(rows_G, target_GD), torch.where(is_here_G, slots_G, -1)

    def _normals(self, places_W: Tensor, max_batch: int) -> Tensor:
        """Keyed by the image's place in the step's global batch: padding and parts do not shift it."""
        places_G = (places_W[:, None] + torch.arange(max_batch, device=self.device)).flatten()
        keys = stream_keys(Stream.MARGIN_NOISE, self.seed, self.step_count)
        return normals_from_bits(random_bits(keys, places_G), torch.float64)

    def _product_dtype(self, embeddings_BD: Tensor) -> torch.dtype:
        """Half precision where a GPU's embeddings or autocast ask for it; a CPU multiplies in the work dtype."""
        if self.device.type == "cpu" or self.store.work_dtype == torch.float64:
            return self.store.work_dtype
        if torch.is_autocast_enabled(self.device.type):
            return torch.get_autocast_dtype(self.device.type)
        return embeddings_BD.dtype

    # ---- backward and update -----------------------------------------------------------------------------------

    def _backward(
        self, plan: _StepPlan, part: LossPart, upstream: Tensor, wants_images: bool, dtype: torch.dtype
    ) -> Tensor | None:
        if self._parts and self._parts[0][0] is not plan:
            raise HeadError(
                "backward() came a second time before step(): for gradient accumulation hand all labels of the step to "
                "begin_step() first."
            )
        self._parts.append((plan, part))
        # DDP divides the summed gradient by W; the loss is a mean over the global batch, not over the ranks' means.
        factor = self.world_size if self.gradient_scale == "mean" else 1
        if self._fused is not None:
            return self._fused.grad_embeddings(part, upstream, plan.num_images, wants_images, factor, dtype)
        image_weight_G = part.is_image_G * (upstream.double() / plan.num_images.clamp_min(1))
        part.weigh(image_weight_G)
        if not wants_images:
            return None
        grad_BD = grad_embeddings(part, self.kernel, self.rank, self.group)
        grad_BD += grad_norms(part, image_weight_G, self.rank)
        return (grad_BD * factor).to(dtype)

    def _move(
        self, lr: float | Tensor, skip: Tensor | None, loss_scale: float | Tensor, is_measured: bool
    ) -> list[Tensor] | None:
        """Where it is measured: sums of squares of the centres' gradient, chunk by chunk."""
        squares: list[Tensor] | None = [] if is_measured else None
        parts = [part for _, part in self._parts]
        statistics = [part.statistics for part in parts if part.statistics is not None]
        is_fused = self._fused is not None and self._fused.can_update
        is_skipped = None
        if self._never_waits and (statistics or not is_fused):
            is_skipped = self._faults.sticky[0] != 0
            is_skipped = is_skipped if skip is None else is_skipped | skip.bool()
        chunks = self.kernel.grad_centres([p.problem for p in parts], [p.negative_coefficients_G for p in parts])
        if self._fused is not None and is_fused:
            move = Move(lr=lr, loss_scale=loss_scale, sticky=self._faults.sticky, skip=skip, step=self.step_count)
            self._fused.update_(parts, chunks, move, squares)
        else:
            for chunk in chunks:
                won_R = self._add_targets_(chunk, parts)
                rows = parts[0].problem.rows_of(chunk.start, chunk.stop)
                mask_R = self._mask(chunk, won_R, is_skipped)
                is_scaled = isinstance(loss_scale, Tensor) or loss_scale != 1
                grad_RD = chunk.grad_RD / loss_scale if is_scaled else chunk.grad_RD
                self.store.update_(rows, grad_RD, mask_R, lr, self.step_count, squares)
        if statistics:
            state = self.margin_state
            for name, new in self.margin.next_state(state, torch.stack(statistics).sum(0)).items():
                state[name].copy_(new if is_skipped is None else torch.where(is_skipped, state[name], new))
        return squares

    def _measure(self, squares: list[Tensor]) -> HeadMeasures:
        plan, num_local = self._parts[0][0], len(self.classes)
        num_sampled = torch.full_like(plan.num_images, num_local)
        if plan.classes_S is not None:
            num_sampled = (plan.classes_S < num_local).sum()
        return measure(
            [part for _, part in self._parts],
            squares,
            num_images=plan.num_images,
            num_sampled=num_sampled,
            num_classes=self.num_classes,
            group=self.group,
        )

    def _add_targets_(self, chunk: CentreGradient, parts: list[LossPart]) -> Tensor | None:
        """Adds the images' pull on their own centres; returns which rows took part where not all did."""
        won_R = chunk.won_R
        num_subcentres = self.store.num_subcentres
        for part in parts:
            slots_G = part.problem.target_slot_G
            is_here_G = (slots_G >= chunk.start) & (slots_G < chunk.stop)
            places_G = (slots_G - chunk.start) * num_subcentres + part.own.rows_G % num_subcentres
            pulls_GD = part.unit_GD * part.target_coefficients_G.to(part.unit_GD.dtype)[:, None]
            # Images whose class is elsewhere add zero to the first row: asking how many are here would be a wait.
            places_G = torch.where(is_here_G, places_G, 0)
            chunk.grad_RD.index_add_(0, places_G, pulls_GD * is_here_G[:, None])
            if won_R is not None:
                hits_R = torch.zeros(len(won_R), dtype=torch.int32, device=self.device)
                won_R = won_R | (hits_R.index_add_(0, places_G, is_here_G.to(torch.int32)) > 0)
        return won_R

    def _mask(self, chunk: CentreGradient, won_R: Tensor | None, is_skipped: Tensor | None) -> Tensor | None:
        """Rows that move: not the padding of a fixed-length sample, not a losing sub-centre, nothing when skipped."""
        mask_R = won_R
        if is_skipped is not None:
            plan = self._parts[0][0]
            mask_R = ~is_skipped if mask_R is None else mask_R & ~is_skipped
            if plan.classes_S is not None:
                is_real_S = plan.classes_S[chunk.start : chunk.stop] < len(self.classes)
                mask_R = mask_R & is_real_S.repeat_interleave(self.store.num_subcentres)
            mask_R = mask_R.expand(len(chunk.grad_RD))
        return mask_R

    # ---- checks ------------------------------------------------------------------------------------------------

    def _check_settings(self, storage: str, num_subcentres: int) -> None:
        limits: list[tuple[str, Any, bool, str]] = [
            ("embedding_dim", self.embedding_dim, self.embedding_dim >= 1, "at least 1"),
            ("num_classes", self.num_classes, 1 <= self.num_classes < 2**31, "in [1, 2^31)"),
            ("num_subcentres", num_subcentres, 1 <= num_subcentres <= 255, "in [1, 255]"),
            ("max_batch", self.max_batch, self.max_batch is None or self.max_batch >= 1, "None or at least 1"),
            ("gradient_scale", self.gradient_scale, self.gradient_scale in ("mean", "sum"), "'mean' or 'sum'"),
            (
                "module_state",
                self.module_state,
                self.module_state in MODULE_STATES,
                f"one of {', '.join(MODULE_STATES)}",
            ),
            ("storage", storage, storage in STORAGE_DTYPES, f"one of {', '.join(STORAGE_DTYPES)}"),
            ("stored_bytes", self.stored_bytes, self.stored_bytes >= 0, "0 or more"),
            (
                "filter_above",
                self.filter_above,
                self.filter_above is None or 0 < self.filter_above <= 1,
                "None or a cosine in (0, 1]",
            ),
            (
                "correct_sampling",
                self.correct_sampling,
                not (self.correct_sampling and 0 in self.rates.rates),
                "False where a sample rate is 0: no negative is drawn, so none can stand for the others",
            ),
        ]
        for name, value, is_allowed, allowed in limits:
            if not is_allowed:
                raise HeadError(f"PartialFC {name} is {value!r}; it must be {allowed}.")

    def _check_agreement(self, storage: str, num_subcentres: int, device: torch.device) -> None:
        """An all-gather of 8 KiB a rank: ranks with different settings would compute different things in silence."""
        settings = {
            "embedding_dim": self.embedding_dim,
            "num_classes": self.num_classes,
            "margin": repr(self.margin),
            "optimizer": repr(self.optimizer),
            "sample_rate": list(zip(self.rates.starts, self.rates.rates, strict=True)),
            "seed": self.seed,
            "max_batch": self.max_batch,
            "gradient_scale": self.gradient_scale,
            "filter_above": self.filter_above,
            "correct_sampling": self.correct_sampling,
            "module_state": self.module_state,
            "storage": storage,
            "num_subcentres": num_subcentres,
        }
        text = json.dumps(settings).encode()
        if len(text) > _SETTINGS_BYTES:
            raise HeadError(
                f"The head's settings are {len(text)} bytes as text, more than {_SETTINGS_BYTES}: shorten sample_rate."
            )
        text = text.ljust(_SETTINGS_BYTES)
        block = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
        texts = [bytes(row.tolist()) for row in gather_blocks(block, self.group).cpu()]
        for other, theirs in enumerate(texts):
            if theirs != texts[0]:
                first, second = json.loads(texts[0]), json.loads(theirs)
                name = next(key for key in first if first[key] != second[key])
                raise HeadError(
                    f"Ranks disagree about the head: {name} is {first[name]} on rank 0 but {second[name]} on rank {other}. "
                    f"Give every rank the same settings."
                )

    def _check_batch(self, embeddings_BD: Tensor, labels_B: Tensor) -> None:
        now = group_rank(self.group), group_size(self.group)
        if now != (self.rank, self.world_size):
            raise HeadError(
                f"The head was built as rank {self.rank} of {self.world_size}, but this process is now rank {now[0]} of "
                f"{now[1]}. Build it after torch.distributed is initialised: under Lightning in configure_model(), under "
                f"Accelerate after Accelerator()."
            )
        if (
            embeddings_BD.ndim != 2
            or embeddings_BD.shape[1] != self.embedding_dim
            or not embeddings_BD.is_floating_point()
        ):
            raise HeadError(
                f"Rank {self.rank} brought embeddings of shape {tuple(embeddings_BD.shape)} and {embeddings_BD.dtype}; the "
                f"head expects (batch, {self.embedding_dim}) of a floating dtype. Set embedding_dim to the backbone's."
            )
        if labels_B.shape != embeddings_BD.shape[:1] or labels_B.is_floating_point():
            raise HeadError(
                f"Rank {self.rank} brought labels of shape {tuple(labels_B.shape)} and {labels_B.dtype} for "
                f"{len(embeddings_BD)} embeddings; expected one integer an embedding."
            )
        if self.max_batch is not None and len(labels_B) > self.max_batch:
            raise HeadError(
                f"Rank {self.rank} brought {len(labels_B)} images, more than max_batch={self.max_batch}: raise max_batch."
            )
        if embeddings_BD.device != self.device:
            raise HeadError(
                f"Embeddings are on {embeddings_BD.device}, the head is on {self.device}: move one of them."
            )


class _HeadLoss(torch.autograd.Function):
    """Hands the loss, already computed, to autograd; backward runs the gradient of the embeddings."""

    @staticmethod
    def forward(
        ctx: Any, embeddings_BD: Tensor, anchor: Tensor, loss: Tensor, head: PartialFC, plan: _StepPlan, part: LossPart
    ) -> Tensor:
        ctx.head, ctx.plan, ctx.part = head, plan, part
        ctx.num_images, ctx.dtype = len(embeddings_BD), embeddings_BD.dtype
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(upstream.device.type, enabled=False):
            grad_BD = ctx.head._backward(ctx.plan, ctx.part, upstream, ctx.needs_input_grad[0], ctx.dtype)
        if grad_BD is not None:
            grad_BD = grad_BD[: ctx.num_images]
        return grad_BD, None, None, None, None, None
