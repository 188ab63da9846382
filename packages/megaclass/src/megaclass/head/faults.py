"""Bad labels, embeddings that are not finite, ranks out of step, overwritten centres: found on the device, raised everywhere.

Every rank sees the whole gathered batch, so all ranks find the same fault without communication. On a CPU it is raised
at once. On a GPU reading it would make the host wait, so the fault stays on the device, where it masks the update and the
gradient of the embeddings, and the host reads a copy a few steps later: all ranks at the same step.
"""

from collections import deque

import torch
from torch import Tensor

from megaclass.errors import HeadError, NotFiniteError
from megaclass.head.gather_batch import PADDING, GlobalBatch

LABEL, NOT_FINITE, OUT_OF_STEP, OVERFLOW, OVERWRITTEN, LABELS, WEIGHT, NO_COUNT, LOGIT = range(1, 10)
# Forwards between a fault and the host's reading of it, on a GPU. The copy has finished by then, so nothing waits.
_LAG = 8
_NUM_WORDS = 6
# On a GPU an optimizer of the backbone has run meanwhile, on gradients of zero: its momentum and decay may have moved weights.
_KEPT = "No centre was updated, and from that step on the embeddings' gradient was zero."

# A label that no image can have. A rank whose data failed sends batches of it (training/data_errors.py), so every rank
# refuses the step through the check of labels below, and no rank is left waiting.
NO_CLASS = -1


def find_fault(
    batch: GlobalBatch,
    labels_GP: Tensor,
    weights_GP: Tensor | None,
    norms_G: Tensor,
    num_classes: int,
    step: int,
    *,
    class_counts_C: Tensor | None = None,
) -> Tensor:
    """Returns (6,) int64: kind (0 = none), rank, position in that rank's batch, value, how many, step."""
    is_outside_GP = (labels_GP < 0) | (labels_GP >= num_classes)
    # From the weakest to the strongest: each overwrites those before it. A rank out of step explains strange labels, and
    # overwritten centres explain everything else.
    bad = {NOT_FINITE: ~torch.isfinite(norms_G)}
    if class_counts_C is not None:
        has_none_GP = class_counts_C[labels_GP.clamp(0, num_classes - 1)] == 0
        bad[NO_COUNT] = (has_none_GP & ~is_outside_GP).any(1)
        is_outside_GP = is_outside_GP | has_none_GP
    if weights_GP is not None:
        bad[WEIGHT] = ~(torch.isfinite(weights_GP) & (weights_GP >= 0)).all(1)
    is_padding_GP = labels_GP == PADDING
    if labels_GP.shape[1] > 1:
        sorted_GP = labels_GP.sort(1).values
        is_twice_G = ((sorted_GP[:, 1:] == sorted_GP[:, :-1]) & (sorted_GP[:, 1:] >= 0)).any(1)
        bad[LABELS] = is_padding_GP.all(1) | is_twice_G
        is_outside_GP = is_outside_GP & ~is_padding_GP
    bad[LABEL] = ((labels_GP < 0) | (labels_GP >= num_classes)).logical_and_(is_outside_GP).any(1)
    fault = torch.zeros(_NUM_WORDS, dtype=torch.int64, device=norms_G.device)
    bad = {kind: batch.is_image_G & is_bad_G for kind, is_bad_G in bad.items()}
    is_on_cpu = norms_G.device.type == "cpu"
    if is_on_cpu and not (any(map(torch.any, bad.values())) or (batch.steps_W != step).any()):
        return fault  # the usual case; on a CPU the test costs nothing
    # The label that is named: the first that is outside, or else the first.
    values_G = labels_GP.gather(1, is_outside_GP.to(torch.int8).argmax(1, keepdim=True)).flatten()
    for kind, is_bad_G in bad.items():
        fault = _first(is_bad_G, kind, batch, values_G, fault, step)
    has_changed_W, is_overwritten = overwritten(batch.steps_W)
    # A negative word is a hash of changed centres, not a step, so such ranks are not compared.
    out_of_step_W = (batch.steps_W != batch.steps_W[0]) & ~has_changed_W & ~has_changed_W[0]
    first = out_of_step_W.to(torch.int64).argmax()
    first_step = batch.steps_W[0]
    values = [first * 0 + OUT_OF_STEP, first, batch.steps_W.take(first), first_step, out_of_step_W.sum(), first_step]
    fault = torch.where(out_of_step_W.any(), torch.stack(values), fault)
    first, zero = has_changed_W.to(torch.int64).argmax(), first * 0
    values = [zero + OVERWRITTEN, first, zero, zero, has_changed_W.sum(), zero + step]
    return torch.where(is_overwritten, torch.stack(values), fault)


def overflow_fault(fault: Tensor, num_overflowed: Tensor, kind: int = OVERFLOW) -> Tensor:
    """Returns the fault of ranks whose drawn classes did not fit the capacity, unless there is another fault already.

    Or of images whose logits are too large, with the kind LOGIT.
    """
    zero = torch.zeros_like(fault[0])
    values = torch.stack([zero + kind, zero, zero, zero, num_overflowed.to(torch.int64), zero])
    return torch.where((fault[0] == 0) & (num_overflowed > 0), values, fault)


