"""The open step of a head: what its forwards and backwards leave for the update.

             begin_step()                  backward                  step(), abandon_step(): a new object
    closed --------------> planned is set -----------> parts ------------------------------------------> closed
       |                                                 ^
       +-------------------------------------------------+
             backward of a step that has one forward

One thread at a time uses it: backward may run on a thread of autograd, but the caller of backward() waits for that.
"""

from torch import Tensor

from megaclass.errors import HeadError
from megaclass.head.step import LossPart, StepPlan


class OpenStep:
    """The plan of a step of several forwards, and the part of each backward so far."""

    def __init__(self) -> None:
        self.planned: StepPlan | None = None
        """The plan for all forwards of a step that begin_step() has opened; else None, and each forward makes its own."""
        self._parts: list[tuple[StepPlan, LossPart]] = []
        self.upstream: Tensor
        """Gradient of the loss that reached the last backward: 1, times what the loss was multiplied by."""

    @property
    def is_open(self) -> bool:
        return self.planned is not None or bool(self._parts)

    def check_closed(self) -> None:
        """Refuses to open a step inside another one."""
        if self.is_open:
            raise HeadError("begin_step() was called inside an open step: call step() first.")

    def add(self, plan: StepPlan, part: LossPart, upstream: Tensor) -> None:
        """Called by backward: the part takes part in the next step()."""
        # Parts of one update share their drawn classes and their mean, and therefore the plan.
        if self._parts and self._parts[0][0] is not plan:
            raise HeadError(
                "backward() came a second time before step(): for gradient accumulation hand all labels of the step to "
                "begin_step() first. Lightning's accumulate_grad_batches and Accelerate's accumulate() cannot do that: set "
                "them to 1, load the whole batch at once, and split it in the training step as the page "
                '"Use it in your own loop" (docs/own-loop.md) shows.'
            )
        self._parts.append((plan, part))
        self.upstream = upstream

    def for_update(self) -> tuple[StepPlan, list[LossPart]]:
        """Returns the plan of the step and its parts, of which there is at least one."""
        if not self._parts:
            raise HeadError("step() was called without a forward and a backward before it.")
        return self._parts[0][0], [part for _, part in self._parts]
