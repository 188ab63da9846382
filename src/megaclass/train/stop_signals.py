"""SIGTERM, SIGUSR1 (preemption) and SIGHUP (the terminal was closed): save and leave with exit code 75, "resume me"."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

from megaclass.distributed.collectives import gather_blocks
from megaclass.launch.inbox import is_heeded, leave_closed_terminal


class StopSignals:
    """Remembers that this rank was told to stop; the ranks compare notes when they report."""

    def __init__(self) -> None:
        self._is_asked = False

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Listens inside the block, in the main thread."""

        def remember(signum: int, frame: FrameType | None) -> None:
            self._is_asked = True
            leave_closed_terminal()

        numbers = [signal.SIGTERM, signal.SIGUSR1] + ([signal.SIGHUP] if is_heeded(signal.SIGHUP) else [])
        previous = {number: signal.signal(number, remember) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def any_rank_was_asked(self, device: torch.device) -> bool:
        """Collective. An all-gather of one byte a rank: a signal may reach one rank only, all must leave together."""
        asked = torch.tensor([self._is_asked], dtype=torch.uint8, device=device)
        return bool(gather_blocks(asked, None).any())
