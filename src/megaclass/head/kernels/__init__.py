"""Kernels behind one signature, and the choice between them."""

import torch

from megaclass.errors import HeadError
from megaclass.head.kernels import chunked, reference
from megaclass.head.kernels.problem import Kernel

KERNELS: dict[str, Kernel] = {"reference": reference, "chunked": chunked}


def choose_kernel(name: str, device: torch.device) -> Kernel:
    """`auto` is the fastest kernel this device has."""
    if name == "auto":
        return KERNELS["chunked"]
    if name not in KERNELS:
        raise HeadError(f"Unknown kernel {name!r} for {device}: expected auto, {' or '.join(KERNELS)}.")
    return KERNELS[name]
