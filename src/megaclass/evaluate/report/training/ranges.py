"""Healthy ranges of the target cosine and of the gradient norm, from the settings of a run and from the run itself.

Target cosine. With margin, the own class must win against classes that the image has nothing to do with, whose cosines are
about 0. Half of the softmax belongs to it when its logit is ln(C - 1), so the cosine c is needed for which

    scale * (cos(m1 * arccos(c) + m2) - m3) = ln(C - 1)

A run ends above it. Far below it the images are still closer to no class than to their own.

Gradient norm. Its size depends on the scale, the batch and the length of the centres, so that no number suits all runs; its
course is telling. After a steep fall in the first tenth it stays within a factor of ten of its median.
"""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from megaclass.config.schema import HeadConfig
from megaclass.head.margins import MARGINS

GRADIENT_FACTOR = 10.0
_MOST_NEEDED = 0.9


@dataclass(frozen=True, slots=True)
class HealthyRange:
    """Values that a run in good order reaches, and why."""

    low: float
    high: float
    words: str


def cosine_range(head: HeadConfig, num_classes: int | None) -> HealthyRange:
    """Returns the target cosines that suffice for the own class to win. num_classes: None if it is not known yet."""
    m1, m2, m3 = _margin_of(head)
    needed = m3 + math.log(max(2, num_classes or 2) - 1) / head.scale
    angle = max(0.0, math.acos(min(needed, 1.0)) - m2) / m1
    low = min(math.cos(min(angle, math.pi)), _MOST_NEEDED)
    classes = f" among {num_classes:,} classes" if num_classes else ""
    return HealthyRange(
        low,
        1.0,
        f"Healthy: it starts near 0, rises all the time and ends in the shaded range, from {low:.2f} on. There the own class "
        f"has more than half of the softmax{classes}, with its margin ({head.margin}) and scale {head.scale:g}.",
    )


def gradient_range(norms: Sequence[float]) -> HealthyRange | None:
    """Returns the range of a factor of ten around the median without the first tenth; None for too few values."""
    later = [norm for norm in norms[len(norms) // 10 :] if math.isfinite(norm) and norm > 0]
    if len(later) < 3:
        return None
    middle = statistics.median(later)
    return HealthyRange(
        middle / GRADIENT_FACTOR,
        middle * GRADIENT_FACTOR,
        "Healthy: it falls steeply at first and then stays in the shaded range, a factor of ten around its median. Growth "
        "from row to row announces values that are not finite; a fall towards 0 means that nothing is learned any more.",
    )


def _margin_of(head: HeadConfig) -> tuple[float, float, float]:
    """Returns m1, m2, m3 of cos(m1 * angle + m2) - m3; the margins that vary per image count with their usual size."""
    if head.margin == "combined":
        return head.m1 or 1.0, head.margin_size or head.m2 or 0.0, head.m3 or 0.0
    # What a margin of the user needs is not known: this is what any margin needs.
    if head.margin == "softmax" or head.margin not in MARGINS:
        return 1.0, 0.0, 0.0
    margin, size_field = MARGINS[head.margin]
    defaults = {one.name: one.default for one in dataclasses.fields(margin)}  # type: ignore[arg-type]
    # MagFace chooses between 0.45 and 0.8 radians by the length of the embedding; the least suffices here.
    usual = defaults.get(size_field or "", 0.45)
    size = head.margin_size if head.margin_size is not None else float(usual)  # type: ignore[arg-type]
    return (1.0, 0.0, size) if head.margin == "cosface" else (1.0, size, 0.0)
