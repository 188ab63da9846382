"""Buffers that are kept and grow, so that the steady state allocates nothing. Only the driver uses them."""

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from megaclass.hvd.transport.arithmetic import views_like

# Layouts that are remembered per buffer: those of the batches of gradients of one step, and some more.
_NUM_LAYOUTS = 32


@dataclass(frozen=True, slots=True)
class _Layout:
    """Consecutive places in a buffer for tensors of these shapes."""

    shapes: list[torch.Size]
    flat: Tensor
    """All places together."""
    places: list[Tensor]


class FusionBuffers:
    """One buffer per dtype, device and use; the next call for the same three may overwrite its content."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.dtype, torch.device, str], Tensor] = {}
        # Layouts in the current buffer for fusion, the latest first.
        self._layouts: dict[tuple[torch.dtype, torch.device], deque[_Layout]] = {}

    def flat(self, count: int, dtype: torch.dtype, device: torch.device, use: str) -> Tensor:
        """Returns `count` elements."""
        buffer = self._buffers.get((dtype, device, use))
        if buffer is None or buffer.numel() < count:
            buffer = self._buffers[dtype, device, use] = torch.empty(count, dtype=dtype, device=device)
        return buffer[:count]

    def for_fusion(self, tensors: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        """Returns room for all tensors in a row, and for each tensor its place in it, of its shape."""
        device = tensors[0].device
        shapes = [tensor.shape for tensor in tensors]
        layouts = self._layouts.get((dtype, device))
        # Making a thousand views takes longer than filling them, and most steps repeat the shapes of the previous step.
        for layout in layouts or ():
            if layout.shapes == shapes:
                return layout.flat, layout.places
        num_elements = sum([tensor.numel() for tensor in tensors])
        old = self._buffers.get((dtype, device, "fusion"))
        flat = self.flat(num_elements, dtype, device, "fusion")
        if layouts is None or self._buffers[dtype, device, "fusion"] is not old:
            # The buffer is another one: layouts of the old one would keep its memory in use.
            layouts = self._layouts[dtype, device] = deque(maxlen=_NUM_LAYOUTS)
        layout = _Layout(shapes, flat, views_like(flat, tensors))
        layouts.appendleft(layout)
        return layout.flat, layout.places
