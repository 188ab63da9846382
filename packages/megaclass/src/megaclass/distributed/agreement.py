"""Shares the outcome of work between ranks, so no rank waits for one that has failed.

A rank that raised an error would leave the others waiting in their next collective until its timeout. Here every rank first
tells the others whether it failed, and all of them raise together.
"""

import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from megaclass_launch.errors import AgreedError as AgreedError
from megaclass_launch.errors import UserError, is_transient
from megaclass_launch.ranks.collectives import gather_blocks, group_rank, group_size

T = TypeVar("T")
_TEXT_BYTES = 4096
# Far below the timeout of any collective.
_SIGN_OF_LIFE_S = 5.0


def on_every_rank(action: Callable[[], T], device: torch.device, group: dist.ProcessGroup | None = None) -> T:
    """Runs the action on every rank and returns this rank's result; a UserError or OSError on any rank raises on all of them.

    One all-gather of 4 KiB per rank. A rank that failed raises its own error, unless a lower rank failed with the same text;
    all other ranks raise an AgreedError with the error of the lowest failed rank.
    """
    error: UserError | OSError | None = None
    try:
        result = action()
    except (UserError, OSError) as caught:
        error = caught
    text = b"" if error is None else (str(error) or type(error).__name__).encode(errors="replace")[:_TEXT_BYTES]
    block = torch.zeros(_TEXT_BYTES + 1, dtype=torch.uint8)
    block[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    # The last byte of the block tells whether a restart may help.
    block[-1] = error is not None and is_transient(error)
    blocks_W = gather_blocks(block.to(device), group).cpu()
    if not blocks_W.any():
        return result
    texts_W = [bytes(row[:-1].tolist()).rstrip(b"\0") for row in blocks_W]
    if error is not None and texts_W.index(text) == group_rank(group):
        raise error
    for rank, failed in enumerate(texts_W):
        if failed:
            may_pass = bool(blocks_W[rank, -1])
            raise AgreedError(f"rank {rank}: {failed.decode(errors='replace')}", is_transient=may_pass)
    return result


def on_main_rank(action: Callable[[], None], device: torch.device, group: dist.ProcessGroup | None = None) -> None:
    """Runs the action on rank 0 while the other ranks wait; its UserError or OSError is raised on all ranks."""
    on_every_rank(action if group_rank(group) == 0 else lambda: None, device, group)


def text_of_main_rank(action: Callable[[], str], device: torch.device, group: dist.ProcessGroup | None = None) -> str:
    """Runs the action on rank 0 and returns its text on every rank; its UserError or OSError is raised on all ranks.

    Two all-gathers, of errors and of the length of the text, and one broadcast of the text.
    """
    return _heard(on_every_rank(action if group_rank(group) == 0 else str, device, group), device, group)


def paths_of_main_rank(
    action: Callable[[], Sequence[Path]], device: torch.device, group: dist.ProcessGroup | None = None
) -> list[Path]:
    """Runs the action on rank 0, for as long as it takes, and returns its paths on every rank; its errors are raised on all.

    Folders may differ between hosts, for a moment or by mistake. Ranks that list them one by one would then give different
    numbers to the same file. A rank on whose host a path is missing finds out when it reads that file.
    """

    def listed() -> str:
        # No name contains a zero byte.
        return "\0".join(map(str, action()))

    text = on_every_rank_for_long(listed if group_rank(group) == 0 else str, device, group)
    return [Path(name) for name in _heard(text, device, group).split("\0") if name]


def _heard(text: str, device: torch.device, group: dist.ProcessGroup | None) -> str:
    """Returns the text of rank 0 on every rank."""
    content = np.frombuffer(text.encode(errors="surrogateescape"), dtype=np.uint8)
    length = int(gather_blocks(torch.tensor([len(content)], device=device), group)[0])
    if not length or group_size(group) == 1:
        return text
    block = torch.empty(length, dtype=torch.uint8, device=device)
    if group_rank(group) == 0:
        block.copy_(torch.from_numpy(content.copy()))
    dist.broadcast(block, group=group, group_src=0)
    return block.cpu().numpy().tobytes().decode(errors="surrogateescape")


def on_every_rank_for_long(action: Callable[[], T], device: torch.device, group: dist.ProcessGroup | None = None) -> T:
    """Works like on_every_rank, for actions that may take longer than the timeout of collectives: reading, hashing, copying.

    The action runs in a separate thread and must not call collectives.
    """
    return when_done_on_every_rank(_started(action, device), device, group)


def on_main_rank_for_long(
    action: Callable[[], None], device: torch.device, group: dist.ProcessGroup | None = None
) -> None:
    """Works like on_main_rank, for actions that may take longer than the timeout of collectives."""
    on_every_rank_for_long(action if group_rank(group) == 0 else lambda: None, device, group)


def when_done_on_every_rank(work: Future[T], device: torch.device, group: dist.ProcessGroup | None = None) -> T:
    """Waits until the work that a thread of each rank is already doing is done everywhere, like on_every_rank.

    Until then the ranks exchange a sign of life every 5 s, an all-gather of one byte per rank. The timeout of collectives
    therefore still detects ranks that are lost, however long the work takes.
    """
    is_any_busy = True
    while is_any_busy:
        wait([work], _SIGN_OF_LIFE_S)
        is_busy = torch.tensor([not work.done()], dtype=torch.uint8, device=device)
        is_any_busy = bool(gather_blocks(is_busy, group).any())
    return on_every_rank(work.result, device, group)


def _started(action: Callable[[], T], device: torch.device) -> Future[T]:
    work: Future[T] = Future()

    def run() -> None:
        try:
            if device.type == "cuda":
                # Each thread has its own current GPU, by default GPU 0, which may belong to another rank.
                torch.cuda.set_device(device)
            work.set_result(action())
        except BaseException as error:  # raised again by result()
            work.set_exception(error)

    # A daemon thread, so Ctrl-C ends the rank at once, whatever the action is doing.
    threading.Thread(target=run, daemon=True, name="megaclass-long-work").start()
    return work


def facts_that_differ(
    facts: Mapping[str, str], device: torch.device, group: dist.ProcessGroup | None = None
) -> dict[str, dict[int, str]]:
    """Collective. Returns the facts that are not the same on all ranks, each with its value by rank; usually none.

    One all-gather of a digest of 32 bytes per rank. Only if they differ are the facts themselves exchanged.
    """
    text = json.dumps(facts, sort_keys=True)
    digest = torch.tensor(list(hashlib.sha256(text.encode()).digest()), dtype=torch.uint8, device=device)
    digests_W = gather_blocks(digest, group)
    if bool((digests_W == digests_W[0]).all()):
        return {}
    facts_W = [json.loads(theirs) for theirs in gather_texts(text, device, group)]
    names = dict.fromkeys(name for theirs in facts_W for name in theirs)
    table = {name: {rank: theirs.get(name, "(not there)") for rank, theirs in enumerate(facts_W)} for name in names}
    return {name: values for name, values in table.items() if len(set(values.values())) > 1}


def gather_texts(text: str, device: torch.device, group: dist.ProcessGroup | None = None) -> list[str]:
    """Collective. Returns the texts of all ranks: one all-gather of lengths, one of the texts, padded to the longest."""
    encoded = text.encode(errors="replace")
    lengths_W = gather_blocks(torch.tensor([len(encoded)], device=device), group).flatten().tolist()
    block = torch.zeros(max(1, *lengths_W), dtype=torch.uint8)
    block[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
    rows = gather_blocks(block.to(device), group).cpu().tolist()
    return [bytes(row[:length]).decode(errors="replace") for row, length in zip(rows, lengths_W, strict=True)]
