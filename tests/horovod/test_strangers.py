"""Strangers who reach a job's ports: they run no code, join nothing, and keep nobody waiting."""

import contextlib
import json
import os
import pickle
import re
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.conftest import free_port
from tests.forked import forked_ranks, python_script
from tests.horovod.jobs import error_of, in_job

import horovod.torch as hvd
from horovod.engine import control_connection
from horovod.engine.control_connection import AuthenticatedListener, Endpoint, connect
from horovod.torch.functions import _plain_dumps, _plain_loads
from megaclass_launch.errors import LaunchError
from megaclass_launch.ranks.store import SignedStore
from megaclass_launch.rendezvous.addresses import SocketOffer, hold_store_port, take_socket
from megaclass_launch.rendezvous.job_secret import JOB_SECRET, LocalSecret, job_secret, local_secret, new_secret

_SECRET = bytes(range(32))


class Bomb:
    """Runs code where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self):
        return Path.touch, (self._mark,)


# ---- connections between ranks ----


@contextlib.contextmanager
def _listener(num_ranks: int = 1) -> Iterator[tuple[Endpoint, "ThreadPoolExecutor", list]]:
    listener = AuthenticatedListener("127.0.0.1", _SECRET)
    with ThreadPoolExecutor(1) as pool:
        arrived = pool.submit(listener.accept_ranks, range(num_ranks), 30.0)
        try:
            yield listener.endpoint, pool, [arrived]
        finally:
            listener.close()
            with contextlib.suppress(LaunchError):
                for connection in arrived.result().values():
                    connection.close()


def _call(endpoint: Endpoint) -> socket.socket:
    return socket.create_connection((endpoint.address, endpoint.port), timeout=10.0)


def test_ranks_with_the_secret_get_in_and_know_that_they_are_at_the_right_place():
    with _listener(2) as (endpoint, _, [arrived]):
        callers = [connect(endpoint, _SECRET, rank=rank, to="rank 0", timeout_s=10.0) for rank in (1, 0)]
        callers[0].sendall(b"from 1")
        assert arrived.result()[1].recv(6) == b"from 1"
        for caller in callers:
            caller.close()


def test_a_caller_without_the_secret_is_turned_away():
    with _listener() as (endpoint, _, [arrived]):
        with pytest.raises(LaunchError, match=r"does not answer there as a rank of this job within 0\.5 s"):
            connect(endpoint, bytes(32), rank=0, to="rank 0", timeout_s=0.5)
        assert not arrived.done()


def test_a_listener_without_the_secret_is_not_believed():
    listener = AuthenticatedListener("127.0.0.1", bytes(32))
    with ThreadPoolExecutor(1) as pool:
        accepting = pool.submit(listener.accept_ranks, [0], 30.0)
        with pytest.raises(LaunchError, match="does not answer there as a rank of this job"):
            connect(listener.endpoint, _SECRET, rank=0, to="rank 0", timeout_s=0.5)
        listener.close()
        with pytest.raises(LaunchError):
            accepting.result()


def test_what_one_rank_said_does_not_let_another_in():
    with _listener(2) as (endpoint, _, [arrived]):
        with _call(endpoint) as recorded:
            number = recorded.recv(32)
            ours = bytes(32)
            proof = control_connection._proof(endpoint.key(_SECRET), b"caller", number, ours, 0)
            # The same words under another rank, and again on another connection, whose number is another one.
            for rank in (1, 0):
                with _call(endpoint) as replayed:
                    replayed.recv(32)
                    replayed.sendall(control_connection._PROOF.pack(ours, rank, proof))
                    assert replayed.recv(32) == b""
        assert not arrived.done()


@pytest.mark.parametrize("num_strangers", [1, 300])
def test_silent_strangers_keep_no_rank_waiting(num_strangers):
    with _listener() as (endpoint, _, [arrived]), contextlib.ExitStack() as strangers:
        for _ in range(num_strangers):
            strangers.enter_context(_call(endpoint))
        with connect(endpoint, _SECRET, rank=0, to="rank 0", timeout_s=20.0):
            # Not one of the strangers has run out of its time yet: the rank did not wait for that.
            assert list(arrived.result(timeout=20.0)) == [0]


def test_a_stranger_who_sends_a_byte_now_and_then_keeps_no_rank_waiting_and_is_dropped(monkeypatch):
    monkeypatch.setattr(control_connection, "_PROOF_S", 1.0)
    with _listener(2) as (endpoint, _, [arrived]), _call(endpoint) as slow:
        is_over = threading.Event()

        def drip() -> None:
            with contextlib.suppress(OSError):
                while not is_over.wait(0.2):
                    slow.sendall(b"x")

        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            first = connect(endpoint, _SECRET, rank=0, to="rank 0", timeout_s=20.0)
            slow.settimeout(20.0)
            assert len(slow.recv(32)) == 32
            with contextlib.suppress(ConnectionResetError):
                assert slow.recv(1) == b""
            second = connect(endpoint, _SECRET, rank=1, to="rank 0", timeout_s=20.0)
            assert sorted(arrived.result()) == [0, 1]
        finally:
            is_over.set()
            dripping.join()
        first.close()
        second.close()


def test_the_number_of_strangers_is_bounded():
    with _listener() as (endpoint, _, [arrived]), contextlib.ExitStack() as strangers:
        callers = [strangers.enter_context(_call(endpoint)) for _ in range(control_connection._MAX_UNPROVEN + 50)]
        # Those that came first have been dropped to make room.
        for caller in callers[:50]:
            assert len(caller.recv(32)) == 32
            assert caller.recv(1) == b""
        assert not arrived.done()


# ---- the store ----


def _a_store() -> "dist.Store":
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_an_entry_of_the_store_that_no_rank_wrote_is_refused_and_never_unpickled(tmp_path):
    store = _a_store()
    signed = SignedStore(store, _SECRET, "group")
    signed.set("who", "a rank")
    assert signed.get("who") == b"a rank"
    stranger = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    stranger, another = dist.PrefixStore("group", stranger), dist.PrefixStore("another group", stranger)
    genuine = stranger.get("who")
    for forged in (pickle.dumps(Bomb(tmp_path / "ran")), b"", genuine[:-1], genuine + b"x", bytes(32) + b"a rank"):
        stranger.set("who", forged)
        with pytest.raises(LaunchError, match="'who' in the job's store was not written by a rank of this job"):
            signed.get("who")
    # What a rank wrote elsewhere is not valid here, and neither is what it wrote under this key for another group.
    another.set("who", genuine)
    with pytest.raises(LaunchError):
        SignedStore(store, _SECRET, "another group").get("who")
    signed.set("elsewhere", "a rank")
    stranger.set("who", stranger.get("elsewhere"))
    with pytest.raises(LaunchError):
        signed.get("who")
    assert not (tmp_path / "ran").exists()


_MEETS = """
import os, time, torch, horovod.torch as hvd
from megaclass_launch.errors import LaunchError
while os.environ["HOROVOD_RANK"] == "1" and not os.path.exists(os.environ["GO"]):
    time.sleep(0.05)
