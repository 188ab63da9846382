"""The connection between an agent and one worker of an elastic job: JSON lines over a pair of Unix sockets.

The worker inherits its end from the agent, so nothing listens anywhere, and only the two processes, and programs that run as
children of the worker with its open files, can write to it. Standard library only.
"""

import contextlib
import json
import os
import select
import socket
import time
from collections.abc import Mapping
from typing import Any

from megaclass_launch.errors import LaunchError

FD_NAME = "MEGACLASS_ELASTIC_FD"
MAX_LINE_BYTES = 4 << 20
"""The members of 10,000 ranks take a quarter of it."""
_READ_BYTES = 1 << 16

Message = dict[str, Any]


class ChannelError(Exception):
    """Raised for lines that neither an agent nor a worker writes."""


class Channel:
    """One end of the connection. Nothing blocks, except for `wait`."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._received = bytearray()
        self._unsent = bytearray()
        self.is_open = True
        """False once the other end has closed the connection."""

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, message: Message) -> None:
        """Queues a message and writes as much as the socket takes now."""
        # Never written past the queue: lines must arrive in order, and a part of one may still wait here.
        self._unsent += json.dumps(message, separators=(",", ":")).encode("ascii") + b"\n"
        self.write()

    def write(self) -> None:
        """Writes as much of the queue as the socket takes. That the reader is gone is noticed in `receive`."""
        while self._unsent:
            try:
                written = self._socket.send(self._unsent, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            # No error here: lines that the other end wrote before it closed may still be read.
            except OSError:
                self._unsent.clear()
                return
            del self._unsent[:written]

    def receive(self) -> list[Message]:
        """Returns the messages that have arrived; one system call if there are none. ChannelError for a line that is none."""
        # To the end of what has arrived, also after the other end has closed: its last lines are in there.
        while self.is_open:
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self.is_open = bool(data)
            self._received += data
        found = []
        while (end := self._received.find(b"\n")) >= 0:
            found.append(_parsed(bytes(self._received[:end])))
            del self._received[: end + 1]
        # A program that writes to the socket without line ends must not fill the memory of the other end.
        if len(self._received) > MAX_LINE_BYTES:
            raise ChannelError(f"a line of more than {MAX_LINE_BYTES} bytes")
        return found

    def wait(self, timeout_s: float | None) -> list[Message]:
        """Returns the messages that arrive within the time; none if the time is up or the connection has ended."""
        ends_at = time.monotonic() + timeout_s if timeout_s is not None else float("inf")
        while True:
            if (found := self.receive()) or not self.is_open:
                return found
            # At least one read comes before this, so a timeout of 0 asks for what is there.
            left_s = ends_at - time.monotonic()
            if left_s <= 0:
                return []
            events = select.poll()
            # Also for room to write: the answer may depend on a message that has not fitted into the socket yet.
            events.register(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            events.poll(min(left_s, 3600.0) * 1000)
            self.write()

    def wait_readable(self, timeout_s: float) -> None:
        """Waits until something arrives, or until the time is up."""
        with contextlib.suppress(OSError, ValueError):
            events = select.poll()
            events.register(self._socket, select.POLLIN)
            events.poll(timeout_s * 1000)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.close()
        self.is_open = False


def _parsed(line: bytes) -> Message:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ChannelError("a line that is not a message") from error
    if not isinstance(message, dict):
        raise ChannelError("a line that is not a message")
    return message


def inherited_channel(env: Mapping[str, str]) -> Channel | None:
    """Returns the channel that this process inherited from its agent; None outside of elastic jobs.

    Raises LaunchError if a program between the agent and this process has closed the connection.
    """
    number = env.get(FD_NAME, "")
    if not number.isdecimal():
        return None
    try:
        connection = socket.socket(fileno=int(number))
        if connection.family != socket.AF_UNIX:
            # Not closed with the object: the file belongs to another part of the program, which has reused the number.
            connection.detach()
            raise OSError("another file has its number")
    except OSError as error:
        raise LaunchError(
            f"The connection of this rank to its agent (file {number}, {FD_NAME}) is not open: {error}. A program between "
            f"the launcher and this process has closed it, as Python's subprocess does unless it is given close_fds=False."
        ) from error
    # Programs that this rank starts get no copy: the agent would not notice the end of the rank.
    os.set_inheritable(connection.fileno(), False)
    return Channel(connection)
