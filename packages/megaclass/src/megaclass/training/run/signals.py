"""Signals that ask a run to save and leave: SIGTERM, SIGUSR1 (preemption), SIGHUP (closed terminal), the first Ctrl-C.

The handlers only record the request. All ranks exchange it when they report (`of_any_rank`), save a checkpoint together
and exit: with 75 after a signal, which asks launchers to resume the job, with 130 after Ctrl-C, which does not.
"""

import enum
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

from megaclass_launch.operating_system import signals_named
from megaclass_launch.ranks.collectives import gather_blocks
from megaclass_launch.signals import is_heeded, leave_closed_terminal


class Stop(enum.IntEnum):
    """Reason to end a run before its last step."""

    NO = 0
    EARLY = 1
    """By a callback, or by train.patience: the run ends with all its results, as after its last step."""
    ASKED = 2
    """By SIGTERM or a similar signal: exit code 75, "resume me"."""
    BY_HAND = 3
    """By Ctrl-C: exit code 130, so no launcher starts the run again."""

    @property
    def is_interruption(self) -> bool:
        """True if the run is not over: it saves and leaves, and --resume continues it."""
        return self >= Stop.ASKED


class StopSignals:
    """Records that this rank was asked to stop, until the ranks exchange it."""

    def __init__(self, *, is_main: bool) -> None:
        self._stop = Stop.NO
        self._is_main = is_main

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handles signals while the block runs. A second Ctrl-C, or SIGTERM after one, ends the rank.

        Python handles signals in the main thread only: in another thread, as of a web service, nothing is handled.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def remember(signum: int, frame: FrameType | None) -> None:
            if self._stop is Stop.BY_HAND and signum == signal.SIGTERM:
                raise KeyboardInterrupt
            # Ctrl-C is stronger: a later SIGTERM must not turn exit code 130 into 75.
            self._stop = max(self._stop, Stop.ASKED)
            leave_closed_terminal()

        def interrupt(signum: int, frame: FrameType | None) -> None:
            if self._stop is Stop.BY_HAND:
                raise KeyboardInterrupt
            self._stop = Stop.BY_HAND
            if self._is_main:
                # Printed even with --quiet, on a line of its own behind the terminal's ^C.
                text = "\nmegaclass: Ctrl-C: saving at the next report; press it again to leave at once."
                print(text, file=sys.stderr, flush=True)

        # SIGHUP and SIGINT that are ignored stay ignored: nohup and background jobs of a shell rely on that.
        hangup = [number for number in signals_named("SIGHUP") if is_heeded(number)]
        numbers = [*signals_named("SIGTERM", "SIGUSR1"), *hangup]
        previous = {number: signal.signal(number, remember) for number in numbers}
        if is_heeded(signal.SIGINT):
            previous[signal.SIGINT] = signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    @property
    def is_asked(self) -> bool:
        """True once this rank was asked to stop."""
        return self._stop is not Stop.NO

    def of_any_rank(self, device: torch.device, own: Stop = Stop.NO) -> Stop:
        """Collective. Returns the strongest request of any rank: a signal may reach one rank only, but all leave together.

        own: another reason of this rank. Traffic: one all-gather of one byte per rank.
        """
        asked = torch.tensor([max(self._stop, own)], dtype=torch.uint8, device=device)
        return Stop(int(gather_blocks(asked, None).max()))
