"""Dropout that depends on (seed, step, image), not on which rank has the image."""

import torch
from torch import Tensor, nn

from megaclass.head.counter_random import random_bits_rows, stream_keys

_DROPOUT = 5


class KeyedDropout(nn.Module):
    """Put in the place of nn.Dropout; told before each forward which images of which step come."""

    def __init__(self, p: float, seed: int, layer: int) -> None:
        super().__init__()
        self.p, self.seed, self.layer = p, seed, layer
        self._images_B: Tensor | None = None
        self._keys: tuple[Tensor, Tensor] | None = None

    def expect(self, images_B: Tensor, step: int) -> None:
        """images_B: (B,) numbers of the images in the data set."""
        first, second = stream_keys(_DROPOUT, self.seed, step, self.layer)
        # Tensors: as numbers they would be part of what torch.compile compiles, anew in every step.
        self._keys = images_B.new_full((), first, dtype=torch.int32), images_B.new_full((), second, dtype=torch.int32)
        self._images_B = images_B

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        assert self._images_B is not None and len(self._images_B) == len(x), "expect() comes before forward"
        assert self._keys is not None
        bits = random_bits_rows(self._keys, self._images_B, x[0].numel())
        is_kept = (bits >= round((self.p - 0.5) * 2**32)).view_as(x)
        return x * is_kept / (1 - self.p)


def key_dropout(module: nn.Module, seed: int) -> list[KeyedDropout]:
    """Replaces every nn.Dropout; returns the new ones."""
    replaced: list[KeyedDropout] = []
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.Dropout) and child.p > 0:
                keyed = KeyedDropout(child.p, seed, layer=len(replaced))
                setattr(parent, name, keyed)
                replaced.append(keyed)
    return replaced
