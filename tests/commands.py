"""Commands of `megaclass` in the test process, which has torch loaded; tests/forked.py runs them in processes of their own."""

import contextlib
import io
from collections.abc import Sequence
from subprocess import PIPE, STDOUT, CompletedProcess

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
