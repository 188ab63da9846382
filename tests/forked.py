"""Processes forked from a server that has torch loaded: a new interpreter would spend four seconds of CPU time on its import.

    run_forked(megaclass_command, "train", "recipe.toml")  # megaclass train recipe.toml
    run_forked(python_script, Path("mnist.py"), "-x")      # python mnist.py -x
    ended_ranks(2, python_script, "import torch; …")       # megaclass run -np 2 python -c "import torch; …"
    torchrun(2, python_script, Path("mnist.py"))           # torchrun --nproc-per-node 2 mnist.py
    with Forked(function, 1, 2) as process:                # beside the test, which sends signals

Coverage does not trace them, which makes Python code a third faster than in the test process.
"""

import atexit
import contextlib
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from tests.conftest import fork_server, free_port

from megaclass.cli.main import main
from megaclass_launch.placement import rank_environment
from megaclass_launch.world import World


class Forked:
    """A process that calls `function(*args)`; at the end of a `with` block it is killed, with what it has started.

    `function` is a module-level function; it and its arguments are pickled. env: variables in addition to those of this
    process.
    """

    def __init__(
        self,
        function: Callable[..., object],
        *args: Any,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.name = function.__name__
        self._folder = tempfile.TemporaryDirectory()
        self._outputs = [Path(self._folder.name, name) for name in ("stdout", "stderr")]
        self._texts: list[str] = []
        place = ({**os.environ, **(env or {})}, str(cwd or Path.cwd()), [str(path) for path in self._outputs])
        self._process = fork_server.Process(target=_main, args=(place, function, args))
        self._process.start()

    def __enter__(self) -> "Forked":
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def stdout(self) -> str:
        """Everything that it has written to standard output."""
        return self._written()[0]

    @property
    def stderr(self) -> str:
        """Everything that it has written to standard error."""
        return self._written()[1]

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def wait(self, timeout_s: float = 240.0) -> int | None:
        """Exit code when it has ended, negative after a signal; None if it has not ended in this time.

        The exit code is that of an interpreter: an exception is printed with its traceback and gives 1.
        """
        self._process.join(timeout_s)
        if self._process.exitcode is not None:
            self.kill()
        return self._process.exitcode

    def end(self, timeout_s: float = 240.0) -> CompletedProcess[str]:
        """Wait for its end; return its exit code and output, as `subprocess.run` does. A late process fails the test."""
        with self:
            code = self.wait(timeout_s)
        if code is None:
            pytest.fail(f"{self.name} did not end within {timeout_s} s\n{self.stdout[-3000:]}{self.stderr[-3000:]}")
        return CompletedProcess([self.name], code, self.stdout, self.stderr)

    def kill(self) -> None:
        """Kill it, if it still runs, and what it has started."""
        if self._texts:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        # It may not be the leader of its session yet. Not without a look: the number of one that has ended may be another's.
        if self.is_alive():
            self._process.kill()
        self._process.join()
        self._texts = self._written()
        self._folder.cleanup()

    def _written(self) -> list[str]:
        found = [path.read_bytes() if path.exists() else b"" for path in self._outputs]
        # The last character may be half written.
        return self._texts or [text.decode(errors="replace") for text in found]


def megaclass_command(*arguments: str) -> None:
    """Run `megaclass arguments…`."""
    sys.exit(main([*arguments]))


def python_script(source: str | Path, *arguments: str) -> None:
    """Run a file as `python source arguments…` does, or a text as `python -c source arguments…`."""
    own = sys.modules["__main__"] = types.ModuleType("__main__")
    name, folder, text = "-c", "", source
    if isinstance(source, Path):
        name, folder, text = str(source), str(source.parent), source.read_text()
        own.__file__ = name
    sys.argv = [name, *arguments]
    sys.path.insert(0, folder)
    exec(compile(text, name, "exec"), own.__dict__)


def run_forked(
    function: Callable[..., object], *args: Any, timeout_s: float = 240.0, **options: Any
) -> CompletedProcess[str]:
    """Call `function(*args)` in a process of its own and wait for its end; options as for `Forked`."""
    return Forked(function, *args, **options).end(timeout_s)


@contextlib.contextmanager
def forked_ranks(
    num_ranks: int,
    function: Callable[..., object],
    *args: Any,
    port: int = 0,
    ranks_per_host: int = 0,
    env: Mapping[str, str] | None = None,
) -> Iterator[list[Forked]]:
    """Start ranks with the environment that `megaclass run` gives them; they are killed at the end of the block.

    port: MASTER_PORT, a free one if it is 0. ranks_per_host: 0 places all on one host.
    """
    port, local_size = port or free_port(), ranks_per_host or num_ranks
    with contextlib.ExitStack() as started:
        ranks = []
        for rank in range(num_ranks):
            (host, local_rank), num_hosts = divmod(rank, local_size), num_ranks // local_size
            local = {"local_rank": local_rank, "local_size": local_size, "cross_rank": host, "cross_size": num_hosts}
            world = World(rank=rank, size=num_ranks, **local, starter="tests", port=port)
            placed = rank_environment(world, host=socket.gethostname(), address="127.0.0.1", port=port)
            ranks.append(started.enter_context(Forked(function, *args, env={**placed, **(env or {})})))
        yield ranks


def ended_ranks(
    num_ranks: int, function: Callable[..., object], *args: Any, timeout_s: float = 240.0, **options: Any
) -> list[CompletedProcess[str]]:
    """Start ranks and wait for their end; options as for `forked_ranks`."""
    deadline = time.monotonic() + timeout_s
    with forked_ranks(num_ranks, function, *args, **options) as ranks:
        return [rank.end(max(1.0, deadline - time.monotonic())) for rank in ranks]


def torchrun(num_ranks: int, function: Callable[..., object], *args: Any, **options: Any) -> CompletedProcess[str]:
    """`function(*args)` in the ranks of torchrun's own agent, as `torchrun --nproc-per-node num_ranks`; agent and ranks are
    forked. The output is that of all ranks; options as for `run_forked`."""
    return run_forked(_launch, num_ranks, free_port(), function, args, **options)


def _main(place: tuple[dict[str, str], str, list[str]], function: Callable[..., object], args: tuple[Any, ...]) -> None:
    environment, folder, outputs = place
    os.setsid()  # what it starts is killed with it
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    os.chdir(folder)
    for descriptor, path in zip((1, 2), outputs, strict=True):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    # One write per line: the lines of several ranks stay apart.
    sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", buffering=1, closefd=False) for descriptor in (1, 2))
    code = _exit_code(function, args)
    # As an interpreter ends: threads, then functions registered with atexit. The server's children would skip the latter.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # torch's gloo threads abort the interpreter's end now and then (docs/decisions.md)


def _exit_code(function: Callable[..., object], args: tuple[Any, ...]) -> int:
    try:
        function(*args)
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
            return 1
        return int(ended.code or 0)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    return 0


def _launch(num_ranks: int, port: int, function: Callable[..., object], args: tuple[Any, ...]) -> None:
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id="tests",
        rdzv_backend="static",
        rdzv_endpoint=f"127.0.0.1:{port}",
        rdzv_configs={"rank": 0},
        max_restarts=0,
        monitor_interval=0.1,
        start_method="fork",
    )
    elastic_launch(config, function)(*args)
