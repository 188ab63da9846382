"""What one rank does or finds, all ranks learn: nobody is left waiting for one that has given up."""

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from megaclass.distributed.collectives import gather_blocks, group_rank
from megaclass.errors import AgreedError as AgreedError
from megaclass.errors import UserError

T = TypeVar("T")
_TEXT_BYTES = 4096


def on_every_rank(action: Callable[[], T], device: torch.device, group: dist.ProcessGroup | None = None) -> T:
    """The action's result on this rank; a UserError or OSError on any rank ends it on all of them.

    An all-gather of 4 KiB a rank. A rank that failed raises its own error, unless a lower rank says the same; the others
    raise that of the first.
    """
    error: UserError | OSError | None = None
    try:
        result = action()
    except (UserError, OSError) as caught:
        error = caught
    text = b"" if error is None else (str(error) or type(error).__name__).encode(errors="replace")[:_TEXT_BYTES]
    block = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
    block[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    blocks_W = gather_blocks(block.to(device), group).cpu()
    if not blocks_W.any():
        return result
    texts_W = [bytes(row.tolist()).rstrip(b"\0") for row in blocks_W]
    if error is not None and texts_W.index(text) == group_rank(group):
        raise error
    for rank, failed in enumerate(texts_W):
        if failed:
            raise AgreedError(f"rank {rank}: {failed.decode(errors='replace')}")
    return result


def on_main_rank(action: Callable[[], None], device: torch.device, group: dist.ProcessGroup | None = None) -> None:
    """Runs the action on rank 0 while the others wait; its UserError or OSError ends all of them."""
    on_every_rank(action if group_rank(group) == 0 else lambda: None, device, group)
