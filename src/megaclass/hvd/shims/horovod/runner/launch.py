"""`horovodrun` as a function."""

import sys

from megaclass.hvd.running import run


def run_commandline() -> None:
    """What the command `horovodrun` does: its arguments, given to `megaclass run`."""
    from megaclass.cli import main

    sys.exit(main(["run", "--horovod", *sys.argv[1:]]))


__all__ = ["run", "run_commandline"]
