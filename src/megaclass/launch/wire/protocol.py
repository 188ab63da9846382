"""The protocol between the driver and its agents: one JSON object per line, some followed by bytes. Standard library only.

A message with `size` is followed by that many raw bytes of a worker's output: no encoding is assumed, nothing is escaped.
Lines and payloads have a maximum length, so that neither side can fill the other's memory.
"""

import json
from collections.abc import Iterator
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

    after: the line that must come first; the end of what precedes it is kept as `noise`.
    """

    def __init__(
        self, after: bytes = b"", *, max_line_bytes: int = MAX_LINE_BYTES, max_payload_bytes: int = MAX_PAYLOAD_BYTES
    ) -> None:
        self.noise = bytearray()
        self._after = after
        self._max_line_bytes = max_line_bytes
        self._max_payload_bytes = max_payload_bytes
        self._buffer = bytearray()
        self._message: Message | None = None

    def feed(self, data: bytes) -> Iterator[tuple[Message, bytes]]:
        """Yields the messages that are complete. Raises ProtocolError for bytes that are no message."""
        self._buffer += data
        if self._after and not self._skip_noise():
            return
        while (whole := self._next()) is not None:
            yield whole

    def _skip_noise(self) -> bool:
        at = self._buffer.find(self._after)
        if at < 0:
            # The greeting may be split over two reads, so all but one byte of its length are kept.
            num_done = max(0, len(self._buffer) - len(self._after) + 1)
            self.noise += self._buffer[:num_done][-4096:]
            del self._buffer[:num_done], self.noise[:-4096]
            return False
        self.noise += self._buffer[:at]
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
