"""What one rank does or finds, all ranks learn: nobody is left waiting for one that has given up."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from megaclass.distributed.collectives import gather_blocks, group_rank
from megaclass.errors import UserError

_TEXT_BYTES = 4096


class AgreedError(UserError):
    """A UserError of another rank, which prints it."""


def on_every_rank(action: Callable[[], None], device: torch.device, group: dist.ProcessGroup | None = None) -> None:
    """Runs the action on this rank; a UserError or OSError on any rank ends it on all of them.

    An all-gather of 4 KiB a rank. The rank that failed raises its own error, the others that of the first.
    """
    error: UserError | OSError | None = None
    try:
        action()
    except (UserError, OSError) as caught:
        error = caught
    text = f"rank {group_rank(group)}: {error}".encode()[:_TEXT_BYTES] if error is not None else b""
    block = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
    block[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    texts = [bytes(row.tolist()).rstrip(b"\0") for row in gather_blocks(block.to(device), group).cpu()]
    if error is not None:
        raise error
    for failed in texts:
        if failed:
            raise AgreedError(failed.decode(errors="replace"))


def on_main_rank(action: Callable[[], None], device: torch.device, group: dist.ProcessGroup | None = None) -> None:
    """Runs the action on rank 0 while the others wait; its UserError or OSError ends all of them."""
    on_every_rank(action if group_rank(group) == 0 else lambda: None, device, group)
