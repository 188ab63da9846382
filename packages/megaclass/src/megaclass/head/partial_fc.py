"""The classifier: embeddings -> loss. Its classes are split over the ranks, and a share of them takes part in each step.

This file is the whole public class. The arithmetic of a step is in plain_step.py and gpu/step.py.

State of a step: `_open_step` (OpenStep in step.py) holds the draw that begin_step() makes for all forwards, and what the
update needs of each backward. step() and abandon_step() form a new one and advance `step_count`, which every rank counts
for itself and which the all-gather compares. All of it belongs to the thread that trains.

Traffic of a step over W ranks, G = W * max_batch rows in all, embeddings of D numbers of b bytes:

    forward    all-gather       W * (16 + max_batch * (8 + D * b)) bytes: embeddings, labels, sizes, step
               all-reduce       8 * (2 * G + 1) bytes: softmax masses and target cosines
               (two of 8 * G and 8 * (G + 1) if the margin's negatives depend on the target)
    backward   reduce-scatter   4 * G * D bytes: gradient of the unit embeddings
    step       none: each rank holds every image's softmax over its own classes
               (an all-reduce of 16 bytes if it is measured)

Without `max_batch` the ranks first all-gather their batch sizes, 8 bytes per rank, and the host waits for them.

The centres are neither parameters nor buffers: DistributedDataParallel and FSDP would overwrite them with those of rank 0, and
every rank holds classes of its own. This class saves, moves and copies them as nn.Module does buffers. A head on several ranks
is a part of the whole: state_dict() of the head itself returns this rank's classes; for a module around it, which may not
know that, the setting `module_state` decides.
"""

import copy
import importlib.util
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megaclass.errors import HeadError
from megaclass.head import chunked
from megaclass.head import state_dict as head_state
from megaclass.head.centres import STORAGE_DTYPES, Centres, class_range
from megaclass.head.faults import FaultWatch
from megaclass.head.followed_scaler import FollowedScaler, check_unscaled
from megaclass.head.gather_batch import gather_batch
from megaclass.head.labels import Labels, Weights, label_words, read_words
from megaclass.head.losses import LossName
from megaclass.head.margins import CurricularFace, Margin
from megaclass.head.plain_step import PlainStep
from megaclass.head.problem import Kernel, rows_of_classes
from megaclass.head.row_optimizers import RowOptimizer
from megaclass.head.sampling import Negatives, SampleRate, rate_schedule
from megaclass.head.settings import (
    HasGroup,
    HeadSettings,
    Similarity,
    check_batch,
    check_embeddings,
    check_tensors,
    checked_counts,
    chosen_device,
    chosen_group,
    chosen_margin,
    chosen_optimizer,
    default_stored_bytes,
    whole_number,
)
from megaclass.head.state_dict import EXTRA, ModuleState, StateHeader
from megaclass.head.step import ForBackward, HeadStats, LossPart, OpenStep, StepContext, StepDraw
from megaclass_launch.ranks.collectives import gather_blocks, group_rank, group_size, sum_over_ranks_
from megaclass_launch.ranks.gloo_exit import end_gloo_at_exit

_FUSED = "triton_fused"
# Classes that are compared with embeddings at a time.
_BLOCK_CLASSES = 1 << 16


