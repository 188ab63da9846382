"""The plan of a step: which classes take part and how many images there are, fixed for all forwards of the step."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DrawnClasses:
    """Classes of this rank that take part in a step; all fields None: all classes."""

    classes_S: Tensor | None = None
    """Local ids, ascending. On a GPU the list has a fixed length, and ids of K and above at its end are padding."""
    class_weight_S: Tensor | None = None
    """Factor of each class's exponential: the sampling correction, and 0 for padding; None: 1 for all."""
    num_drawn: Tensor | None = None
    """0-d int32: how many of classes_S are no padding, where weights do not mark it."""
    overflowed: Tensor | None = None
    """0-d float64: 1 where more classes were drawn than the list holds."""


@dataclass(slots=True)
class StepPlan:
    """Written by the engine when the step opens; each forward then appends to counts_before."""

    drawn: DrawnClasses
    num_images: Tensor
    """0-d float64: images of all ranks in the whole step."""
    counts_W: Tensor
    """Images of each rank in the whole step."""
    counts_before: list[Tensor]
    """Images of each rank in every forward of the step so far."""

    @property
    def overflowed(self) -> Tensor:
        return torch.zeros_like(self.num_images) if self.drawn.overflowed is None else self.drawn.overflowed

    def places_W(self) -> Tensor:
        """Returns the place in the step's global batch of each rank's next image."""
        return torch.stack([self.counts_W.cumsum(0) - self.counts_W, *self.counts_before]).sum(0)

    def at_this_part(self) -> "StepPlan":
        """Returns a copy that later forwards do not change."""
        return replace(self, counts_before=list(self.counts_before))