class FaultWatch:
    """Keeps the first fault until the host has seen it.

    `first_fault` is written on the device by forward (`note`, or the fused program) and read there as a mask. `_copies` are
    copies on their way to the host, one per forward; the oldest is read when its transfer has long finished. `_spare` is the
    memory of one that has been read, for the next.
    """

    def __init__(self, device: torch.device) -> None:
        self.first_fault = torch.zeros(_NUM_WORDS, dtype=torch.int64, device=device)
        self.is_scaled = False
        """The head follows a GradScaler, which skips steps whose gradients are not finite."""
        self._copies: deque[tuple[Tensor, torch.cuda.Event]] = deque()
        self._spare: tuple[Tensor, torch.cuda.Event] | None = None

    def note(self, fault: Tensor) -> None:
        torch.where(self.first_fault[0] == 0, fault, self.first_fault, out=self.first_fault)

    def masked(self, grad_BD: Tensor) -> Tensor:
        """Returns the embeddings' gradient; after a fault zeros, or NaN if a GradScaler sees it and skips the step."""
        # Not a product: zero times NaN is NaN.
        return grad_BD.masked_fill_(self.first_fault[0] != 0, torch.nan if self.is_scaled else 0.0)

    def look(self, num_classes: int) -> None:
        """Raises the first fault: at once on a CPU; on a GPU the one of a few steps ago, whose copy has arrived."""
        if self.first_fault.device.type == "cpu":
            self._raise(self.first_fault, num_classes)
            return
        # Pinned, because a copy to pageable memory would make the host wait. Not those that are still under way.
        copy, event = self._spare or (torch.empty(_NUM_WORDS, dtype=torch.int64, pin_memory=True), torch.cuda.Event())
        copy.copy_(self.first_fault, non_blocking=True)
        # On the stream of the copy, also if another GPU is the current one.
        event.record(torch.cuda.current_stream(self.first_fault.device))
        self._copies.append((copy, event))
        self._spare = None
        # Counted in forwards, not in time, so all ranks read the copy of the same step and raise together.
        if len(self._copies) > _LAG:
            self._spare = copy, event = self._copies.popleft()
            event.synchronize()
            self._raise(copy, num_classes)

    def look_now(self, num_classes: int) -> None:
        self._raise(self.first_fault.cpu(), num_classes)

    def clear(self) -> None:
        """Drops the fault without reading it: for loops that skip bad steps and count them."""
        self.first_fault.zero_()
        # Copies under way may hold the fault that is being cleared: it must not be raised again.
        self._copies.clear()

    def forgive_not_finite(self) -> None:
        """Drops embeddings that were not finite, and nothing else: the GradScaler has skipped their step."""
        self.first_fault.mul_(self.first_fault[0] != NOT_FINITE)

    def _raise(self, fault: Tensor, num_classes: int) -> None:
        kind, rank, position, value, count, step = fault.tolist()
        if not kind or (self.is_scaled and kind == NOT_FINITE):
            return
        self.clear()
        error = NotFiniteError if kind == NOT_FINITE else HeadError
        facts = {"rank": rank, "position": position, "value": value, "count": count, "step": step}
        raise error(_TEXTS[kind].format(**facts, num_classes=num_classes, kept=_KEPT))


def _first(bad_G: Tensor, kind: int, batch: GlobalBatch, values_G: Tensor, otherwise: Tensor, step: int) -> Tensor:
    if not bad_G.numel():
        return otherwise
    # argmax of 0 and 1 returns the first 1, so every rank names the same image.
    place = bad_G.to(torch.int64).argmax()
    values = torch.stack(
        [
            # Constants are formed from a tensor on the device: torch.tensor(kind) would copy from the host and wait.
            place * 0 + kind,
            place // batch.max_batch,
            place % batch.max_batch,
            values_G.take(place),
            bad_G.sum(),
            place * 0 + step,
        ]
    )
    return torch.where(bad_G.any(), values, otherwise)


