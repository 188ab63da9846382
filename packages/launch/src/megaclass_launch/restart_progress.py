"""Lets a rank report its latest checkpoint to its agent, so that restarts stop when a job makes no progress.

The agent creates a small file in memory and passes its descriptor to its ranks; a rank that has published a checkpoint
writes the step into it. The ranks read nothing back, and ranks without an agent write nothing. Standard library only.
"""

import contextlib
import os
import struct
from pathlib import Path

FD_NAME = "MEGACLASS_PROGRESS_FD"
_FILE_NAME = "megaclass-progress"
_STEP = struct.Struct("<Q")


class ProgressFile:
    """The file in memory, as the agent uses it: ranks write to it, the agent reads it."""

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
    """Tells the agent, if there is one, that the checkpoint of this step is published."""
    number = os.environ.get(FD_NAME, "")
    if not number.isdecimal():
        return
    with contextlib.suppress(OSError):
        # A program between the agent and this process may have closed the file; its number may now be another file.
        if str(Path(f"/proc/self/fd/{number}").readlink()).startswith(f"/memfd:{_FILE_NAME}"):
            os.pwrite(int(number), _STEP.pack(step), 0)
