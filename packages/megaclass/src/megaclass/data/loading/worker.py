"""A loader process: fills pieces of batches in the ring that it shares with its rank. Started by exec, free of torch.

    python -P -m megaclass.data.loading.worker SOCKET MEMFD PARENT

The main thread only receives, so it notices at once when the rank is gone, whatever the decoding threads do; then the
process ends without waiting for them. Signals that a terminal or a scheduler sends to all processes of a job are ignored:
the rank decides when loading ends.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import sys
import threading
from typing import Any

from megaclass.data.loading.messages import Piece, bad_reports, describe_failure, receive, send
from megaclass.data.loading.reader import BatchPlan, BatchReader
from megaclass.data.loading.ring import NO_IMAGE, BatchRing, RingLayout
from megaclass.data.sources.open_source import open_source
from megaclass.data.sources.source import ImageSource
from megaclass.errors import DataError
from megaclass_launch.operating_system import readable
from megaclass_launch.rank_status import give_loader_stacks, wait_for_work

_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
# How often a process whose socket is still open (another process may hold its other end) asks whether its rank lives.
_PARENT_CHECK_S = 1.0


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
            piece = wait_for_work(pieces.get)
            try:
                num_resized = self._fill(piece)
                # In packets, and before "done", so that the rank judges the share of bad images with each of them.
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
        slot, rows = self._ring.slot(piece.slot), range(piece.first, piece.stop)
        num_resized = self._reader.fill(piece.epoch, piece.step, rows, slot.images_BHW3, slot.indices_B)
        self._mark(NO_IMAGE)
        # From the indices that were filled: a replaced image brings the label of its own class.
        slot.labels_B[rows.start : rows.stop] = self._reader.source.labels[slot.indices_B[rows.start : rows.stop]]
        return num_resized

    def _mark(self, index: int) -> None:
        self._ring.decoding[self._thread] = index


def main(arguments: list[str]) -> None:
    for number in _IGNORED:
        # Ctrl-C reaches every process of the terminal; a worker that left would cost the batch that the rank still needs.
        signal.signal(number, signal.SIG_IGN)
    give_loader_stacks()
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
        if not wait_for_work(lambda: readable([connection], _PARENT_CHECK_S)):
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
