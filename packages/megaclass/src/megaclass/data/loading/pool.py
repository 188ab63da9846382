"""The loader processes of one rank: hands out pieces of batches, collects the batches in order, replaces a process that died.

All of it runs in the rank's own thread (there is no thread here: nothing competes with training for the interpreter): it hands
out work and collects reports when the next batch is asked for. State of `LoaderProcesses`:

    _workers    one entry per process, with the pieces that it has been given and not yet reported
    _missing    per slot of the ring: number of its pieces that are not filled yet
    _crashes    images on which a decoder has crashed; every process is told, so none decodes them again
    _filling    (step, slot) of the batches that are being filled or are full, in order
    _ready      (step, slot) of the batches whose copy to the GPU has begun, in order
    _free       slots that were handed out; on a GPU their copies may still be under way

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
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megaclass.data.loading.reader import BadImages, BatchReader
from megaclass.data.loading.worker import NO_IMAGE, BatchRing, Piece, RingLayout, failure, receive, send
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
_MIN_AHEAD, _MAX_AHEAD = 4, 16
# A batch in the hands of the training loop, and one that is being copied.
_NUM_HELD = 2
_AHEAD_BYTES = 2**28
_NUM_ON_DEVICE = 2


def num_slots(batch_bytes: int) -> int:
    """Returns how many batches of this size the ring of the loader processes of one rank holds."""
    return min(_MAX_AHEAD, max(_MIN_AHEAD, _AHEAD_BYTES // batch_bytes)) + _NUM_HELD


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoaderSettings:
    """Place of the data, and number of processes and threads that read it."""

    path: str
    num_processes: int
    num_threads: int
    """Decoding threads per process."""


@dataclasses.dataclass(frozen=True)
class Loaded:
    """One batch of the processes."""

    step: int
    """Counted across epochs."""
    images: Tensor
    """uint8 (B, 3, H, W) in the channels-last layout."""
    labels: Tensor
    indices: NDArray[np.int64]
    """On the host."""
    index_tensor: Tensor
    """The indices where the images are."""


class _Worker:
    """One loader process and the pieces that it has not reported yet."""

    def __init__(self, number: int, threads: list[int], ring: BatchRing, first_message: dict[str, Any]) -> None:
        self.number = number
        self.threads = threads
        """Its rows in the ring's table of images being decoded."""
        self.pieces: dict[int, Piece] = {}
        self.num_failed_starts = 0
        """Times that it ended since it last reported a piece, or since a crash named another image."""
        self._ring, self._first_message = ring, first_message
        self.start()

    def start(self) -> None:
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # With the pid, which the worker compares with its parent: the rank may have been killed meanwhile.
            arguments = [str(theirs.fileno()), str(self._ring.handle), str(os.getpid())]
            # Use the rank's own sys.path; -P keeps a user's file from shadowing a module.
            path = os.pathsep.join(entry for entry in sys.path if entry)
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", _WORKER, *arguments],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), self._ring.handle),
                env=os.environ | _ENVIRONMENT | {"PYTHONPATH": path},
            )
        self.send(**self._first_message, threads=self.threads)

    def send(self, **message: Any) -> None:
        # If it has died, the next wait notices, and gives its pieces to a new process.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            send(self.connection, **message)

    def give(self, piece: Piece) -> None:
        self.pieces[piece.number] = piece
        self.send(piece=dataclasses.astuple(piece))

    def end(self) -> int:
        """Ends the process and returns its exit code: negative if a signal ended it."""
        self.connection.close()
        try:
            return self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


