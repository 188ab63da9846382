"""The loader processes of one rank: starts them, hands out pieces of batches, and replaces a process that died.

State of `LoaderProcesses`, all of it used by the rank's own thread only (there is no thread here: nothing competes with
training for the interpreter):

    _workers    one entry per process, with the pieces that it has been given and not yet reported
    _missing    per slot: number of its pieces that are not filled yet
    _crashes    images on which a decoder has crashed; every process is told, so that none decodes them again

A process that ends is started again and given the same pieces: a piece is filled with the same bytes however often it is
tried. The ring records which image each thread was decoding. If a decoder crashed (SIGSEGV and its like) and the process had
one thread, that image is the one; with several threads the new process gets one thread, and the next crash tells.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from megaclass.data.loading.messages import Piece, failure, receive, send
from megaclass.data.loading.reader import BadImages, BatchPlan
from megaclass.data.loading.ring import NO_IMAGE, BatchRing, RingLayout, new_ring
from megaclass.data.sources.source import ImageSource
from megaclass.errors import DataError
from megaclass_launch.even_parts import even_part
from megaclass_launch.operating_system import signals_named
from megaclass_launch.rank_status import wait_for_helper

_log = logging.getLogger("megaclass.data")

_WORKER = "megaclass.data.loading.worker"
# Signals of a program error: the image is to blame. SIGKILL is not among them: the kernel may have been short of memory.
_CRASHES = frozenset(signals_named("SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGABRT"))
# A process that ends three times in a row without a result will not do better the fourth time.
_MAX_STARTS = 3
_END_S = 2.0
# Smaller pieces cost more in messages than they gain in balance.
_MIN_PIECE_ROWS = 16
_SLOW_S = 30.0
# OpenBLAS and OpenMP would start a thread per core in each process, and no loader multiplies matrices.
_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoaderSettings:
    """Place of the data, and number of processes and threads that read it."""

    path: str
    num_processes: int
    num_threads: int
    """Decoding threads per process."""


class _Worker:
    """One loader process and the pieces that it has not reported yet."""

    def __init__(self, number: int, threads: list[int]) -> None:
        self.number = number
        self.threads = threads
        """Its rows in the ring's table of images being decoded."""
        self.pieces: dict[int, Piece] = {}
        self.num_rows = 0
        self.num_failed_starts = 0
        """Times that it ended since it last reported a piece, or since a crash named another image."""
        self.process: subprocess.Popen[bytes] | None = None
        self.connection: socket.socket | None = None

    def start(self, ring: BatchRing, first: dict[str, Any]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # With the pid, which the worker compares with its parent: the rank may have been killed meanwhile.
            arguments = [str(theirs.fileno()), str(ring.handle), str(os.getpid())]
            # Use the rank's own sys.path; -P keeps a user's file from shadowing a module.
            path = os.pathsep.join(entry for entry in sys.path if entry)
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", _WORKER, *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), ring.handle),
                env=os.environ | _ENVIRONMENT | {"PYTHONPATH": path},
            )
        self.connection = ours
        self.send(**first, threads=self.threads)

    def send(self, **message: Any) -> None:
        assert self.connection is not None
        # If it has died, the next wait notices, and gives its pieces to a new process.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            send(self.connection, **message)

    def give(self, piece: Piece) -> None:
        self.pieces[piece.number] = piece
        self.num_rows += piece.stop - piece.first
        self.send(piece=dataclasses.astuple(piece))

    def take_back(self, number: int) -> Piece:
        piece = self.pieces.pop(number)
        self.num_rows -= piece.stop - piece.first
        return piece

    def end(self) -> int:
        """Ends the process and returns its exit code: negative if a signal ended it."""
        assert self.process is not None and self.connection is not None
        self.connection.close()
        try:
            return self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


