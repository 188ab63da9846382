"""The server of run(), without a launcher: threads of this process play the ranks."""

import os
import pickle
import socket
import subprocess
import threading
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from types import SimpleNamespace
from typing import Any

import pytest

from megaclass.errors import LaunchError
from megaclass.hvd import run_function, run_function_worker
from megaclass.hvd.exceptions import SHUT_DOWN
from megaclass.hvd.run_function import FUNCTION_SERVER, _FunctionServer, pickled_call, run


class _FakeLauncher:
    """Stands for `megaclass run`: starts a thread per rank, which behaves as the test says."""

    command: list[str] = []  # noqa: RUF012 (of the last one started)
    env: dict[str, str] = {}  # noqa: RUF012
    behaviours: list[Any] = []  # noqa: RUF012
    exit_code = 0

    def __init__(self, command: list[str], env: dict[str, str], stdin: int) -> None:
        type(self).command, type(self).env = command, env
        assert stdin == subprocess.DEVNULL
        where = env[FUNCTION_SERVER].split()
        self._ranks = [
            threading.Thread(target=behaviour, args=(rank, where)) for rank, behaviour in enumerate(self.behaviours)
        ]
        for thread in self._ranks:
            thread.start()

    def wait(self, timeout: float | None = None) -> int:
        for thread in self._ranks:
            thread.join(30)
        return self.exit_code

    def poll(self) -> int:
        return self.exit_code


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> type[_FakeLauncher]:
    monkeypatch.setattr(run_function.subprocess, "Popen", _FakeLauncher)
    monkeypatch.setattr(_FakeLauncher, "exit_code", 0)
    return _FakeLauncher


def _connection(where: list[str], key: bytes | None = None) -> Any:
    address, port, own_key = where
    return Client((address, int(port)), authkey=key or bytes.fromhex(own_key))


def _obedient(rank: int, where: list[str]) -> None:
    with _connection(where) as connection:
        _, call = pickle.loads(connection.recv_bytes())
        func, args, kwargs = pickle.loads(call)
        connection.send_bytes(pickle.dumps((rank, True, func(*args, **kwargs) + rank)))
        assert connection.recv_bytes() == b"taken"


def _failing(rank: int, where: list[str]) -> None:
    with _connection(where) as connection:
        connection.recv_bytes()
        connection.send_bytes(pickle.dumps((rank, False, f"traceback of rank {rank}")))
        connection.recv_bytes()


def _lost(rank: int, where: list[str]) -> None:
    with _connection(where) as connection:
        connection.recv_bytes()


def test_results_come_by_rank_whatever_the_order_of_the_answers(launcher):
    launcher.behaviours = [_obedient] * 5
    assert run(pow, (2,), {"exp": 3}, num_proc=5) == [8, 9, 10, 11, 12]


def test_the_launcher_gets_the_options_and_the_ranks_get_the_key_in_their_environment_only(launcher):
    launcher.behaviours = [_obedient] * 2
    run(
        abs,
        (1,),
        num_proc=2,
        start_timeout=77,
        ssh_port=2222,
        ssh_identity_file="key",
        output_filename="out",
        verbose=True,
        executable="/other/python",
    )
    text = " ".join(launcher.command)
    assert "--num-proc 2 -H localhost:2 --start-timeout 77 --ssh-port 2222 --ssh-identity-file key" in text
    assert "--output-filename out --verbose /other/python -m megaclass.hvd.run_function_worker" in text
    assert launcher.env["HOROVOD_START_TIMEOUT"] == "77"
    *addresses, _, key = launcher.env[FUNCTION_SERVER].split()
    assert addresses == ["127.0.0.1"] and len(bytes.fromhex(key)) == 32
    assert key not in text


def test_a_rank_that_fails_is_shown_with_its_traceback(launcher, monkeypatch):
    launcher.behaviours = [_obedient, _failing]
    monkeypatch.setattr(launcher, "exit_code", 1)
    with pytest.raises(RuntimeError, match=r"Process name: 1\nExit code: 1\ntraceback of rank 1"):
        run(abs, (1,), num_proc=2)


def test_a_rank_that_sends_no_result_is_an_error(launcher):
    launcher.behaviours = [_obedient, _lost]
    with pytest.raises(RuntimeError, match="Process name: unknown, see the output above\nExit code: 0"):
        run(abs, (1,), num_proc=2)


def test_of_several_failures_the_one_that_is_no_consequence_is_shown():
    failures = [(0, f"HorovodInternalError: {SHUT_DOWN}"), (2, "KeyError: 'cause'")]
    assert "Process name: 2" in run_function._failed(failures, 1)
    assert "Process name: 0" in run_function._failed(failures[:1], 1)


