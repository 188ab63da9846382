"""`horovod.runner.util.threads`: calls functions in threads."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any


def execute_function_multithreaded(
    fn: Callable[..., Any],
    args_list: list[list[Any]],
    block_until_all_done: bool = True,
    max_concurrent_executions: int = 1000,
) -> dict[int, Any] | None:
    """Calls fn once per list of arguments; returns the results by position, or None at once if it does not wait."""
    if not block_until_all_done:
        for args in args_list:
            in_thread(fn, tuple(args))
        return None
    if not args_list:
        return {}
    with ThreadPoolExecutor(min(max_concurrent_executions, len(args_list))) as pool:
        futures = [pool.submit(fn, *args) for args in args_list]
    if any(future.exception() for future in futures):
        raise RuntimeError(f"Some threads for func {fn.__name__} did not complete successfully.")
    return {index: future.result() for index, future in enumerate(futures)}


def in_thread(
    target: Callable[..., Any],
    args: tuple[Any, ...] = (),
    name: str | None = None,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Starts a thread and returns it. `silent` drops exceptions of the target."""
    if not isinstance(args, tuple):
        raise ValueError(f"args must be a tuple, not {type(args)}, for a single argument use (arg,)")

    def quietly(*given: Any) -> None:
        with suppress(Exception):
            target(*given)

    thread = threading.Thread(target=quietly if silent else target, args=args, name=name, daemon=daemon)
    thread.start()
    return thread


def on_event(
    event: threading.Event,
    func: Callable[..., Any],
    args: tuple[Any, ...] = (),
    stop: threading.Event | None = None,
    check_stop_interval_s: float = 1.0,
    daemon: bool = True,
    silent: bool = False,
) -> threading.Thread:
    """Starts a thread that calls func when the event is set, unless `stop` is set first."""
    if event is None:
        raise ValueError("Event must not be None")
    if not isinstance(args, tuple):
        raise ValueError(f"args must be a tuple, not {type(args)}, for a single argument use (arg,)")
    if stop is None and not daemon:
        raise ValueError("Stop event must be given for non-daemon event thread")

    def wait_and_call() -> None:
        if stop is None:
            event.wait()
        else:
            while not event.is_set() and not stop.is_set():
                event.wait(timeout=check_stop_interval_s)
        if stop is None or not stop.is_set():
            func(*args)

    return in_thread(wait_and_call, daemon=daemon, silent=silent)
