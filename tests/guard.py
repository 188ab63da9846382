"""Cleans up after a test process that was killed: ends the processes it started, removes its network namespaces.

A test process starts this program with a mark that all its children have in their environment, and with a pipe as standard
input. The pipe closes when the test process ends, however that happens. If it has not said "done" by then, its fixtures had
no chance to clean up.

    python tests/guard.py MARK PID FOLDER    FOLDER: removed if it exists; holds keys and logs of the hosts
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

VARIABLE = "TESTS_OF_MEGACLASS"
_PATIENCE_S = 20.0


def start_guard(folder: Path) -> "subprocess.Popen[bytes]":
    """Marks this process's environment and starts its guard, in a session of its own so that Ctrl-C does not reach it."""
    mark = os.environ[VARIABLE] = os.urandom(8).hex()
    unmarked = {name: value for name, value in os.environ.items() if name != VARIABLE}
    command = [sys.executable, "-S", __file__, mark, str(os.getpid()), str(folder)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, env=unmarked, stdin=subprocess.PIPE, start_new_session=True, **quiet)


def dismiss(guard: "subprocess.Popen[bytes]") -> None:
    """Tells the guard that the fixtures have cleaned up."""
    guard.communicate(b"done", timeout=60)


def main(mark: str, pid: int, folder: Path) -> None:
    if sys.stdin.buffer.read() == b"done":
        return
    end_marked(mark)
    for name in namespaces_of(pid):
        # Logins through sshd have an environment of their own: they are found by their network.
        listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
        for process in listed.stdout.split():
            kill(int(process))
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)


def end_marked(mark: str) -> None:
    """Kills every process with the mark, and those they start meanwhile."""
    text = f"{VARIABLE}={mark}".encode()
    ends_at = time.monotonic() + _PATIENCE_S
    while time.monotonic() < ends_at:
        found = False
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                is_zombie = (place / "stat").read_bytes().rpartition(b")")[2].split()[0] == b"Z"
                if not is_zombie and text in (place / "environ").read_bytes().split(b"\0"):
                    found = True
                    kill(int(place.name))
        if not found:
            return
        time.sleep(0.05)


def namespaces_of(pid: int) -> list[str]:
    """Returns the namespaces of this process's hosts, and those of runs of benchmarks/hvd_link.py that are no more."""
    folder = Path("/run/netns")
    names = sorted(file.name for file in folder.iterdir()) if folder.is_dir() else []
    links = {name: re.fullmatch(r"mchvd(\d+)[s\d]", name) for name in names}
    return [
        name
        for name in names
        if name.startswith(f"mc{pid}-") or ((link := links[name]) and not Path("/proc", link[1]).exists())
    ]


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
