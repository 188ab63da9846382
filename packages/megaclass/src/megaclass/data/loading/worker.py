"""A loader process: fills pieces of batches in memory that it shares with its rank. Started by exec, free of torch.

    python -P -m megaclass.data.loading.worker SOCKET MEMFD PARENT

What the rank and its processes share is at the top: messages, and a ring of batch slots. Messages are JSON objects, one per
packet of a local socket; pixels never travel there:

    rank -> process    settings             first message: the plan, the layout of the ring, and this process's threads
                       piece                rows of a batch to fill
                       crashes              images on which a decoder has crashed: not to be decoded any more
    process -> rank    bad                  images of a piece that cannot be read
                       done                 a piece is filled; number of resized images among its rows
                       failed               a piece cannot be filled, or the data cannot be opened

The memory of the ring is a memfd: it has no name, needs no room in /dev/shm (64 MiB in many containers), and is gone with its
last process. After a table with one number per decoding thread follow the slots, each with one batch of the rank, so one copy
takes all of it to the device:

    labels     int64 (rows,)
    indices    int64 (rows,)
    images     uint8 (rows, H, W, 3), from a multiple of 64 bytes on

The main thread of the process only receives, so it notices at once when the rank is gone (its end of the socket is closed),
whatever the decoding threads do; then the process ends without waiting for them. Signals that a terminal or a scheduler sends
to all processes of a job are ignored: the rank decides when loading ends.
"""

from __future__ import annotations

import json
import mmap
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megaclass.data.loading.reader import BatchPlan, BatchReader
from megaclass.data.sources.open_source import open_source
from megaclass.data.sources.source import ImageSource
from megaclass.errors import DataError
from megaclass_launch.errors import UserError
from megaclass_launch.operating_system import readable

NO_IMAGE = -1
_PAGE, _ALIGNED = 4096, 64
_MAX_BYTES = 2**17
# Texts of errors may quote long paths, and JSON has six bytes for a character that is not ASCII.
_MAX_TEXT = 2000
_MAX_REPORT_TEXT = 500
# Bad images of one piece that are reported with their error; further ones are counted, without a text of their own.
_MAX_REPORTS = 32
# If most images are bad, each row tries many of them: a piece may have more reports than a packet takes.
_REPORTS_PER_PACKET = 1000
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
# How often a process whose socket is still open (another process may hold its other end) asks whether its rank lives.
_PARENT_CHECK_S = 1.0


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
    if isinstance(error, UserError | OSError):
        # The number tells the rank whether the error may pass (is_transient); a job is then restarted.
        cause = error if isinstance(error, OSError) else error.__cause__
        kind, number = "os" if isinstance(error, OSError) else "data", getattr(cause, "errno", None)
        return {"kind": kind, "text": str(error)[:_MAX_TEXT], "errno": number}
    return {"kind": "bug", "text": "".join(traceback.format_exception(error))[-_MAX_TEXT:], "errno": None}


def failure(fields: dict[str, Any]) -> Exception:
    """Returns the error that a loader process has reported. The cause is kept: a restart may help against some."""
    text, number = str(fields["text"]), fields["errno"]
    if fields["kind"] == "os":
        return OSError(number, text)
    if fields["kind"] == "bug":
        return RuntimeError(f"A loader process failed:\n{text}")
    error = DataError(text)
    if number is not None:
        error.__cause__ = OSError(number, text)
    return error


@dataclass(frozen=True, kw_only=True)
class RingLayout:
    """Sizes and places in the shared memory; the same in all processes."""

    num_slots: int
    rows: int
    image_size: tuple[int, int]
    num_threads: int
    """Decoding threads of all loader processes together."""

    @property
    def images_at(self) -> int:
        """First byte of the images within a slot."""
        return _rounded_up(16 * self.rows, _ALIGNED)

    @property
    def slot_bytes(self) -> int:
        height, width = self.image_size
        return _rounded_up(self.images_at + self.rows * height * width * 3, _PAGE)

    @property
    def slots_at(self) -> int:
        return _rounded_up(8 * self.num_threads, _PAGE)

    @property
    def num_bytes(self) -> int:
        return self.slots_at + self.num_slots * self.slot_bytes


