"""Devices that a user names, checked before torch fails on them with an error that names no way out."""

import torch

from megaclass.errors import LaunchError


def usable_device(given: str | torch.device, asker: str) -> torch.device:
    """Returns the device, or raises an error in one line if torch cannot use it here. asker: whose argument it is."""
    try:
        device = torch.device(given)
    except RuntimeError:
        raise LaunchError(f"{asker} was asked for device {str(given)!r}: expected cpu, cuda or cuda:N.") from None
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        raise LaunchError(f"{asker} was asked for device {str(device)!r}, but {no_gpu()}. Otherwise use device='cpu'.")
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise LaunchError(
            f"{asker} was asked for device {str(device)!r}, but torch sees {torch.cuda.device_count()} GPU(s) here: "
            f"cuda:0 to cuda:{torch.cuda.device_count() - 1}."
        )
    return device


def no_gpu() -> str:
    """Says that torch sees no GPU, and what to check."""
    return f"torch {torch.__version__} sees no GPU: check the driver with nvidia-smi, and that torch is a CUDA build"
