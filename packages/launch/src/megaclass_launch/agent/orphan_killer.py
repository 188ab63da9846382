"""The orphan killer: a process that kills the ranks of a host when their supervisor has died.

Every worker carries its run's id in the environment, and so do the processes it starts, whatever sessions they open. The
supervisor (of an agent, or of a program that starts ranks itself) starts this file as two processes, each of which holds
the reading end of a pipe. If the supervisor dies without a goodbye, or falls silent, they kill every process that carries
the id. There are two, so killing the supervisor together with one of them leaves the other.

The driver of `megaclass run` is a third watcher: when it loses an agent, it starts this file on that host (over ssh if that
is another machine) with the run's id on stdin, and kills from there what the agent should have ended.

The file is given to the interpreter on stdin: its command line does not name the package, so a `pkill -9 -f megaclass`
aimed at the supervisor misses it. Therefore it imports nothing of the package.
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
_KILL_S = 1.0
_LONGEST_KILL_S = 10.0
_PAUSE_S = 0.05


def processes_of(
    run_id: str, sessions: Collection[int] = (), adopted_by: int = 0, apart_from: Collection[int] = ()
) -> list[int]:
    """Returns the live processes of a run: by id in the environment, by session, and all descendants of those.

    adopted_by: a subreaper all of whose children belong to the run, except for those in apart_from.
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
            continue  # it has ended meanwhile
        if state in (b"Z", b"X"):
            continue
        parents[pid] = int(parent)
        if int(session) in sessions or (adopted_by and int(parent) == adopted_by) or _carries(folder, mark):
            found.add(pid)
    # Descendants belong to the run although they may have cleared their environment, as sudo and some shells do.
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found)


def _carries(folder: Path, mark: bytes) -> bool:
    try:
        return mark in (folder / "environ").read_bytes().split(b"\0")
    except OSError:
        return False  # it has ended meanwhile, or belongs to another user


def kill_all(run_id: str, at_least_s: float = _KILL_S) -> None:
    """Kills repeatedly, until nothing is left: a process can start another between being listed and being killed."""
    begun = time.monotonic()
    while True:
        left = processes_of(run_id)
        for pid in left:
            send(pid, signal.SIGKILL)
        # Not at the first empty list: a process that forked while /proc was read is in none.
        if time.monotonic() - begun > (_LONGEST_KILL_S if left else at_least_s):
            return
        time.sleep(_PAUSE_S)


def kill_after(run_id: str, agent: int, grace_s: float) -> None:
    """Kills what a lost agent has not ended. While the agent lives, its ranks have the grace to save and leave."""
    deadline = time.monotonic() + grace_s
    while time.monotonic() < deadline and _is_alive(agent) and processes_of(run_id):
        time.sleep(_PAUSE_S)
    kill_all(run_id, 2 * _PAUSE_S)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def send(pid: int, number: int) -> None:
    """Sends a signal to a process that may have ended already."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return


def main(run_id: str, lifeline: int, supervisor: int, silence_s: float) -> None:
    """Waits for the supervisor's end and kills its ranks.

    silence_s: a supervisor that writes nothing for so long counts as dead (it may be stopped); 0 disables the limit.
    """
    # A batch system sends them to every process of the job, and the ranks may outlive the supervisor.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    # poll(), not select(): the number of the pipe may lie above 1,023.
    events = select.poll()
    events.register(lifeline, select.POLLIN)
    while True:
        if not events.poll(1000 * silence_s if silence_s else None):
            # Still our parent, so the pid cannot belong to another process by now.
            if os.getppid() == supervisor:
                send(supervisor, signal.SIGKILL)
            break
        data = os.read(lifeline, 4096)
        if GOODBYE in data:
            return
        if not data:
            break
    kill_all(run_id)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        # Started by the driver. The id is not on the command line, by which a pkill might also find this process.
        _run_id, _agent, _grace_s = sys.stdin.readline().split()
        kill_after(_run_id, int(_agent), float(_grace_s))
    else:
        main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