class LoaderProcesses:
    """Loader processes with their ring of batch slots. `close` ends them; so does the end of this process, however it ends."""

    def __init__(
        self,
        settings: LoaderSettings,
        plan: BatchPlan,
        source: ImageSource,
        bad_images: BadImages,
        num_slots: int,
    ) -> None:
        self._source, self._bad_images = source, bad_images
        self.num_resized = 0
        """Images of another size since the last reading of this number."""
        self.layout = RingLayout(
            num_slots=num_slots,
            rows=plan.max_rows,
            image_size=plan.image_size,
            num_threads=settings.num_processes * settings.num_threads,
        )
        self.ring = new_ring(self.layout)
        self._first_message = {
            "path": settings.path,
            "plan": dataclasses.asdict(plan),
            "layout": dataclasses.asdict(self.layout),
        }
        self._missing = [0] * num_slots
        self._crashes: dict[int, str] = {}
        self._num_given = 0
        self._workers = [
            _Worker(number, [number * settings.num_threads + thread for thread in range(settings.num_threads)])
            for number in range(settings.num_processes)
        ]
        try:
            for worker in self._workers:
                worker.start(self.ring, self._first_message)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends all processes. The ring stays mapped as long as something refers to a batch in it."""
        started = [worker for worker in self._workers if worker.connection is not None]
        for worker in started:
            assert worker.connection is not None
            # All sockets first: the processes then end at the same time, and not one after the other.
            worker.connection.close()
        for worker in started:
            worker.end()
        os.close(self.ring.handle)

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self._workers if worker.process is not None]

    def submit(self, slot: int, epoch: int, step: int, num_rows: int) -> None:
        """Has one batch decoded into a slot, cut into pieces for all processes."""
        num_pieces = max(1, min(len(self._workers), num_rows // _MIN_PIECE_ROWS))
        # Its pieces are reported by several processes, in any order.
        self._missing[slot] = num_pieces
        for number in range(num_pieces):
            rows = even_part(num_rows, number, num_pieces)
            # The process with the least work left: one on a busy core gets less.
            worker = min(self._workers, key=lambda worker: worker.num_rows)
            worker.give(Piece(self._num_given, slot, epoch, step, rows.start, rows.stop))
            self._num_given += 1

    def is_filled(self, slot: int) -> bool:
        """Tells whether the batch in the slot is complete, without waiting."""
        self._handle_messages(0.0)
        return not self._missing[slot]

    def wait_for(self, slot: int) -> None:
        """Returns when the batch in the slot is complete. Raises what a process reports, or the reason why it died."""
        begun = time.monotonic()
        has_told = False
        while self._missing[slot]:
            wait_for_helper(lambda: self._handle_messages(1.0))
            # Only a message: slow disks are no error, and a process that died is replaced in _handle_messages.
            if not has_told and time.monotonic() - begun > _SLOW_S:
                _log.warning("the loader processes have not delivered the next batch for %.0f s", _SLOW_S)
                has_told = True

    def _handle_messages(self, timeout_s: float) -> None:
        """Handles everything that has arrived; waits for the first message at most as long as given."""
        for worker in self._ready(timeout_s):
            assert worker.connection is not None
            message = receive(worker.connection)
            if message is None:
                self._replace(worker)
            elif "failed" in message:
                raise failure(message)
            elif "bad" in message:
                for index, text in message["bad"]:
                    self._bad_images.add_bad(index, DataError(text or f"Cannot read {self._source.name_of(index)}."))
            else:
                self._finish(worker, message)

    def _ready(self, timeout_s: float) -> Iterator[_Worker]:
        # poll(), not select(): descriptors of a job with many files may lie above 1,023.
        poll, by_handle = select.poll(), {}
        for worker in self._workers:
            assert worker.connection is not None
            poll.register(worker.connection, select.POLLIN)
            by_handle[worker.connection.fileno()] = worker
        while events := poll.poll(1000 * timeout_s):
            for handle, _ in events:
                yield by_handle[handle]
                if by_handle[handle].connection.fileno() != handle:  # type: ignore[union-attr]  # it was replaced
                    return
            timeout_s = 0.0

    def _finish(self, worker: _Worker, message: dict[str, Any]) -> None:
        worker.num_failed_starts = 0
        piece = worker.take_back(message["done"])
        self._missing[piece.slot] -= 1
        self._bad_images.add_read(piece.stop - piece.first)
        self.num_resized += message["resized"]

    def _replace(self, worker: _Worker) -> None:
        """Starts a process again that has ended, with the pieces that it left; gives up if that keeps happening."""
        code = worker.end()
        # Shared memory outlives the process, so that it still says what each of its threads was decoding.
        images = [int(self.ring.decoding[thread]) for thread in worker.threads]
        images = [index for index in images if index != NO_IMAGE]
        names = ", ".join(self._source.name_of(index) for index in images) or "no image"
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        has_crashed = code < 0 and -code in _CRASHES
        worker.num_failed_starts += 1
        # With one thread there is no doubt which image it was; after a crash, the next start has only one.
        if has_crashed and len(worker.threads) == 1 and images:
            self._crashes[images[0]] = f"the decoder crashed on it ({signal.Signals(-code).name})"
            worker.num_failed_starts = 0
        if worker.num_failed_starts >= _MAX_STARTS:
            raise DataError(
                f"Loader process {worker.number} ended {how}, {worker.num_failed_starts} times in a row without delivering "
                f"anything; it was decoding {names}. After SIGKILL, look for a lack of memory (dmesg); after an exit code, "
                f"its messages are above. data.workers=0 decodes in the rank itself."
            )
        _log.warning("loader process %d ended %s while it decoded %s; it is started again", worker.number, how, names)
        if has_crashed:
            worker.threads = worker.threads[:1]
        for thread in worker.threads:
            self.ring.decoding[thread] = NO_IMAGE
        worker.start(self.ring, self._first_message)
        # Before the pieces are given again: the new process must know which images to leave alone.
        for other in self._workers:
            other.send(crashes=list(self._crashes.items()))
        # give() counts them again.
        left, worker.pieces, worker.num_rows = list(worker.pieces.values()), {}, 0
        for piece in left:
            worker.give(piece)
