"""run(): calls a function on every rank of a job, on one or several machines, and returns the results by rank.

`megaclass run` starts the ranks (run_function_worker.py). Function and results travel through its pipes (launch/wire/call.py);
no port is opened. Unpickling runs code, so results are taken from ranks of this job only: no other process holds the pipes.
"""

import contextlib
import multiprocessing.spawn
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from horovod.common.exceptions import SHUT_DOWN
from megaclass_launch.errors import LaunchError
from megaclass_launch.hosts import Host, given_hosts
from megaclass_launch.placement import HOROVOD_MARK, place_ranks
from megaclass_launch.wire.call import MAX_CALL_BYTES, PIECE, SIZE

__all__ = ["run"]

_GRACE_S = 10.0


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
    """Calls `func(*args, **kwargs)` in `num_proc` processes on `hosts` or this machine; returns the results by rank.

    If a rank fails, the others are ended, and RuntimeError has its traceback. With `min_num_proc` or `host_discovery_script`
    the job is elastic: `func` uses hvd.elastic.run, and the results are those of the ranks that the job ends with. Arguments
    for MPI are refused or have no effect; see docs/horovod.md.
    """
    if network_interface:
        _deprecated("network_interface", "network_interfaces")
        network_interfaces = network_interface.split(",")
    if np is not None:
        _deprecated("np", "num_proc")
        num_proc = np
    if min_np is not None:
        _deprecated("min_np", "min_num_proc")
        min_num_proc = min_np
    if max_np is not None:
        _deprecated("max_np", "max_num_proc")
        max_num_proc = max_np
    if hosts is not None and hostfile is not None:
        raise ValueError("Argument hosts and hostfile only allow one provided.")
    if use_gloo and use_mpi:
        raise ValueError("Argument use_gloo and use_mpi only allow one set True.")
    if use_mpi:
        raise ValueError("MPI support has not been built: megaclass has none. Leave use_mpi out.")
    given: dict[str, Any] = {
        "--verbose": bool(verbose),
        "--start-timeout": start_timeout,
        "--ssh-port": ssh_port,
        "--ssh-identity-file": ssh_identity_file,
        "--output-filename": output_filename,
        "--network-interfaces": ",".join(network_interfaces or ()),
    }
    is_elastic = host_discovery_script is not None or min_num_proc is not None
    if is_elastic:
        given |= {"--min-np": min_num_proc or num_proc, "--max-np": max_num_proc}
        given |= {"--num-proc": num_proc if num_proc > 1 else None, "--hosts": hosts, "--hostfile": hostfile}
        given |= {"--host-discovery-script": host_discovery_script, "--slots-per-host": slots}
        given |= {"--reset-limit": None if reset_limit is None else str(reset_limit)}
        given |= {"--blacklist-cooldown-range": cooldown_range}
    else:
        machines = _machines(num_proc, hosts, hostfile)
        given |= {"--num-proc": num_proc, "--hosts": ",".join(f"{host.name}:{host.slots}" for host in machines)}
    call = pickled_call(func, tuple(args), kwargs or {})
    if len(call) > MAX_CALL_BYTES:
        raise ValueError(
            f"run(): the pickled function and its arguments have {len(call):,} bytes; at most {MAX_CALL_BYTES:,} can be sent. "
            f"Let the function read large data from files."
        )
    # The number of ranks that an elastic job ends with is not known before.
    size_known = None if is_elastic else num_proc
    # -P: files of the current folder are not imported in place of a rank's modules. The caller's sys.path follows them.
    task = [executable or sys.executable, "-P", "-m", "horovod.runner.run_function_worker"]
    return _results(call, size_known, [*options_of(given), *task], start_timeout)


def options_of(given: dict[str, Any]) -> list[str]:
    """Returns the options of `megaclass run`; those without a value are left out."""
    options: list[str] = []
    for flag, value in given.items():
        if value:
            values = () if value is True else value if isinstance(value, (list, tuple)) else (value,)
            options += [flag, *map(str, values)]
    return options


def _deprecated(old: str, new: str) -> None:
    warnings.warn(f"{old} is deprecated, use {new} instead", DeprecationWarning, stacklevel=3)


