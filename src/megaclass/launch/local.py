"""Processes of one job on this machine: started, watched, and never left behind. Standard library only."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from megaclass.errors import LaunchError
from megaclass.world import World, environment_of

_GRACE_S = 3.0
_POLL_S = 0.05
_PR_SET_PDEATHSIG = 1


def run_local(command: Sequence[str], num_processes: int, env: Mapping[str, str] = os.environ) -> int:
    """Runs the command once a rank and waits; 0 when all ranks end with 0, else the exit code of the first that failed.

    A rank that fails takes the others with it: SIGTERM, and SIGKILL 3 s later. Ctrl-C reaches the ranks through the
    terminal; SIGTERM is passed on. If this process dies, the kernel kills the ranks.
    """
    port = _free_port()
    ranks: list[subprocess.Popen[bytes]] = []
    # Taken before the first start: a signal that comes in between must not orphan anybody.
    previous = signal.signal(signal.SIGTERM, _raise_terminated)
    try:
        for rank in range(num_processes):
            ranks.append(_start(command, rank, num_processes, port, env))  # noqa: PERF401 (those started must be ended)
        return _wait(ranks)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except _TerminatedError:
        return 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, previous)
        _end(ranks)


def default_threads(num_processes: int) -> int:
    """Threads a process may use without the processes getting in each other's way."""
    return max(1, len(os.sched_getaffinity(0)) // num_processes)


class _TerminatedError(Exception):
    """SIGTERM came."""


def _raise_terminated(signum: int, frame: object) -> None:
    raise _TerminatedError


def _start(command: Sequence[str], rank: int, size: int, port: int, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    world = World(rank=rank, size=size, local_rank=rank, local_size=size, starter="megaclass", port=port)
    own_env = {"OMP_NUM_THREADS": str(default_threads(size)), **env, **environment_of(world), "PYTHONUNBUFFERED": "1"}
    try:
        return subprocess.Popen(list(command), env=own_env, preexec_fn=_die_with_parent)
    except OSError as error:
        raise LaunchError(f"Cannot start rank {rank} with {command[0]!r}: {error.strerror}.") from error


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _wait(ranks: list[subprocess.Popen[bytes]]) -> int:
    while True:
        codes = [process.poll() for process in ranks]
        failed = [rank for rank, code in enumerate(codes) if code not in (None, 0)]
        if failed:
            rank = failed[0]
            code = codes[rank]
            assert code is not None
            print(_epitaph(rank, ranks, code), file=sys.stderr, flush=True)
            return code if code > 0 else 128 - code
        if all(code == 0 for code in codes):
            return 0
        time.sleep(_POLL_S)


def _epitaph(rank: int, ranks: list[subprocess.Popen[bytes]], code: int) -> str:
    how = f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
    others = f"; the other {len(ranks) - 1} are being stopped" if len(ranks) > 1 else ""
    return f"megaclass: rank {rank} on {socket.gethostname()} (pid {ranks[rank].pid}) ended with {how}{others}."


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    for process in ranks:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + _GRACE_S
    for process in ranks:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
