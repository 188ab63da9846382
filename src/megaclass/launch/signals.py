"""Signals as something to wait for next to pipes: nothing is decided inside a handler. Standard library only."""

import errno
import os
import signal
import socket
import termios
from collections.abc import Iterable
from types import TracebackType
from typing import Any


class SignalInbox:
    """Takes the given signals for the duration of a `with` block, in the main thread; the handlers before come back.

    Readable when signals came; `taken()` lists them in the order of their coming, each as often as it came.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        self._numbers = [*numbers]
        self._previous: dict[int, Any] = {}
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._previous_fd = -1

    def fileno(self) -> int:
        return self._reader.fileno()

    def taken(self) -> list[int]:
        try:
            return list(self._reader.recv(4096))
        except BlockingIOError:
            return []

    def __enter__(self) -> "SignalInbox":
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


def is_heeded(number: int) -> bool:
    """False where whoever started this process had it ignore the signal, as nohup does with SIGHUP."""
    return signal.getsignal(number) is not signal.SIG_IGN


def leave_closed_terminal() -> None:
    """Standard streams on a terminal that has been closed lead nowhere from now on: a write would fail, and end its writer."""
    for number in (0, 1, 2):
        try:
            termios.tcgetattr(number)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                nowhere = os.open(os.devnull, os.O_RDWR)
                os.dup2(nowhere, number)
                os.close(nowhere)


def open_standard_streams() -> None:
    """A process started with stdin, stdout or stderr closed would hand their numbers to the next files it opens."""
    while (opened := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(opened, True)
    os.close(opened)
