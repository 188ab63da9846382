"""The protocol between the driver and its agents: one JSON object per line, some followed by bytes. Standard library only.

A message with `size` is followed by that many raw bytes of a worker's output: no encoding is assumed, nothing is escaped.
Lines and payloads have a maximum length, so neither side can fill the other's memory.
"""

import json
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Any

Message = dict[str, Any]

MAX_LINE_BYTES = 16 << 20
"""The job line carries the environment, which Linux limits to a few MiB."""
MAX_PAYLOAD_BYTES = 1 << 20


class ProtocolError(Exception):
    """Raised for bytes that no driver or agent of this version sends."""


def encode(message: Message, payload: bytes = b"") -> bytes:
    """Encodes a message as ASCII JSON, which preserves the lone surrogates by which Python represents invalid UTF-8."""
    if payload:
        message = {**message, "size": len(payload)}
    return json.dumps(message, separators=(",", ":")).encode("ascii") + b"\n" + payload


def greeting(token: str) -> bytes:
    """Returns the first line of an agent; output of a login shell's start-up files before it is skipped."""
    return f"megaclass-agent {token}\n".encode("ascii")


class MessageReader:
    """Turns bytes, as they arrive, into complete messages.

    after: the line that must come first; what precedes it is skipped.
    """

    def __init__(
        self, after: bytes = b"", *, max_line_bytes: int = MAX_LINE_BYTES, max_payload_bytes: int = MAX_PAYLOAD_BYTES
    ) -> None:
        self._after = after
        self._max_line_bytes = max_line_bytes
        self._max_payload_bytes = max_payload_bytes
        self._buffer = bytearray()
        self._message: Message | None = None

    def feed(self, data: bytes) -> Iterator[tuple[Message, bytes]]:
        """Yields the messages that are complete. Raises ProtocolError for bytes that are not a message."""
        self._buffer += data
        if self._after and not self._skip_noise():
            return
        while (whole := self._next()) is not None:
            yield whole

    def _skip_noise(self) -> bool:
        at = self._buffer.find(self._after)
        if at < 0:
            # The greeting may be split over two reads, so all but one byte of its length are kept.
            del self._buffer[: max(0, len(self._buffer) - len(self._after) + 1)]
            return False
        del self._buffer[: at + len(self._after)]
        self._after = b""
        return True

    def _next(self) -> tuple[Message, bytes] | None:
        if self._message is None:
            end = self._buffer.find(b"\n")
            if max(end, len(self._buffer) if end < 0 else 0) > self._max_line_bytes:
                raise ProtocolError(f"a line of more than {self._max_line_bytes} bytes")
            if end < 0:
                return None
            self._message = _parsed(bytes(self._buffer[:end]), self._max_payload_bytes)
            del self._buffer[: end + 1]
        size = self._message.get("size", 0)
        if len(self._buffer) < size:
            return None
        message, payload = self._message, bytes(self._buffer[:size])
        del self._buffer[:size]
        self._message = None
        return message, payload


def _parsed(line: bytes, max_payload_bytes: int) -> Message:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"{line[:80]!r} is not a message") from error
    size = message.get("size", 0) if isinstance(message, dict) else None
    if not isinstance(size, int) or isinstance(size, bool) or not 0 <= size <= max_payload_bytes:
        raise ProtocolError(f"{line[:80]!r} is not a message")
    assert isinstance(message, dict)
    return message


class Outbox:
    """Bytes on their way into a pipe or socket that never blocks. write: os.write or send of a file; may take a part."""

    def __init__(self, write: Callable[[bytearray], int]) -> None:
        self._write = write
        self._unsent = bytearray()

    @property
    def num_bytes(self) -> int:
        """Returns the number of bytes that wait for room."""
        return len(self._unsent)

    def clear(self) -> None:
        self._unsent.clear()

    def add(self, data: bytes) -> bool:
        """Queues bytes and writes as much as there is room for now; see write."""
        # Never written past the queue: messages must stay in order, and a part of one may still wait here.
        self._unsent += data
        return self.write()

    def write(self) -> bool:
        """Writes as much of the queue as there is room for; returns False, and drops it, if nothing reads it any more."""
        while self._unsent:
            try:
                del self._unsent[: self._write(self._unsent)]
            except BlockingIOError:
                return True
            except OSError:
                self._unsent.clear()
                return False
        return True


class Why(StrEnum):
    """Why a worker of an elastic job comes to the rendezvous."""

    START = "start"
    """The process has just started, or joins again of its own accord."""
    FAILED = "failed"
    """A collective failed: a rank or its host is gone."""
    CHANGED = "changed"
    """The driver has announced other hosts, and all ranks have agreed to leave the generation."""


# ---- heartbeat ----
# Intervals of the heartbeat, the same for the driver and its agents.

# TCP retransmits lost packets after pauses that double: on a local network 0.2, 0.6, 1.4, 3, 6.2, 12.6 and 25.4 s after the
# first attempt. ssh's connection therefore recovers from an outage of 13 to 25 s after 25.4 s, and the lost heartbeat may
# have been due one interval after the last one that arrived. With the default limit of 30 s, the longest silence is longer
# than both together, and the rest suffices to end everything.
_BEATS_PER_LIMIT = 30
_LONGEST_GRACE_S = 1.0
"""Grace after a silence: the ranks wait for a host that is gone, and have less time than after other failures."""
_LONGEST_END_S = 1.5
"""Time for processes to vanish and for the last messages."""


def silence_limits(heartbeat_s: float, grace_s: float) -> tuple[float, float]:
    """Returns the longest silence and the grace after it, so everything is over within the heartbeat limit."""
    grace_s = min(grace_s, heartbeat_s / 4, _LONGEST_GRACE_S)
    return heartbeat_s - min(heartbeat_s / 10, _LONGEST_END_S) - grace_s, grace_s


def beat_interval(heartbeat_s: float) -> float:
    """Returns the time between two heartbeats."""
    return heartbeat_s / _BEATS_PER_LIMIT