class BatchRing:
    """The shared memory, mapped into this process."""

    def __init__(self, layout: RingLayout, handle: int) -> None:
        self.layout = layout
        self.handle = handle
        # Never unmapped by hand: arrays may refer to it, and the last of them unmaps it.
        self.memory = mmap.mmap(handle, layout.num_bytes)
        self.decoding: NDArray[np.int64] = np.frombuffer(self.memory, dtype=np.int64, count=layout.num_threads)
        """Index of the image that each thread is decoding (NO_IMAGE: none); after a crash the rank reads there which it was."""

    def slot(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8]]:
        """Returns views of a slot: labels (rows,), indices (rows,) and images (rows, H, W, 3)."""
        layout, at = self.layout, self.layout.slots_at + number * self.layout.slot_bytes
        numbers = np.frombuffer(self.memory, dtype=np.int64, count=2 * layout.rows, offset=at).reshape(2, layout.rows)
        shape = (layout.rows, *layout.image_size, 3)
        pixels = np.frombuffer(self.memory, dtype=np.uint8, count=int(np.prod(shape)), offset=at + layout.images_at)
        return numbers[0], numbers[1], pixels.reshape(shape)


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


class Filler:
    """One decoding thread: takes pieces from the queue and reports each."""

    def __init__(
        self,
        source: ImageSource,
        plan: BatchPlan,
        ring: BatchRing,
        thread: int,
        crashes: dict[int, str],
        connection: socket.socket,
    ) -> None:
        self._ring, self._thread, self._connection = ring, thread, connection
        self._bad: list[tuple[int, DataError]] = []
        self._reader = BatchReader(source, plan, lambda index, error: self._bad.append((index, error)), self._mark)
        # One table for all threads; the main thread adds to it.
        self._reader.crashes = crashes

    def run(self, pieces: queue.SimpleQueue[Piece]) -> None:
        while True:
            piece = pieces.get()
            try:
                num_resized = self._fill(piece)
                # In packets, and before "done", so the rank judges the share of bad images with each of them.
                for reports in bad_reports(self._bad):
                    send(self._connection, bad=reports)
                send(self._connection, done=piece.number, resized=num_resized)
            # The rank is gone, or has closed the loader, and the main thread may not have noticed yet.
            except (BrokenPipeError, ConnectionResetError):
                os._exit(0)
            except Exception as error:
                send(self._connection, failed=piece.number, **describe_failure(error))

    def _fill(self, piece: Piece) -> int:
        self._bad.clear()
        (labels_B, indices_B, images_BHW3), rows = self._ring.slot(piece.slot), slice(piece.first, piece.stop)
        num_resized = self._reader.fill(piece.epoch, piece.step, range(piece.first, piece.stop), images_BHW3, indices_B)
        self._mark(NO_IMAGE)
        # From the indices that were filled: a replaced image brings the label of its own class.
        labels_B[rows] = self._reader.source.labels[indices_B[rows]]
        return num_resized

    def _mark(self, index: int) -> None:
        self._ring.decoding[self._thread] = index


def main(arguments: list[str]) -> None:
    for number in _IGNORED:
        # Ctrl-C reaches every process of the terminal; a worker that left would cost the batch that the rank still needs.
        signal.signal(number, signal.SIG_IGN)
    handle, memory, parent = map(int, arguments)
    connection = socket.socket(fileno=handle)
    settings = receive(connection)
    if settings is None:
        return
    pieces: queue.SimpleQueue[Piece] = queue.SimpleQueue()
    crashes: dict[int, str] = {}
    # In a thread, because a large index takes seconds to open, in which the main thread must notice the end of the rank.
    threading.Thread(
        target=_open_and_fill, args=(settings, memory, connection, pieces, crashes), name="open", daemon=True
    ).start()
    # A killed rank has another parent adopt this process. Its socket may stay open in a process that the rank had forked.
    while os.getppid() == parent:
        if not readable([connection], _PARENT_CHECK_S):
            continue
        message = receive(connection)
        if message is None:
            break
        if "crashes" in message:
            crashes.update({int(index): reason for index, reason in message["crashes"]})
        else:
            pieces.put(Piece(*message["piece"]))
    # Without waiting for a thread that may be inside a decoder.
    os._exit(0)


def _open_and_fill(
    settings: dict[str, Any],
    memory: int,
    connection: socket.socket,
    pieces: queue.SimpleQueue[Piece],
    crashes: dict[int, str],
) -> None:
    """Opens the data, which may take long, and starts the decoding threads; becomes the first of them."""
    try:
        layout = RingLayout(**_with_size(settings["layout"]))
        plan = BatchPlan(**_with_size(settings["plan"]))
        ring = BatchRing(layout, memory)
        source = open_source(settings["path"])
        fillers = [Filler(source, plan, ring, thread, crashes, connection) for thread in settings["threads"]]
    except Exception as error:
        send(connection, failed=-1, **describe_failure(error))
        return
    for filler in fillers[1:]:
        threading.Thread(target=filler.run, args=(pieces,), name="decode", daemon=True).start()
    fillers[0].run(pieces)


def _with_size(fields: dict[str, Any]) -> dict[str, Any]:
    return fields | {"image_size": tuple(fields["image_size"])}


if __name__ == "__main__":
    main(sys.argv[1:])
