"""`run_ranks`: a function in N real processes, over gloo on CPUs; tests/many_gpus/ has the same over NCCL.

Ranks are forked by a server that has torch loaded and stay for the next test, each test in a process group of its own.
The store where they meet stays, too: torch asks the name server about every new connection to a store, and waits.
A rank that raises fails the test with its traceback; ranks that do not finish in time have their stacks printed. After
either, all ranks are killed and the next test starts fresh ones.
"""

import faulthandler
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from tests import guard
from tests.be_host import be_host

from megaclass_launch.messages import messages_on_stderr
from megaclass_launch.rendezvous.addresses import reserve_port

os.environ.setdefault("OMP_NUM_THREADS", "1")
# The tests may run inside a job, of Slurm for instance; the processes that they start are no ranks of it.
for _name in (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "HOROVOD_RANK",
    "OMPI_COMM_WORLD_RANK",
    "SLURM_PROCID",
):
    os.environ.pop(_name, None)
# torch asks the name server who connects to a store; an answer that is lost costs a second then, not five.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")
fork_server = multiprocessing.get_context("forkserver")
# torch._dynamo: every optimizer loads it, which takes as long as torch itself.
fork_server.set_forkserver_preload(
    ["torch", "torch._dynamo", "torch.distributed.tensor.debug", "megaclass.head.partial_fc", "numpy"]
)
_reserved: list[socket.socket] = []


def free_port() -> int:
    """A port on which nobody listens and which the kernel gives to nobody else until the tests end."""
    _reserved.append(reserve_port(0))
    return int(_reserved[-1].getsockname()[1])


def _rank_main(calls: Connection, stacks: str, store_port: int, device: str, host: int | None) -> None:
    if host is not None:
        be_host(host)
    import torch
    import torch.distributed as dist

    from megaclass_launch.ranks import process_group as groups

    store = dist.TCPStore("127.0.0.1", store_port, timeout=timedelta(seconds=60))
    torch.set_num_threads(1)
    with messages_on_stderr(), Path(stacks).open("w") as file:
        faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)
        while True:
            number, world, pickled_call = calls.recv()
            groups._store = lambda world, timeout_s, number=number: dist.PrefixStore(str(number), store)
            try:
                with groups.process_group(world, device=device, timeout_s=60):
                    # gloo fails on a rank that is still connecting when another has done its part and left.
                    dist.barrier()
                    # Plain pickle: multiprocessing's own would send tensors as shared memory that dies with the rank.
                    # An error is sent before the group ends: with NCCL that end may wait for the other ranks.
                    calls.send_bytes(pickle.dumps(_outcome_of(pickled_call)))
            except BaseException:
                calls.send_bytes(pickle.dumps((False, traceback.format_exc())))


def _outcome_of(pickled_call: bytes) -> tuple[bool, Any]:
    try:
        function, args = pickle.loads(pickled_call)
        return True, function(*args)
    except BaseException:
        return False, traceback.format_exc()


@dataclass
class _Rank:
    process: BaseProcess
    calls: Connection
    stacks: Path


