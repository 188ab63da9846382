"""The command `horovodrun`: `megaclass run` with Horovod's names for the variables of the ranks."""

import sys
from typing import NoReturn

from megaclass_launch.command import run


def command() -> NoReturn:
    """Starts a job as typed: horovodrun -np 16 -H host1:8,host2:8 python train.py."""
    sys.exit(run(["--horovod", *sys.argv[1:]], "horovodrun"))


if __name__ == "__main__":
    command()
