"""The agent's two pipes: the job comes in on stdin, messages to the driver go out on stdout. Standard library only."""

import os
import sys
from collections import deque
from collections.abc import Callable

from megaclass.launch.wire.protocol import MAX_LINE_BYTES, Message, MessageReader
from megaclass.operating_system import readable

READ_BYTES = 1 << 16
_QUEUE_BYTES = 4 << 20
"""If more waits for the driver, the workers' pipes are not read: they wait, as for a slow terminal, and no memory grows."""
_JOB_S = 30.0
"""How long to wait for the job on stdin. ssh delivers it with the first packets, unless the cable was cut just then."""


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


class DriverPipe:
    """Sends to the driver through stdout, which must be non-blocking: a stopped driver must not stop the agent."""

    def __init__(self, on_closed: Callable[[str], None]) -> None:
        """on_closed: called with the reason when the driver does not read any more."""
        self._on_closed = on_closed
        self._is_open = True
        self._queue: deque[bytes] = deque()
        self._num_bytes = 0

    def fileno(self) -> int:
        return sys.stdout.fileno()

    @property
    def is_empty(self) -> bool:
        """Returns whether the driver has been sent everything."""
        return not self._queue

    @property
    def is_full(self) -> bool:
        """Returns whether so much waits that nothing more should be read from the workers."""
        return self._num_bytes >= _QUEUE_BYTES

    def send(self, data: bytes) -> None:
        """Queues the bytes and writes as much as the pipe takes now."""
        # The ends of the ranks are reported after the loss of the driver, too, and then go nowhere.
        if self._is_open:
            self._queue.append(data)
            self._num_bytes += len(data)
            self.write()

    def write(self) -> None:
        """Writes as much of the queue as the pipe takes."""
        while self._queue:
            try:
                written = os.write(self.fileno(), self._queue[0])
            except BlockingIOError:
                return
            except OSError:
                self._on_closed("the driver has closed the pipe")
                return
            self._num_bytes -= written
            first = self._queue.popleft()
            # The pipe took a part of the message; the rest goes first next time.
            if written < len(first):
                self._queue.appendleft(first[written:])

    def drop(self) -> None:
        """Forgets the queue and what is sent later: no process reads it, and a full queue keeps the workers' pipes unread."""
        self._is_open = False
        self._queue.clear()
        self._num_bytes = 0
