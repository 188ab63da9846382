"""Ways to run a job of several ranks in the tests of hvd."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import megaclass.hvd as hvd
from megaclass.launch.plan import rank_environment
from megaclass.world import World


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


def start_script(script: str, size: int, port: int, **variables: str) -> list[subprocess.Popen[str]]:
    """The script in real processes, as a launcher would start them."""
    processes = []
    for rank in range(size):
        world = World(rank=rank, size=size, local_rank=rank, local_size=size, starter="tests", port=port)
        placed = rank_environment(world, host=socket.gethostname(), address="127.0.0.1", port=port)
        env = {**os.environ, **placed, "OMP_NUM_THREADS": "1", **variables}
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", script], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        )
    return processes


def outputs_of(processes: list[subprocess.Popen[str]], timeout_s: float = 60.0) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) by rank; nobody is left behind."""
    try:
        results = []
        for process in processes:
            out, err = process.communicate(timeout=timeout_s)
            results.append((process.returncode, out, err))
        return results
    finally:
        for process in processes:
            process.kill()
            process.wait()
