"""The agent's connection to its driver: messages in both directions, and the loss of the driver. Standard library only.

    connected --stdin ends, stdout is closed, silence, or bytes of no message -------> lost, for good

The job comes in on stdin, messages to the driver go out on stdout. Neither blocks: a stopped driver must not stop the agent.
The connection never comes back: a driver that has lost an agent gives up its host, so the ranks must end. Everything happens
in the agent's one thread.

    field              changed by                                       read by
    _heard_at          _on_stdin, for any byte                          check_silence, lost_at
    _is_connected      lose, once                                       lose: the first reason is reported; _send
    _queue, _num_bytes _send, _write, lose                              is_full, is_empty, watch_room
"""

import logging
import os
import selectors
import sys
import time
from collections import deque
from collections.abc import Callable

from megaclass_launch.operating_system import readable
from megaclass_launch.wire.protocol import MAX_LINE_BYTES, Message, MessageReader, ProtocolError, encode, greeting

READ_BYTES = 1 << 16
_QUEUE_BYTES = 4 << 20
"""If more waits for the driver, the workers' pipes are not read: they wait, as for a slow terminal, and no memory grows."""
_JOB_S = 30.0
"""How long to wait for the job on stdin. ssh delivers it with the first packets, unless the cable was cut just then."""

_logger = logging.getLogger("megaclass.launch")


def read_job() -> tuple[Message | None, bytes]:
    """Returns the first line of stdin and what came with it; None if the driver left before the line was complete."""
    data = bytearray()
    while (end := data.find(b"\n")) < 0:
        # Limited: an agent whose driver died during the login would otherwise wait for its job forever.
        is_there = readable([sys.stdin], _JOB_S)
        more = os.read(sys.stdin.fileno(), READ_BYTES) if is_there else b""
        if not more or len(data) > MAX_LINE_BYTES:
            return None, b""
        data += more
    reader = MessageReader()
    [(job, _)] = reader.feed(bytes(data[: end + 1]))
    # Heartbeats, or the order to end, may have come in the same packet.
    return job, bytes(data[end + 1 :])


class DriverConnection:
    """Reads the driver's messages from stdin and sends the agent's through stdout; both must be non-blocking.

    silence_s: a driver that sends nothing for so long is lost. obey: carries out one message. on_lost: called
    once, with whether the driver fell silent.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        silence_s: float,
        obey: Callable[[Message], None],
        on_lost: Callable[[bool], None],
    ) -> None:
        self._selector = selector
        self._silence_s = silence_s
        self._obey = obey
        self._on_lost = on_lost
        self._reader = MessageReader()
        self._queue: deque[bytes] = deque()
        self._num_bytes = 0
        self._is_connected = True
        self._heard_at = time.monotonic()

    @property
    def is_empty(self) -> bool:
        """Returns whether the driver has been sent everything."""
        return not self._queue

    @property
    def is_full(self) -> bool:
        """Returns whether so much waits that nothing more should be read from the workers."""
        return self._num_bytes >= _QUEUE_BYTES

    @property
    def lost_at(self) -> float:
        """Returns the time at which the driver is lost unless something arrives."""
        return self._heard_at + self._silence_s

    # ---- to the driver ----

    def greet(self, token: str) -> None:
        """Sends the token, by which the driver finds the start of the agent's own output after that of login scripts."""
        self._send(greeting(token))

    def say(self, message: Message, payload: bytes = b"") -> None:
        """Sends a message; after the loss of the driver it is dropped."""
        self._send(encode(message, payload))

    def watch_room(self) -> None:
        """Waits for room in the driver's pipe while something is queued."""
        # Only then: a pipe with room would wake the selector all the time.
        is_registered = sys.stdout.fileno() in self._selector.get_map()
        if self.is_empty == is_registered:
            if is_registered:
                self._selector.unregister(sys.stdout)
            else:
                self._selector.register(sys.stdout, selectors.EVENT_WRITE, self._write)

    def _send(self, data: bytes) -> None:
        # The ends of the ranks are also reported after the loss of the driver, and then go nowhere.
        if self._is_connected:
            self._queue.append(data)
            self._num_bytes += len(data)
            self._write()

    def _write(self) -> None:
        while self._queue:
            try:
                written = os.write(sys.stdout.fileno(), self._queue[0])
            except BlockingIOError:
                return
            except OSError:
                self.lose("the driver has closed the pipe")
                return
            self._num_bytes -= written
            first = self._queue.popleft()
            # The pipe took a part of the message; the rest goes first next time.
            if written < len(first):
                self._queue.appendleft(first[written:])

    # ---- from the driver ----

    def listen(self) -> None:
        """Has the selector call for what arrives on stdin."""
        self._selector.register(sys.stdin, selectors.EVENT_READ, self._on_stdin)

    def feed(self, data: bytes) -> None:
        """Carries out the driver's messages in `data`."""
        try:
            for message, _ in self._reader.feed(data):
                self._obey(message)
        except ProtocolError as error:
            self.lose(f"the driver sent something else than messages: {error}")

    def check_silence(self, now: float) -> None:
        """Counts the driver as lost if it has sent nothing for too long, not even heartbeats."""
        if now - self._heard_at > self._silence_s:
            self.lose(f"the driver has sent nothing for {now - self._heard_at:.1f} s", is_silent=True)

    def lose(self, why: str, *, is_silent: bool = False) -> None:
        """Counts the driver as lost, and reports the first reason."""
        if self._is_connected:
            self._is_connected = False
            # No process reads it any more, and a full queue would keep the workers' pipes unread.
            self._queue.clear()
            self._num_bytes = 0
            # The driver cannot be told any more; stderr may still reach a terminal or a log.
            _logger.warning(f"{why}; ending its ranks")
            self._on_lost(is_silent)

    def _on_stdin(self) -> None:
        try:
            data = os.read(sys.stdin.fileno(), READ_BYTES)
        except BlockingIOError:
            return
        # An error means the same as the end of the stream: no message of the driver can arrive any more.
        except OSError:
            data = b""
        if data:
            # For any byte: a long message may take longer than the limit, and heartbeats wait behind it.
            self._heard_at = time.monotonic()
            self.feed(data)
        else:
            # An ended stream is always readable: the loop would spin until the ranks are gone.
            self._selector.unregister(sys.stdin)
            self.lose("the driver has ended")
