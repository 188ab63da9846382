"""Ways to run a function in a Horovod job in the tests of hvd."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import horovod.torch as hvd


@contextmanager
def job(**settings: str) -> Iterator[tuple[int, int]]:
    """(rank, size), between init() and shutdown(); settings are HOROVOD_ variables."""
    variables = {f"HOROVOD_{name}": value for name, value in settings.items()}
    os.environ.update(variables)
    try:
        hvd.init()
        yield hvd.rank(), hvd.size()
    finally:
        hvd.shutdown()
        for name in variables:
            os.environ.pop(name, None)


def in_job(function: Callable[..., Any], *args: Any) -> Any:
    """For run_ranks: the function, given rank and size, inside a job."""
    with job() as (rank, size):
        return function(rank, size, *args)


def error_of(call: Callable[[], Any]) -> tuple[str, str]:
    """Type and text of what the call raises; ('', '') if nothing."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""
