"""A step whose forward and update were captured as CUDA graphs: the host starts each of them with one call.

    forward     pack_block        an ordinary launch: copies the batch into the block that the graph reads
                forward graph     all-gather's copy, draw, exponentials, products, faults, loss
    backward    two ordinary launches that read what the graph has left, and return fresh memory
    update      update graph      centres' gradient chunk by chunk, rows moved, watched numbers renewed

The programs read what changes from step to step on the device (rows.py:StepNumbers). Everything between is in memory of the
graphs' own pool, at the same addresses in every step. Therefore only one step at a time can use a CapturedStep: from its
forward to its update, or until nothing refers to its GraphedPart any more, which then no backward can ask for.

Memory: the pool keeps until the CapturedStep is dropped what an ordinary step allocates and frees: the stored
exponentials, the unit centres of one chunk, one or two gradients of 128 MiB, some megabytes for the images, and cuBLAS's
workspace (32 MiB on Hopper). StepGraphs bounds it by default.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from megaclass.gpu.cuda_graphs import CudaGraph, Recorder, ShapeGraphs
from megaclass.head.gpu.images import Block
from megaclass.head.gpu.tiling import GRAPH_BYTES
from megaclass.head.overwrite_check import OverwriteCheck
from megaclass.head.step import ForBackward, LossPart, StepPlan


@dataclass(frozen=True, slots=True)
class StepShape:
    """All that a captured step depends on and the device does not read; two steps with the same can share the graphs.

    The number of images is not part of it: rows up to max_batch are padding, and the block contains their number.
    """

    max_batch: int
    embeddings_dtype: torch.dtype
    product_dtype: torch.dtype
    rate: float
    for_backward: ForBackward
    overwrite_check: OverwriteCheck
    """Compared by identity: Centres.apply_() forms a new one, and may have replaced the tensors that the graphs refer to."""


class GraphedPart(LossPart):
    """One forward of a captured step. Its tensors are the graphs' own and belong to the next forward after the update."""

    captured: "CapturedStep"

    @property
    def is_closed(self) -> bool:
        """True after the update, which drops what was stored."""
        return self.problem.stored is None


class CapturedStep:
    """The graphs of one StepShape, and the tensors through which they are used."""

    def __init__(
        self,
        shape: StepShape,
        recorder: Recorder,
        block: Block,
        forward: Callable[[], tuple[StepPlan, LossPart]],
        update: Callable[[LossPart], None],
    ) -> None:
        """Captures both functions. forward: reads the batch from `block`. update: moves the rows by this part."""
        self.shape, self.block = shape, block
        self._forward_graph, (self._plan, self._part) = recorder.record(forward)
        # What forward has left is still referred to here, so the second capture takes other memory.
        self._update_graph, _ = recorder.record(lambda: update(self._part))
        self._last_part: weakref.ref[GraphedPart] | None = None

    @property
    def is_free(self) -> bool:
        """False while a backward may come that needs what the last forward has left."""
        last = None if self._last_part is None else self._last_part()
        return last is None or last.is_closed

    def forward(self) -> tuple[StepPlan, LossPart]:
        """Runs forward on the batch in the block. The loss is overwritten by the next forward: the caller copies it."""
        assert self.is_free
        self._forward_graph.replay()
        # Objects of its own for every step: PartialFC recognises a step by its plan, and the update writes to the problem.
        template = self._part
        part = GraphedPart(
            template.images, replace(template.problem), template.cosines_G, template.losses, template.statistics
        )
        part.negative_coefficients_G = template.negative_coefficients_G
        part.target_coefficients_G = template.target_coefficients_G
        part.captured = self
        self._last_part = weakref.ref(part)
        return replace(self._plan, counts_before=[]), part

    def update(self, part: GraphedPart) -> None:
        """Moves the rows by the part, whose backward has run."""
        assert part.captured is self and not part.is_closed
        self._update_graph.replay()
        part.problem.stored = None


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
