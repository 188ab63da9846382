"""Detects writes to a rank's centres by something other than the head: a broadcast, an average over ranks, a copy.

Such a write trains wrongly in silence, because every rank holds different classes. torch offers no cheap sign of it
(collectives do not increase a tensor's version), so each rank keeps 64 numbers of its centres and compares them before
each forward. A rank whose numbers changed sends a hash of them instead of its step, and all ranks judge by the same rule:

    some ranks changed, others did not         overwritten: a broadcast leaves its source as it was
    all ranks changed, two to the same values  overwritten: a broadcast, or an average over ranks
    all ranks changed, to different values     accepted: every rank wrote centres of its own

Writers that belong to the head (steps, load_rows, load_state_dict) renew the kept numbers.

The device does all of it: no forward makes the host wait. The fused step compares and renews inside the program that packs
the batch, so only renew() after the update is a launch of its own; the plain step needs about ten small launches. Only
note_change() makes the host wait, and only engines that may wait call it.
"""

import torch
from torch import Tensor

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
        # A view, spread evenly: a broadcast or an average of the whole tensor changes these places, too.
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
        """(), int64: the step; where the centres changed, a number below 0 that depends on them alone."""
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
