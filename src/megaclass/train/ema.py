"""A running mean of the backbone's weights: what is evaluated and exported when it is kept."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Ema:
    """mean <- decay * mean + (1 - decay) * weights, after every step that counted. Batch statistics are not averaged."""

    def __init__(self, backbone: nn.Module, decay: float) -> None:
        self._decay = decay
        self._parameters = dict(backbone.named_parameters())
        self.means = {name: parameter.detach().clone() for name, parameter in self._parameters.items()}

    @torch.no_grad()
    def follow(self, found_inf: Tensor) -> None:
        """found_inf: 0-d bool; a step that was skipped changes nothing, and the host need not know."""
        weight = torch.where(found_inf, 0.0, 1 - self._decay)
        for name, parameter in self._parameters.items():
            self.means[name].lerp_(parameter, weight.to(parameter.dtype))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The backbone carries the means inside the block, its own weights again afterwards."""
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
