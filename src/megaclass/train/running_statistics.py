"""What a forward in training changes in a backbone: batch norm's running statistics. A step that is skipped puts them back."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


class RunningStatistics:
    """All buffers of a backbone, which it changes in place. A few launches a step, however many layers; nothing waits."""

    def __init__(self, backbone: nn.Module) -> None:
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for buffer in backbone.buffers():
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
        self._copies = [(buffers, _Row.like(buffers), _Row.like(buffers)) for buffers in by_dtype.values()]

    @torch.no_grad()
    def keep(self) -> None:
        """Before the first forward of a step: remembers them as they are."""
        for buffers, kept, _ in self._copies:
            torch._foreach_copy_(kept.parts, buffers)

    @torch.no_grad()
    def put_back(self, was_skipped: Tensor) -> None:
        """After the last backward. was_skipped: 0-d bool on the device; where it is false they stay as they are now."""
        for buffers, kept, now in self._copies:
            torch._foreach_copy_(now.parts, buffers)
            # Chosen, not mixed by weights: what is thrown away may be NaN.
            torch.where(was_skipped, kept.whole, now.whole, out=now.whole)
            torch._foreach_copy_(buffers, now.parts)


@dataclass(frozen=True)
class _Row:
    """Room for tensors of one dtype, side by side."""

    whole: Tensor
    parts: list[Tensor]
    """Views of it, in the tensors' shapes."""

    @classmethod
    def like(cls, tensors: list[Tensor]) -> "_Row":
        sizes = [tensor.numel() for tensor in tensors]
        whole = tensors[0].new_empty(sum(sizes))
        return cls(whole, [part.view(t.shape) for part, t in zip(whole.split(sizes), tensors, strict=True)])
