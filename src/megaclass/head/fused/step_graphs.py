"""Decides which steps are captured as CUDA graphs.

A graph pays where the host needs longer to start a step's launches than the GPU to run them, and costs memory that stays
allocated. Both follow from the same number, the bytes of exponentials and unit centres; `auto` has a limit (GRAPH_BYTES).
"""

import torch

from megaclass.gpu.cuda_graphs import CudaGraph, ShapeGraphs
from megaclass.head.fused.captured_step import CapturedStep, StepShape
from megaclass.head.kernels.cut import GRAPH_BYTES


def can_capture(device: torch.device, num_ranks: int, *, has_margin_program: bool, has_update_program: bool) -> bool:
    """Returns True where forward and update are launches on one GPU and nothing else.

    Several ranks exchange something in forward. A margin whose derivative is not written out needs autograd, and a user's own
    optimizer may do anything.
    """
    return device.type == "cuda" and num_ranks == 1 and has_margin_program and has_update_program


class StepGraphs(ShapeGraphs[StepShape, CapturedStep]):
    """The captured step of one head, if there is one. The size of a step is its step_bytes()."""

    def __init__(self, setting: CudaGraph, *, is_possible: bool) -> None:
        """is_possible: result of can_capture()."""
        super().__init__(
            is_on=is_possible and setting != "off",
            largest_bytes=None if setting == "on" else GRAPH_BYTES,
            subject="The head's step",
            setting="cuda_graph='off'",
        )
