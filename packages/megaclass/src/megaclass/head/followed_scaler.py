"""The GradScaler of the loop, whose loss scale and decision the head follows (fp16).

A scaler multiplies the loss, and so the gradient that reaches the head, by its scale; users multiply it by weights, which are
meant. Only the scaler can tell the two apart. Its scale is copied in backward, because update() changes it in place. The
decision is read in head.step(), where update() may have run (Lightning, Accelerate) or not (a plain loop):

    not yet     the scaler still holds the flags of its optimizers
    it has      the scale is smaller than in backward exactly if a step was skipped

The host reads no value of the device.
"""

import torch
from torch import Tensor

from megaclass.errors import HeadError

# No weight of a loss is as large; the scale of a GradScaler begins at 65,536.
_SCALE_LIKE = 128


class FollowedScaler:
    """Scale in the last backward, and whether the scaler let its optimizers step after it."""

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler
        self._noted: Tensor | None = None
        self._version = 0

    def note_backward(self) -> None:
        """Copies the scale by which the loss of this backward was multiplied; None: scale() has not been called."""
        scale = self._scaler._scale
        self._noted = None if scale is None else scale.clone()
        self._version = 0 if scale is None else scale._version

    def loss_scale(self, device: torch.device) -> float | Tensor:
        return 1.0 if self._noted is None else self._noted.to(device)

    def is_skipped(self, device: torch.device) -> bool | Tensor:
        """Returns a flag on the device: the scaler has found a gradient that is not finite."""
        scale = self._scaler._scale
        if self._noted is None or scale is None:
            return False
        states = self._scaler._per_optimizer_states.values()
        flags = [flag.to(device) for state in states for flag in state["found_inf_per_device"].values()]
        if flags:
            return torch.stack(flags).sum() > 0
        # Counted by torch on the host: update() writes to the scale in place.
        if scale._version == self._version:
            raise HeadError(
                "head.step() came before the GradScaler that the head follows has judged the gradients: call "
                "scaler.step(optimizer) first, then head.step(lr=…). scaler.update() may come before or after it."
            )
        return (scale < self._noted).to(device)


def check_unscaled(upstream: Tensor) -> None:
    """Raises for a gradient of the loss that looks like a loss scale. The host waits for a GPU."""
    factor = float(upstream)
    if _SCALE_LIKE <= abs(factor) < float("inf"):
        raise HeadError(
            f"The loss was multiplied by {factor:g} before backward, which looks like the loss scale of a GradScaler (fp16): "
            f"the centres would move by {factor:g} times too much. Call head.follow_scaler(scaler) once, before the first "
            f"backward (Lightning: self.trainer.precision_plugin.scaler, Accelerate: accelerator.scaler), or give "
            f"head.step(lr, loss_scale=…). If the factor is a weight that is meant, give loss_scale=1.0."
        )
