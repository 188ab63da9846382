"""The numbers that change from step to step, on the device, where the programs of the fused step read them.

A number that is an argument of a program is fixed once the launch is part of a CUDA graph (captured_step.py). These are
read from memory instead, by every step, whether it is part of a graph or not. The keys of random numbers are not among
them: the programs derive those from the step's number and a prefix that the seed determines (row_programs.step_state).

The host remembers what it has written, so that a number that stays the same costs no launch. Only the thread that trains
calls these methods, and never while a graph is captured, with one exception: set_step() with the number already there.
"""

import torch
from torch import Tensor


class StepNumbers:
    """The step's number, and the factors of its update."""

    def __init__(self, device: torch.device) -> None:
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self.factors = torch.zeros(3, device=device)
        """Learning rate, loss scale, and a flag that leaves all rows as they are; float32."""
        self._places = self.factors.split(1)
        self._known_step = 0
        # None where a tensor was given, whose value the host does not know.
        self._known_factors: list[float | None] = [0.0, 0.0, 0.0]

    def set_step(self, step: int) -> None:
        """Writes the number of the step that is computed next. A launch if it differs from the last one."""
        if step != self._known_step:
            self.step.fill_(step)
            self._known_step = step

    def set_factors(self, lr: float | Tensor, loss_scale: float | Tensor, skip: Tensor | None) -> None:
        """Writes the factors of the next update. A launch for each tensor and for each number that differs from the last."""
        given = (lr, loss_scale, 0.0 if skip is None else skip)
        for index, (place, value) in enumerate(zip(self._places, given, strict=True)):
            if isinstance(value, Tensor):
                place.copy_(value)
                self._known_factors[index] = None
            elif float(value) != self._known_factors[index]:
                place.fill_(float(value))
                self._known_factors[index] = float(value)
