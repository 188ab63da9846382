"""A head's settings: their limits, their comparison between ranks, and the check of each batch against them.

Also turns what a user gives to PartialFC (margin, row optimizer, device, group) into objects, or says what to give instead.
"""

import contextlib
import difflib
import hashlib
import operator
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Literal, Protocol, TypeVar, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from megaclass.distributed.agreement import facts_that_differ
from megaclass.errors import HeadError
from megaclass.head.centres import STORAGE_DTYPES
from megaclass.head.labels import Labels, Weights
from megaclass.head.losses import LOSSES, LossName
from megaclass.head.margins import MARGINS, ArcFace, Margin, NormalisedSoftmax, UniFace
from megaclass.head.row_optimizers import ROW_OPTIMIZERS, RowOptimizer, RowSGD
from megaclass.head.sampling import NEGATIVES, Negatives, RateSchedule
from megaclass.head.state_dict import MODULE_STATES, ModuleState
from megaclass_launch.ranks.collectives import group_rank, group_size
from megaclass_launch.ranks.devices import usable_device
from megaclass_launch.world import world_from_environment

_T = TypeVar("_T")

Similarity = Literal["cosine", "inner"]
SIMILARITIES: tuple[str, ...] = get_args(Similarity)

# Memory for exponentials that a step keeps for its backward, if the user does not say how much.
_STORED_ON_CPU = 4 << 30
SHARE_OF_DEVICE = 8
_SHARE_OF_FREE = 2


