"""The last resort against orphans: who belongs to a run, and a process that kills them when their keeper is gone.

Every worker carries its run's id in the environment, and so do the processes it starts, whatever sessions they open. The
keeper (an agent, or `megaclass train` with local ranks) starts this file as two processes of their own, each of which holds
the reading end of a pipe. When the keeper dies without saying goodbye, or falls silent, everything that carries the id is
killed. Two, so that killing the keeper together with one of them leaves the other.

The driver of `megaclass run` is a third watcher: when it loses an agent, it starts this file on that host (over ssh where that
is another machine) with the run's id on stdin, and what the agent should have ended is killed from there.

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
_LONGEST_SWEEP_S = 10.0
_PAUSE_S = 0.05


def members(
    run_id: str, sessions: Collection[int] = (), adopted_by: int = 0, apart_from: Collection[int] = ()
) -> list[int]:
    """Processes of the run that are alive: by id in the environment, by session, or as descendants of such ones.

    adopted_by: a subreaper all of whose children belong to the run, apart from some.
    """
    mark = f"{RUN_ID_NAME}={run_id}".encode()
    parents: dict[int, int] = {}
    found: set[int] = set()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) in (os.getpid(), *apart_from):
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


def kill_all(run_id: str, at_least_s: float = _SWEEP_S) -> None:
    """Kills for a while and until nothing is left: a process can start another between being listed and being killed."""
    begun = time.monotonic()
    while True:
        left = members(run_id)
        for pid in left:
            send(pid, signal.SIGKILL)
        if time.monotonic() - begun > (_LONGEST_SWEEP_S if left else at_least_s):
            return
        time.sleep(_PAUSE_S)


def kill_after(run_id: str, agent: int, grace_s: float) -> None:
    """Kills what a lost agent has not ended. While the agent lives, it has the grace to let its ranks save and leave."""
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and _is_alive(agent) and members(run_id):
        time.sleep(_PAUSE_S)
    kill_all(run_id, 2 * _PAUSE_S)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


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
    kill_all(run_id)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        # From the driver. Not on the command line, by which somebody might find and kill this process, too.
        _run_id, _agent, _grace_s = sys.stdin.readline().split()
        kill_after(_run_id, int(_agent), float(_grace_s))
    else:
        main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
