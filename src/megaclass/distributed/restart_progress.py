"""Progress of a job, reported by a rank to its agent, so that restarts stop when no checkpoint follows. Standard library only.

The agent gives its workers a small file in memory; a rank that has published a checkpoint writes the step there. Ranks read
nothing from it, and a rank that another starter has started writes nowhere.
"""

import contextlib
import os
import struct
from pathlib import Path

FD_NAME = "MEGACLASS_PROGRESS_FD"
_FILE_NAME = "megaclass-progress"
_STEP = struct.Struct("<Q")


class ProgressMark:
    """The agent's side: the file and its content."""

    def __init__(self) -> None:
        self._handle = os.memfd_create(_FILE_NAME, os.MFD_CLOEXEC)

    def fileno(self) -> int:
        return self._handle

    def step(self) -> int | None:
        """Returns the step of the last checkpoint that a rank of this host has published, or None."""
        data = os.pread(self._handle, _STEP.size, 0)
        return int(_STEP.unpack(data)[0]) if len(data) == _STEP.size else None

    def close(self) -> None:
        os.close(self._handle)


def report_progress(step: int) -> None:
    """Tells the agent, if there is one, that a checkpoint of this step is published."""
    number = os.environ.get(FD_NAME, "")
    if not number.isdecimal():
        return
    with contextlib.suppress(OSError):
        # A program between the agent and this process may have closed the file, and its number may belong to another now.
        if str(Path(f"/proc/self/fd/{number}").readlink()).startswith(f"/memfd:{_FILE_NAME}"):
            os.pwrite(int(number), _STEP.pack(step), 0)