class PartialFC(nn.Module):
    """Sharded, sampled margin softmax.

    >>> loss = head(embeddings_BD, labels_B)   # mean over the global batch, the same number on every rank
    >>> loss.backward()                        # forms the embeddings' gradient, nothing else
    >>> head.step(lr=0.1)                      # forms the centres' gradient and moves the rows that took part

    Ranks may bring different numbers of images, also none. The constructor, forward, backward and the methods
    marked collective must be called by every rank of `group`.
    """

    group: dist.ProcessGroup | None
    rank: int
    world_size: int
    settings: HeadSettings
    classes: range
    """Classes on this rank."""
    store: Centres
    """Centres and optimizer state of this rank; written by the engine's update and by loading."""
    margin_state: dict[str, Tensor]
    """The margin's running values, 0-d float64, the same on every rank; written by the engine's update and by loading."""
    step_count: int
    """Steps done; keys the random numbers of a step."""
    _follows_embeddings: bool = False
    """The head was built without a device, and moves to that of the first embeddings it is given."""

    _scaler: FollowedScaler | None = None
    """The GradScaler of the loop; copies of the head follow none."""
    _is_scale_checked: bool = False
    """A step without a scaler has shown that the loss is not multiplied by a loss scale."""

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
        sample_positives: bool = False,
        stored_bytes: int | None = None,
        module_state: ModuleState = "refuse",
        loss: LossName | None = None,
        max_labels: int = 1,
        weighted: bool = False,
        label_smoothing: float = 0.0,
        similarity: Similarity = "cosine",
        bias: bool = False,
        temperature: float | None = None,
        negatives: Negatives = "uniform",
        class_counts: Tensor | None = None,
        margin_schedule: Sequence[tuple[int, float]] = (),
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
        gradient_scale: "mean" if the backbone's gradients are averaged over ranks afterwards (DDP), "sum" if
            they are summed.
        kernel: "auto", "triton_fused" or "chunked".
        storage: dtype of the centres; "bf16" rounds stochastically.
        num_subcentres: centres per class; an image is compared with the closest one.
        filter_above: negatives with a larger cosine count as cosine 0 (noisy labels).
        correct_sampling: weight drawn negatives by 1 / sample rate, so the softmax denominator is unbiased.
        sample_positives: sample_rate is the share of all classes that take part, positives included, as in InsightFace: fewer
            negatives are drawn.
        stored_bytes: most bytes of exponentials kept for backward; the rest is computed again. By default an eighth of the
            GPU's memory.
        module_state: behaviour of state_dict() of a module around a head on several ranks. "refuse" raises, "whole"
            gathers all classes (collective), "local" holds this rank's classes.
        loss: "softmax", "decoupled" or "sigmoid" (losses.py); by default that of the margin.
        max_labels: most labels per image. weighted: forward is given weights.
        label_smoothing: share of an image's weight that is spread evenly over the classes that take part.
        similarity: "inner" compares by inner products, with NormalisedSoftmax or CosFace as the margin.
        bias: a learned bias per class, for inner products: the last number of each centre.
        temperature: logits are divided by it; it replaces the scale of the margin, which is its inverse.
        negatives: "uniform"; "frequencies" draws them in proportion to class_counts; "in-batch" draws uniformly and takes the
            labels of the other images for draws by frequency. The last two are always corrected for the sampling (logQ).
        class_counts: (C,) training images of each class, or their frequencies, the same on every rank.
        margin_schedule: [(step, share of the margin), …], linear in between: [(0, 0.0), (2000, 1.0)] is a warm-up.
        device: by default the head moves to the device of the first embeddings it is given.
        """
        super().__init__()
        # A script of Lightning or Accelerate may end without destroying its group, which sometimes aborts the process.
        end_gloo_at_exit()
        group = chosen_group(group)
        self.group, self.rank, self.world_size = group, group_rank(group), group_size(group)
        embedding_dim = whole_number("embedding_dim", embedding_dim)
        num_classes = whole_number("num_classes", num_classes)
        chosen = chosen_margin(margin, loss, similarity, temperature)
        counts_C, counts_digest = checked_counts(class_counts, num_classes)
        self.settings = HeadSettings(
            embedding_dim=embedding_dim,
            num_classes=num_classes,
            margin=chosen,
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
            sample_positives=sample_positives,
            stored_bytes=stored_bytes,
            module_state=module_state,
            loss=chosen.loss if loss is None else loss,
            max_labels=whole_number("max_labels", max_labels),
            is_weighted=weighted,
            label_smoothing=label_smoothing,
            similarity=similarity,
            has_bias=bias,
            negatives=negatives,
            margin_shares=tuple((int(step), float(share)) for step, share in margin_schedule),
            class_counts=counts_digest,
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
        engine = choose_engine(self.settings, device, dtype=STORAGE_DTYPES[storage])
        self.settings.compare_between_ranks(device, group)
        self.store = Centres(
            self.classes,
            self.settings.width,
            num_subcentres,
            storage=storage,
            optimizer=self.optimizer,
            seed=seed,
            device=device,
            # Ranks hold one class more or less; all of them watch places of their centres that every rank has.
            fewest_classes=num_classes // self.world_size,
            is_cosine=self.settings.is_cosine,
            has_bias=bias,
        )
        self._class_counts_C = None if counts_C is None else counts_C.to(device)
        # On the device, where the update moves them: the host never reads them within a step.
        self.margin_state = {
            name: torch.tensor(value, dtype=torch.float64, device=device)
            for name, value in self.margin.state_for(num_classes).items()
        }
        self._start_engine(*engine)
        self._follows_embeddings = follows_embeddings

    def _start_engine(self, engine: type[PlainStep], kernel: Kernel) -> None:
        """Forms what depends on the device and dtype of the centres, and on nothing else."""
        faults = FaultWatch(self.device)
        faults.is_scaled = self._scaler is not None
        counts_C = self._class_counts_C
        context = StepContext(self.settings, self.store, self.margin_state, self.group, faults, counts_C)
        self._engine = engine(context, kernel)
        # Lets loss.backward() reach the centres when the embeddings themselves are frozen.
        self._anchor = torch.zeros((), device=self.device, requires_grad=True)
        self._open_step = OpenStep()

    # ---- the step ----------------------------------------------------------------------------------------------

    def forward(self, embeddings_BD: Tensor, labels: Labels, weights: Weights | None = None) -> Tensor:
        """Collective. Returns the mean loss over the global batch, the same on every rank.

        After `begin_step` it is this part's share of the step's mean.

        embeddings_BD: (B, D) floating, not normalised.
        labels: (B,) integers in [0, num_classes). With max_labels above 1 also (B, up to max_labels), where -1 is padding, or a
            list with a list of labels for each image.
        weights: for a head with weighted=True. (B,) is one per image, which its labels share; for the loss sigmoid each label
            has it. Weights in the shape of the labels are taken as given (soft labels). The mean is over images, whatever they
            weigh.
        """
        check_tensors(embeddings=embeddings_BD)
        if self.settings.max_labels == 1:
            check_tensors(labels=labels, weights=weights)
        self._settle_on(embeddings_BD.device)
        built_as = self.rank, self.world_size
        check_batch(self.settings, embeddings_BD, labels, weights, built_as, self.group, self.device)
        # Both are asked out here, because the block below switches off what they depend on: autocast and gradients.
        product_dtype = self._engine.context.product_dtype(embeddings_BD)
        for_backward = None
        if torch.is_grad_enabled() and self.training:
            for_backward = ForBackward(embeddings_BD.requires_grad, self._stored_bytes())
        # Autograd would keep the (G, S) logits and their exponentials. The head has a backward of its own, which keeps what
        # stored_bytes allows and computes the rest again.
        with torch.no_grad(), _without_autocast(self.device):
            draw, part = self._engine.forward(
                self._widened(embeddings_BD.detach()),
                self._words(labels, weights),
                self._open_step.opened,
                step=self.step_count,
                product_dtype=product_dtype,
                for_backward=for_backward,
            )
        loss = part.losses.mean_loss
        if for_backward is None:
            return loss
        # Random numbers of an image are keyed by its place in the step: those of the next forward come after these.
        draw.counts_before.append(part.images.counts_W)
        result: Tensor = _HeadLoss.apply(embeddings_BD, self._anchor, loss, self, draw, part)  # type: ignore[no-untyped-call]
        return result

    def _stored_bytes(self) -> int:
        if self.settings.stored_bytes is not None:
            return self.settings.stored_bytes
        # Asked once per device: later the step's own memory would count as taken.
        if self._default_stored is None or self._default_stored[0] != self.device:
            self._default_stored = self.device, default_stored_bytes(self.device)
        return self._default_stored[1]

    def _words(self, labels: Labels, weights: Weights | None) -> Tensor:
        settings = self.settings
        is_shared = settings.loss != "sigmoid"
        words = label_words(labels, weights, settings.max_labels, settings.is_weighted, is_shared=is_shared)
        return words.to(self.device)

    def _widened(self, embeddings_BD: Tensor) -> Tensor:
        """Returns the embeddings with a 1 behind each, which meets the bias of the centres."""
        return nn.functional.pad(embeddings_BD, (0, 1), value=1.0) if self.settings.has_bias else embeddings_BD

    def begin_step(self, labels: Labels) -> None:
        """Collective. Opens a step of several forwards (gradient accumulation). Two small all-gathers.

        labels: all labels this rank will bring in the step, in order. The classes that take part and the mean are then
        those of the whole step, so the parts add up to what one big batch gives.
        """
        self._open_step.check_closed()
        if self.settings.max_labels == 1:
            check_tensors(labels=labels)
        # Labels on the CPU say nothing about where the embeddings will be.
        if isinstance(labels, Tensor) and labels.device.type != "cpu":
            self._settle_on(labels.device)
        with torch.no_grad():
            # The all-gather of forward, with embeddings of no columns. Not with max_batch, which bounds a single forward.
            no_embeddings = torch.zeros((len(labels), 0), device=self.device)
            words = self._words(labels, None)
            batch = gather_batch(no_embeddings, words, step=self.step_count, max_batch=None, group=self.group)
            labels_GP, _ = read_words(batch.labels_G, self.settings.max_labels)
            # The padding of the gathered block is -1 in all words.
            self._open_step.opened = self._engine.draw(labels_GP.flatten(), batch.counts_W, self.step_count)

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
            that of the scaler given to follow_scaler(), whose decision is then also followed; without a scaler 1.
        is_measured: returns statistics of the step, for which 16 bytes are all-reduced; None if the host saw skip,
            without meaning if skip masked the update on the device. The same on all ranks.
        """
        draw, parts = self._open_step.for_update()
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
            draw, parts, lr, skip=skip, loss_scale=loss_scale, step=self.step_count, is_measured=is_measured
        )
        if self._scaler is not None:
            self._engine.faults.forgive_not_finite()
        # Not before: if the update raises, the step stays open, and abandon_step() drops it.
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
        # The other ranks also close theirs: step counters that differ are a fault in the next forward.
        self._close_step()

    def forgive_fault(self) -> None:
        """Clears a fault that masked a step on a GPU, without raising it. The host does not wait."""
        self._engine.faults.clear()

    def extra_repr(self) -> str:
        return (
            f"{self.embedding_dim} -> {self.num_classes} classes, [{self.classes.start}, {self.classes.stop}) on rank "
            f"{self.rank} of {self.world_size}, {self.margin}, rates {self.settings.rates.rates}, {self.optimizer}"
        )

    # ---- questions about the centres -----------------------------------------------------------------------------

    @torch.no_grad()
    def centres(self, class_ids: Tensor) -> Tensor:
        """Collective. Returns the (N, D) centres of these classes on every rank; (N, M, D) with sub-centres.

        class_ids: (N,), the same on every rank. An all-reduce of N * M * D numbers.
        """
        store, num_subcentres = self.store, self.store.num_subcentres
        outside = class_ids[(class_ids < 0) | (class_ids >= self.num_classes)]
        if len(outside):
            raise HeadError(f"centres() was asked for class {int(outside[0])}: it must lie in [0, {self.num_classes}).")
        local_N = class_ids.to(self.device) - self.classes.start
        is_here_N = (local_N >= 0) & (local_N < len(self.classes))
        rows = rows_of_classes(local_N, store.weight_RD, num_subcentres)
        centres_NMD = store.weight_RD[rows].to(store.work_dtype).unflatten(0, (-1, num_subcentres))
        # Exactly one rank owns a class, so the sum over ranks, zeros elsewhere, is its centre.
        centres_NMD = sum_over_ranks_(centres_NMD * is_here_N[:, None, None], self.group)
        return centres_NMD[:, 0] if num_subcentres == 1 else centres_NMD

    @torch.no_grad()
    def minor_subcentres(self, k: int = 1000) -> tuple[int, int, list[tuple[int, int, int]]]:
        """Collective. Returns how many images had another sub-centre than the most frequent one of their class.

        Such images are often mislabelled. Counted are the steps since store.num_wins_R was set to zero: the training does so at
        the start of every epoch. Returns the number of images, of those in minor sub-centres, and (class, images, images in
        minor sub-centres) of the k classes that have most of the latter. An all-gather of 24 * k bytes per rank.
        """
        wins_KM = self.store.num_wins_R.view(-1, self.store.num_subcentres).long()
        images_K = wins_KM.sum(1)
        minor_K = images_K - wins_KM.amax(1)
        totals = sum_over_ranks_(torch.stack([images_K.sum(), minor_K.sum()]), self.group).tolist()
        best = minor_K.topk(min(k, len(minor_K))).indices
        found = torch.stack([best + self.classes.start, images_K[best], minor_K[best]], 1)
        # Every rank sends k rows; one with fewer classes fills up with zeros.
        rows = gather_blocks(nn.functional.pad(found, (0, 0, 0, k - len(found))), self.group).flatten(0, 1)
        order = rows[:, 2].argsort(descending=True, stable=True)[:k]
        return totals[0], totals[1], [(row[0], row[1], row[2]) for row in rows[order].tolist() if row[2] > 0]

    @torch.no_grad()
    def logits(self, embeddings_BD: Tensor) -> Tensor:
        """Collective. Returns scale * cosine of these embeddings with all classes, (B, C), without margin and gradient.

        With sub-centres the closest one of a class counts. For few classes: traffic and memory are those of predict() for
        k = C, W * G * C numbers. The accuracy on a batch needs predict(embeddings)[0] only.
        """
        ids_BC, cosines_BC = self.predict(embeddings_BD, self.num_classes)
        return torch.empty_like(cosines_BC).scatter_(1, ids_BC, cosines_BC).mul_(self.margin.scale)

    @torch.no_grad()
    def predict(self, embeddings_BD: Tensor, k: int = 1) -> tuple[Tensor, Tensor]:
        """Collective. Returns the k classes closest to each embedding, best first: ids and cosines, both (B, k).

        Memory for 65,536 classes at a time. An all-gather of the embeddings, and two of W * G * k numbers.
        """
        if not 1 <= k <= self.num_classes:
            raise HeadError(f"predict() was asked for k={k}: it must lie in [1, {self.num_classes}].")
        self._settle_on(embeddings_BD.device)
        check_embeddings(self.settings, embeddings_BD, self.rank, self.device)
        unit_BD = self.store.directions(self._widened(embeddings_BD.detach()))[0]
        labels_B = torch.zeros(len(unit_BD), dtype=torch.int64, device=unit_BD.device)
        batch = gather_batch(unit_BD, labels_B, step=0, max_batch=None, group=self.group)
        cosines_Gk = batch.embeddings_GD.new_full((len(batch.embeddings_GD), k), -torch.inf)
        ids_Gk = torch.zeros_like(cosines_Gk, dtype=torch.int64)
        num_subcentres, first = self.store.num_subcentres, self.classes.start
        with _without_autocast(self.device):
            for block in self.store.weight_RD.split(_BLOCK_CLASSES * num_subcentres):
                cosines_GR = batch.embeddings_GD @ self.store.directions(block)[0].T
                # The closest sub-centre of a class counts.
                cosines_GS = cosines_GR.unflatten(1, (-1, num_subcentres)).amax(2)
                ids_S = torch.arange(first, first + cosines_GS.shape[1], device=self.device).expand_as(cosines_GS)
                cosines_Gk, ids_Gk = _best(torch.cat([cosines_Gk, cosines_GS], 1), torch.cat([ids_Gk, ids_S], 1), k)
                first += _BLOCK_CLASSES
        cosines = gather_blocks(cosines_Gk, self.group).transpose(0, 1).flatten(1)
        ids = gather_blocks(ids_Gk, self.group).transpose(0, 1).flatten(1)
        start = self.rank * batch.max_batch
        own = slice(start, start + len(embeddings_BD))
        best, best_ids = _best(cosines[own], ids[own], k)
        return best_ids, best

    # ---- as a torch module: state dicts, moves and conversions, copies and pickles -----------------------------------

    @property
    def device(self) -> torch.device:
        return self.store.weight_RD.device

    @property
    def kernel(self) -> Kernel:
        return self._engine.kernel

    def _settle_on(self, device: torch.device) -> None:
        """Moves a head that was built without `device` to that of the first tensors it is given."""
        if self._follows_embeddings and not self._open_step.is_open and self.device != device:
            self.to(device)
        # Once: from now on embeddings on another device are a mistake, which check_embeddings() explains.
        self._follows_embeddings = False

    def rows(self) -> dict[str, Tensor]:
        """Returns this rank's centres and optimizer state, row for row: `weight`, and one entry per state tensor.

        They are the head's own tensors. Change them with load_rows(), or call accept_rows() afterwards.
        """
        return self.store.rows()

    def accept_rows(self) -> None:
        """Declares that a write to rows() was intended; without it the next forward may take it for an accident."""
        self.store.overwrite_check.renew()

    def load_rows(self, first_class: int, tensors: dict[str, Tensor]) -> None:
        """Copies the part of the rows that belongs to this rank, whatever number of ranks saved them.

        first_class: class of row 0.
        """
        self.store.load_rows(first_class, tensors)

    def whole_state_dict(self) -> dict[str, Tensor]:
        """Collective. Returns the state dict of the head on one rank: all classes, in host memory on every rank.

        load_state_dict() accepts it on any number of ranks.
        """
        rows = head_state.gather_whole_rows(self.store, self.settings.num_classes, self.group)
        return head_state.name_tensors(rows, self.margin_state, self._header(range(self.settings.num_classes)))

    def get_extra_state(self) -> Tensor:
        return self._header(self.classes).to_tensor()

    def set_extra_state(self, state: Tensor | Mapping[str, int]) -> None:
        header, own = StateHeader.read(state), self.classes
        saved = header.classes
        if header.num_classes != self.settings.num_classes or not saved.start <= own.start < own.stop <= saved.stop:
            is_shard = header.num_classes == self.settings.num_classes
            raise HeadError(
                f"The state holds classes [{saved.start}, {saved.stop}) of {header.num_classes}"
                f"{', the part of one rank as state_dict() returns it' if is_shard else ''}, but rank {self.rank} of "
                f"{self.world_size} holds [{own.start}, {own.stop}) of {self.settings.num_classes}: load it with load_rows(), "
                f"or save with whole_state_dict(), which loads on any number of ranks."
            )
        self.step_count = header.step_count

    def _header(self, classes: range) -> StateHeader:
        return StateHeader(self.step_count, classes, self.settings.num_classes)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        # Without a prefix the head itself was asked, and the caller knows that it gets a shard.
        is_part = self.world_size > 1 and bool(prefix)
        if is_part and self.settings.module_state == "refuse":
            what = f"state_dict() of the module that contains this head as {prefix.removesuffix('.')!r}"
            raise head_state.refuse_part(what, self.classes, self.settings.num_classes, self.rank, self.world_size)
        if is_part and self.settings.module_state == "whole":
            named = self.whole_state_dict()
        else:
            named = head_state.name_tensors(self.rows(), self.margin_state, self._header(self.classes))
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
        known = head_state.name_tensors(self.rows(), self.margin_state, self._header(self.classes))
        missing_keys += [prefix + name for name in known if name not in given]
        unexpected_keys += [prefix + name for name in given if name not in known]
        given = {name: value for name, value in given.items() if name in known}
        rows = head_state.rows_in(given)
        if EXTRA in given:
            self.set_extra_state(given[EXTRA])
        elif rows and self.world_size > 1:
            raise HeadError(
                f"The state has centres but no {prefix}{EXTRA}, which names their classes: it cannot be loaded on "
                f"{self.world_size} ranks. Keep that entry, or use load_rows()."
            )
        first_class = StateHeader.read(given[EXTRA]).classes.start if EXTRA in given else 0
        with torch.no_grad():
            self.store.load_some_rows(first_class, rows)
            for name, value in head_state.margin_state_in(given).items():
                self.margin_state[name].copy_(value)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PartialFC":
        """Moves and converts as for buffers (`.to()`, `.cuda()`, `.double()`); the margin's values stay float64."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        old = self.store.weight_RD
        probe = fn(old.new_empty(0))
        if probe.dtype not in STORAGE_DTYPES.values():
            raise HeadError(
                f"The head's centres cannot become {probe.dtype}: they are stored as one of {', '.join(STORAGE_DTYPES)} "
                f"(.float(), .double(), .bfloat16()). Convert the other parts of the model only: embeddings may be of any "
                f"floating dtype, and autocast leaves the head as it is."
            )
        is_moved = (probe.dtype, probe.device) != (old.dtype, old.device)
        if is_moved and self._open_step.is_open:
            raise HeadError("The head was moved or converted inside an open step: call step() first.")
        chosen = self._choose_engine(probe)
        self.store.apply_(fn)
        if self._class_counts_C is not None:
            self._class_counts_C = self._class_counts_C.to(probe.device)
        for name, value in self.margin_state.items():
            moved = fn(value)
            self.margin_state[name] = moved if moved.dtype == value.dtype else value.to(moved.device)
        if is_moved:
            self._start_engine(*chosen)
        if probe.device != old.device:
            # The user, or a wrapper such as DDP, has chosen.
            self._follows_embeddings = False
        return self

    def _choose_engine(self, weight: Tensor) -> tuple[type[PlainStep], Kernel]:
        return choose_engine(self.settings, weight.device, dtype=weight.dtype)

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state for copies and pickles: all but the scaler, the open step and what _start_engine() forms."""
        formed = ("_engine", "_anchor", "_open_step", "_scaler")
        return {name: value for name, value in vars(self).items() if name not in formed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.store.apply_(lambda tensor: tensor)
        self._start_engine(*self._choose_engine(self.store.weight_RD))

    def __deepcopy__(self, memo: dict[int, Any]) -> "PartialFC":
        # The copy belongs to the same ranks; a process group cannot be copied.
        memo[id(self.group)] = self.group
        other: PartialFC = self.__class__.__new__(self.__class__)
        memo[id(self)] = other
        other.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return other

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuses to pickle one rank's part of a head (torch.save of a module, or handing it to another process)."""
        if self.world_size > 1 and self.settings.module_state != "local":
            raise head_state.refuse_part(
                "A pickled head", self.classes, self.settings.num_classes, self.rank, self.world_size
            )
        return super().__reduce_ex__(protocol)


def _best(cosines: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    top = cosines.topk(k, dim=1)
    return top.values, ids.gather(1, top.indices)


def _without_autocast(device: torch.device) -> AbstractContextManager[object]:
    # Entering torch's context costs 20 microseconds, also if there is nothing to switch off.
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


class _HeadLoss(torch.autograd.Function):
    """Hands the loss, already computed, to autograd; backward asks the engine for the gradient of the embeddings."""

    @staticmethod
    def forward(
        ctx: Any, embeddings_BD: Tensor, anchor: Tensor, loss: Tensor, head: PartialFC, draw: StepDraw, part: LossPart
    ) -> Tensor:
        ctx.head, ctx.draw, ctx.part = head, draw, part
        ctx.num_images, ctx.dtype = len(embeddings_BD), embeddings_BD.dtype
        # A copy: autograd would take an input that is returned as it is for a view of that input.
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        # First: a backward that must not come raises here, on every rank, before any of them enters the reduce-scatter.
        ctx.head._open_step.add(ctx.draw, ctx.part, upstream)
        if ctx.head._scaler is not None:
            ctx.head._scaler.note_backward()
        with _without_autocast(upstream.device):
            grad_BD = ctx.head._engine.backward(ctx.draw, ctx.part, upstream, ctx.needs_input_grad[0], ctx.dtype)
        if grad_BD is not None:
            # The rows behind are padding up to max_batch.
            grad_BD = ctx.head._engine.faults.masked(grad_BD[: ctx.num_images, : ctx.head.embedding_dim])
        return grad_BD, None, None, None, None, None


# ---- the choice between the two steps -------------------------------------------------------------------------------


def choose_engine(
    settings: HeadSettings, device: torch.device, *, dtype: torch.dtype
) -> tuple[type[PlainStep], Kernel]:
    """Returns the step and the kernel; for kernel="auto" the fastest that this device has for these settings.

    dtype: of the stored centres. On a GPU a warning says why `auto` is not the fused kernel.
    """
    name = settings.kernel
    if name == "chunked":
        return PlainStep, chunked
    if name not in ("auto", _FUSED):
        raise HeadError(f"Unknown kernel {name!r} for {device}: expected auto, chunked or {_FUSED}.")
    obstacle = fused_obstacle(settings, device, dtype=dtype)
    if obstacle is None and (device.type == "cuda" or name == _FUSED):
        # Imported here: Triton need not be installed.
        from megaclass.head.gpu import kernel
        from megaclass.head.gpu.step import FusedImagesStep, FusedStep

        is_usual = settings.is_cosine and settings.max_labels == 1 and not settings.is_weighted
        return FusedImagesStep if is_usual and settings.loss == "softmax" else FusedStep, kernel
    if name == _FUSED:
        raise HeadError(f"kernel={_FUSED!r} cannot run here: {obstacle}. Use kernel='auto', or remove that obstacle.")
    if device.type == "cuda":
        warnings.warn(f"The head uses its plain chunked kernel on {device}: {obstacle}.", stacklevel=3)
    return PlainStep, chunked


def fused_obstacle(settings: HeadSettings, device: torch.device, *, dtype: torch.dtype) -> str | None:
    """Returns why the fused kernel cannot run, as the end of a sentence; None if it can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    # Triton's interpreter runs the same programs on a CPU, for tests.
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"it needs a CUDA GPU, and the head is on {device}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        return f"it needs compute capability 8.0 or later, and {torch.cuda.get_device_name(device)} has {capability}"
    if dtype == torch.float64:
        return "it computes in float32, and storage is 'float64'"
    from megaclass.head.gpu.kernel import MAX_LOGIT

    margin = settings.margin
    if settings.is_cosine and margin.logit_bound() > MAX_LOGIT:
        return f"it takes logits up to {MAX_LOGIT:g}, and those of {margin} reach {margin.logit_bound():g}"
    if not margin.touches_only_target and not isinstance(margin, CurricularFace):
        return f"{type(margin).__name__} changes the negatives' logits in a way it does not know"
    if settings.max_labels > 1 and settings.filter_above is not None:
        return "it takes filter_above with one label per image only"
    if settings.loss == "sigmoid":
        return "it does not know the loss sigmoid"
    return "it does not know label_smoothing" if settings.label_smoothing else None
