"""A map over many small items on a few threads; decoding and encoding release the interpreter lock."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Given = TypeVar("Given")
Result = TypeVar("Result")


def ordered_map(
    function: Callable[[Given], Result], items: Iterable[Given], num_threads: int, num_ahead: int | None = None
) -> Iterator[Result]:
    """Yields the results in the order of the items. Closing the iterator, or dropping it, ends its threads.

    num_ahead: items that are given to the threads ahead of the reader; 4 per thread by default.
    """
    num_ahead = 4 * num_threads if num_ahead is None else num_ahead
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="megaclass-data")
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