try:
    hvd.init()
    print(hvd.allreduce(torch.ones(1), op=hvd.Sum).item())
except LaunchError as error:
    print("LaunchError", error)
"""


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "has_secret"),
    [
        pytest.param("who/1", True, marks=pytest.mark.soak),
        ("who", True),
        pytest.param("endpoint", True, marks=pytest.mark.soak),
        pytest.param("networks/1", False, marks=pytest.mark.soak),
        ("networks", False),
    ],
)
def test_a_stranger_in_the_store_of_a_job_runs_no_code_in_init(tmp_path, name, has_secret):
    """Somebody who knows only the port puts a pickle where ranks will look."""
    port, mark = free_port(), tmp_path / "ran"
    settings = {"HOROVOD_START_TIMEOUT": "5", "GO": str(tmp_path / "go")}
    if has_secret:
        settings[JOB_SECRET] = new_secret()
    with forked_ranks(2, python_script, _MEETS, port=port, env=settings) as ranks:
        stranger = dist.TCPStore("127.0.0.1", port, is_master=False)
        stranger.set("horovod.torch/(0, 1)/1/" + name, pickle.dumps(Bomb(mark)))
        (tmp_path / "go").touch()
        ended = [rank.end() for rank in ranks]
    assert not mark.exists()
    # A rank that has written the entry again in the meantime does not even notice.
    for rank in ended:
        assert rank.returncode == 0, rank.stderr
        assert rank.stdout == "2.0\n" or rank.stdout.startswith("LaunchError"), rank.stdout


# ---- objects ----


def _objects(rank: int, size: int) -> None:
    mine = {"rank": rank, "function": Path.name}
    assert hvd.broadcast_object(mine, root_rank=1)["rank"] == 1
    assert [one["rank"] for one in hvd.allgather_object(mine)] == list(range(size))
    # The same name again is another object, with another signature.
    assert hvd.broadcast_object(rank, 0, name="same") == 0
    assert hvd.broadcast_object(rank + 10, 0, name="same") == 10


def test_objects_of_any_class_travel_between_ranks_of_one_machine_without_a_starters_secret(run_ranks):
    assert JOB_SECRET not in os.environ
    run_ranks(3, in_job, _objects)


def _forged(rank: int, size: int, mark: str) -> None:
    """Rank 1 stands for a stranger in gloo's connections: it sends bytes, but has no secret."""
    if rank == 0:
        assert error_of(lambda: hvd.broadcast_object(None, root_rank=1, name="object"))[0] == "HorovodInternalError"
    else:
        data = torch.frombuffer(bytearray(bytes(32) + pickle.dumps(Bomb(Path(mark)))), dtype=torch.uint8)
        hvd.broadcast_(torch.tensor([data.numel()]), 1, "object.sz")
        hvd.broadcast_(data, 1, "object.t")


