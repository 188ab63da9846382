"""Signals that ask a run to save and leave: SIGTERM, SIGUSR1 (preemption), SIGHUP (the terminal was closed), Ctrl-C once."""

import enum
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

from megaclass.distributed.collectives import gather_blocks
from megaclass.launch.signals import is_heeded, leave_closed_terminal


class Stop(enum.IntEnum):
    """Why a run leaves before its end."""

    NO = 0
    ASKED = 1
    """By SIGTERM and the like: exit code 75, "resume me"."""
    BY_HAND = 2
    """By Ctrl-C: exit code 130, so that nobody starts it again."""


class StopSignals:
    """Remembers that this rank was told to stop; the ranks compare notes when they report."""

    def __init__(self, *, is_main: bool) -> None:
        self._stop = Stop.NO
        self._is_main = is_main

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Listens inside the block, in the main thread. A second Ctrl-C, or a SIGTERM after the first, ends the rank."""

        def remember(signum: int, frame: FrameType | None) -> None:
            if self._stop is Stop.BY_HAND and signum == signal.SIGTERM:
                raise KeyboardInterrupt
            self._stop = max(self._stop, Stop.ASKED)
            leave_closed_terminal()

        def interrupt(signum: int, frame: FrameType | None) -> None:
            if self._stop is Stop.BY_HAND:
                raise KeyboardInterrupt
            self._stop = Stop.BY_HAND
            if self._is_main:
                text = "\nmegaclass: Ctrl-C: saving at the next report; again to leave at once."
                print(text, file=sys.stderr, flush=True)

        numbers = [signal.SIGTERM, signal.SIGUSR1] + ([signal.SIGHUP] if is_heeded(signal.SIGHUP) else [])
        previous = {number: signal.signal(number, remember) for number in numbers}
        if is_heeded(signal.SIGINT):
            previous[signal.SIGINT] = signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def of_any_rank(self, device: torch.device) -> Stop:
        """Collective. An all-gather of one byte a rank: a signal may reach one rank only, all must leave together."""
        asked = torch.tensor([self._stop], dtype=torch.uint8, device=device)
        return Stop(int(gather_blocks(asked, None).max()))