def test_a_connection_with_the_wrong_key_gets_no_function(launcher):
    refused = []

    def stranger_then_rank(rank: int, where: list[str]) -> None:
        try:
            _connection(where, key=bytes(32))
        except (AuthenticationError, EOFError, OSError) as error:
            refused.append(type(error))
        _obedient(rank, where)

    launcher.behaviours = [stranger_then_rank]
    assert run(abs, (-3,), num_proc=1) == [3]
    assert len(refused) == 1


def test_silent_connections_neither_delay_the_ranks_nor_stay(launcher, monkeypatch):
    monkeypatch.setattr(run_function, "_PROOF_S", 1.0)
    silent: list[socket.socket] = []

    def among_silent_ones(rank: int, where: list[str]) -> None:
        silent.extend(socket.create_connection((where[0], int(where[1])), 5) for _ in range(20))
        _obedient(rank, where)
        for connection in silent:
            connection.settimeout(20)
            while connection.recv(1000):  # the challenge, then the end
                pass

    launcher.behaviours = [among_silent_ones]
    assert run(abs, (-3,), num_proc=1) == [3]
    assert len(silent) == 20
    for connection in silent:
        connection.close()


def test_a_caller_that_is_interrupted_ends_its_launcher(monkeypatch):
    ended = []

    def interrupted(timeout: float | None = None) -> int:
        if timeout is None and not ended:
            raise KeyboardInterrupt
        return 0

    process = SimpleNamespace(wait=interrupted, poll=lambda: None, terminate=lambda: ended.append("terminate"))
    monkeypatch.setattr(run_function.subprocess, "Popen", lambda *_, **__: process)
    with pytest.raises(KeyboardInterrupt):
        run(abs, (1,), num_proc=1)
    assert ended == ["terminate"]


# ---- addresses ----


def test_on_one_machine_the_server_listens_on_loopback_only():
    assert run_function._own_addresses([], []) == ["127.0.0.1"]


def test_towards_other_hosts_one_address_is_used_if_all_routes_leave_from_it(monkeypatch):
    monkeypatch.setattr(run_function, "own_addresses", lambda: ["10.0.0.1", "192.168.0.1"])
    routes = {"near": "10.0.0.1", "far": "192.168.0.1", "unknown": None}
    monkeypatch.setattr(run_function, "source_towards", lambda name: routes[name])
    assert run_function._own_addresses(["near"], []) == ["10.0.0.1"]
    assert run_function._own_addresses(["user@near", "[near]"], []) == ["10.0.0.1"]
    assert run_function._own_addresses(["near", "far"], []) == ["10.0.0.1", "192.168.0.1"]
    assert run_function._own_addresses(["near", "unknown"], []) == ["10.0.0.1", "192.168.0.1"]


def test_network_interfaces_that_are_asked_for_are_used(monkeypatch):
    monkeypatch.setattr(run_function, "own_addresses", lambda: ["10.0.0.1", "192.168.0.1"])
    monkeypatch.setattr(run_function, "interfaces", lambda: {"eth0": ["10.0.0.1"], "ib0": ["192.168.0.1"]})
    assert run_function._own_addresses(["far"], ["ib0", "eth0"]) == ["192.168.0.1"]
    assert run_function._own_addresses(["far"], ["none"]) == ["10.0.0.1", "192.168.0.1"]


# ---- the rank's side ----


def test_a_rank_connects_to_the_first_address_that_answers(monkeypatch):
    job = _FunctionServer(pickled_call(abs, (1,), {}), 1, [], [], "python")
    monkeypatch.setenv(FUNCTION_SERVER, f"127.0.0.2 {job._where()}")
    monkeypatch.setattr(run_function_worker, "_CONNECT_S", 1.0)
    threading.Thread(target=job._serve, daemon=True).start()
    try:
        with run_function_worker._connected() as connection:
            _, call = pickle.loads(connection.recv_bytes())
            assert pickle.loads(call) == (abs, (1,), {})
        # The key is taken out of the environment: the function's own processes do not inherit it.
        assert FUNCTION_SERVER not in os.environ
    finally:
        job._is_over = True
        job._listener.close()


def test_a_rank_that_reaches_no_address_says_where_it_has_tried(monkeypatch):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        monkeypatch.setenv(FUNCTION_SERVER, f"127.0.0.1 127.0.0.2 {port} {bytes(32).hex()}")
        monkeypatch.setenv("SSH_CONNECTION", "127.0.0.3 1 127.0.0.1 22")
        with pytest.raises(
            LaunchError, match=rf"at 127\.0\.0\.1, 127\.0\.0\.2, port {port}: let it through the firewall"
        ):
            run_function_worker._connected()
