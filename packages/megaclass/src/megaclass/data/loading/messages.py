"""Messages between a rank and its loader processes: one JSON object per packet of a local socket. Free of torch.

    rank -> process    settings             first message: the plan, the layout of the ring, and this process's threads
                       piece                rows of a batch to fill
                       crashes              images on which a decoder has crashed: not to be decoded any more
    process -> rank    bad                  images of a piece that cannot be read
                       done                 a piece is filled; number of resized images among its rows
                       failed               a piece cannot be filled, or the data cannot be opened

Pixels never travel here: they are in the ring. A process ends when its rank's end of the socket is closed.
"""

from __future__ import annotations

import json
import socket
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megaclass.errors import DataError
from megaclass_launch.errors import UserError

_MAX_BYTES = 2**17
# Texts of errors may quote long paths, and JSON has six bytes for a character that is not ASCII.
_MAX_TEXT = 2000
_MAX_REPORT_TEXT = 500
# Bad images of one piece that are reported with their error; further ones are counted, without a text of their own.
_MAX_REPORTS = 32
# Where most images are bad, each row tries many of them: a piece may have more reports than a packet takes.
_REPORTS_PER_PACKET = 1000


@dataclass(frozen=True)
class Piece:
    """Rows [first, stop) of this rank's batch of one step, to be filled in one slot."""

    number: int
    slot: int
    epoch: int
    step: int
    first: int
    stop: int


def send(connection: socket.socket, **message: Any) -> None:
    connection.send(json.dumps(message).encode())


def receive(connection: socket.socket) -> dict[str, Any] | None:
    """Returns the next message; None if the other end is closed."""
    try:
        packet = connection.recv(_MAX_BYTES)
    # The other end was killed with packets of ours unread: the same as its end.
    except ConnectionResetError:
        return None
    return json.loads(packet) if packet else None


def bad_reports(bad: list[tuple[int, DataError]]) -> Iterator[list[tuple[int, str]]]:
    """Yields the reports of a piece's bad images, one packet after another."""
    reports = [
        (index, str(error)[:_MAX_REPORT_TEXT] if n < _MAX_REPORTS else "") for n, (index, error) in enumerate(bad)
    ]
    for start in range(0, len(reports), _REPORTS_PER_PACKET):
        yield reports[start : start + _REPORTS_PER_PACKET]


def describe_failure(error: BaseException) -> dict[str, Any]:
    """Returns the fields from which `failure` makes the same error in the rank."""
    if isinstance(error, UserError):
        cause = error.__cause__
        return {
            "kind": "data",
            "text": str(error)[:_MAX_TEXT],
            # The number tells the rank whether the error may pass (is_transient), upon which a job is restarted.
            "errno": cause.errno if isinstance(cause, OSError) else None,
        }
    if isinstance(error, OSError):
        return {"kind": "os", "text": str(error)[:_MAX_TEXT], "errno": error.errno}
    return {"kind": "bug", "text": "".join(traceback.format_exception(error))[-_MAX_TEXT:], "errno": None}


def failure(fields: dict[str, Any]) -> Exception:
    """Returns the error that a loader process has reported. The cause is kept: a restart may help against some."""
    text, errno = str(fields["text"]), fields["errno"]
    if fields["kind"] == "os":
        return OSError(errno, text)
    if fields["kind"] == "bug":
        return RuntimeError(f"A loader process failed:\n{text}")
    error = DataError(text)
    if errno is not None:
        error.__cause__ = OSError(errno, text)
    return error
