"""Statistics of a step: numbers on the device, which the host may read later."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megaclass.distributed.collectives import sum_over_ranks_
from megaclass.head.step.cross_entropy import LossPart


@dataclass(frozen=True, slots=True)
class HeadStats:
    """0-d float64 each, the same on every rank."""

    target_cosine: Tensor
    """Mean over the images of the cosine with the (closest) centre of their own class: before the update, no margin."""
    gradient_norm: Tensor
    """Length of the centres' gradient over all ranks: loss scale taken out, before clipping and decay."""
    sampled_share: Tensor
    """Share of the classes that took part."""


def head_stats(
    parts: Sequence[LossPart],
    squares: Sequence[Tensor],
    *,
    num_images: Tensor,
    num_sampled: Tensor,
    num_classes: int,
    group: dist.ProcessGroup | None,
) -> HeadStats:
    """Collective: an all-reduce of 2 float64.

    squares: sums of squares of this rank's gradient, chunk by chunk. num_sampled: classes of this rank that took part.
    """
    cosines = torch.stack([torch.where(part.images.is_image_G, part.cosines_G, 0).sum() for part in parts]).sum()
    # The zero is for a rank without chunks. Cosines are the same on all ranks already and are not summed over them.
    own = torch.stack([torch.stack([torch.zeros_like(cosines), *squares]).sum(), num_sampled.double()])
    square, num_sampled = sum_over_ranks_(own, group)
    return HeadStats(cosines / num_images.clamp_min(1), square.sqrt(), num_sampled / num_classes)
