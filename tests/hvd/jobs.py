"""Ways to run a job of several ranks in the tests of hvd."""

import atexit
import contextlib
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, TextIO

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
    pipe = subprocess.PIPE
    return [
        subprocess.Popen([sys.executable, "-c", script], env=env, text=True, stdout=pipe, stderr=pipe)
        for env in _environments(size, port, variables)
    ]


def fork_script(script: str, size: int, port: int, **variables: str) -> "list[ForkedScript]":
    """Like start_script, in processes forked from the server of run_ranks, which spares each the import of torch.

    For scripts that are not about a new interpreter: torch, numpy and a few modules of megaclass are already loaded.
    """
    return [ForkedScript(script, env) for env in _environments(size, port, variables)]


def _environments(size: int, port: int, variables: Mapping[str, str]) -> Iterator[dict[str, str]]:
    for rank in range(size):
        world = World(rank=rank, size=size, local_rank=rank, local_size=size, starter="tests", port=port)
        placed = rank_environment(world, host=socket.gethostname(), address="127.0.0.1", port=port)
        yield {**os.environ, **placed, "OMP_NUM_THREADS": "1", **variables}


class ForkedScript:
    """A process that runs a script as `python -c script` would; has the part of subprocess.Popen's interface that tests use."""

    def __init__(self, script: str, env: Mapping[str, str]) -> None:
        forkserver = multiprocessing.get_context("forkserver")
        (stdout, out), (stderr, err) = forkserver.Pipe(duplex=False), forkserver.Pipe(duplex=False)
        arguments = (script, dict(env), out, err)
        self._process = forkserver.Process(target=_run_script, args=arguments, daemon=True)
        self._process.start()
        self.stdout, self.stderr = _text_of(stdout), _text_of(stderr)
        for connection in (stdout, stderr, out, err):
            connection.close()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def communicate(self, timeout: float) -> tuple[str, str]:
        texts = {}

        def read(stream: TextIO) -> None:
            # A stream is closed under its reader where a process was killed whose children hold the other end.
            with contextlib.suppress(ValueError, OSError):
                texts[stream] = stream.read()

        readers = [threading.Thread(target=read, args=(stream,), daemon=True) for stream in (self.stdout, self.stderr)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(timeout)
            if reader.is_alive():
                raise subprocess.TimeoutExpired("a forked script", timeout)
        self._process.join(timeout)
        return texts[self.stdout], texts[self.stderr]

    def kill(self) -> None:
        self._process.kill()

    def wait(self) -> None:
        self._process.join()


def _text_of(connection: Connection) -> TextIO:
    return os.fdopen(os.dup(connection.fileno()), "r")


def _run_script(script: str, env: Mapping[str, str], out: Connection, err: Connection) -> None:
    for number, connection in ((1, out), (2, err)):
        os.dup2(connection.fileno(), number)
        connection.close()
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    os.environ.clear()
    os.environ.update(env)
    sys.argv[:] = ["-c"]
    sys.path[:0] = ["", *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    code: Any = 0
    try:
        exec(compile(script, "<string>", "exec"), main.__dict__)
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    # As an interpreter ends: threads, then functions registered with atexit. The server's children would skip the latter.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


def outputs_of(
    processes: "Sequence[subprocess.Popen[str] | ForkedScript]", timeout_s: float = 60.0
) -> list[tuple[int | None, str, str]]:
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
