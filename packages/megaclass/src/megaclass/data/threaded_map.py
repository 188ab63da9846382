"""A map over many small items on a few threads; decoding and encoding release the interpreter lock."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Given = TypeVar("Given")
Result = TypeVar("Result")


def ordered_map(function: Callable[[Given], Result], items: Iterable[Given], num_threads: int) -> Iterator[Result]:
    """Yields the results in the order of the items; at most 4 per thread are computed ahead of the reader."""
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="megaclass-data")
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > 4 * num_threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
