"""The loader processes of one rank: workers of a torch DataLoader that decode into memory which they share with the rank.

The DataLoader hands out work, and returns the results in order. It gets what its workers alone do not have:

    memory     a memfd that holds the images of several batches. It needs no room in /dev/shm (64 MiB in many containers), is
               page-locked once, and is gone with its last process. Only the numbers of rows travel through the DataLoader.
    end        a worker ends as soon as its rank closes the pool or is gone, however that happened (`_run_worker`).
    start      workers start without the user's main module, with one thread each, and import nothing from the current folder.
               They block the signals that a terminal or a scheduler sends to all processes of a job: the rank decides when
               loading ends.
    crashes    a table in the shared memory tells which image each worker is decoding. If a decoder crashed (SIGSEGV and its
               like), that image is named and counted as bad.

If a worker dies, all are started again with the pieces that were not delivered: a piece is filled with the same bytes however
often it is tried.
"""

import atexit
import contextlib
import itertools
import logging
import mmap
import os
import signal
import sys
import threading
import time
import traceback
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import connection, forkserver, reduction, resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from megaclass.data.loading.choose import LoaderSettings
from megaclass.data.loading.reader import BadImages, BatchPlan, BatchReader
from megaclass.data.sources.open_source import open_source
from megaclass.errors import DataError
from megaclass_launch.errors import UserError
from megaclass_launch.even_parts import even_part
from megaclass_launch.operating_system import signals_named
from megaclass_launch.rank_status import wait_for_helper

_log = logging.getLogger("megaclass.data")

# Signals of a program error: the image is to blame. SIGKILL is not among them: the kernel may have been short of memory.
_CRASHES = frozenset(signals_named("SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGABRT"))
_BLOCKED = signals_named("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
# OpenBLAS and OpenMP would start a thread per core in each process, and no loader multiplies matrices.
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
# A worker that dies three times in a row without a result will not do better the fourth time.
_MAX_STARTS = 3
_LOOK_S, _SLOW_S, _END_S = 1.0, 30.0, 2.0
# Smaller pieces cost more in messages than they gain in balance.
_MIN_PIECE_ROWS = 16
_MIN_AHEAD, _MAX_AHEAD = 4, 16
_AHEAD_BYTES = 2**28
# The batch that is being collected, and one whose copy to the GPU is under way.
_NUM_HELD = 2
_NO_IMAGE = -1
_PAGE, _ALIGNED = 4096, 64
# Texts of errors may quote long paths.
_MAX_TEXT = 2000
# Bad images of one piece that are reported with their error; further ones are reported without a text of their own.
_MAX_REPORTS = 32

Piece = tuple[int, int, int]
"""A step, counted across epochs, and the rows [first, stop) of this rank's batch that one worker fills."""


BatchTensors = tuple[Tensor, Tensor, NDArray[np.int64], Tensor]
"""Images, uint8 (B, 3, H, W) in the channels-last layout; labels; indices on the host, and where the images are."""


# ---- shared memory ----


class BatchSlots:
    """Shared memory, mapped into this process: a table of the images being decoded, then one slot per batch.

    A slot holds labels (rows,), indices (rows,) and images (rows, H, W, 3), so one copy takes all of it to the device.
    """

    def __init__(
        self,
        num_slots: int,
        rows: int,
        image_size: tuple[int, int],
        num_workers: int,
        handle: Any = None,
    ) -> None:
        """handle: the memory of the rank, as a DupFd; None allocates it."""
        self._sizes = (num_slots, rows, image_size, num_workers)
        self.num_slots, self.rows = num_slots, rows
        self._shape = (rows, *image_size, 3)
        self.images_at = _rounded_up(16 * rows, _ALIGNED)
        self.slot_bytes = _rounded_up(self.images_at + int(np.prod(self._shape)), _PAGE)
        self._slots_at = _rounded_up(8 * num_workers, _PAGE)
        num_bytes = self._slots_at + num_slots * self.slot_bytes
        self.handle = _allocate(num_bytes, num_slots, rows) if handle is None else handle.detach()
        # Never unmapped by hand: arrays may refer to it, and the last of them unmaps it.
        self.memory = mmap.mmap(self.handle, num_bytes)
        self.decoding: NDArray[np.int64] = np.frombuffer(self.memory, dtype=np.int64, count=num_workers)
        """Index of the image that each worker is decoding (_NO_IMAGE: none); it outlives the worker."""
        if handle is None:
            self.decoding[:] = _NO_IMAGE

    def __reduce__(self) -> tuple[Any, ...]:
        return BatchSlots, (*self._sizes, reduction.DupFd(self.handle))

    def start_of(self, step: int) -> int:
        """Returns the first byte of the slot of a step."""
        return self._slots_at + step % self.num_slots * self.slot_bytes

    def arrays(self, step: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8]]:
        """Returns views of the labels, indices and images of a step."""
        at = self.start_of(step)
        numbers = np.frombuffer(self.memory, dtype=np.int64, count=2 * self.rows, offset=at).reshape(2, self.rows)
        num_pixels = int(np.prod(self._shape))
        pixels = np.frombuffer(self.memory, dtype=np.uint8, count=num_pixels, offset=at + self.images_at)
        return numbers[0], numbers[1], pixels.reshape(self._shape)


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _allocate(num_bytes: int, num_slots: int, rows: int) -> int:
    """Returns a memfd. All of it is allocated here: later a lack of memory would end a process with SIGBUS."""
    handle = os.memfd_create("megaclass-batches", os.MFD_CLOEXEC)
    try:
        # ftruncate alone reserves nothing: a lack of memory would show at the first write to a page.
        os.ftruncate(handle, num_bytes)
        os.posix_fallocate(handle, 0, num_bytes)
    except OSError as error:
        os.close(handle)
        raise DataError(
            f"There is no memory for {num_slots} batches of {rows} images, {num_bytes / 2**20:,.0f} MiB: "
            f"{error.strerror}. Use fewer loader processes (data.workers; 0 decodes in the rank itself) or a smaller "
            f"train.global_batch."
        ) from error
    return handle