# Fields that have another name as an argument.
_SHOWN = {"rates": "sample_rate", "margin_shares": "margin_schedule", "is_weighted": "weighted", "has_bias": "bias"}


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadSettings:
    """Arguments of PartialFC, which documents them, with their defaults filled in."""

    embedding_dim: int
    num_classes: int
    margin: Margin
    optimizer: RowOptimizer
    rates: RateSchedule
    seed: int
    max_batch: int | None
    gradient_scale: Literal["mean", "sum"]
    kernel: str
    storage: Literal["float32", "float64", "bf16"]
    """As given to the constructor; `.double()` and its like change the centres, not this."""
    num_subcentres: int
    filter_above: float | None
    correct_sampling: bool
    sample_positives: bool
    stored_bytes: int | None
    module_state: ModuleState
    loss: LossName
    max_labels: int
    is_weighted: bool
    label_smoothing: float
    similarity: Similarity
    has_bias: bool
    negatives: Negatives
    margin_shares: tuple[tuple[int, float], ...]
    """(step, share of the margin); linear in between."""
    class_counts: str
    """Digest of the class counts; empty if there are none."""

    @property
    def width(self) -> int:
        """Numbers per centre: with a bias one more than an embedding has."""
        return self.embedding_dim + self.has_bias

    @property
    def is_cosine(self) -> bool:
        return self.similarity == "cosine"

    def margin_at(self, step: int) -> Margin:
        """Returns the margin of a step; the same object if there is no schedule."""
        if not self.margin_shares:
            return self.margin
        before = [pair for pair in self.margin_shares if pair[0] <= step]
        (start, low), *_ = before[-1:]
        stop, high = next((pair for pair in self.margin_shares if pair[0] > step), (start + 1, low))
        return self.margin.at_share(low + (high - low) * (step - start) / (stop - start))

    def __post_init__(self) -> None:
        limits: dict[str, tuple[bool, str]] = {
            "embedding_dim": (self.embedding_dim >= 1, "at least 1"),
            "num_classes": (1 <= self.num_classes < 2**31, "in [1, 2^31)"),
            "num_subcentres": (1 <= self.num_subcentres <= 255, "in [1, 255]"),
            "max_batch": (self.max_batch is None or self.max_batch >= 1, "None or at least 1"),
            "gradient_scale": (self.gradient_scale in ("mean", "sum"), "'mean' or 'sum'"),
            "module_state": (self.module_state in MODULE_STATES, f"one of {', '.join(MODULE_STATES)}"),
            "storage": (self.storage in STORAGE_DTYPES, f"one of {', '.join(STORAGE_DTYPES)}"),
            "stored_bytes": (self.stored_bytes is None or self.stored_bytes >= 0, "None, or 0 or more"),
            "filter_above": (self.filter_above is None or 0 < self.filter_above <= 1, "None or a cosine in (0, 1]"),
            "correct_sampling": (
                not (self.correct_sampling and 0 in self.rates.rates),
                "False if a sample rate is 0: no negative is drawn, so none can represent the others",
            ),
            "sample_positives": (
                not (self.sample_positives and (self.correct_sampling or self.negatives != "uniform")),
                "False with correct_sampling, whose weight is the inverse of a rate that does not depend on the batch",
            ),
            "loss": (self.loss in LOSSES, f"one of {', '.join(LOSSES)}"),
            "max_labels": (1 <= self.max_labels <= 4096, "in [1, 4096]"),
            "label_smoothing": (0 <= self.label_smoothing < 1, "in [0, 1)"),
            "similarity": (self.similarity in SIMILARITIES, f"one of {', '.join(SIMILARITIES)}"),
            "has_bias": (not (self.has_bias and self.is_cosine), "False unless similarity is 'inner'"),
            "negatives": (self.negatives in NEGATIVES, f"one of {', '.join(NEGATIVES)}"),
        }
        for name, (is_allowed, allowed) in limits.items():
            if not is_allowed:
                shown = _SHOWN.get(name, name)
                raise HeadError(f"PartialFC {shown} is {getattr(self, name)!r}; it must be {allowed}.")
        self._check_combinations()

    def _check_combinations(self) -> None:
        reads_one_label = not self.margin.touches_only_target and self.margin.negatives_read_targets
        has_counts = bool(self.class_counts)
        together = {
            f"label_smoothing with the loss {self.loss}: it is defined for the loss softmax": (
                self.label_smoothing > 0 and self.loss != "softmax"
            ),
            f"the loss {self.loss} with {self.margin}, which learns a bias: it is made for the loss sigmoid": (
                self.margin.learns_bias and self.loss != "sigmoid"
            ),
            f"max_labels={self.max_labels} with {self.margin}, whose negatives depend on the one label of an image": (
                self.max_labels > 1 and reads_one_label
            ),
            f"similarity='inner' with {self.margin}, which needs cosines: give NormalisedSoftmax or CosFace": (
                not self.is_cosine and self.margin.needs_cosines
            ),
            "similarity='inner' with filter_above, which is a cosine": (
                not self.is_cosine and self.filter_above is not None
            ),
            f"{self.margin} without class_counts, the number of images of every class": (
                self.margin.needs_class_counts and not has_counts
            ),
            f"negatives={self.negatives!r} without class_counts, the frequencies of the classes": (
                self.negatives != "uniform" and not has_counts
            ),
            "negatives='frequencies' with the sample rate 0: no negative is drawn": (
                self.negatives == "frequencies" and 0 in self.rates.rates
            ),
        }
        for what, is_so in together.items():
            if is_so:
                raise HeadError(f"PartialFC cannot combine {what}.")
        steps = [step for step, _ in self.margin_shares]
        if steps and (steps[0] != 0 or steps != sorted(set(steps))):
            raise HeadError(
                f"margin_schedule is {list(self.margin_shares)!r}: it must be a list of (step, share of the margin) that "
                f"begins at step 0 and rises, for example [(0, 0.0), (2000, 1.0)]; it is linear in between."
            )
        for _, share in self.margin_shares:
            # Builds the margin, which checks its own range.
            self.margin.at_share(share)

    def compare_between_ranks(self, device: torch.device, group: dist.ProcessGroup | None) -> None:
        """Collective: all-gathers 32 bytes per rank. Ranks with different settings would silently compute different things.

        `kernel` and `stored_bytes` may differ.
        """
        facts = {one.name: repr(getattr(self, one.name)) for one in fields(self)}
        different = facts_that_differ(
            {name: value for name, value in facts.items() if name not in ("kernel", "stored_bytes")}, device, group
        )
        for name, values in different.items():
            other = next(rank for rank, value in values.items() if value != values[0])
            name = _SHOWN.get(name, name)
            raise HeadError(
                f"Ranks disagree about the head: {name} is {values[0]} on rank 0 but {values[other]} on rank {other}. "
                f"Give every rank the same settings."
            )