_TEXTS = {
    LABEL: (
        "Label {value} at position {position} of the batch of rank {rank} is outside [0, {num_classes}) "
        "({count} such label(s) in the global batch of step {step}, counted from 0). {kept} "
        "Check num_classes against the data."
    ),
    NOT_FINITE: (
        "{count} embedding(s) of the global batch are NaN or infinite, the first at position {position} of rank {rank} "
        "(label {value}) in step {step}, counted from 0. {kept} Lower the learning rate or the loss "
        "scale, or look at that image."
    ),
    OUT_OF_STEP: (
        "Rank {rank} is at step {position} of the head while rank 0 is at step {value}: every rank must call "
        "forward, backward and step equally often. {kept}"
    ),
    LABELS: (
        "The image at position {position} of the batch of rank {rank} has no label, or the same one twice ({count} such "
        "image(s) in the global batch of step {step}, counted from 0). Every image needs one to max_labels different "
        "labels; -1 is padding. {kept}"
    ),
    WEIGHT: (
        "A weight of the image at position {position} of the batch of rank {rank} is missing, negative or not finite "
        "({count} such image(s) in the global batch of step {step}, counted from 0). Weights must be 0 or more. {kept}"
    ),
    NO_COUNT: (
        "Class {value}, of the image at position {position} of the batch of rank {rank}, has the class count 0 ({count} "
        "such image(s) in the global batch of step {step}, counted from 0). {kept} class_counts must be above 0 for "
        "every class that occurs."
    ),
    LOGIT: (
        "The inner products of {count} image(s) with their negatives are too large for exp, or not finite. {kept} Lower "
        "the learning rate, or raise the temperature: logits should stay below 600, and below 75 with the kernel "
        "triton_fused."
    ),
    OVERWRITTEN: (
        "The centres of {count} rank(s), the first of them rank {rank}, were written to by something other than the "
        "head before step {step}, counted from 0: a broadcast, an average over ranks, or another rank's state. Every "
        "rank holds classes of its own, so this loses them. {kept} Keep the head's tensors out of "
        "such calls, then load a checkpoint. Centres are changed with load_rows() or load_state_dict(); after "
        "writing to rows() yourself call accept_rows()."
    ),
    OVERFLOW: (
        "Classes that take part in the step are not among those drawn, on {count} rank(s). {kept} "
        "Give begin_step() all labels of the step. Without begin_step(): more classes were drawn than fit the capacity; raise "
        "max_batch, which it is computed from, to the largest batch in use."
    ),
}


# ---- writes to the centres by others ------------------------------------------------------------------------------------
#
# Detects writes to a rank's centres by something other than the head: a broadcast, an average over ranks, a copy.
#
# Such a write trains wrongly in silence, because every rank holds different classes. torch offers no cheap sign of it
# (collectives do not increase a tensor's version), so each rank keeps 64 numbers of its centres and compares them before
# each forward. A rank whose numbers changed sends a hash of them instead of its step, and all ranks judge by the same rule:
#
#     some ranks changed, others did not         overwritten: a broadcast leaves its source as it was
#     all ranks changed, two to the same values  overwritten: a broadcast, or an average over ranks
#     all ranks changed, to different values     accepted: every rank wrote centres of its own
#
# Writers that belong to the head (steps, load_rows, load_state_dict) renew the kept numbers.
#
# The device does all of it: no forward makes the host wait. The fused step compares and renews inside the program that packs
# the batch, so only renew() after the update is a launch of its own; the plain step needs about ten small launches. Only
# note_change() makes the host wait, and only engines that may wait call it.

NUM_WATCHED = 64
_BITS = {torch.float32: torch.int32, torch.float64: torch.int64, torch.bfloat16: torch.int16}
_HASH_BITS = 62
MULTIPLIER = 0x9E3779B97F4A7C1


class OverwriteCheck:
    """64 numbers of a rank's centres as they were when the head last wrote them."""

    def __init__(self, weight_RD: Tensor, smallest_shard: int) -> None:
        """smallest_shard: rows of the smallest shard; ranks then watch the same places, whatever their own number."""
        num_numbers = smallest_shard * weight_RD.shape[1]
        self.stride = max(1, num_numbers // NUM_WATCHED)
        bits = weight_RD.view(_BITS[weight_RD.dtype]).view(-1)
        # A view, spread evenly: a broadcast or an average of the whole tensor also changes these places.
        # Bits, not values: NaN differs from itself, and -0.0 equals 0.0.
        self.watched = bits[: num_numbers : self.stride][:NUM_WATCHED]
        self.kept = self.watched.clone()
        self._noted: Tensor | None = None
        # Odd factors, different for each place: the sum depends on which place has which value.
        self._factors = (2 * torch.arange(len(self.kept), device=weight_RD.device) + 1) * MULTIPLIER

    def renew(self) -> None:
        """Accepts the centres as they are. One launch."""
        self.kept.copy_(self.watched)
        self._noted = None

    def note_change(self) -> bool:
        """Looks before the head itself writes; a change is kept for the next control_word(). The host waits."""
        word = self.control_word(0)
        if word < 0:
            self._noted = word
        return self._noted is not None

    def control_word(self, step: int) -> Tensor:
        """(), int64: the step; if the centres changed, a number below 0 that depends on them alone."""
        if self._noted is not None:
            return self._noted
        digest = (self.watched.to(torch.int64) * self._factors).sum() & ((1 << _HASH_BITS) - 1)
        # ~digest is below 0 for every digest, and steps are not.
        return torch.where((self.watched != self.kept).any(), ~digest, step)


def overwritten(words_W: Tensor) -> tuple[Tensor, Tensor]:
    """Judges the gathered control words: which ranks changed, and whether something overwrote their centres."""
    has_changed_W = words_W < 0
    are_all_changed = has_changed_W.all()
    has_twin = (words_W[1:] == words_W[0]).any()
    return has_changed_W, has_changed_W.any() & (~are_all_changed | has_twin)
