"""The classes that take part in a step: all positives of the global batch, and a random share of the negatives."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from megaclass.errors import HeadError
from megaclass.head.counter_random import random_bits, stream_keys
from megaclass.keyed_random import Stream

# The hash of a block of this many classes stays in the cache of a CPU core.
_BLOCK = 1 << 16

SampleRate = float | Sequence[tuple[int, float]]
Negatives = Literal["uniform", "frequencies", "in-batch"]
NEGATIVES: tuple[str, ...] = get_args(Negatives)


@dataclass(frozen=True, slots=True)
class RateSchedule:
    """Sample rates over training: `rates[i]` holds from step `starts[i]` on."""

    starts: tuple[int, ...]
    rates: tuple[float, ...]

    def at(self, step: int) -> float:
        return next(rate for start, rate in zip(self.starts[::-1], self.rates[::-1], strict=True) if step >= start)


def rate_schedule(sample_rate: SampleRate) -> RateSchedule:
    """Reads `0.1`, or `[(0, 0.1), (8000, 1.0)]`: a tenth of the negatives first, all of them from step 8000."""
    pairs = (
        [(0, float(sample_rate))] if isinstance(sample_rate, (int, float)) else [(s, float(r)) for s, r in sample_rate]
    )
    starts = [start for start, _ in pairs]
    if not pairs or starts[0] != 0 or starts != sorted(set(starts)):
        raise HeadError(
            f"sample_rate is {sample_rate!r}: a schedule is a list of (first step, rate) that begins at step 0 and rises, "
            f"for example [(0, 0.1), (8000, 1.0)]."
        )
    for start, rate in pairs:
        if not 0 <= rate <= 1:
            raise HeadError(
                f"sample_rate is {rate} from step {start} on; it must lie in [0, 1]: 1.0 = all classes, 0 = positives only."
            )
    return RateSchedule(tuple(starts), tuple(rate for _, rate in pairs))


@dataclass(frozen=True, slots=True)
class ClassSample:
    """Classes of this rank that take part in a step."""

    classes_S: Tensor
    """Local class ids, ascending, int64. Entries past the sampled ones (only with a capacity) hold num_local."""
    is_positive_S: Tensor
    """True for classes of the global batch, which always take part."""
    overflowed: Tensor
    """0-d bool: more classes were drawn than the capacity holds. The step must not count."""


def rate_of_negatives(labels_G: Tensor, num_classes: int, rate: float) -> Tensor:
    """Returns the rate of the negatives with which rate * num_classes classes take part on average, positives included.

    InsightFace's meaning of the rate. 0 if the positives are as many or more. 0-d float64, formed on the device: every rank
    knows all labels, so the ranks agree, and the classes do not depend on their number. labels_G: padding is below 0.
    """
    sorted_G = labels_G.sort().values
    is_new_G = sorted_G.diff(prepend=sorted_G.new_full((1,), -1)) > 0
    num_positives = (is_new_G & (sorted_G >= 0)).sum(dtype=torch.float64)
    return ((rate * num_classes - num_positives) / (num_classes - num_positives).clamp_min(1)).clamp(0, 1)


def rates_by_frequency(frequencies_C: Tensor, rate: float) -> Tensor:
    """Returns a rate per class, proportional to its frequency and at most 1, with rate * C classes drawn on average.

    Fewer, if fewer classes have a frequency above 0. float64.
    """
    frequencies_C = frequencies_C.double()
    sorted_C = frequencies_C.sort(descending=True).values
    places_C = torch.arange(len(sorted_C), dtype=torch.float64, device=sorted_C.device)
    # If the j most frequent classes are drawn with certainty, the others share what is left.
    rest_C = sorted_C.flip(0).cumsum(0).flip(0)
    factors_C = (rate * len(sorted_C) - places_C) / rest_C.clamp_min(torch.finfo(torch.float64).tiny)
    fits_C = (factors_C * sorted_C <= 1) & (sorted_C > 0)
    if not fits_C.any():
        return (frequencies_C > 0).double()
    return (factors_C[fits_C.to(torch.int8).argmax()] * frequencies_C).clamp(0, 1)


def in_batch_probability(frequencies_K: Tensor, rate: float, num_others: Tensor) -> Tensor:
    """Returns the probability that a class takes part: drawn, or the label of one of the other images; (K,) float64.

    frequencies_K: shares of the labels. num_others: 0-d, labels of the batch but the image's own.
    """
    return 1 - (1 - rate) * (1 - frequencies_K.double()) ** num_others.clamp_min(0)


def draw_threshold(rate: Tensor) -> Tensor:
    """Returns the threshold of `is_drawn` for a rate on the device, or for one per class; int64, (1,) or (K,)."""
    return ((rate * 2**32).round().to(torch.int64) - 2**31).clamp_max(2**31 - 1).view(-1)


def is_drawn(start: int, num_local: int, rate: float | Tensor, seed: int, step: int, device: torch.device) -> Tensor:
    """Returns (num_local,) bool: whether each class is drawn. Depends on (seed, step, class), not on the ranks."""
    keys = stream_keys(Stream.DRAW_NEGATIVES, seed, step)
    if isinstance(rate, Tensor):
        classes = torch.arange(start, start + num_local, dtype=torch.int32, device=device)
        return random_bits(keys, classes) < draw_threshold(rate)
    # Random bits are signed: a class is drawn if its bits are among the lowest `rate` of all 2^32 values.
    threshold = round(rate * 2**32) - 2**31
    drawn_K = torch.zeros(num_local, dtype=torch.bool, device=device)
    if threshold == -(2**31):
        return drawn_K  # threshold - 1 would wrap around to the largest int32, and draw every class
    block = _BLOCK if device.type == "cpu" else num_local
    for first in range(0, num_local, block):
        last = min(first + block, num_local)
        classes = torch.arange(start + first, start + last, dtype=torch.int32, device=device)
        # Signed comparison: threshold - 1 fits int32; the threshold itself, at rate 1, does not.
        torch.le(random_bits(keys, classes), threshold - 1, out=drawn_K[first:last])
    return drawn_K


def sample_classes(
    labels_G: Tensor,
    start: int,
    num_local: int,
    rate: float | Tensor,
    seed: int,
    step: int,
    capacity: int | None = None,
) -> ClassSample:
    """Returns the positives of the global batch on this rank, and each other class with probability `rate`.

    labels_G: global class ids; those of other ranks, and padding below 0, are ignored.
    capacity: None lets the host wait for the number drawn; otherwise the result has exactly this many entries and
    nothing waits.
    """
    device = labels_G.device
    is_positive = torch.zeros(num_local + 1, dtype=torch.bool, device=device)
    local_G = labels_G - start
    # Labels of other ranks land in a scratch entry behind the last class.
    is_positive.index_fill_(0, torch.where((local_G >= 0) & (local_G < num_local), local_G, num_local), True)
    is_positive_K = is_positive[:num_local]
    takes_part_K = is_drawn(start, num_local, rate, seed, step, device).logical_or_(is_positive_K)
    if capacity is None:
        classes_S = takes_part_K.nonzero().flatten()
        return ClassSample(classes_S, is_positive_K[classes_S], torch.zeros((), dtype=torch.bool, device=device))
    # nonzero() without its wait: each class that takes part writes its id to its place, all others to a scratch entry.
    place_K = takes_part_K.cumsum(0) - 1
    classes = torch.full((capacity + 1,), num_local, dtype=torch.int64, device=device)
    place_K = torch.where(takes_part_K & (place_K < capacity), place_K, capacity)
    classes.scatter_(0, place_K, torch.arange(num_local, device=device))
    classes_S = classes[:capacity]
    is_positive[num_local].fill_(False)
    return ClassSample(classes_S, is_positive[classes_S], takes_part_K.sum() > capacity)


def sample_capacity(num_local: int, rate: float, global_batch: int) -> int:
    """Returns a length that overflows with probability below 1e-15: the mean, 8 standard deviations, all positives."""
    mean = rate * num_local
    return min(num_local, math.ceil(mean + 8 * math.sqrt(mean * (1 - rate))) + global_batch)
