"""Runs commands of `megaclass` without a new interpreter, which would spend seconds on the import of torch.

`ended_in_this_process` runs a command in the test process. `forked_command` forks the server of tests/conftest.py, which has
torch loaded: for commands that are sent signals or that crash.
"""

import contextlib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from subprocess import PIPE, STDOUT, CompletedProcess

from tests.conftest import fork_server

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
def forked_command(arguments: Sequence[str], folder: Path, preparation: str = "") -> Iterator[ForkedCommand]:
    """Starts `megaclass` with these arguments; it is killed at the end of the block. Its output goes to a file in `folder`.

    preparation: Python code that the process runs first.
    """
    stderr = folder / "stderr.txt"
    process = fork_server.Process(target=_run_command, args=([*arguments], str(stderr), preparation), daemon=True)
    process.start()
    try:
        yield ForkedCommand(process, stderr)
    finally:
        process.kill()
        process.join()


def _run_command(arguments: list[str], stderr: str, preparation: str) -> None:
    with Path(stderr).open("w") as file:
        os.dup2(file.fileno(), 2)
    os.dup2(2, 1)
    exec(preparation, {})
    sys.exit(main(arguments))
