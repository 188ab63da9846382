"""The output of this host's workers, from their pipes to the driver. Standard library only.

    watch: a worker was started -> _read whenever its pipes have something -> the end of the stream: the pipe is closed

The pipes are not read while `pause_if` was last called with True. They fill then, and the workers wait in their writes, as for
a slow terminal. A read that the agent asks for (read_stderr, read_last, read_rest) is made all the same.
"""

import contextlib
import os
import selectors
from collections.abc import Callable, Iterable
from functools import partial
from typing import IO

from megaclass_launch.agent.driver_connection import READ_BYTES
from megaclass_launch.agent.supervisor import Worker

_READS_OF_A_FULL_PIPE = 2


class WorkerOutput:
    """Reads the workers' stdout, stderr and results. take: called with a rank, the stream and the bytes of one read."""

    def __init__(self, selector: selectors.BaseSelector, take: Callable[[int, str, bytes], None]) -> None:
        self._selector = selector
        self._take = take
        self._is_paused = False
        self._pipes: dict[int, tuple[Worker, str]] = {}
        """Worker and stream by file number, until the stream ends."""
        self._results: dict[int, IO[bytes]] = {}
        """Pipe for the result by rank, in jobs of hvd.run()."""

    def watch(self, worker: Worker, result_fd: int | None = None) -> None:
        """Reads the output of a worker that was started. result_fd: the pipe for its result, in jobs of hvd.run()."""
        pipes = {"stdout": worker.process.stdout, "stderr": worker.process.stderr}
        if result_fd is not None:
            pipes["result"] = self._results[worker.rank] = os.fdopen(result_fd, "rb", buffering=0)
        for stream, pipe in pipes.items():
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self._pipes[pipe.fileno()] = (worker, stream)
            # An elastic job starts workers at any time, also while the others are not read.
            if not self._is_paused:
                self._listen(pipe.fileno())

    def pause_if(self, is_full: bool) -> None:
        """Stops reading while the driver does not take what was read, and resumes when it does."""
        if is_full == self._is_paused:
            return
        self._is_paused = is_full
        for pipe in self._pipes:
            if is_full:
                self._selector.unregister(pipe)
            else:
                self._listen(pipe)

    def read_stderr(self, rank: int) -> None:
        """Reads what a rank has printed on stderr, while the agent's loop waits for its stacks."""
        self._read_all(
            pipe for pipe, (owner, stream) in self._pipes.items() if (owner.rank, stream) == (rank, "stderr")
        )

    def read_last(self, worker: Worker) -> None:
        """Reads what a worker that has ended left in its pipes, so that its last output is sent before its exit code."""
        for pipe in [pipe for pipe, (owner, _) in self._pipes.items() if owner is worker]:
            # Not to the end of the stream: a process that the worker started may hold the pipe open and write without end.
            for _ in range(_READS_OF_A_FULL_PIPE):
                if pipe in self._pipes and not self._read(pipe):
                    break

    def read_rest(self) -> None:
        """Reads everything that is left in the pipes of all workers; no process may write to them any more."""
        self._read_all(self._pipes)

    def _read_all(self, pipes: Iterable[int]) -> None:
        # A list, because a read removes the pipe at the end of its stream.
        for pipe in list(pipes):
            while self._read(pipe):
                continue

    def _listen(self, pipe: int) -> None:
        self._selector.register(pipe, selectors.EVENT_READ, partial(self._read, pipe))

    def _read(self, pipe: int) -> bool:
        """Passes on one read of a worker's output; returns whether there may be more."""
        worker, stream = self._pipes[pipe]
        try:
            data = os.read(pipe, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            # It is not registered while the output is paused.
            with contextlib.suppress(KeyError):
                self._selector.unregister(pipe)
            del self._pipes[pipe]
            closed = self._results.get(worker.rank) if stream == "result" else getattr(worker.process, stream)
            assert closed is not None
            # Closed here and not with the worker, which may have ended long before a child that inherited its pipe.
            closed.close()
            return False
        self._take(worker.rank, stream, data)
        return True
