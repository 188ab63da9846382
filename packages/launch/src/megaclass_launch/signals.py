"""Signals as events that can be waited for next to pipes, and what several Ctrl-C mean. Standard library only."""

import errno
import os
import signal
import socket
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from megaclass_launch.operating_system import signals_named


class EndedBySignalError(Exception):
    """Raised while a job waits for its start, with the number of the signal by which the user has ended it."""


class SignalQueue:
    """Queues the given signals for the duration of a `with` block; the previous handlers are restored at its end.

    Python's own handlers run between two bytecodes of the main thread, where nothing can safely be decided. Here the
    handlers do nothing: the C handler writes each signal's number to a socket, which becomes readable.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        self._numbers = [*numbers]
        self._previous: dict[int, Any] = {}
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._previous_fd = -1

    def fileno(self) -> int:
        """Returns the file descriptor to select on."""
        return self._reader.fileno()

    def taken(self) -> list[int]:
        """Removes and returns the queued signals in the order of their arrival."""
        try:
            return list(self._reader.recv(4096))
        except BlockingIOError:
            return []

    def raise_if_ended(self) -> None:
        """Raises EndedBySignalError if a signal that ends the job is queued; others are for ranks, of which none runs."""
        for number in self.taken():
            if number in ENDING_SIGNALS:
                raise EndedBySignalError(number)

    def __enter__(self) -> "SignalQueue":
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in self._numbers:
            self._previous[number] = signal.signal(number, lambda *_: None)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_fd)
        self._reader.close()
        self._writer.close()


DRIVER_SIGNALS = signals_named("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
"""Signals that a driver queues: the first three end the job, the others are passed on to the ranks."""
ENDING_SIGNALS = DRIVER_SIGNALS[:3]


class InterruptLadder:
    """Chooses the signal that each Ctrl-C sends to the ranks: SIGINT asks, SIGTERM insists, SIGKILL ends them."""

    _SIGNALS = signals_named("SIGINT", "SIGTERM", "SIGKILL")

    def __init__(self) -> None:
        self._num_interrupts = 0

    def climb(self) -> signal.Signals:
        """Returns the signal to send for one more Ctrl-C."""
        sent = self._SIGNALS[min(self._num_interrupts, 2)]
        self._num_interrupts += 1
        return sent

    def message(self, sent: signal.Signals, num_ranks: int) -> str:
        """Describes what was sent and what the next Ctrl-C would send."""
        more = {signal.SIGINT: "; again for SIGTERM", signal.SIGTERM: "; again for SIGKILL"}.get(sent, "")
        return f"Ctrl-C: {sent.name} to {num_ranks} rank(s){more}."


def is_heeded(number: int) -> bool:
    """Returns False if the parent process made this one ignore the signal, as nohup does with SIGHUP."""
    return signal.getsignal(number) is not signal.SIG_IGN


def leave_closed_terminal() -> None:
    """Redirects standard streams on a closed terminal to /dev/null: a write to them would fail and end its writer."""
    try:
        import termios
    except ImportError:  # Windows has no terminals of this kind
        return
    for number in (0, 1, 2):
        try:
            termios.tcgetattr(number)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                null = os.open(os.devnull, os.O_RDWR)
                os.dup2(null, number)
                os.close(null)


def open_standard_streams() -> None:
    """Opens /dev/null for standard streams that are closed, whose numbers the next opened files would get otherwise."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(opened, True)
    os.close(opened)
