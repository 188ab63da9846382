"""The GPUs that a plan knows: what their makers state, and the share of it that our programs reach."""

from dataclasses import dataclass

import torch

from megaclass.errors import UserError

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU."""

    name: str
    memory: int
    """Bytes that torch sees."""
    flops: float
    """Dense bf16 operations per second, as stated."""
    bandwidth: float
    """Bytes per second of its memory, as stated."""
    link: float
    """Bytes per second that each GPU of a host sends in a collective: NVLink, or else PCIe."""
    capability: tuple[int, int]
    num_sms: int


def _gpu(
    name: str, gib: float, tflops: float, gb_per_s: float, link: float, capability: tuple[int, int], sms: int
) -> Gpu:
    return Gpu(name, round(gib * GIB), tflops * 1e12, gb_per_s * 1e9, link * 1e9, capability, sms)


# name, GiB, bf16 TFLOPS, memory GB/s, GB/s between GPUs of a host, compute capability, multiprocessors
GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("b200", 178.4, 2250, 8000, 700, (10, 0), 148),
        _gpu("h200", 139.8, 989, 4800, 350, (9, 0), 132),
        _gpu("h100", 79.2, 989, 3350, 350, (9, 0), 132),
        _gpu("h100-pcie", 79.2, 756, 2000, 45, (9, 0), 114),
        _gpu("a100-80", 79.3, 312, 2039, 230, (8, 0), 108),
        _gpu("a100-40", 39.5, 312, 1555, 230, (8, 0), 108),
        _gpu("l40s", 44.5, 362, 864, 22, (8, 9), 142),
        _gpu("a10", 22.1, 125, 600, 12, (8, 6), 72),
        _gpu("l4", 22.1, 121, 300, 12, (8, 9), 58),
        _gpu("rtx4090", 23.5, 165, 1008, 22, (8, 9), 128),
        _gpu("rtx3090", 23.6, 71, 936, 12, (8, 6), 82),
    )
}


def gpu_named(name: str | None) -> Gpu:
    """Returns the GPU of this name; None: that of this machine if it is in the table, or else an H200."""
    if name is not None:
        known = GPUS.get(name.lower())
        if known is None:
            raise UserError(f"--gpu is {name!r}, which is not in the table; known: {', '.join(GPUS)}.")
        return known
    if torch.cuda.is_available():
        here = torch.cuda.get_device_properties(0)
        return known_gpu(here.name, here.total_memory) or GPUS["h200"]
    return GPUS["h200"]


def known_gpu(name: str, memory: object) -> Gpu | None:
    """Returns the GPU of the table that CUDA calls so, by its memory in bytes if there are several; None if there is none."""
    words = name.lower().replace("geforce rtx ", "rtx").replace("-", " ").split()
    alike = [gpu for gpu in GPUS.values() if gpu.name.split("-")[0] in words]
    size = memory if isinstance(memory, int) else 0
    return min(alike, key=lambda gpu: abs(gpu.memory - size)) if alike else None
