"""Number format of the backbone, and the state that follows every step: loss scale, moving average, running statistics.

All of it stays on the device: a skipped step changes nothing, and the host never waits to learn of
it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megaclass.config.schema import TrainConfig
from megaclass_launch.errors import ConfigError

_FIRST_SCALE = 2.0**16
_GROWTH_STEPS = 2000
_SMALLEST_SCALE = 1.0
"""float16 gradients that overflow without any scaling come from a run that diverges; a scale of 0 would skip all steps."""


@dataclass(frozen=True)
class Precision:
    """Number format in which the backbone computes."""

    dtype: torch.dtype

    def autocast(self, device: torch.device) -> torch.autocast:
        return torch.autocast(device.type, self.dtype, enabled=self.dtype != torch.float32)


def choose_precision(config: TrainConfig, device: torch.device) -> Precision:
    """Returns the format that train.precision names; auto is bf16 on GPUs that support it, otherwise float32."""
    if device.type == "cpu":
        if config.precision in ("bf16", "fp16"):
            raise ConfigError(f"train.precision is {config.precision}, but the device is a CPU: use auto or float32.")
        return Precision(torch.float32)
    if config.precision == "auto":
        # Emulated bf16 is slower than float32.
        return Precision(torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32)
    return Precision({"bf16": torch.bfloat16, "fp16": torch.float16, "float32": torch.float32}[config.precision])


class LossScale:
    """Doubles after 2,000 good steps, halves after a bad one, down to 1.

    It is kept on the device, so the host never waits for it.

    All ranks hold the same value: it depends only on `found_inf`, which all ranks derive from the same gradients.
    """

    def __init__(self, precision: Precision, device: torch.device) -> None:
        self.is_dynamic = precision.dtype == torch.float16
        # A scale of 1 for the other formats keeps one code path.
        first = _FIRST_SCALE if self.is_dynamic else 1.0
        self.scale = torch.tensor(first, dtype=torch.float32, device=device)
        self._good_steps = torch.zeros((), dtype=torch.float32, device=device)

    def follow(self, found_inf: Tensor) -> None:
        """Adapts the scale after a step. found_inf: 0-d bool on the device."""
        if not self.is_dynamic:
            return
        self._good_steps = torch.where(found_inf, 0.0, self._good_steps + 1)
        # Branches become torch.where: the host never reads the flag.
        is_grown = self._good_steps >= _GROWTH_STEPS
        halved = (self.scale * 0.5).clamp(min=_SMALLEST_SCALE)
        self.scale = torch.where(found_inf, halved, torch.where(is_grown, self.scale * 2, self.scale))
        self._good_steps = torch.where(is_grown, 0.0, self._good_steps)

    def state(self) -> dict[str, Tensor]:
        return {"scale": self.scale, "good_steps": self._good_steps}

    def load(self, state: dict[str, Tensor]) -> None:
        self.scale, self._good_steps = state["scale"].to(self.scale.device), state["good_steps"].to(self.scale.device)


class Ema:
    """mean <- decay * mean + (1 - decay) * weights, after every step not skipped. Batch statistics are not averaged."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], decay: float) -> None:
        self._decay, self._parameters = decay, parameters
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


class RunningStatistics:
    """Saves and restores all buffers of a backbone in place, with a few kernel launches per step and without waiting.

    The decision to restore is a tensor on the device, so both copies are always made.
    """

    def __init__(self, backbone: nn.Module) -> None:
        # One contiguous block per dtype, so a few launches copy all buffers.
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
