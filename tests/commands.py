"""Runs commands of `megaclass` without a new interpreter, which would spend seconds on the import of torch.

`ended_in_this_process` runs a command in the test process. `forked_command` forks the server of tests/conftest.py, which has
torch loaded: for commands that are sent signals or that crash.
"""

import contextlib
import io
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from subprocess import PIPE, STDOUT, CompletedProcess

from tests.conftest import fork_server, free_port

from megaclass.cli.main import main


def ended_in_this_process(arguments: Sequence[str], stderr: int = PIPE) -> CompletedProcess[str]:
    """Exit code and output, as of `subprocess.run`. stderr: PIPE, or STDOUT for both in one text."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out if stderr == STDOUT else err):
        try:
            code = main([*arguments])
        except SystemExit as ended:  # argparse's way to end
            code = int(ended.code or 0)
    return CompletedProcess(["megaclass", *arguments], code, out.getvalue(), err.getvalue())


@dataclass
class ForkedCommand:
    """A command that runs in a process of its own."""

    process: BaseProcess
    stdout: Path
    stderr: Path

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def is_alive(self) -> bool:
        return self.process.is_alive()

    def ended(self, timeout_s: float = 120.0) -> int | None:
        """Exit code when the command has ended, negative after a signal; None if it has not ended in this time."""
        self.process.join(timeout_s)
        return self.process.exitcode

    def errors(self) -> str:
        """Everything that was written to standard error."""
        return self.stderr.read_text()


@contextlib.contextmanager
def forked_command(
    arguments: Sequence[str],
    folder: Path,
    preparation: str = "",
    *,
    env: Mapping[str, str] | None = None,
    name: str = "command",
) -> Iterator[ForkedCommand]:
    """Starts `megaclass` with these arguments; it is killed at the end of the block.

    Its output goes to the files `name`.stdout and `name`.stderr in `folder`. preparation: Python code that the process runs
    first. env: its whole environment, if it is not that of the tests.
    """
    outputs = folder / f"{name}.stdout", folder / f"{name}.stderr"
    call = ([*arguments], *map(str, outputs), preparation, dict(os.environ if env is None else env))
    process = fork_server.Process(target=_run_command, args=call, daemon=True)
    process.start()
    try:
        yield ForkedCommand(process, *outputs)
    finally:
        process.kill()
        process.join()


def ended_ranks(commands: Sequence[Sequence[str]], folder: Path, env: Mapping[str, str]) -> list[ForkedCommand]:
    """Runs one command per rank, as under torchrun with one rank per host, and returns them when all have ended."""
    port = free_port()
    with contextlib.ExitStack() as started:
        ranks = []
        for rank, arguments in enumerate(commands):
            size = len(commands)
            world = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            world |= {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": rank, "GROUP_WORLD_SIZE": size}
            whole = {**env, **{key: str(value) for key, value in world.items()}}
            ranks.append(started.enter_context(forked_command(arguments, folder, env=whole, name=f"rank-{rank}")))
        for one in ranks:
            one.ended(240.0)
        return ranks


def _run_command(arguments: list[str], stdout: str, stderr: str, preparation: str, env: dict[str, str]) -> None:
    for number, path in ((1, stdout), (2, stderr)):
        with Path(path).open("w") as file:
            os.dup2(file.fileno(), number)
    os.environ.clear()
    os.environ.update(env)
    exec(preparation, {})
    sys.exit(main(arguments))