def test_a_pickle_without_the_jobs_signature_is_not_unpickled(run_ranks, tmp_path):
    run_ranks(2, in_job, _forged, str(tmp_path / "ran"))
    assert not (tmp_path / "ran").exists()


def test_without_a_secret_only_plain_data_is_unpickled(tmp_path):
    plain = {"epoch": 3, "names": ["a", ("b", None, 1.5)], "weights": torch.ones(2)}
    found = _plain_loads(_plain_dumps(plain))
    assert found["names"] == plain["names"] and found["weights"].tolist() == [1, 1]
    with pytest.raises(LaunchError, match=f"export the same {JOB_SECRET} to all ranks"):
        _plain_dumps(Bomb(tmp_path / "ran"))
    content = tmp_path / "object"
    torch.save(Bomb(tmp_path / "ran"), content)
    with pytest.raises(LaunchError, match="is not plain data"):
        _plain_loads(content.read_bytes())
    assert not (tmp_path / "ran").exists()


# ---- the secret ----


def test_the_secret_is_refused_when_it_is_too_short_and_never_shown():
    assert job_secret({}) == b""
    assert len(job_secret({JOB_SECRET: new_secret()})) == 32
    for wrong in ("abcd", "zz" * 32):
        with pytest.raises(LaunchError, match="at least 32 hexadecimal digits") as caught:
            job_secret({JOB_SECRET: wrong})
        assert wrong not in str(caught.value)


def test_ranks_of_one_user_and_machine_share_a_secret():
    offered = LocalSecret(2, 10.0)
    assert local_secret(offered.name) == local_secret(offered.name) == offered.secret


_AS_NOBODY = """
import os, socket, sys
os.setgid(65534); os.setuid(65534)
{code}
"""

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="another user is needed")


def _as_nobody(code: str, *args: str) -> str:
    script = _AS_NOBODY.format(code=textwrap.dedent(code))
    run = subprocess.run([sys.executable, "-c", script, *args], capture_output=True, text=True, timeout=60, check=True)
    return run.stdout


@pytest.mark.ranks
@as_root
def test_another_user_of_the_machine_does_not_get_the_secret():
    offered = LocalSecret(1, 20.0)
    code = """
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect("\\0" + sys.argv[1])
        print(len(caller.recv(32)))
    """
    assert _as_nobody(code, offered.name) == "0\n"
    assert local_secret(offered.name) == offered.secret


@pytest.mark.ranks
@as_root
@pytest.mark.parametrize("address", ["127.0.0.1", ""])
def test_another_user_cannot_take_the_port_that_is_held_for_the_store(address):
    code = """
    import itertools
    for target, *options in itertools.product(["127.0.0.1", "0.0.0.0"], [0, 1], [0, 1]):
        with socket.socket() as taker:
            taker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, options[0])
            taker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, options[1])
            try:
                taker.bind((target, int(sys.argv[1])))
                taker.listen(1)
                print("taken", target, options)
            except OSError:
                pass
    """
    with hold_store_port(address) as held:
        assert _as_nobody(code, str(held.getsockname()[1])) == ""


@pytest.mark.ranks
@as_root
def test_another_user_does_not_get_the_socket_of_the_store():
    code = """
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect("\\0" + sys.argv[1])
        print(len(socket.recv_fds(caller, 1, 1)[1]))
    """
    offer = SocketOffer(socket.create_server(("127.0.0.1", 0)))
    offer.serve()
    assert _as_nobody(code, offer.name) == "0\n"
    with take_socket(offer.name) as taken, socket.create_connection(taken.getsockname()):
        taken.accept()[0].close()
    offer.close()
    assert take_socket(offer.name) is None


# ---- whole jobs ----

