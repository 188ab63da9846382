"""Chooses the GPU of a rank, and checks devices that a user names before torch fails on them with an obscure error.

A rank uses cuda:LOCAL_RANK if that is visible. A starter may also show each rank only its own GPU (`srun
--gpus-per-task=1`, MIG, CUDA_VISIBLE_DEVICES per rank): every rank then uses cuda:0, and only the UUIDs of the GPUs tell
whether two ranks share one.
"""

import os
from collections.abc import Sequence

import torch

from megaclass_launch.errors import LaunchError


def gpu_of_rank(local_rank: int, num_visible: int) -> int | None:
    """Returns the number of the rank's GPU among those that torch sees; None if there is none for it."""
    if local_rank < num_visible:
        return local_rank
    return 0 if num_visible == 1 else None


def visible_gpus() -> list[str]:
    """Returns a text per GPU that torch sees; two ranks cannot talk over NCCL if their GPUs have the same text.

    The text is the UUID of the GPU, and NCCL_HOSTID if it is set: NCCL refuses two ranks of one host on one GPU, and takes
    ranks with different values for different hosts.
    """
    if not torch.cuda.is_available():
        return []
    host = os.environ.get("NCCL_HOSTID", "")
    uuids = [torch.cuda.get_device_properties(index).uuid for index in range(torch.cuda.device_count())]
    return [f"{uuid} on NCCL host {host}" if host else str(uuid) for uuid in uuids]


def ranks_sharing_a_gpu(gpus_W: Sequence[str]) -> tuple[int, int] | None:
    """Returns the first two ranks with the same GPU, given the GPU of every rank as one of its visible_gpus()."""
    first_ranks: dict[str, int] = {}
    for rank, gpu in enumerate(gpus_W):
        if first_ranks.setdefault(gpu, rank) != rank:
            return first_ranks[gpu], rank
    return None


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
