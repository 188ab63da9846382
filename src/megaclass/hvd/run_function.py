"""run(): calls a function on every rank of a job, on one or several machines, and returns the results by rank.

`megaclass run` starts the ranks (run_function_worker.py). Each connects back to this process, receives the pickled
function and sends its result; a rank whose connection closes ends itself. Because unpickling runs code, both sides prove
by HMAC that they know a key, which the ranks get in their environment and never on a command line.
"""

import multiprocessing.spawn
import os
import pickle
import re
import secrets
import socket
import struct
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge
from pathlib import Path
from typing import Any

from megaclass.distributed.network.addresses import interfaces, own_addresses, source_towards
from megaclass.errors import LaunchError
from megaclass.hvd.exceptions import SHUT_DOWN
from megaclass.hvd.pickling import CannotPickleError, has_cloudpickle, pickled
from megaclass.launch.hosts import Host, given_hosts
from megaclass.launch.plan import HOROVOD_MARK, place_ranks

__all__ = ["run"]

FUNCTION_SERVER = "MEGACLASS_FUNCTION_SERVER"
"""Environment variable with the addresses, port and key of the process that called run()."""
_GRACE_S = 10.0
_BACKLOG = 512
_PROOF_S = 5.0
"""Time within which a connection must prove that it knows the key."""
_MAX_UNPROVEN = 512
"""Connections that may be proving themselves at a time; further ones wait in the backlog."""
_TIMEVAL = struct.Struct("ll")


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

    If a rank fails, the others are ended, and RuntimeError has its traceback. Arguments for elastic jobs and for MPI are
    refused or have no effect; see docs/horovod.md.
    """
    if network_interface:
        _deprecated("network_interface", "network_interfaces")
        network_interfaces = network_interface.split(",")
    if np is not None:
        _deprecated("np", "num_proc")
        num_proc = np
    if min_np is not None:
        _deprecated("min_np", "min_num_proc")
    if max_np is not None:
        _deprecated("max_np", "max_num_proc")
    if hosts is not None and hostfile is not None:
        raise ValueError("Argument hosts and hostfile only allow one provided.")
    if use_gloo and use_mpi:
        raise ValueError("Argument use_gloo and use_mpi only allow one set True.")
    if use_mpi:
        raise ValueError("MPI support has not been built: megaclass has none. Leave use_mpi out.")
    if host_discovery_script is not None or min_num_proc is not None or min_np is not None:
        raise LaunchError("run() starts a fixed number of processes: leave min_num_proc and host_discovery_script out.")
    machines = _machines(num_proc, hosts, hostfile)
    wanted = list(network_interfaces or ())
    options = [
        *("--num-proc", str(num_proc), "-H", ",".join(f"{host.name}:{host.slots}" for host in machines)),
        *(("--start-timeout", str(start_timeout)) if start_timeout else ()),
        *(("--ssh-port", str(ssh_port)) if ssh_port else ()),
        *(("--ssh-identity-file", str(ssh_identity_file)) if ssh_identity_file else ()),
        *(("--output-filename", str(output_filename)) if output_filename else ()),
        *(("--network-interfaces", ",".join(wanted)) if wanted else ()),
        *(("--verbose",) if verbose else ()),
    ]
    call = pickled_call(func, tuple(args), kwargs or {})
    others = [host.name for host in machines if not host.is_local]
    return _FunctionServer(call, num_proc, others, wanted, executable or sys.executable).results(options, start_timeout)


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
    """Returns the call, and what the ranks need to unpickle it, as bytes.

    Without cloudpickle functions are pickled by name, and the ranks import the main script, as multiprocessing's do.
    """
    prepared = multiprocessing.spawn.get_preparation_data("hvd.run")
    place = {"sys_path": prepared["sys_path"], "sys_argv": prepared["sys_argv"]}
    name = repr(getattr(func, "__name__", func))
    if not has_cloudpickle():
        main = {key: value for key, value in prepared.items() if key.startswith("init_main")}
        if getattr(func, "__module__", "") == "__main__" and not _is_importable(main):
            raise CannotPickleError(name, "the ranks cannot import what was typed in")
        place |= main
    return pickle.dumps((place, pickled((func, args, kwargs), name)))


def _is_importable(main: dict[str, str]) -> bool:
    return "init_main_from_name" in main or Path(main.get("init_main_from_path", "")).is_file()


class _FunctionServer:
    """The server that hands out the function, and the launcher of the ranks that ask for it.

    `_serve` and one `_answer` per connection run in threads; they write `_answers` (result by rank) and `_order` (ranks in
    the order of their answers). `results` reads both after the launcher has ended.
    """

    def __init__(self, call: bytes, size: int, others: list[str], wanted: list[str], executable: str) -> None:
        self._call = call
        self._size = size
        self._executable = executable
        self._key = secrets.token_bytes(32)
        self._addresses = _own_addresses(others, wanted)
        # Listen on all interfaces only if the host names do not show which one leads to the hosts.
        bound = self._addresses[0] if len(self._addresses) == 1 else "0.0.0.0"
        self._listener = Listener((bound, 0), backlog=_BACKLOG)
        self._answers: dict[int, tuple[bool, Any]] = {}
        self._order: list[int] = []
        self._is_over = False
        self._unproven = threading.BoundedSemaphore(_MAX_UNPROVEN)

    def results(self, options: list[str], start_timeout: int | None) -> list[Any]:
        env = {**os.environ, FUNCTION_SERVER: self._where()}
        if start_timeout:
            env["HOROVOD_START_TIMEOUT"] = str(start_timeout)
        task = [self._executable, "-m", "megaclass.hvd.run_function_worker"]
        # The mark gives functions Horovod's environment variables, as its own run() does. It does not put the shims on
        # PYTHONPATH: an installed Horovod stays importable.
        mark = ["-x", f"{HOROVOD_MARK}=1"]
        command = [sys.executable, "-P", "-m", "megaclass", "run", *mark, *options, *task]
        threading.Thread(target=self._serve, name="hvd.run", daemon=True).start()
        launcher = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL)
        try:
            code = launcher.wait()
        finally:
            self._is_over = True
            if launcher.poll() is None:
                launcher.terminate()
                try:
                    launcher.wait(_GRACE_S)
                except subprocess.TimeoutExpired:
                    launcher.kill()
                    launcher.wait()
            self._listener.close()
        # In the order of the answers: the first failure is the likely cause of the others.
        failures = [(rank, self._answers[rank][1]) for rank in self._order if not self._answers[rank][0]]
        if failures or code or len(self._answers) < self._size:
            raise RuntimeError(_failed(failures, code))
        return [self._answers[rank][1] for rank in range(self._size)]

    def _where(self) -> str:
        return " ".join([*self._addresses, str(self._listener.address[1]), self._key.hex()])

    def _serve(self) -> None:
        while not self._is_over:
            try:
                connection = self._listener.accept()
            except OSError:
                # The other end has already closed the connection, or results() has closed the listener.
                continue
            # At the limit, wait until a connection has proved itself or has run out of time.
            self._unproven.acquire()
            # One thread per connection: a foreign connection that sends nothing must not delay the ranks.
            threading.Thread(target=self._answer, args=(connection,), name="hvd.run", daemon=True).start()

    def _is_rank(self, connection: Connection) -> bool:
        try:
            # Connection has no timeouts; the socket below it does.
            _set_read_timeout(connection, _PROOF_S)
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            _set_read_timeout(connection, 0.0)
        except (AuthenticationError, EOFError, OSError):
            return False
        finally:
            self._unproven.release()
        return True

    def _answer(self, connection: Connection) -> None:
        with connection:
            if not self._is_rank(connection):
                return
            try:
                connection.send_bytes(self._call)
                rank, succeeded, value = pickle.loads(connection.recv_bytes())
            except (EOFError, OSError):
                return
            self._answers[rank] = (succeeded, value)
            self._order.append(rank)
            # The rank waits for this before it ends.
            connection.send_bytes(b"taken")


def _set_read_timeout(connection: Connection, timeout_s: float) -> None:
    """Makes reads raise OSError if nothing arrives for that long; 0 disables it."""
    with socket.socket(fileno=os.dup(connection.fileno())) as shared:
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(int(timeout_s), 0))


def _own_addresses(others: list[str], wanted: list[str]) -> list[str]:
    """Returns the addresses at which other hosts reach this process: one if the route to them shows it, else all."""
    if not others:
        return ["127.0.0.1"]
    if wanted:
        return [address for name in wanted for address in interfaces().get(name, [])][:1] or own_addresses()
    towards = {source_towards(re.sub(r"^.*@|[\[\]]", "", name)) for name in others}
    known = [address for address in towards if address is not None]
    return known if len(known) == len(towards) == 1 else own_addresses()


def _failed(failures: list[tuple[int, str]], code: int) -> str:
    """Returns Horovod's text. One failure makes the other ranks fail too, so the one that is not a consequence is shown."""
    text = (
        "Horovod detected that one or more processes exited with non-zero status, thus causing the job to be terminated. "
        "The first process to do so was:\n"
    )
    if not failures:
        return f"{text}Process name: unknown, see the output above\nExit code: {code}\n"
    rank, traceback = min(failures, key=lambda failure: SHUT_DOWN in failure[1])
    return f"{text}Process name: {rank}\nExit code: {code}\n{traceback}"
