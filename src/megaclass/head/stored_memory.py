"""Memory for exponentials that a step keeps for its backward, where the user does not say how much."""

import torch

_ON_CPU = 4 << 30
SHARE_OF_DEVICE = 8
_SHARE_OF_FREE = 2


def default_stored_bytes(device: torch.device) -> int:
    """Returns an eighth of a GPU's memory, or half of what is free if that is less; 4 GiB on a CPU.

    The GPU's size decides wherever it can, not what happens to be free: it also decides how classes are cut into chunks, and
    so the last bits of a sum, which should be the same after a restart.
    """
    if device.type != "cuda":
        return _ON_CPU
    free, total = torch.cuda.mem_get_info(device)
    # What torch's allocator has reserved and does not use is free, too.
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return min(total // SHARE_OF_DEVICE, free // _SHARE_OF_FREE)