def _machines(num_proc: int, hosts: str | None, hostfile: str | None) -> list[Host]:
    """Returns the hosts; raises ValueError, as Horovod does, if they cannot be parsed or have too few slots."""
    if num_proc < 1:
        raise ValueError(f"run(num_proc={num_proc}): num_proc must be at least 1.")
    try:
        found = given_hosts(hosts, Path(hostfile) if hostfile is not None else None)
        machines = found or [Host(name="localhost", slots=num_proc, is_local=True)]
        place_ranks(machines, num_proc)
    except LaunchError as error:
        raise ValueError(str(error)) from error
    return machines


def pickled_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Returns the call, and what the ranks need to unpickle it, as bytes; functions of the main script travel by value."""
    prepared = multiprocessing.spawn.get_preparation_data("horovod.run")
    place = {"sys_path": prepared["sys_path"], "sys_argv": prepared["sys_argv"]}
    return pickle.dumps((place, cloudpickle.dumps((func, args, kwargs))))


def _results(call: bytes, size: int | None, command: list[str], start_timeout: int | None) -> list[Any]:
    """Starts `megaclass run` with two pipes, sends the function and returns the results by rank."""
    env = {**os.environ, **({"HOROVOD_START_TIMEOUT": str(start_timeout)} if start_timeout else {})}
    call_reader, call_writer = os.pipe()
    results_reader, results_writer = os.pipe()
    # The mark gives functions Horovod's environment variables, as its own run() does.
    own = ["-x", f"{HOROVOD_MARK}=1", "--call-fds", f"{call_reader},{results_writer}"]
    launch = [sys.executable, "-P", "-m", "megaclass_launch", "run", *own, *command]
    # What each process has sent so far, in the order in which they began to answer.
    received: dict[int, bytearray] = {}
    # The launcher takes the end of the first pipe for the end of this process: it stays open until the job is over.
    with os.fdopen(call_writer, "wb", buffering=0) as to_launcher, os.fdopen(results_reader, "rb") as from_launcher:
        try:
            launcher = subprocess.Popen(
                launch, env=env, stdin=subprocess.DEVNULL, pass_fds=[call_reader, results_writer]
            )
        finally:
            os.close(call_reader)
            os.close(results_writer)
        try:
            # A launcher that ends at once has said why on stderr.
            with contextlib.suppress(BrokenPipeError):
                for part in (SIZE.pack(len(call)), call):
                    view = memoryview(part)
                    while view:
                        view = view[to_launcher.write(view) or 0 :]
            while len(head := from_launcher.read(PIECE.size)) == PIECE.size:
                process, num_bytes = PIECE.unpack(head)
                received.setdefault(process, bytearray()).extend(from_launcher.read(num_bytes))
            code = launcher.wait()
        finally:
            _end(launcher)
    return _by_rank(received, size, code)


def _by_rank(received: dict[int, bytearray], size: int | None, code: int) -> list[Any]:
    """Returns the results by rank; raises RuntimeError if a rank failed or sent none."""
    # A rank that was ended while it sent leaves a part.
    whole = [
        data
        for data in received.values()
        if len(data) >= SIZE.size and len(data) - SIZE.size == SIZE.unpack_from(data)[0]
    ]
    # In an elastic job the rank of a process changes, so each sends the rank that it has at its end.
    answers: list[tuple[bool, Any, int]] = [pickle.loads(memoryview(data)[SIZE.size :]) for data in whole]
    # In the order of the answers: the first failure is the likely cause of the others.
    failures = [(rank, value) for succeeded, value, rank in answers if not succeeded]
    # An elastic job continues without the processes that fail, as long as enough are left.
    results = {rank: value for succeeded, value, rank in answers if succeeded}
    if code or (size is not None and len(results) < size):
        raise RuntimeError(_failed(failures, code))
    return [results[rank] for rank in sorted(results)]


def _end(launcher: subprocess.Popen[bytes]) -> None:
    """Ends the launcher, and with it the ranks, if an exception has interrupted run()."""
    if launcher.poll() is None:
        launcher.terminate()
        try:
            launcher.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            launcher.kill()
            launcher.wait()


def _failed(failures: list[tuple[int, str]], code: int) -> str:
    """Returns Horovod's text. One failure makes the other ranks fail, so the one that is not a consequence is shown."""
    text = (
        "Horovod detected that one or more processes exited with non-zero status, thus causing the job to be terminated. "
        "The first process to do so was:\n"
    )
    if not failures:
        return f"{text}Process name: unknown, see the output above\nExit code: {code}\n"
    rank, traceback = min(failures, key=lambda failure: SHUT_DOWN in failure[1])
    return f"{text}Process name: {rank}\nExit code: {code}\n{traceback}"
