"""The two steps of a head, as PartialFC sees them, and the choice between them and their kernels."""

import importlib.util
import os
import warnings
from typing import TYPE_CHECKING, TypeAlias

import torch

from megaclass.errors import HeadError
from megaclass.head.cpu import chunked, reference
from megaclass.head.cpu.step import PlainStep
from megaclass.head.margins import CurricularFace, Margin
from megaclass.head.problem import Kernel

if TYPE_CHECKING:
    from megaclass.head.gpu.step import FusedStep

_PLAIN: dict[str, Kernel] = {"reference": reference, "chunked": chunked}
_FUSED = "triton_fused"


StepEngine: TypeAlias = "PlainStep | FusedStep"
"""The class that computes the steps of one head. The step number is the head's and comes with every call."""


def choose_engine(
    name: str, device: torch.device, *, margin: Margin, dtype: torch.dtype
) -> tuple[type[StepEngine], Kernel]:
    """Returns the step and the kernel for a name; `auto` is the fastest that this device has for these settings.

    dtype: of the stored centres. On a GPU a warning says why `auto` is not the fused kernel.
    """
    if name in _PLAIN:
        return PlainStep, _PLAIN[name]
    if name not in ("auto", _FUSED):
        raise HeadError(f"Unknown kernel {name!r} for {device}: expected auto, {', '.join(_PLAIN)} or {_FUSED}.")
    obstacle = fused_obstacle(device, margin=margin, dtype=dtype)
    if obstacle is None and (device.type == "cuda" or name == _FUSED):
        # Imported here: Triton need not be installed.
        from megaclass.head.gpu import kernel
        from megaclass.head.gpu.step import FusedStep

        return FusedStep, kernel
    if name == _FUSED:
        raise HeadError(f"kernel={_FUSED!r} cannot run here: {obstacle}. Use kernel='auto', or remove that obstacle.")
    if device.type == "cuda":
        warnings.warn(f"The head uses its plain chunked kernel on {device}: {obstacle}.", stacklevel=3)
    return PlainStep, chunked


def fused_obstacle(device: torch.device, *, margin: Margin, dtype: torch.dtype) -> str | None:
    """Returns why the fused kernel cannot run, as the end of a sentence; None if it can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    # Triton's interpreter runs the same programs on a CPU, for tests.
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"it needs a CUDA GPU, and the head is on {device}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        return f"it needs compute capability 8.0 or later, and {torch.cuda.get_device_name(device)} has {capability}"
    if dtype == torch.float64:
        return "it computes in float32, and storage is 'float64'"
    from megaclass.head.gpu.kernel import MAX_LOGIT

    if margin.logit_bound() > MAX_LOGIT:
        return f"it takes logits up to {MAX_LOGIT:g}, and those of {margin} reach {margin.logit_bound():g}"
    if not margin.touches_only_target and not isinstance(margin, CurricularFace):
        return f"{type(margin).__name__} changes the negatives' logits in a way it does not know"
    return None
