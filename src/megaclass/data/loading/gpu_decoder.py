"""JPEGs decoded on the GPU, by NVIDIA's decoder in torchvision.

Its pixels are not those of the CPU's decoder (libjpeg-turbo): both follow the standard, which leaves the rounding of the
inverse transform and the interpolation of colours open. docs/data.md has the measured differences.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

from megaclass.errors import ConfigError

EXTRA = "pip install 'megaclass[gpu-decode]'"


def why_not(device: torch.device) -> str:
    """Returns why JPEGs cannot be decoded on this device; empty if they can."""
    if device.type != "cuda":
        return "training runs on the CPU (train.device)"
    if importlib.util.find_spec("torchvision") is None:
        return f"torchvision is not installed: {EXTRA}, in the build that belongs to your torch"
    return ""


def decodes_on_gpu(decode: str, device: torch.device, has_processes: bool) -> bool:
    """Returns whether the GPU decodes JPEGs. decode: data.decode; ConfigError if it is gpu and that is not possible."""
    if decode != "gpu":
        return False
    reason = why_not(device)
    if not reason and not has_processes:
        reason = "threads of the rank itself read the data: set data.workers to 1 or more"
    if reason:
        raise ConfigError(f"data.decode is gpu, but {reason}. Leave data.decode out to decode on the CPU.")
    return True


def decode_jpegs(jpegs: Sequence[Tensor], device: torch.device) -> Tensor:
    """Returns RGB pixels (B, H, W, 3) of JPEGs of one size, given as bytes on the host. RuntimeError if one is damaged."""
    from torchvision.io import ImageReadMode, decode_jpeg

    images = decode_jpeg(list(jpegs), mode=ImageReadMode.RGB, device=device)
    return torch.stack(images).permute(0, 2, 3, 1)
