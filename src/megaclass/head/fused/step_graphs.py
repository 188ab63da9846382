"""Decides which steps are captured as CUDA graphs.

A graph pays where the host needs longer to start a step's launches than the GPU to run them, and costs memory that stays
allocated. Both follow from the same number, the bytes of exponentials and unit centres; `auto` has a limit (GRAPH_BYTES).

State, used by the thread that trains: `_captured` is the last step captured, `_shape` and `_num_equal` count ordinary
steps of the same shape in a row. A step of another shape takes the ordinary way and changes nothing, for example the last
batch of an epoch; if its shape stays, it replaces what was captured.
"""

import warnings
from collections.abc import Callable

import torch

from megaclass.head.fused.captured_step import CapturedStep, StepShape
from megaclass.head.kernels.cut import GRAPH_BYTES
from megaclass.head.settings import CudaGraph

NUM_ORDINARY_STEPS = 3
"""Steps of one shape before it is captured: they compile the programs, which cannot be done during a capture."""


def can_capture(device: torch.device, num_ranks: int, *, has_margin_program: bool, has_update_program: bool) -> bool:
    """Returns True where forward and update are launches on one GPU and nothing else.

    Several ranks exchange something in forward. A margin whose derivative is not written out needs autograd, and a user's own
    optimizer may do anything.
    """
    return device.type == "cuda" and num_ranks == 1 and has_margin_program and has_update_program


class StepGraphs:
    """The captured step of one head, if there is one."""

    def __init__(self, setting: CudaGraph, *, is_possible: bool) -> None:
        """is_possible: result of can_capture()."""
        self._is_on = is_possible and setting != "off"
        self._largest_bytes = None if setting == "on" else GRAPH_BYTES
        self._captured: CapturedStep | None = None
        self._shape: StepShape | None = None
        self._num_equal = 0

    def find(
        self, shape: StepShape, num_bytes: int, capture: Callable[[StepShape], CapturedStep]
    ) -> CapturedStep | None:
        """Returns the captured step for the next forward; None: it takes the ordinary way.

        num_bytes: step_bytes() of the step.
        """
        if not self._is_on or (self._largest_bytes is not None and num_bytes > self._largest_bytes):
            return None
        if self._captured is not None and self._captured.shape == shape:
            self._num_equal = 0
            return self._captured if self._captured.is_free else None
        self._num_equal = self._num_equal + 1 if shape == self._shape else 1
        self._shape = shape
        if self._num_equal <= NUM_ORDINARY_STEPS:
            return None
        # Before the new one is captured, so that both are not held at once.
        self._captured = None
        try:
            self._captured = capture(shape)
        except RuntimeError as error:
            # Nothing was run, so the ordinary way is still open. torch.OutOfMemoryError is a RuntimeError, too.
            self._is_on = False
            warnings.warn(
                f"The head's step could not be captured as a CUDA graph and runs without one, which only takes time of the "
                f"host. cuda_graph='off' avoids the attempt. The reason: {error}",
                stacklevel=2,
            )
        return self._captured
