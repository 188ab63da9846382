"""The connection between an agent and one worker of an elastic job: signed lines over a pair of Unix sockets.

    line = HMAC-SHA256(key, sender, number of the line, text) in hexadecimal digits, a blank, text (JSON), line end

The worker inherits its end from the agent, so nothing listens anywhere. The key is different for each worker and reaches it in
its environment. A line is parsed only after its HMAC has been verified. The number of the line is part of it, so that a line
cannot be repeated, left out or sent back. Standard library only.
"""

import contextlib
import hashlib
import hmac
import json
import os
import select
import socket
import time
from collections.abc import Mapping
from typing import Any

from megaclass.errors import LaunchError

FD_NAME = "MEGACLASS_ELASTIC_FD"
KEY_NAME = "MEGACLASS_ELASTIC_KEY"
MAX_LINE_BYTES = 4 << 20
"""The members of 10,000 ranks take a quarter of it."""
_MAC_DIGITS = 64
_READ_BYTES = 1 << 16

Message = dict[str, Any]


class ChannelError(Exception):
    """Raised for lines that the other end did not write, or after which no line can be trusted."""


def worker_key(secret: str, worker: int) -> str:
    """Returns the key of one worker's channel, derived from the job's secret."""
    return hmac.digest(bytes.fromhex(secret), b"elastic worker %d" % worker, "sha256").hex()


class Channel:
    """One end of the connection. Nothing blocks, except for `wait`.

    is_agent: which end this is. The lines of both ends are signed differently.
    """

    def __init__(self, connection: socket.socket, key: str, *, is_agent: bool) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._key = bytes.fromhex(key)
        self._names = (b"agent", b"worker") if is_agent else (b"worker", b"agent")
        self._num_sent = self._num_received = 0
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
        text = json.dumps(message, separators=(",", ":")).encode("ascii")
        # Never written past the queue: lines must arrive in the order of their numbers, and a part of one may still wait here.
        self._unsent += self._mac(self._names[0], self._num_sent, text) + b" " + text + b"\n"
        self._num_sent += 1
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
        """Returns the messages that have arrived; one system call if there are none. ChannelError for a forged line."""
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
            found.append(self._verified(bytes(self._received[:end])))
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
            # At least one read comes before this, so that a timeout of 0 asks for what is there.
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

    def _verified(self, line: bytes) -> Message:
        mac, text = line[:_MAC_DIGITS], line[_MAC_DIGITS + 1 :]
        # Before the text is parsed: only the other end of this very channel can have written it, as its next line.
        if not hmac.compare_digest(mac, self._mac(self._names[1], self._num_received, text)):
            raise ChannelError("a line without a valid signature")
        self._num_received += 1
        message = json.loads(text)
        if not isinstance(message, dict):
            raise ChannelError("a line that is no message")
        return message

    def _mac(self, sender: bytes, number: int, text: bytes) -> bytes:
        return hmac.new(self._key, b"%s %d " % (sender, number) + text, hashlib.sha256).hexdigest().encode()


def inherited_channel(env: Mapping[str, str]) -> Channel | None:
    """Returns the channel that this process inherited from its agent; None outside of elastic jobs.

    Raises LaunchError if a program between the agent and this process has closed the connection.
    """
    number, key = env.get(FD_NAME, ""), env.get(KEY_NAME, "")
    if not number.isdecimal() or not key:
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
            f"`megaclass run` and this process has closed it, as Python's subprocess does unless it is given close_fds=False."
        ) from error
    # Programs that this rank starts get no copy: the agent would not notice the end of the rank.
    os.set_inheritable(connection.fileno(), False)
    return Channel(connection, key, is_agent=False)
