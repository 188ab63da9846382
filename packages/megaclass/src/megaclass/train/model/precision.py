"""Number format of the backbone, and the dynamic loss scale for float16."""

from dataclasses import dataclass

import torch
from torch import Tensor

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

    @property
    def uses_autocast(self) -> bool:
        return self.dtype != torch.float32


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
