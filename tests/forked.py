"""Processes forked from a server that has torch loaded: a new interpreter would spend four seconds of CPU time on its import.

Coverage does not trace them, which makes Python code a third faster than in the test process.
"""

import atexit
import contextlib
import os
import runpy
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from tests.conftest import fork_server, free_port

from megaclass.cli.main import main
from megaclass.launch.plan import rank_environment
from megaclass.world import World


class Forked:
    """A process that calls `function(*args)`.

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
        place = ({**os.environ, **(env or {})}, str(cwd or Path.cwd()), [str(path) for path in self._outputs])
        self._process = fork_server.Process(target=_main, args=(place, function, args))
        self._process.start()

    def end(self, timeout_s: float = 240.0) -> CompletedProcess[str]:
        """Wait for its end; return its exit code and output, as `subprocess.run` does.

        The exit code is that of an interpreter: an exception is printed with its traceback and gives 1.
        """
        try:
            self._process.join(timeout_s)
            is_late = self._process.exitcode is None
        finally:
            self.kill()
        out, err = (path.read_text() if path.exists() else "" for path in self._outputs)
        self._folder.cleanup()
        if is_late:
            pytest.fail(f"{self.name} did not end within {timeout_s} s\n{out[-3000:]}{err[-3000:]}")
        assert self._process.exitcode is not None
        return CompletedProcess([self.name], self._process.exitcode, out, err)

    def kill(self) -> None:
        """Kill it, if it still runs, and what it has started."""
        assert self._process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()  # not yet the leader of its session
        self._process.join()


def run_forked(
    function: Callable[..., object], *args: Any, timeout_s: float = 240.0, **options: Any
) -> CompletedProcess[str]:
    """Call `function(*args)` in a process of its own and wait for its end; options as for `Forked`."""
    return Forked(function, *args, **options).end(timeout_s)


def run_command(*arguments: str, **options: Any) -> CompletedProcess[str]:
    """`megaclass arguments…` in a forked process; options as for `run_forked`."""
    return run_forked(_run_megaclass, *arguments, **options)


def run_script(path: Path, *arguments: str, **options: Any) -> CompletedProcess[str]:
    """`python path arguments…` in a forked process; options as for `run_forked`."""
    return run_forked(_run_as_main, str(path), *arguments, **options)


def launched_script(
    num_ranks: int, path: Path, *arguments: str, timeout_s: float = 240.0
) -> list[CompletedProcess[str]]:
    """`megaclass run -np num_ranks python path arguments…` without the launcher: forked ranks with its environment."""
    port, ranks = free_port(), []
    try:
        for rank in range(num_ranks):
            world = World(rank=rank, size=num_ranks, local_rank=rank, local_size=num_ranks, starter="tests", port=port)
            env = rank_environment(world, host=socket.gethostname(), address="127.0.0.1", port=port)
            ranks.append(Forked(_run_as_main, str(path), *arguments, env=env))
        return [rank.end(timeout_s) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def torchrun(num_ranks: int, function: Callable[..., object], *args: Any, **options: Any) -> CompletedProcess[str]:
    """`function(*args)` in the ranks of torchrun's own agent, as `torchrun --nproc-per-node num_ranks`; agent and ranks are
    forked. The output is that of all ranks; options as for `run_forked`."""
    return run_forked(_launch, num_ranks, free_port(), function, args, **options)


def torchrun_script(num_ranks: int, path: Path, *arguments: str, **options: Any) -> CompletedProcess[str]:
    """`torchrun --nproc-per-node num_ranks path arguments…`; agent and ranks are forked."""
    return torchrun(num_ranks, _run_as_main, str(path), *arguments, **options)


def _main(place: tuple[dict[str, str], str, list[str]], function: Callable[..., object], args: tuple[Any, ...]) -> None:
    environment, folder, outputs = place
    os.setsid()  # what it starts is killed with it
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for descriptor, path in zip((1, 2), outputs, strict=True):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    # One write per line: the lines of several ranks stay apart.
    sys.stdout, sys.stderr = (os.fdopen(descriptor, "w", buffering=1, closefd=False) for descriptor in (1, 2))
    code = _exit_code(function, args)
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
        traceback.print_exc()
        return 1
    return 0


def _run_megaclass(*arguments: str) -> None:
    sys.exit(main([*arguments]))


def _run_as_main(path: str, *arguments: str) -> None:
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    runpy.run_path(path, run_name="__main__")


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