def check_batch(
    settings: HeadSettings,
    embeddings_BD: Tensor,
    labels: Labels,
    weights: Weights | None,
    built_as: tuple[int, int],
    group: dist.ProcessGroup | None,
    device: torch.device,
) -> None:
    """Raises for a batch whose shapes, dtypes or device do not fit the head. Reads no values, so the host never waits.

    built_as: rank and number of ranks when the head was built.
    """
    now, (rank, world_size) = (group_rank(group), group_size(group)), built_as
    if now != built_as:
        raise HeadError(
            f"The head was built as rank {rank} of {world_size}, but this process is now rank {now[0]} of {now[1]}. "
            f"Build it after torch.distributed is initialised: under Lightning in configure_model(), under Accelerate "
            f"after Accelerator()."
        )
    check_embeddings(settings, embeddings_BD, rank, device)
    num_images, widest = len(embeddings_BD), settings.max_labels
    several = f", or up to max_labels={widest}" if widest > 1 else " (several need max_labels=…)"
    for name, given in (("labels", labels), ("weights", weights)):
        if given is None:
            continue
        is_label = name == "labels"
        shape = tuple(given.shape) if isinstance(given, Tensor) else (len(given),)
        fits = shape[:1] == (num_images,) and len(shape) <= 2 and (len(shape) == 1 or 1 <= shape[1] <= widest)
        if isinstance(given, Tensor) and (not fits or given.is_floating_point() == is_label):
            kind = "integer" if is_label else "number"
            raise HeadError(
                f"Rank {rank} brought {name} of shape {shape} and {given.dtype} for {num_images} embeddings; expected one "
                f"{kind} per embedding{several}."
            )
        if not isinstance(given, Tensor) and not fits:
            raise HeadError(f"Rank {rank} brought {len(given)} lists of {name} for {num_images} embeddings.")
        if isinstance(given, Tensor) and given.device != embeddings_BD.device:
            raise HeadError(
                f"Rank {rank} brought {name} on {given.device} and embeddings on {embeddings_BD.device}; they must be on "
                f"the same device: {name}.to(embeddings.device)."
            )
    if weights is not None and not settings.is_weighted:
        raise HeadError(
            f"Rank {rank} brought weights to a head that was built without weighted=True: PartialFC(…, weighted=True)."
        )
    if settings.max_batch is not None and num_images > settings.max_batch:
        raise HeadError(
            f"Rank {rank} brought {num_images} images, more than max_batch={settings.max_batch}: raise max_batch."
        )


def check_embeddings(settings: HeadSettings, embeddings_BD: Tensor, rank: int, device: torch.device) -> None:
    """Raises for embeddings of another shape, dtype or device than the head's. Reads no values."""
    is_matrix = embeddings_BD.ndim == 2 and embeddings_BD.shape[1] == settings.embedding_dim
    if not is_matrix or not embeddings_BD.is_floating_point():
        raise HeadError(
            f"Rank {rank} brought embeddings of shape {tuple(embeddings_BD.shape)} and {embeddings_BD.dtype}; the head "
            f"expects (batch, {settings.embedding_dim}) of a floating dtype. Set embedding_dim to the backbone's."
        )
    if embeddings_BD.device != device:
        raise HeadError(
            f"Rank {rank} brought embeddings on {embeddings_BD.device}, the head is on {device}: build the head with "
            f"device={str(embeddings_BD.device)!r}, or move it there with head.to(…)."
        )


