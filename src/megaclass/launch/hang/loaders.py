"""Collects the stacks of a rank's loader processes, for which its main thread may wait. Standard library only.

A loader process writes them into a file in memory of its own, which is found among its open files. They follow the rank's
own stacks in the same text, each process under a heading that frames.py reads:

    loader process 4711: answered; read of /data/000123.jpg
    Thread 0x… (most recent call first):
"""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from megaclass.distributed.rank_status import LOADER_FILE_NAME, STACKS_SIGNAL
from megaclass.launch.hang.process_state import children_of, file_wait, state_of

_MAX_BYTES = 1 << 13
"""Per loader process. Its innermost frames come first."""
_MAX_LOADERS = 4
"""Further processes of a rank read the same data; their stacks would crowd out the rank's own."""


@dataclass(frozen=True, slots=True)
class AskedLoader:
    """A loader process that was asked for its stacks."""

    pid: int
    call: str
    """File operation in which one of its threads waits."""
    file: Path
    begins_at: int
    """Size of the file before it was asked: an earlier answer stays in it."""

    @property
    def is_stopped(self) -> bool:
        """Asked for when it is needed: SIGSTOP takes a moment to reach the threads of a process on a busy machine."""
        return state_of(self.pid) in ("T", "t")

    def answer(self) -> str:
        """Returns what it has written since it was asked; empty if that is nothing."""
        with contextlib.suppress(OSError), self.file.open("rb") as file:
            file.seek(self.begins_at)
            return file.read(_MAX_BYTES).decode(errors="replace")
        return ""


def ask_loaders(rank_pid: int) -> list[AskedLoader]:
    """Asks the loader processes of a rank for their stacks; waits for nothing."""
    asked = []
    for pid in children_of(rank_pid):
        if (file := _stacks_file(pid)) is None:
            continue
        with contextlib.suppress(OSError):
            loader = AskedLoader(pid, file_wait(pid), file, file.stat().st_size)
            # A process that is stopped answers when it continues, into a file that is not read any more.
            os.kill(pid, STACKS_SIGNAL)
            asked.append(loader)
        if len(asked) == _MAX_LOADERS:
            break
    return asked


def have_answered(loaders: list[AskedLoader]) -> bool:
    """Tells whether every loader process that can answer has begun to."""
    return all(loader.is_stopped or loader.answer() for loader in loaders)


def loader_stacks(loaders: list[AskedLoader]) -> str:
    """Returns the answers under their headings; empty if there are no loader processes."""
    parts = []
    for loader in loaders:
        text = loader.answer()
        state = "stopped" if loader.is_stopped else "answered" if text else "silent"
        parts.append(f"loader process {loader.pid}: {state}" + (f"; {loader.call}" if loader.call else ""))
        parts.append(text)
    return "\n".join(parts)


def _stacks_file(pid: int) -> Path | None:
    """Returns the file into which a process writes its stacks; None if it is no loader process."""
    with contextlib.suppress(OSError):
        for file in Path(f"/proc/{pid}/fd").iterdir():
            # A file that is closed meanwhile is passed over.
            with contextlib.suppress(OSError):
                if str(file.readlink()).startswith(f"/memfd:{LOADER_FILE_NAME}"):
                    return file
    return None
