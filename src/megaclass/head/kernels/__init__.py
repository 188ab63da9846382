"""Kernels behind one signature, and the choice between them."""

import importlib.util
import os
import warnings

import torch

from megaclass.errors import HeadError
from megaclass.head.kernels import chunked, reference
from megaclass.head.kernels.problem import Kernel
from megaclass.head.margins import Margin

_PLAIN: dict[str, Kernel] = {"reference": reference, "chunked": chunked}
_FUSED = "triton_fused"


def choose_kernel(name: str, device: torch.device, *, margin: Margin, storage: str) -> Kernel:
    """`auto` is the fastest kernel this device has for these settings; on a GPU it says why when that is not the fused one."""
    if name in _PLAIN:
        return _PLAIN[name]
    if name not in ("auto", _FUSED):
        raise HeadError(f"Unknown kernel {name!r} for {device}: expected auto, {', '.join(_PLAIN)} or {_FUSED}.")
    obstacle = fused_obstacle(device, margin=margin, storage=storage)
    if obstacle is None and (device.type == "cuda" or name == _FUSED):
        from megaclass.head.kernels import fused as triton_fused

        return triton_fused
    if name == _FUSED:
        raise HeadError(f"kernel={_FUSED!r} cannot run here: {obstacle}. Use kernel='auto', or mend that.")
    if device.type == "cuda":
        warnings.warn(f"The head uses its plain chunked kernel on {device}: {obstacle}.", stacklevel=3)
    return chunked


def is_fused(kernel: Kernel) -> bool:
    """Whether rows are drawn and moved by Triton programs too."""
    return kernel not in _PLAIN.values()


def fused_obstacle(device: torch.device, *, margin: Margin, storage: str) -> str | None:
    """Why the fused kernel cannot run, as the end of a sentence; None where it can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    # Triton's interpreter runs the same programs on a CPU, for tests.
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"it needs a CUDA GPU, and the head is on {device}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
        return f"it needs compute capability 8.0 or later, and {torch.cuda.get_device_name(device)} has {capability}"
    if storage == "float64":
        return "it computes in float32, and storage is 'float64'"
    from megaclass.head.kernels.fused import MAX_LOGIT

    if margin.logit_bound() > MAX_LOGIT:
        return f"it takes logits up to {MAX_LOGIT:g}, and those of {margin} reach {margin.logit_bound():g}"
    if not margin.touches_only_target and type(margin).curriculum is Margin.curriculum:
        return f"{type(margin).__name__} changes the negatives' logits in a way it does not know"
    return None