class LoaderProcesses:
    """Loader processes with their ring of batch slots, for one pass over a range of steps.

    `close` ends the processes; so does the end of this process, however it ends.
    """

    def __init__(
        self, settings: LoaderSettings, reader: BatchReader, bad_images: BadImages, device: torch.device | None
    ) -> None:
        """device: a GPU to which the batches are copied ahead of time; otherwise they are copied out of the ring."""
        self._reader, self._source, self._bad_images = reader, reader.source, bad_images
        plan, num_threads = reader.plan, settings.num_threads
        height, width = plan.image_size
        slots = num_slots(plan.max_rows * height * width * 3)
        layout = RingLayout(
            num_slots=slots,
            rows=plan.max_rows,
            image_size=plan.image_size,
            num_threads=settings.num_processes * num_threads,
        )
        self._ring = _new_ring(layout)
        self._missing = [0] * slots
        self._crashes: dict[int, str] = {}
        self._num_given = 0
        self._filling: deque[tuple[int, int]] = deque()
        self._ready: deque[tuple[int, int]] = deque()
        self._free: deque[int] = deque(range(slots))
        self._workers: list[_Worker] = []
        self._copies: _GpuCopies | None = None
        first_message = {
            "path": settings.path,
            "plan": dataclasses.asdict(plan),
            "layout": dataclasses.asdict(layout),
        }
        try:
            for number in range(settings.num_processes):
                threads = list(range(number * num_threads, (number + 1) * num_threads))
                self._workers.append(_Worker(number, threads, self._ring, first_message))
            if device is not None and device.type == "cuda":
                self._copies = _GpuCopies(self._ring, device)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends all processes. The ring stays mapped as long as something refers to it."""
        if self._copies is not None:
            self._copies.close()
        for worker in self._workers:
            # All sockets first: the processes then end at the same time, and not one after the other.
            worker.connection.close()
        for worker in self._workers:
            worker.end()
        os.close(self._ring.handle)

    def batches(self, first: int, stop: int) -> Iterator[Loaded]:
        """Yields the batches of the steps [first, stop), counted across epochs."""
        upcoming = first
        for _ in range(first, stop):
            while upcoming < stop and (slot := self._next_free()) is not None:
                self._submit(slot, upcoming)
                self._filling.append((upcoming, slot))
                upcoming += 1
            self._collect()
            step, slot = self._ready.popleft()
            loaded = self._take(step, slot)
            # The oldest is tried first: its copy is most probably done.
            self._free.append(slot)
            yield loaded

    def _num_rows(self, step: int) -> int:
        # The last batch of an epoch may be shorter than the slot.
        return self._reader.num_rows(step % self._reader.order.steps_per_epoch)

    def _next_free(self) -> int | None:
        """Returns a slot that may be filled again; None if the copies of all are under way and a batch is on its way."""
        for slot in self._free:
            if self._copies is None or self._copies.is_done(slot):
                self._free.remove(slot)
                return slot
        if not self._free or self._filling or self._ready:
            return None
        # Nothing is on its way: without a free slot there would never be another batch.
        assert self._copies is not None
        self._copies.wait(self._free[0])
        return self._free.popleft()

    def _submit(self, slot: int, step: int) -> None:
        """Has one batch decoded into a slot, cut into pieces for all processes."""
        num_rows = self._num_rows(step)
        num_pieces = max(1, min(len(self._workers), num_rows // _MIN_PIECE_ROWS))
        # Its pieces are reported by several processes, in any order.
        self._missing[slot] = num_pieces
        epoch, step_in_epoch = divmod(step, self._reader.order.steps_per_epoch)
        for number in range(num_pieces):
            rows = even_part(num_rows, number, num_pieces)
            # The process with the least work left: one on a busy core gets less.
            worker = min(self._workers, key=lambda worker: len(worker.pieces))
            worker.give(Piece(self._num_given, slot, epoch, step_in_epoch, rows.start, rows.stop))
            self._num_given += 1

    def _collect(self) -> None:
        """Waits for the next batch; on a GPU also starts the copy of the one after it if that is complete."""
        while self._filling and len(self._ready) < (_NUM_ON_DEVICE if self._copies is not None else 1):
            step, slot = self._filling[0]
            if not self._ready:
                self._wait_for(slot)
            else:
                self._handle_messages(0.0)
                # In order: a later slot that is full already has to wait for this one.
                if self._missing[slot]:
                    break
            self._filling.popleft()
            if self._copies is not None:
                self._copies.begin(slot)
            self._ready.append((step, slot))

    def _take(self, step: int, slot: int) -> Loaded:
        num_rows = self._num_rows(step)
        # Indices are small and always copied: only the images decide how long the slot is in use.
        labels_B, indices_B, images_BHW3 = self._ring.slot(slot)
        indices_B = indices_B[:num_rows].copy()
        if self._copies is not None:
            images, labels, index_tensor = self._copies.take(slot, num_rows)
            return Loaded(step, images, labels, indices_B, index_tensor)
        images = torch.from_numpy(images_BHW3[:num_rows].copy()).permute(0, 3, 1, 2)
        return Loaded(
            step, images, torch.from_numpy(labels_B[:num_rows].copy()), indices_B, torch.from_numpy(indices_B)
        )

    def _wait_for(self, slot: int) -> None:
        """Returns when the batch in the slot is complete. Raises what a process reports, or the reason why it died."""
        begun = time.monotonic()
        has_told = False
        while self._missing[slot]:
            wait_for_helper(lambda: self._handle_messages(1.0))
            # Only a message: slow disks are not an error, and a process that died is replaced in _handle_messages.
            if not has_told and time.monotonic() - begun > _SLOW_S:
                _log.warning("the loader processes have not delivered the next batch for %.0f s", _SLOW_S)
                has_told = True

    def _handle_messages(self, timeout_s: float) -> None:
        """Handles everything that has arrived; waits for the first message at most as long as given."""
        for worker in self._with_messages(timeout_s):
            message = receive(worker.connection)
            if message is None:
                self._replace(worker)
            elif "failed" in message:
                raise failure(message)
            elif "bad" in message:
                for index, text in message["bad"]:
                    self._bad_images.add_bad(index, DataError(text or f"Cannot read {self._source.name_of(index)}."))
            else:
                worker.num_failed_starts = 0
                piece = worker.pieces.pop(message["done"])
                self._missing[piece.slot] -= 1
                self._bad_images.add_read(piece.stop - piece.first, message["resized"])

    def _with_messages(self, timeout_s: float) -> Iterator[_Worker]:
        # poll(), not select(): descriptors of a job with many files may lie above 1,023.
        poll = select.poll()
        by_handle = {worker.connection.fileno(): worker for worker in self._workers}
        for handle in by_handle:
            poll.register(handle, select.POLLIN)
        while events := poll.poll(1000 * timeout_s):
            for handle, _ in events:
                yield by_handle[handle]
                if by_handle[handle].connection.fileno() != handle:  # it was replaced
                    return
            timeout_s = 0.0

    def _replace(self, worker: _Worker) -> None:
        """Starts a process again that has ended, with the pieces that it left; gives up if that keeps happening."""
        code = worker.end()
        # Shared memory outlives the process, so it still says what each of its threads was decoding.
        images = [int(self._ring.decoding[thread]) for thread in worker.threads]
        images = [index for index in images if index != NO_IMAGE]
        names = ", ".join(self._source.name_of(index) for index in images) or "no image"
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        has_crashed = code < 0 and -code in _CRASHES
        worker.num_failed_starts += 1
        # With one thread it is certain which image it was; after a crash, the next start has only one.
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
            self._ring.decoding[thread] = NO_IMAGE
        worker.start()
        # Before the pieces are given again: the new process must know which images to leave alone.
        for other in self._workers:
            other.send(crashes=list(self._crashes.items()))
        for piece in worker.pieces.values():
            worker.give(piece)


class _GpuCopies:
    """Copies slots to the GPU on a stream of its own, while the GPU computes. A slot may be filled again when its copy is done.

    The ring is page-locked once, at the start: otherwise every copy would go through a buffer of the driver and make the
    host wait.
    """

    def __init__(self, ring: BatchRing, device: torch.device) -> None:
        self._layout, self._device = ring.layout, device
        self._bytes = torch.frombuffer(ring.memory, dtype=torch.uint8)
        self._stream = torch.cuda.Stream(device)
        self._on_device: dict[int, Tensor] = {}
        """Slots on their way to the GPU, or there, that have not been taken yet."""
        self._copied: dict[int, torch.cuda.Event] = {}
        code = int(torch.cuda.cudart().cudaHostRegister(self._bytes.data_ptr(), self._bytes.nbytes, 0))
        self._is_locked = code == 0
        if not self._is_locked:
            _log.warning(
                "the memory of batches cannot be page-locked (CUDA error %d): copies to the GPU take longer", code
            )

    def begin(self, slot: int) -> None:
        """Starts the copy of a filled slot; slots are then taken in the same order."""
        start = self._layout.slots_at + slot * self._layout.slot_bytes
        with torch.cuda.stream(self._stream):
            source = self._bytes[start : start + self._layout.slot_bytes]
            self._on_device[slot] = source.to(self._device, non_blocking=True)
            self._copied[slot] = torch.cuda.Event()
            self._copied[slot].record(self._stream)

    def take(self, slot: int, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns images, labels and indices on the GPU."""
        content, layout = self._on_device.pop(slot), self._layout
        current = torch.cuda.current_stream(self._device)
        # The stream waits, not the host, which continues to queue the kernels of the step.
        current.wait_event(self._copied[slot])
        # The memory belongs to the side stream: it is not to be used again before the current stream is done with it.
        content.record_stream(current)
        labels, indices = content[: 16 * layout.rows].view(torch.int64).view(2, -1)[:, :num_rows]
        height, width = layout.image_size
        pixels = content[layout.images_at : layout.images_at + num_rows * height * width * 3]
        return pixels.view(num_rows, height, width, 3).permute(0, 3, 1, 2), labels, indices

    def is_done(self, slot: int) -> bool:
        """Tells whether a slot that was taken has been copied, or never was."""
        return slot not in self._copied or self._copied[slot].query()

    def wait(self, slot: int) -> None:
        self._copied[slot].synchronize()

    def close(self) -> None:
        # A copy under way reads the pages that are unlocked, and later unmapped, below.
        self._stream.synchronize()
        if self._is_locked:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())


def _new_ring(layout: RingLayout) -> BatchRing:
    """Makes the shared memory. All of it is allocated here: later a lack of memory would end a process with SIGBUS."""
    handle = os.memfd_create("megaclass-batches", os.MFD_CLOEXEC)
    try:
        # ftruncate alone reserves nothing: a lack of memory would show at the first write to a page.
        os.ftruncate(handle, layout.num_bytes)
        os.posix_fallocate(handle, 0, layout.num_bytes)
        ring = BatchRing(layout, handle)
    except OSError as error:
        os.close(handle)
        raise DataError(
            f"There is no memory for {layout.num_slots} batches of {layout.rows} images, {layout.num_bytes / 2**20:,.0f} MiB: "
            f"{error.strerror}. Use fewer loader processes (data.workers; 0 decodes in the rank itself) or a smaller "
            f"train.global_batch."
        ) from error
    ring.decoding[:] = NO_IMAGE
    return ring
