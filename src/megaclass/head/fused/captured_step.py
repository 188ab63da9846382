"""A step whose forward and update were captured as CUDA graphs: the host starts each of them with one call.

    forward     pack_block        an ordinary launch: copies the batch into the block that the graph reads
                forward graph     all-gather's copy, draw, exponentials, products, faults, loss
    backward    two ordinary launches that read what the graph has left, and return fresh memory
    update      update graph      centres' gradient chunk by chunk, rows moved, seal renewed

The programs read what changes from step to step on the device (step_numbers.py). Everything between is in memory of the
graphs' own pool, at the same addresses in every step. Therefore only one step at a time can use a CapturedStep: from its
forward to its update, or until nothing refers to its GraphedPart any more, which then no backward can ask for.

Memory: the pool keeps until the CapturedStep is dropped what an ordinary step allocates and frees: the stored
exponentials, the unit centres of one chunk, one or two gradients of 128 MiB, some megabytes for the images, and cuBLAS's
workspace (32 MiB on Hopper). step_graphs.py bounds it by default.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megaclass.gpu.cuda_graphs import Recorder
from megaclass.head.fused.images import Block
from megaclass.head.state.seal import Seal
from megaclass.head.step.cross_entropy import LossPart
from megaclass.head.step.engine import ForBackward
from megaclass.head.step.plan import StepPlan


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
    seal: Seal
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
        forward: Callable[[], tuple[StepPlan, LossPart, Tensor]],
        update: Callable[[LossPart], None],
    ) -> None:
        """Captures both functions. forward: reads the batch from `block`. update: moves the rows by this part."""
        self.shape, self.block = shape, block
        self._forward_graph, (self._plan, self._part, self._loss) = recorder.record(forward)
        # What forward has left is still referred to here, so the second capture takes other memory.
        self._update_graph, _ = recorder.record(lambda: update(self._part))
        self._last_part: weakref.ref[GraphedPart] | None = None

    @property
    def is_free(self) -> bool:
        """False while a backward may come that needs what the last forward has left."""
        last = None if self._last_part is None else self._last_part()
        return last is None or last.is_closed

    def forward(self) -> tuple[StepPlan, GraphedPart, Tensor]:
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
        return replace(self._plan, counts_before=[]), part, self._loss

    def update(self, part: GraphedPart) -> None:
        """Moves the rows by the part, whose backward has run."""
        assert part.captured is self and not part.is_closed
        self._update_graph.replay()
        part.problem.stored = None
