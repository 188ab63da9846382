"""run(): a function in several processes of this machine, and its results by rank."""

import multiprocessing
import os
import pickle
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from megaclass.errors import LaunchError
from megaclass.hvd.exceptions import SHUT_DOWN
from megaclass.world import World, environment_of

_GRACE_S = 3.0
_CAUSE_S = 1.0


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Any = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: int | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: bool | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: Any = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Runs `func(*args, **kwargs)` in `num_proc` processes of this machine; the results, by rank.

    Other hosts, and elastic jobs, are `megaclass run`'s; the arguments for ssh and MPI have nothing to do here.
    """
    if np is not None:
        warnings.warn("np is deprecated, use num_proc instead", DeprecationWarning, stacklevel=2)
        num_proc = np
    if min_num_proc or max_num_proc or min_np or max_np or host_discovery_script:
        raise LaunchError(
            "run() starts a fixed number of processes: give num_proc only; for elastic jobs use megaclass run."
        )
    if use_mpi:
        raise LaunchError("run(use_mpi=True): there is no MPI here; leave it out.")
    if num_proc < 1:
        raise LaunchError(f"run(num_proc={num_proc}): it must be at least 1.")
    for host in _hosts(hosts, hostfile):
        if host not in ("localhost", "127.0.0.1", "::1", socket.gethostname()):
            raise LaunchError(
                f"run() starts processes on this machine only, not on {host!r}: use megaclass run -H {hosts}."
            )
    call = _pickled((func, tuple(args), kwargs or {}))
    return _results(call, func if call is None else None, tuple(args), kwargs or {}, num_proc, start_timeout)


def _hosts(hosts: str | None, hostfile: str | None) -> list[str]:
    if hosts:
        return [part.rpartition(":")[0] or part for part in hosts.split(",")]
    if hostfile:
        with open(hostfile, encoding="utf-8") as file:  # noqa: PTH123 (a name the user gave, opened once)
            return [line.split()[0] for line in file if line.strip() and not line.startswith("#")]
    return []


def _pickled(call: Any) -> bytes | None:
    """By cloudpickle where it is installed: it knows lambdas and functions of the main script by value."""
    try:
        import cloudpickle
    except ImportError:
        return None
    pickled: bytes = cloudpickle.dumps(call)
    return pickled


def _results(
    call: bytes | None, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], size: int, start_timeout: int | None
) -> list[Any]:
    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    ranks = []
    try:
        for rank in range(size):
            world = World(rank=rank, size=size, local_rank=rank, local_size=size, starter="megaclass", port=port)
            ours, theirs = context.Pipe(duplex=False)
            variables = {**environment_of(world), **horovod_variables(world)}
            if start_timeout:
                variables["HOROVOD_START_TIMEOUT"] = str(start_timeout)
            process = context.Process(
                target=_rank_main, args=(theirs, variables, call, func, args, kwargs), daemon=True
            )
            process.start()
            theirs.close()
            ranks.append((process, ours))
        return _collected(ranks)
    finally:
        for process, _ in ranks:
            process.terminate()
        for process, _ in ranks:
            process.join(_GRACE_S)
            if process.is_alive():
                process.kill()


def _collected(ranks: list[tuple[Any, Connection]]) -> list[Any]:
    waiting = {ours: rank for rank, (_, ours) in enumerate(ranks)}
    results: list[Any] = [None] * len(ranks)
    failures: list[tuple[int, str]] = []
    while waiting:
        # One failure makes the others fail too: they are given a moment, to tell the cause from what it caused.
        ready = wait(list(waiting), timeout=_CAUSE_S if failures else None)
        if not ready:
            break
        for ours in ready:
            assert isinstance(ours, Connection)
            rank = waiting.pop(ours)
            try:
                succeeded, value = pickle.loads(ours.recv_bytes())
            except EOFError:
                ranks[rank][0].join(_GRACE_S)
                succeeded, value = False, f"exit code {ranks[rank][0].exitcode}, no result"
            if succeeded:
                results[rank] = value
            else:
                failures.append((rank, value))
    if failures:
        failures.sort(key=lambda failure: SHUT_DOWN in failure[1])
        raise RuntimeError(
            f"Horovod detected that one or more processes exited with non-zero status, thus causing the job to be "
            f"terminated. The first process to do so was:\nProcess name: {failures[0][0]}\n{failures[0][1]}"
        )
    return results


def horovod_variables(world: World) -> dict[str, str]:
    """What Horovod's own launcher gives its workers, as far as scripts read it."""
    return {
        "HOROVOD_RANK": str(world.rank),
        "HOROVOD_SIZE": str(world.size),
        "HOROVOD_LOCAL_RANK": str(world.local_rank),
        "HOROVOD_LOCAL_SIZE": str(world.local_size),
        "HOROVOD_CROSS_RANK": str(world.cross_rank),
        "HOROVOD_CROSS_SIZE": str(world.cross_size),
        "HOROVOD_HOSTNAME": socket.gethostname(),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }


def _rank_main(
    results: Connection,
    variables: dict[str, str],
    call: bytes | None,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(variables)
    if "OMP_NUM_THREADS" not in os.environ:
        import torch

        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(variables["WORLD_SIZE"])))
    try:
        if call is not None:
            func, args, kwargs = pickle.loads(call)
        answer = pickle.dumps((True, func(*args, **kwargs)))
    except BaseException:
        traceback.print_exc()
        answer = pickle.dumps((False, traceback.format_exc()))
    # Before the result is known to the parent, which then ends this process.
    from megaclass.hvd.basics import _basics

    _basics.shutdown()
    results.send_bytes(answer)
    results.close()
    sys.stdout.flush()