class RankPool:
    """Ranks that stay. device: as for `process_group`. are_hosts: each rank is the only one of a host, see `be_host`."""

    def __init__(self, folder: Path, *, device: str = "cpu", are_hosts: bool = False) -> None:
        self._folder, self._device, self._are_hosts = folder, device, are_hosts
        self._ranks: list[_Rank] = []
        self._num_calls = 0
        self._store: Any = None

    def run(self, size: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
        """Results by rank. `function` is a module-level function; it and its arguments are pickled."""
        from megaclass_launch.world import World

        while len(self._ranks) < size:
            self._start_rank()
        call = pickle.dumps((function, args))
        self._num_calls += 1
        for rank in range(size):
            place: dict[str, int] = {"local_rank": rank, "local_size": size}
            if self._are_hosts:
                place = {"local_rank": 0, "local_size": 1, "cross_rank": rank, "cross_size": size}
            world = World(rank=rank, size=size, **place, starter="tests", port=1)
            self._ranks[rank].calls.send((self._num_calls, world, call))
        try:
            return self._outcomes(size, time.monotonic() + timeout_s)
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        for rank in self._ranks:
            rank.process.kill()
            rank.process.join()
        self._ranks = []

    def _start_rank(self) -> None:
        import torch.distributed as dist

        if self._store is None:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ours, theirs = fork_server.Pipe()
        stacks = self._folder / f"stacks.{time.monotonic_ns()}.txt"
        host = len(self._ranks) if self._are_hosts else None
        arguments = (theirs, str(stacks), self._store.port, self._device, host)
        process = fork_server.Process(target=_rank_main, args=arguments, daemon=True)
        process.start()
        theirs.close()
        self._ranks.append(_Rank(process, ours, stacks))

    def _outcomes(self, size: int, deadline: float) -> list[Any]:
        waiting = {self._ranks[rank].calls: rank for rank in range(size)}
        results: list[Any] = [None] * size
        failures: list[str] = []
        while waiting:
            # One failure makes the others fail too: give them a moment, then show all of them, root cause included.
            ready = wait(list(waiting), timeout=1.0 if failures else max(0.0, deadline - time.monotonic()))
            if not ready and failures:
                failures.append(self._stacks(waiting))
                break
            if not ready:
                pytest.fail(f"ranks {sorted(waiting.values())} did not finish in time\n{self._stacks(waiting)}")
            for calls in ready:
                rank = waiting.pop(calls)
                succeeded, value = self._outcome(rank)
                if succeeded:
                    results[rank] = value
                else:
                    failures.append(f"--- rank {rank} ---\n{value}")
        if failures:
            pytest.fail("\n".join(failures), pytrace=False)
        return results

    def _outcome(self, rank: int) -> tuple[bool, Any]:
        try:
            succeeded, value = pickle.loads(self._ranks[rank].calls.recv_bytes())
        except EOFError:
            self._ranks[rank].process.join(5)
            return False, f"ended without a result, exit code {self._ranks[rank].process.exitcode}"
        return succeeded, value

    def _stacks(self, waiting: dict[Any, int]) -> str:
        texts = []
        for rank in sorted(waiting.values()):
            pid = self._ranks[rank].process.pid
            assert pid is not None
            os.kill(pid, signal.SIGUSR2)
            time.sleep(0.2)
            texts.append(f"--- rank {rank}, pid {pid} ---\n{self._ranks[rank].stacks.read_text()}")
        return "\n".join(texts)


# ---- kinds of tests: unit, ranks, hosts, gpu, soak ----

_KINDS = ("unit", "ranks", "hosts", "gpu", "soak")
# A test that uses one of these fixtures starts hosts (namespaces, sshd, Slurm, Ray) or processes; all others are unit tests
# unless they carry a mark of their own.
_FIXTURES_WITH_HOSTS = {"bed_of_the_session", "slurm", "cluster", "mpirun_on_hosts"}
_FIXTURES_WITH_PROCESSES = {"rank_pool", "run"}
_running: list[pytest.Item] = []


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    can_try_again = config.pluginmanager.hasplugin("rerunfailures")
    is_covered = config.pluginmanager.hasplugin("pytest_cov")
    # Daemons and networks are upset by a busy machine, so one failure of `hosts` is tried again; it is listed with its reason.
    # Machines of a CI are used by others as well, and one late thread among 4,000 tests must not refuse a change: there every
    # test gets the second try. Elsewhere failures must be seen.
    tried_again = _KINDS if os.environ.get("CI") == "true" else ("hosts",)
    for item in items:
        if not any(item.get_closest_marker(kind) for kind in _KINDS):
            fixtures = set(getattr(item, "fixturenames", ()))
            if fixtures & _FIXTURES_WITH_HOSTS:
                item.add_marker("hosts")
            else:
                item.add_marker("ranks" if fixtures & _FIXTURES_WITH_PROCESSES else "unit")
        if is_covered and not item.get_closest_marker("unit"):
            # Before Python 3.12, counting lines makes Python code up to four times slower, and this is the larger part of it.
            item.add_marker("no_cover")
        if can_try_again and any(item.get_closest_marker(kind) for kind in tried_again):
            item.add_marker(pytest.mark.flaky(reruns=1))
    _put_long_files_first(items)


def _put_long_files_first(items: list[pytest.Item]) -> None:
    """Hosts, which mostly wait, then processes, then unit tests: the last tests are short, so workers end at the same time.

    Whole files are moved, because tests of one file share fixtures.
    """
    with_hosts, with_ranks = (
        {item.path for item in items if item.get_closest_marker(kind)} for kind in ("hosts", "ranks")
    )
    items.sort(key=lambda item: 0 if item.path in with_hosts else 1 if item.path in with_ranks else 2)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Shows why tests were tried again: a first failure is a hint at a race, also if the second try passes."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"tried again: {report.nodeid}")
        terminalreporter.write_line(report.longreprtext[-3000:])


# Cleans up if this process is killed; started before the first test that starts processes.
_guards: list[Any] = []


def pytest_runtest_setup(item: pytest.Item) -> None:
    if not _guards and not item.get_closest_marker("unit"):
        _guards.append(guard.start_guard(Path(tempfile.gettempdir(), f"megaclass-bed-{os.getpid()}")))


def pytest_unconfigure() -> None:
    while _guards:
        guard.dismiss(_guards.pop())


def _refuse_processes(event: str, arguments: tuple[Any, ...]) -> None:
    """Audit hook: a unit test that starts a process has the wrong mark."""
    if event in ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn") and _running:
        item = _running[-1]
        if item.get_closest_marker("unit"):
            raise AssertionError(f"{item.nodeid} is a unit test but starts a process: mark it with pytest.mark.ranks.")


sys.addaudithook(_refuse_processes)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    # Not the whole protocol: the teardown of a session's fixtures, which may start processes, belongs to no test.
    _running.append(item)
    try:
        return (yield)
    finally:
        _running.pop()


@pytest.fixture(autouse=True)
def messages_are_printed() -> Iterator[None]:
    """Messages of the library go to standard error, as under the command line, so tests can read them there."""
    with messages_on_stderr():
        yield


@pytest.fixture(autouse=True)
def environment_is_restored() -> Iterator[None]:
    """A test that joins a process group in the test process leaves GLOO_SOCKET_IFNAME, which later ranks would inherit."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    # PYTEST_CURRENT_TEST, which pytest changes meanwhile, is its own.
    os.environ.update({name: value for name, value in before.items() if name != "PYTEST_CURRENT_TEST"})
    # A group that an error ended stays until the process ends or joins another one, see `process_group`.
    if (groups := sys.modules.get("megaclass_launch.ranks.process_group")) is not None:
        groups._drop_group_left_by_error()


@pytest.fixture(autouse=True, scope="session")
def signals_are_heard() -> Iterator[None]:
    """Under nohup, or in the background of a shell, every process that a test starts would ignore SIGHUP or SIGINT."""
    ignored = [n for n in (signal.SIGHUP, signal.SIGINT) if signal.getsignal(n) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    with tempfile.TemporaryDirectory() as folder:
        pool = RankPool(Path(folder))
        yield pool
        pool.kill()


@pytest.fixture
def run_ranks(rank_pool: RankPool) -> Callable[..., list[Any]]:
    """run_ranks(size, function, *args): results by rank."""
    return rank_pool.run
