"""What the kernel says about this process's connections. Dead ones, between hosts: tests/launch/test_blocked_ports.py."""

import errno
import socket
import sys
import time
from pathlib import Path

import pytest

from megaclass_launch.errors import LaunchError
from megaclass_launch.rendezvous import connection_watch
from megaclass_launch.rendezvous.connection_watch import Connection, ConnectionWatch, connections, network_timeout


def test_the_limit_is_30_s_unless_the_environment_says_otherwise():
    assert network_timeout({}) == 30
    assert network_timeout({"MEGACLASS_NETWORK_TIMEOUT": "5.5"}) == 5.5
    assert network_timeout({"MEGACLASS_NETWORK_TIMEOUT": "0"}) == 0


@pytest.mark.parametrize("text", ["-1", "0.5", "soon", "inf", "nan"])
def test_a_limit_that_is_none_is_refused(text):
    with pytest.raises(LaunchError, match=f"MEGACLASS_NETWORK_TIMEOUT='{text}' .* 1 or more, or 0 to wait forever"):
        network_timeout({"MEGACLASS_NETWORK_TIMEOUT": text})


@pytest.fixture
def pair():
    """Both ends of a connection within this host."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as one,
        listener.accept()[0] as other,
    ):
        yield one, other


def test_every_tcp_connection_of_the_process_is_seen_with_both_ends(pair):
    one, other = pair
    one.sendall(b"data")
    assert other.recv(4) == b"data"
    found = {connection.local: connection for connection in connections()}
    assert found[one.getsockname()].remote == other.getsockname()
    assert found[other.getsockname()].remote == one.getsockname()
    assert found[one.getsockname()].is_open and not found[one.getsockname()].owes_answer
    assert found[one.getsockname()].silent_s < 60


def test_a_file_that_is_no_socket_any_more_is_closed_again(monkeypatch, tmp_path):
    with (tmp_path / "file").open("w") as file:
        monkeypatch.setattr(connection_watch, "_sockets", lambda: [(file.fileno(), "1")])
        num_open = len(list(Path("/proc/self/fd").iterdir()))
        assert list(connections()) == []
        assert len(list(Path("/proc/self/fd").iterdir())) == num_open


def test_a_process_that_has_used_up_its_files_is_watched_again_later(monkeypatch):
    watch = ConnectionWatch("rank 0", 1.0)
    num_looks = 0

    def sockets():
        nonlocal num_looks
        num_looks += 1
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(connection_watch, "_sockets", sockets)
    watch.start()
    ends_at = time.monotonic() + 30.0
    while num_looks < 2 and time.monotonic() < ends_at:
        time.sleep(0.01)
    monkeypatch.undo()
    watch.stop()
    assert num_looks >= 2


def test_connections_within_this_host_are_left_alone(pair):
    one, _ = pair
    watch = ConnectionWatch("rank 0", 1.0).start()
    watch.joined(["127.0.0.1"], ends_process=False)
    # Nobody reads: more than the buffers hold stays unsent, for longer than the limit.
    one.setblocking(False)
    with pytest.raises(BlockingIOError):
        while True:
            one.send(bytes(1 << 20))
    time.sleep(1.5)
    watch.stop()
    assert not watch.reason


def test_an_error_that_the_program_does_not_catch_after_a_dead_connection_ends_it_with_74(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", lambda *_: None)
    usual = sys.excepthook
    watch = ConnectionWatch("rank 0", 1.0)
    watch.joined(ends_process=False)
    watch._end([Connection(99, "1", ("10.0.0.1", 1), ("10.0.0.2", 2), True, True, 1.0)])
    with pytest.raises(SystemExit) as ended:
        sys.excepthook(RuntimeError, RuntimeError("allreduce failed"), None)
    assert ended.value.code == 74
    sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    # An elastic job continues in the next generation: its later errors are errors of their own.
    watch.stop()
    assert sys.excepthook is usual