# ---- the worker's side ----


@dataclass(frozen=True)
class _Filled:
    """A worker's report of one piece."""

    num_resized: int = 0
    bad: list[tuple[int, str]] | None = None
    """Images that cannot be read, with their errors."""
    error: Exception | None = None
    """The piece cannot be filled, or the data cannot be opened."""
    reason: OSError | None = None
    """Cause of the error; its number tells whether the error may pass (is_transient), and a restart may help."""


class _Pieces(Dataset[_Filled]):
    """Fills pieces of batches in shared memory."""

    def __init__(self, path: str, plan: BatchPlan, slots: BatchSlots, crashes: dict[int, str]) -> None:
        self._path, self._plan, self._slots, self._crashes = path, plan, slots, crashes
        self._reader: BatchReader | None = None
        self._bad: list[tuple[int, str]] = []

    def __getitem__(self, piece: Piece) -> _Filled:
        self._bad.clear()
        try:
            return _Filled(self._fill(*piece), self._bad[:])
        except (UserError, OSError) as error:
            cause = error if isinstance(error, OSError) else error.__cause__
            reason = OSError(cause.errno, str(cause)[:_MAX_TEXT]) if isinstance(cause, OSError) else None
            return _Filled(error=DataError(str(error)[:_MAX_TEXT]), reason=reason)
        except Exception:
            return _Filled(error=RuntimeError(f"A loader process failed:\n{traceback.format_exc()[-_MAX_TEXT:]}"))

    def _fill(self, step: int, first: int, stop: int) -> int:
        if self._reader is None:
            self._reader = BatchReader(open_source(self._path), self._plan, self._add_bad, self._mark)
            self._reader.crashes = self._crashes
        labels_B, indices_B, images_BHW3 = self._slots.arrays(step)
        epoch, step_in_epoch = divmod(step, self._reader.order.steps_per_epoch)
        num_resized = self._reader.fill(epoch, step_in_epoch, range(first, stop), images_BHW3, indices_B)
        self._mark(_NO_IMAGE)
        # From the indices that were filled: a replaced image brings the label of its own class.
        labels_B[first:stop] = self._reader.source.labels[indices_B[first:stop]]
        return num_resized

    def _add_bad(self, index: int, error: DataError) -> None:
        self._bad.append((index, str(error)[:_MAX_TEXT] if len(self._bad) < _MAX_REPORTS else ""))

    def _mark(self, index: int) -> None:
        worker = get_worker_info()
        assert worker is not None
        self._slots.decoding[worker.id] = index


