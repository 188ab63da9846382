"""Batch norm's running statistics, which every forward in training changes; a skipped step restores them."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


class RunningStatistics:
    """Saves and restores all buffers of a backbone in place, with a few kernel launches per step and without waiting.

    The decision to restore is a tensor on the device, so both copies are always made.
    """

    def __init__(self, backbone: nn.Module) -> None:
        # One contiguous block per dtype, so that a few launches copy all buffers.
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for buffer in backbone.buffers():
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
        self._copies = [(buffers, _Row.like(buffers), _Row.like(buffers)) for buffers in by_dtype.values()]

    @torch.no_grad()
    def keep(self) -> None:
        """Saves the buffers; called before the first forward of a step."""
        for buffers, kept, _ in self._copies:
            torch._foreach_copy_(kept.parts, buffers)

    @torch.no_grad()
    def put_back(self, was_skipped: Tensor) -> None:
        """Restores the saved buffers if `was_skipped`, a 0-d bool on the device; called after the last backward."""
        for buffers, kept, now in self._copies:
            torch._foreach_copy_(now.parts, buffers)
            # Selected, not blended by weights: the discarded values may be NaN.
            torch.where(was_skipped, kept.whole, now.whole, out=now.whole)
            torch._foreach_copy_(buffers, now.parts)


@dataclass(frozen=True)
class _Row:
    """Contiguous memory for tensors of one dtype."""

    whole: Tensor
    parts: list[Tensor]
    """Views of `whole`, in the shapes of the tensors."""

    @classmethod
    def like(cls, tensors: list[Tensor]) -> "_Row":
        sizes = [tensor.numel() for tensor in tensors]
        whole = tensors[0].new_empty(sum(sizes))
        return cls(whole, [part.view(t.shape) for part, t in zip(whole.split(sizes), tensors, strict=True)])
