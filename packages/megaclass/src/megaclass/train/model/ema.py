"""Exponential moving average of the backbone's weights; if enabled, it is evaluated and exported."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Ema:
    """mean <- decay * mean + (1 - decay) * weights, after every step not skipped. Batch statistics are not averaged."""

    def __init__(self, backbone: nn.Module, decay: float) -> None:
        self._decay = decay
        self._parameters = dict(backbone.named_parameters())
        self.means = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}

    @torch.no_grad()
    def follow(self, found_inf: Tensor) -> None:
        """Updates the means. found_inf: 0-d bool on the device; a skipped step changes nothing, without waiting for it."""
        weight = torch.where(found_inf, 0.0, 1 - self._decay)
        for name, parameter in self._parameters.items():
            self.means[name].lerp_(parameter, weight.to(parameter.dtype))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Puts the means into the backbone while the block runs, and its own weights back afterwards."""
        own = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}
        self._copy(self.means)
        try:
            yield
        finally:
            self._copy(own)

    def load(self, means: dict[str, Tensor]) -> None:
        for name, mean in self.means.items():
            mean.copy_(means[name])

    @torch.no_grad()
    def _copy(self, tensors: dict[str, Tensor]) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(tensors[name])