def _run_worker(
    lifeline: connection.Connection, rank: int, loop: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    """Runs the worker's loop in a thread; the main thread ends the process when its rank closes the lifeline or is gone."""
    threading.Thread(target=_loop_or_exit, args=(loop, arguments), name="decode", daemon=True).start()
    watched: list[Any] = [lifeline]
    try:
        # The pipe alone is not enough: a process that the rank had forked may still hold its other end.
        watched.append(os.pidfd_open(rank))
    except ProcessLookupError:
        os._exit(0)
    except (OSError, AttributeError):
        pass  # Kernels before 5.3, some containers, and a Python that was built for such a kernel do not have it.
    connection.wait(watched)
    # Without waiting for a thread that may be inside a decoder.
    os._exit(0)


def _loop_or_exit(loop: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    try:
        loop(*arguments)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


# ---- starting workers ----


class _WorkerContext(ForkServerContext):
    """Starts the workers of a DataLoader. Remembers them, and holds the end of the pipe that keeps them alive."""

    def __init__(self) -> None:
        super().__init__()
        self.processes: list[ForkServerProcess] = []
        self._theirs, self.lifeline = self.Pipe(duplex=False)

    def Process(self, *, target: Any, args: Any) -> ForkServerProcess:  # type: ignore[override]
        process = ForkServerProcess(target=_run_worker, args=(self._theirs, os.getpid(), target, args))
        self.processes.append(process)
        return process

    def end(self) -> None:
        """Ends all workers, at the same time and not one after the other."""
        self.lifeline.close()
        self._theirs.close()
        for process in self.processes:
            if process.pid is not None:
                process.join(_END_S)
                process.kill()
                process.join()


# A server of our own: processes that the user starts from theirs must not have blocked signals and one thread each.
_server = forkserver.ForkServer()
_server.set_forkserver_preload([__name__])


def start_fork_server() -> None:
    """Starts the process from which loader processes are forked, unless it runs; it imports torch once for all of them.

    Does not wait for the import, so a rank that calls it early gets its first batch early.
    """
    # The tracker of semaphores first: its start unblocks signals.
    for start in (resource_tracker.ensure_running, _server.ensure_running):
        with _clean_start():
            start()


@contextlib.contextmanager
def _clean_start() -> Iterator[None]:
    """Lets processes start from our server, with blocked signals, without the main module, and with the rank's sys.path.

    A script that trains without `if __name__ == "__main__"` would otherwise train again in each worker. A user's file
    must not shadow a module because it is in the current folder.
    """
    path, environment, main = sys.path[:], dict(os.environ), sys.modules["__main__"]
    sys.path[:] = filter(None, path)
    os.environ.update(_ONE_THREAD | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONSAFEPATH": "1"})
    sys.modules["__main__"] = types.ModuleType("__main__")
    users_server = forkserver.connect_to_new_process
    forkserver.connect_to_new_process = _server.connect_to_new_process
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        sys.modules["__main__"] = main
        forkserver.connect_to_new_process = users_server
        for name in (*_ONE_THREAD, "PYTHONPATH", "PYTHONSAFEPATH"):
            os.environ.pop(name)
            os.environ.update({name: environment[name]} if name in environment else {})
        sys.path[:] = path


# ---- the rank's side ----


class LoaderProcesses:
    """Loader processes with their shared memory, for one pass over a range of steps.

    `close` ends the processes; so does the end of this process, however it ends.
    """

    def __init__(
        self, settings: LoaderSettings, reader: BatchReader, bad_images: BadImages, device: torch.device | None
    ) -> None:
        """device: a GPU to which the batches are copied ahead of time; otherwise they are copied out of the slots."""
        self._settings, self._reader, self._bad_images = settings, reader, bad_images
        plan = reader.plan
        height, width = plan.image_size
        slots = _NUM_HELD + min(_MAX_AHEAD, max(_MIN_AHEAD, _AHEAD_BYTES // (plan.max_rows * height * width * 3)))
        # A batch is cut into pieces: the first one is there sooner than with a batch per process, and fewer slots suffice.
        self._num_pieces = max(1, min(settings.num_processes, plan.max_rows // _MIN_PIECE_ROWS))
        num_ahead = (slots - _NUM_HELD) * self._num_pieces
        self._num_workers = min(settings.num_processes, num_ahead)
        # A DataLoader is ahead by whole rounds of its workers: at most the slots that are not held.
        self._prefetch = num_ahead // self._num_workers
        self._slots = BatchSlots(slots, plan.max_rows, plan.image_size, self._num_workers)
        self._crashes: dict[int, str] = {}
        self._given: deque[Piece] = deque()
        """Pieces that were handed out and not delivered yet, in order."""
        self._num_failed_starts = 0
        """Times that a worker died since the last piece was delivered, or since a crash named another image."""
        self._context: _WorkerContext | None = None
        self._filled: Iterator[_Filled] = iter(())
        self._copies = _GpuCopies(self._slots, device) if device is not None and device.type == "cuda" else None
        self._is_closed = False
        # Before multiprocessing waits, at the end of this process, for workers that were not told to end.
        atexit.register(self.close)

    def close(self) -> None:
        """Ends all processes. The slots stay mapped as long as something refers to them."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        self._end_workers()
        if self._copies is not None:
            self._copies.close()
        os.close(self._slots.handle)

    def batches(self, first: int, stop: int) -> Iterator[BatchTensors]:
        """Yields the batches of the steps [first, stop), counted across epochs."""
        self._pieces = self._hand_out(first, stop)
        self._start_workers()
        for step in range(first, stop):
            for _ in range(self._num_pieces):
                self._receive_piece()
            yield self._take(step)

    def _hand_out(self, first: int, stop: int) -> Iterator[Piece]:
        """Yields pieces as fast as the DataLoader asks for them; a slot is given again when its copy is done."""
        for step in range(first, stop):
            if self._copies is not None:
                self._copies.wait(step)
            num_rows = self._num_rows(step)
            for number in range(self._num_pieces):
                part = even_part(num_rows, number, self._num_pieces)
                self._given.append((step, part.start, part.stop))
                yield self._given[-1]

    def _num_rows(self, step: int) -> int:
        # The last batch of an epoch may be shorter than the slot.
        return self._reader.num_rows(step % self._reader.order.steps_per_epoch)

    def _start_workers(self) -> None:
        start_fork_server()
        self._context = _WorkerContext()
        again: Iterable[Piece] = tuple(self._given)
        with warnings.catch_warnings(), _clean_start():
            # More workers than cores are what the user has asked for.
            warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
            loader = DataLoader(
                _Pieces(self._settings.path, self._reader.plan, self._slots, dict(self._crashes)),
                batch_size=None,
                # What was handed out before is not noted a second time.
                sampler=itertools.chain(again, self._pieces),
                num_workers=self._num_workers,
                prefetch_factor=self._prefetch,
                multiprocessing_context=self._context,
                # Looks for workers that have died this often.
                timeout=_LOOK_S,
                # Otherwise the number from which workers seed themselves would be drawn from the stream of the training.
                generator=torch.Generator(),
            )
            self._filled = iter(loader)

    def _end_workers(self) -> None:
        if self._context is not None:
            self._context.end()
            # The DataLoader's own part: its queues and their threads.
            self._filled, self._context = iter(()), None

    def _receive_piece(self) -> None:
        """Returns when the next piece is filled. Raises what a worker reports, or the reason why it died."""
        filled = wait_for_helper(self._next_filled)
        self._num_failed_starts = 0
        _, first, stop = self._given.popleft()
        for index, text in filled.bad or ():
            name = self._reader.source.name_of(index)
            self._bad_images.add_bad(index, DataError(text or f"Cannot read {name}."))
        if filled.error is not None:
            raise filled.error from filled.reason
        self._bad_images.add_read(stop - first, filled.num_resized)

    def _next_filled(self) -> _Filled:
        begun, has_told = time.monotonic(), False
        while True:
            try:
                return next(self._filled)
            # The DataLoader's time is over, or a worker is gone. Workers report errors of their own in `_Filled`.
            except RuntimeError as error:
                assert self._context is not None
                if any(process.exitcode is not None for process in self._context.processes):
                    self._replace()
                elif "timed out" not in str(error):
                    raise
            # Only a message: slow disks are not an error.
            if not has_told and time.monotonic() - begun > _SLOW_S:
                _log.warning("the loader processes have not delivered the next batch for %.0f s", _SLOW_S)
                has_told = True

    def _replace(self) -> None:
        """Starts the workers again after one has ended; gives up if that keeps happening."""
        assert self._context is not None
        codes = {number: process.exitcode for number, process in enumerate(self._context.processes)}
        self._end_workers()
        self._num_failed_starts += 1
        for number, code in codes.items():
            if code is None:
                continue
            # Shared memory outlives the process, so it still says what it was decoding.
            index = int(self._slots.decoding[number])
            name = self._reader.source.name_of(index) if index != _NO_IMAGE else "no image"
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
            if -code in _CRASHES and index != _NO_IMAGE:
                self._crashes[index] = f"the decoder crashed on it ({signal.Signals(-code).name})"
                self._num_failed_starts = 0
            if self._num_failed_starts >= _MAX_STARTS:
                raise DataError(
                    f"Loader process {number} ended {how}, {self._num_failed_starts} times in a row without delivering "
                    f"anything; it was decoding {name}. After SIGKILL, look for a lack of memory (dmesg); after an exit "
                    f"code, its messages are above. data.workers=0 decodes in the rank itself."
                )
            _log.warning("loader process %d ended %s while it decoded %s; it is started again", number, how, name)
        self._slots.decoding[:] = _NO_IMAGE
        self._start_workers()

    def _take(self, step: int) -> BatchTensors:
        num_rows = self._num_rows(step)
        # Indices are small and always copied: only the images decide how long the slot is in use.
        labels_B, indices_B, images_BHW3 = self._slots.arrays(step)
        labels_B, indices_B, images_BHW3 = labels_B[:num_rows], indices_B[:num_rows].copy(), images_BHW3[:num_rows]
        if self._copies is not None:
            content = self._copies.take(step)
            labels, index_tensor = content[: 16 * self._slots.rows].view(torch.int64).view(2, -1)[:, :num_rows]
            pixels = content[self._slots.images_at :][: images_BHW3.nbytes].view(images_BHW3.shape)
            return pixels.permute(0, 3, 1, 2), labels, indices_B, index_tensor
        images = torch.from_numpy(images_BHW3.copy()).permute(0, 3, 1, 2)
        return images, torch.from_numpy(labels_B.copy()), indices_B, torch.from_numpy(indices_B)


class _GpuCopies:
    """Copies slots to the GPU on a stream of its own, while the GPU computes. A slot may be filled again when its copy is done.

    The slots are page-locked once, at the start: otherwise every copy would go through a buffer of the driver and make the
    host wait.
    """

    def __init__(self, slots: BatchSlots, device: torch.device) -> None:
        self._slots, self._device = slots, device
        self._bytes = torch.frombuffer(slots.memory, dtype=torch.uint8)
        self._stream = torch.cuda.Stream(device)
        self._copied: dict[int, torch.cuda.Event] = {}
        """The end of the last copy of each slot."""
        code = int(torch.cuda.cudart().cudaHostRegister(self._bytes.data_ptr(), self._bytes.nbytes, 0))
        self._is_locked = code == 0
        if not self._is_locked:
            _log.warning(
                "the memory of batches cannot be page-locked (CUDA error %d): copies to the GPU take longer", code
            )

    def take(self, step: int) -> Tensor:
        """Returns the bytes of a step's slot on the GPU."""
        start, current = self._slots.start_of(step), torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            content = self._bytes[start : start + self._slots.slot_bytes].to(self._device, non_blocking=True)
            self._copied[start] = copied = torch.cuda.Event()
            copied.record(self._stream)
        # The stream waits, not the host, which continues to queue the kernels of the step.
        current.wait_event(copied)
        # The memory belongs to the side stream: it is not to be used again before the current stream is done with it.
        content.record_stream(current)
        return content

    def wait(self, step: int) -> None:
        """Returns when the last copy of this step's slot is done."""
        copied = self._copied.get(self._slots.start_of(step))
        if copied is not None:
            copied.synchronize()

    def close(self) -> None:
        # A copy under way reads the pages that are unlocked, and later unmapped, below.
        self._stream.synchronize()
        if self._is_locked:
            torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())