def default_stored_bytes(device: torch.device) -> int:
    """Returns an eighth of a GPU's memory, or half of what is free if that is less; 4 GiB on a CPU.

    The GPU's size decides wherever it can, not what happens to be free: it also decides how classes are cut into chunks, and
    so the last bits of a sum, which should be the same after a restart.
    """
    if device.type != "cuda":
        return _STORED_ON_CPU
    free, total = torch.cuda.mem_get_info(device)
    # What torch's allocator has reserved and does not use is also free.
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return min(total // SHARE_OF_DEVICE, free // _SHARE_OF_FREE)


# ---- what a user gives to PartialFC


def checked_counts(given: Tensor | None, num_classes: int) -> tuple[Tensor | None, str]:
    """Returns the class counts as float32 in host memory, and their digest, by which the ranks compare them."""
    if given is None:
        return None, ""
    check_tensors(class_counts=given)
    counts_C = given.detach().to("cpu", torch.float32)
    if counts_C.shape != (num_classes,) or not (torch.isfinite(counts_C) & (counts_C >= 0)).all() or not counts_C.any():
        raise HeadError(
            f"PartialFC class_counts has shape {tuple(given.shape)}; expected one number of 0 or more for each of the "
            f"{num_classes} classes, not all of them 0: the number of its images, or its frequency."
        )
    return counts_C, hashlib.sha256(counts_C.numpy().tobytes()).hexdigest()[:16]


class HasGroup(Protocol):
    """An object that stands for a process group, such as a process set of Horovod's API."""

    @property
    def group(self) -> dist.ProcessGroup: ...


def whole_number(name: str, given: object) -> int:
    """Returns a Python or NumPy integer as it is; refuses 40.0, which would make a tensor of another dtype."""
    try:
        return operator.index(given)  # type: ignore[arg-type]
    except TypeError:
        shown = f"; write {int(given)}" if isinstance(given, float) and given == int(given) else ""
        raise HeadError(f"PartialFC {name} is {given!r}; it must be a whole number{shown}.") from None


def chosen_margin(given: Margin | str | None, loss: str | None, similarity: str, temperature: float | None) -> Margin:
    """Returns the margin itself, the one of that name with its published values, or the default of the loss for None.

    temperature: replaces the scale of the margin by its inverse.
    """
    margin = _chosen_margin(given, loss, similarity)
    if temperature is None:
        return margin
    if not temperature > 0 or not is_dataclass(margin):
        raise HeadError(
            f"PartialFC temperature is {temperature}; it must be above 0, and the margin {margin!r} one with a field scale."
        )
    return replace(margin, scale=1 / temperature)


def _chosen_margin(given: Margin | str | None, loss: str | None, similarity: str) -> Margin:
    if given is None and similarity == "inner":
        return NormalisedSoftmax(scale=1.0)
    if given is None:
        return UniFace(margin=0.0) if loss == "sigmoid" else ArcFace()
    if isinstance(given, str):
        return _by_name({name: cls for name, (cls, _) in MARGINS.items()}, given, "margin")()
    if not isinstance(given, Margin):
        allowed = f"an instance such as ArcFace(scale=64, margin=0.5), or one of {', '.join(MARGINS)}"
        raise HeadError(
            f"PartialFC margin is {_described(given)}; it must be {allowed}. {_call_it(given, Margin)}".strip()
        )
    return given


def chosen_optimizer(given: RowOptimizer | str | None) -> RowOptimizer:
    """Returns the row optimizer itself, the one of that name with its default values, or RowSGD() for None."""
    if given is None:
        return RowSGD()
    if isinstance(given, str):
        return _by_name(ROW_OPTIMIZERS, given, "optimizer")()
    if isinstance(given, RowOptimizer):
        return given
    text = f"PartialFC optimizer is {_described(given)}; it must be RowSGD(), RowAdamW() or RowAdagrad()."
    is_class = isinstance(given, type)
    if isinstance(given, torch.optim.Optimizer) or (is_class and issubclass(given, torch.optim.Optimizer)):
        name = given.__name__ if isinstance(given, type) else type(given).__name__
        row = {"adam": "RowAdamW()", "adamw": "RowAdamW()", "adagrad": "RowAdagrad()"}.get(name.lower(), "RowSGD()")
        raise HeadError(
            f"{text} Optimizers of torch.optim update all rows of a parameter, and the head updates only the centres that "
            f"took part in a step. Use optimizer={row} here, give the learning rate to head.step(lr=…), and keep "
            f"torch.optim for the backbone."
        )
    raise HeadError(f"{text} {_call_it(given, RowOptimizer)}".strip())


def chosen_device(given: torch.device | str | None, group: dist.ProcessGroup | None) -> torch.device:
    """Returns the device of a new head; for None torch's default device, or the current GPU if the group is for GPUs only."""
    if given is not None:
        return usable_device(given, "PartialFC")
    default = torch.get_default_device()
    # A group of NCCL alone cannot exchange anything between CPUs.
    is_for_gpus = torch.cuda.is_available() and _is_for_gpus_only(group)
    return torch.device("cuda", torch.cuda.current_device()) if default.type == "cpu" and is_for_gpus else default


def _is_for_gpus_only(group: dist.ProcessGroup | None) -> bool:
    if group is not None:
        return torch.device("cpu") not in group._device_types
    return dist.is_initialized() and "cpu" not in dist.get_backend_config()


def chosen_group(given: object) -> dist.ProcessGroup | None:
    """Returns the process group that `group=` names, or None for the default group or a process on its own.

    given: a process group, or an object that has one as its attribute `group`, such as a process set of Horovod's API.
    """
    if given is None:
        _check_alone()
        return None
    group = given if isinstance(given, dist.ProcessGroup) else getattr(given, "group", None)
    if not isinstance(group, dist.ProcessGroup):
        raise HeadError(
            f"PartialFC group is {_described(given)}; it must be a process group of torch.distributed, or a process set of "
            f"Horovod's API, such as hvd.global_process_set."
        )
    return group


def _check_alone() -> None:
    """Raises if this process is one of several and no group connects them: each would train a head of its own."""
    if dist.is_initialized():
        return
    num_ranks = world_from_environment().size
    # A script that was started by horovodrun, or by hand with Horovod's names.
    with contextlib.suppress(ValueError):
        num_ranks = max(num_ranks, int(os.environ.get("HOROVOD_SIZE", "1")))
    if num_ranks > 1:
        raise HeadError(
            f"PartialFC was built in one of {num_ranks} processes, but torch.distributed is not initialised, so each of them "
            f"would train a separate head. Call torch.distributed.init_process_group() before, or give group=: with Horovod's "
            f"API, PartialFC(…, group=hvd.global_process_set) after hvd.init(). To train separate heads on purpose, unset "
            f"WORLD_SIZE and HOROVOD_SIZE."
        )


def check_tensors(**given: object) -> None:
    """Raises for a list or an array given instead of a tensor."""
    for name, value in given.items():
        if value is not None and not isinstance(value, Tensor):
            raise HeadError(
                f"The head's {name} are {_described(value)}; they must be a tensor: torch.as_tensor({name}) makes one."
            )


def _by_name(known: Mapping[str, type[_T]], given: str, what: str) -> type[_T]:
    if given.lower() in known:
        return known[given.lower()]
    close = difflib.get_close_matches(given.lower(), known, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    raise HeadError(f"PartialFC {what} is {given!r}; it must be one of {', '.join(known)}.{hint}")


def _described(given: object) -> str:
    if isinstance(given, type):
        return f"the class {given.__name__}"
    return f"an object of {type(given).__module__}.{type(given).__qualname__}"


def _call_it(given: object, base: type) -> str:
    return f"Write {given.__name__}(), with parentheses." if isinstance(given, type) and issubclass(given, base) else ""
