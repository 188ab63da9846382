"""Dropout, stochastic depth and patch masks that depend on (seed, step, image), not on the rank that holds the image."""

import torch
from torch import Tensor, nn

from megaclass.backbones.vit import DropPath, PatchMask, kept_patches
from megaclass.head.counter_random import random_bits_rows, stream_keys
from megaclass.keyed_random import Stream


class KeyedDropout(nn.Module):
    """Replaces nn.Dropout. `expect` announces the images and the step before each forward."""

    def __init__(self, p: float, seed: int, layer: int) -> None:
        super().__init__()
        self.p, self.seed, self.layer = p, seed, layer
        self._images_B: Tensor | None = None
        self._keys: tuple[Tensor, Tensor] | None = None

    def expect(self, images_B: Tensor, step: int) -> None:
        """Announces the next forward. images_B: (B,) indices of the images in the data set."""
        first, second = stream_keys(Stream.DROPOUT, self.seed, step, self.layer)
        # Tensors, not numbers: torch.compile would treat numbers as constants and compile again in every step.
        self._keys = images_B.new_full((), first, dtype=torch.int32), images_B.new_full((), second, dtype=torch.int32)
        self._images_B = images_B

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        return x * self.is_kept(x, x[0].numel()).view_as(x) / (1 - self.p)

    def is_kept(self, x: Tensor, num_columns: int) -> Tensor:
        """Returns (B, num_columns) independent choices, each True with probability 1 - p."""
        return self.bits(x, num_columns) >= round((self.p - 0.5) * 2**32)

    def bits(self, x: Tensor, num_columns: int) -> Tensor:
        """Returns (B, num_columns) int32 random bits for the images announced by expect()."""
        assert self._images_B is not None and len(self._images_B) == len(x), "expect() comes before forward"
        assert self._keys is not None
        return random_bits_rows(self._keys, self._images_B, num_columns)


class KeyedDropPath(KeyedDropout):
    """Replaces a DropPath."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * self.is_kept(x, 1)[:, :, None] / (1 - self.p)


class KeyedPatchMask(KeyedDropout):
    """Replaces a PatchMask."""

    def forward(self, x: Tensor) -> Tensor:
        return kept_patches(self.bits(x, x.shape[1]), self.p)


_KEYED: dict[type[nn.Module], type[KeyedDropout]] = {
    nn.Dropout: KeyedDropout,
    DropPath: KeyedDropPath,
    PatchMask: KeyedPatchMask,
}


def key_dropout(module: nn.Module, seed: int) -> list[KeyedDropout]:
    """Replaces every nn.Dropout, DropPath and PatchMask; returns the new modules."""
    replaced: list[KeyedDropout] = []
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            keyed_type = next((keyed for plain, keyed in _KEYED.items() if isinstance(child, plain)), None)
            p = getattr(child, "p", 0.0)
            if keyed_type is not None and p > 0:
                # The position among the replaced layers is part of the key: two layers must not drop the same elements.
                keyed = keyed_type(p, seed, layer=len(replaced))
                setattr(parent, name, keyed)
                replaced.append(keyed)
    return replaced
