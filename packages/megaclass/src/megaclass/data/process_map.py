"""A map over blocks of work in several processes, for work that holds the interpreter lock, such as drawing."""

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from megaclass.errors import DataError

Given = TypeVar("Given")
Result = TypeVar("Result")


def process_map(
    function: Callable[[Given], Result], items: Iterable[Given], num_processes: int
) -> Generator[Result, None, None]:
    """Yields the results in the order of the items. One process: the caller itself. Closing the iterator ends the processes."""
    if num_processes == 1:
        yield from map(function, items)
        return
    # Never fork: the caller may hold threads and a process group.
    context = multiprocessing.get_context("spawn")
    # New processes start with `python -c`, which would import files of the current folder in place of Python's modules.
    is_safe = "PYTHONSAFEPATH" in os.environ
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    pool = ProcessPoolExecutor(num_processes, mp_context=context, initializer=_prepare_worker)
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > 3 * num_processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            "A process that draws images was killed, perhaps because memory ran out: try fewer processes."
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        if not is_safe:
            del os.environ["PYTHONSAFEPATH"]


def _prepare_worker() -> None:
    """Ends a worker with its parent, and leaves Ctrl-C to the parent.

    A worker waits for jobs on a pipe of which it holds both ends, so it would otherwise outlive a killed parent.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    sentinel = parent.sentinel

    def watch() -> None:
        multiprocessing.connection.wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="megaclass-parent-watch").start()
