"""The last resort against orphans: who belongs to a run, and a process that kills them when their keeper is gone.

Every worker carries its run's id in the environment, and so do the processes it starts, whatever sessions they open. The
keeper (an agent, or `megaclass train` with local ranks) starts this file as a process of its own that holds the reading end
of a pipe. When the keeper dies without saying goodbye, or falls silent, everything that carries the id is killed.

The file is handed to the interpreter on stdin: its command line does not name the package, so that a `pkill -9 -f megaclass`
aimed at the keeper misses it. Therefore it imports nothing of the package.
"""

import os
import select
import signal
import sys
import time
from collections.abc import Collection
from pathlib import Path

RUN_ID_NAME = "MEGACLASS_RUN_ID"
GOODBYE = b"q"
_SWEEP_S = 1.0
_PAUSE_S = 0.05


def members(run_id: str, sessions: Collection[int] = (), adopted_by: int = 0, apart_from: int = 0) -> list[int]:
    """Processes of the run that are alive: by id in the environment, by session, or as descendants of such ones.

    adopted_by: a subreaper all of whose children belong to the run, apart from one.
    """
    mark = f"{RUN_ID_NAME}={run_id}".encode()
    parents: dict[int, int] = {}
    found: set[int] = set()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) in (os.getpid(), apart_from):
            continue
        pid = int(folder.name)
        try:
            state, parent, _, session = (folder / "stat").read_bytes().rpartition(b")")[2].split()[:4]
        except OSError:
            continue  # gone meanwhile
        if state in (b"Z", b"X"):
            continue
        parents[pid] = int(parent)
        if int(session) in sessions or (adopted_by and int(parent) == adopted_by) or _carries(folder, mark):
            found.add(pid)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found)


def _carries(folder: Path, mark: bytes) -> bool:
    try:
        return mark in (folder / "environ").read_bytes().split(b"\0")
    except OSError:
        return False  # gone meanwhile, or another user's


def kill_members(run_id: str, number: int) -> None:
    for pid in members(run_id):
        send(pid, number)


def send(pid: int, number: int) -> None:
    """A signal to a process that may be gone already."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return


def main(run_id: str, lifeline: int, keeper: int, silence_s: float) -> None:
    """silence_s: a keeper that says nothing for so long counts as dead (it is stopped, say); 0 = it need say nothing."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    while True:
        if not select.select([lifeline], [], [], silence_s or None)[0]:
            if os.getppid() == keeper:
                send(keeper, signal.SIGKILL)
            break
        said = os.read(lifeline, 4096)
        if GOODBYE in said:
            return
        if not said:
            break
    # More than one look: a process can start another between being listed and being killed.
    deadline = time.monotonic() + _SWEEP_S
    while time.monotonic() < deadline:
        kill_members(run_id, signal.SIGKILL)
        time.sleep(_PAUSE_S)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
