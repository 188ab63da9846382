"""Maps over many items on a few threads or in a few processes, with the results in the order of the items."""

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from megaclass.errors import DataError

Given = TypeVar("Given")
Result = TypeVar("Result")


def ordered_map(
    function: Callable[[Given], Result], items: Iterable[Given], num_threads: int, num_ahead: int | None = None
) -> Generator[Result, None, None]:
    """Maps on threads, for work that releases the interpreter lock, such as decoding and encoding.

    Closing the iterator, or dropping it, ends its threads. num_ahead: items that are given to the threads ahead of the reader;
    4 per thread by default.
    """
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="megaclass-data")
    yield from _in_order(pool, function, items, 4 * num_threads if num_ahead is None else num_ahead)


def process_map(
    function: Callable[[Given], Result], items: Iterable[Given], num_processes: int
) -> Generator[Result, None, None]:
    """Maps in processes, for blocks of work that hold the interpreter lock, such as drawing. One process: the caller itself.

    Closing the iterator ends the processes.
    """
    if num_processes == 1:
        yield from map(function, items)
        return
    # Never fork: the caller may hold threads and a process group.
    context = multiprocessing.get_context("spawn")
    # New processes start with `python -c`, which would import files of the current folder in place of Python's modules.
    is_safe = "PYTHONSAFEPATH" in os.environ
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    try:
        pool = ProcessPoolExecutor(num_processes, mp_context=context, initializer=_prepare_worker)
        yield from _in_order(pool, function, items, 3 * num_processes)
    except BrokenProcessPool as error:
        raise DataError(
            "A process that draws images was killed, perhaps because memory ran out: try fewer processes."
        ) from error
    finally:
        if not is_safe:
            del os.environ["PYTHONSAFEPATH"]


def _in_order(
    pool: Executor, function: Callable[[Given], Result], items: Iterable[Given], num_ahead: int
) -> Generator[Result, None, None]:
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > num_ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        # Also when the caller drops the generator: no thread may read on after its run has ended.
        pool.shutdown(wait=True, cancel_futures=True)


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