_STEPS = """
import os, sys, time, torch, torch.distributed as dist
if "hvd" in sys.argv:
    import horovod.torch as hvd
    hvd.init()
    rank = hvd.rank()
    def all_know(flag):
        return hvd.broadcast_object(hvd.allreduce(torch.full([10], flag), op=hvd.Sum)[0].item())
else:
    from megaclass_launch.ranks.process_group import process_group
    from megaclass_launch.world import world_from_environment
    joined = process_group(world_from_environment(), device="cpu")
    joined.__enter__()
    rank = dist.get_rank()
    def all_know(flag):
        dist.all_reduce(flags := torch.full([10], flag))
        return flags[0].item()
all_know(0.0)
if rank == 0:
    print("environment", sorted(os.environ), flush=True)
    print("pid", os.getpid(), flush=True)
end = time.monotonic() + 120
# Every rank ends after the same step, the first one in which any of them has seen the file.
while not all_know(float(os.path.exists(sys.argv[1]))):
    time.sleep(0.05)
    assert time.monotonic() < end
if "trainer" in sys.argv:
    joined.__exit__(None, None, None)
print("all", flush=True)
"""


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])


def _listening(pid: int) -> list[tuple[str, int]]:
    """Addresses at which a process listens."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(str(entry.readlink()).removeprefix("socket:[").removesuffix("]"))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            local, _, state, *rest = line.split()[1:]
            if state == "0A" and rest[5] in inodes:
                digits, port = local.split(":")
                found.append(
                    (socket.inet_ntoa(bytes.fromhex(digits)[::-1]) if len(digits) == 8 else digits, int(port, 16))
                )
    return found


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("starter", "what"),
    [("run", "hvd"), pytest.param("run", "trainer", marks=pytest.mark.soak), ("train.nproc", "trainer")],
)
def test_a_job_on_one_machine_listens_on_loopback_and_survives_a_thousand_idle_connections(tmp_path, starter, what):
    (tmp_path / "steps.py").write_text(_STEPS)
    (tmp_path / "train_nproc.py").write_text(
        "import sys; from megaclass_launch.launchers.local import run_local; sys.exit(run_local(sys.argv[1:], 2))"
    )
    start = "-m megaclass run -np 2" if starter == "run" else "train_nproc.py"
    # Behind a program that passes no file on to its children.
    between = f'"{sys.executable}" -S -c "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))"'
    command = f'ulimit -Sn 1024; exec "{sys.executable}" {start} {between} "{sys.executable}" steps.py done {what}'
    job = subprocess.Popen(
        ["bash", "-c", command],
        cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    strangers = contextlib.ExitStack()
    try:
        assert job.stdout is not None
        said = ""
        while (match := re.search(r"pid (\d+)", said)) is None:
            line = job.stdout.readline()
            assert line, said
            said += line
        assert JOB_SECRET in said and "MEGACLASS_STORE_PORT" in said
        places = _listening(int(match[1]))
        assert places and {address for address, _ in places} == {"127.0.0.1"}, places
        # The store listens with the socket that the launcher made before any process knew the port, and with no other.
        given = dict(part.partition("=")[::2] for part in Path(f"/proc/{match[1]}/environ").read_text().split("\0"))
        store = ("127.0.0.1", int(given["MEGACLASS_STORE_PORT"]))
        assert places.count(store) == 1
        above = int(match[1])
        while store not in _listening(above := _parent(above)):
            assert above > 1, "no process above rank 0 listens at the store's port"
        with strangers:
            for place in places:
                for _ in range(1000 // len(places) + 1):
                    strangers.enter_context(socket.create_connection(place, timeout=10.0))
            time.sleep(1.0)
            (tmp_path / "done").touch()
            rest = job.communicate(timeout=120)[0]
        assert job.returncode == 0, rest
        assert rest.count("all") == 2
    finally:
        if job.poll() is None:
            job.terminate()
            job.communicate(timeout=60)


@pytest.mark.ranks
def test_the_secret_is_on_no_command_line_and_in_no_plan(tmp_path):
    shows = "import os; print(open('/proc/self/cmdline').read().count(os.environ['MEGACLASS_JOB_SECRET']))"
    command = [sys.executable, "-m", "megaclass", "run", "-np", "1"]
    run = subprocess.run(
        [*command, sys.executable, "-c", shows], capture_output=True, text=True, timeout=120, check=True
    )
    assert "0" in run.stdout
    plan = subprocess.run([*command, "--dry-run", "true"], capture_output=True, text=True, timeout=60, check=True)
    assert JOB_SECRET not in plan.stdout
    assert json.dumps(plan.stdout)
