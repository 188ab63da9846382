"""The parts of an agent, without processes: its driver, the output of its workers, their setup, ports and heartbeats."""

import os
import selectors
import socket
import time
from types import SimpleNamespace

import pytest

from megaclass_launch.agent import agent
from megaclass_launch.agent.agent import DriverConnection
from megaclass_launch.agent.rank_watch import RankWatch
from megaclass_launch.agent.workers import Rank0Ports, WorkerOutput, WorkerSetup
from megaclass_launch.errors import LaunchError
from megaclass_launch.rank_status import OwnStatus
from megaclass_launch.wire.protocol import encode
from megaclass_launch.world import World


@pytest.fixture
def selector():
    with selectors.DefaultSelector() as found:
        yield found


def handle_events(selector) -> int:
    """Handles what has come, as the agent's loop does; returns the number of events."""
    events = selector.select(0)
    for key, _ in events:
        key.data()
    return len(events)


# ---- the driver ----


class DriverEnd:
    """The driver's ends of the agent's stdin and stdout, and what its connection does."""

    def __init__(self, selector, stdin: int, stdout: int) -> None:
        self.stdin, self.stdout = stdin, stdout
        self.obeyed: list[dict] = []
        self.num_losses = 0
        self.connection = DriverConnection(selector, 10.0, self.obeyed.append, self._note_loss)
        self.connection.listen()

    def _note_loss(self, is_silent) -> None:
        self.num_losses += 1


@pytest.fixture
def driver(selector, monkeypatch):
    (their_in, our_in), (our_out, their_out) = os.pipe(), os.pipe()
    with os.fdopen(their_in) as stdin, os.fdopen(their_out, "w") as stdout:
        os.set_blocking(their_in, False)
        os.set_blocking(their_out, False)
        # Not in the module sys itself: pytest sets its stdout anew between a fixture and the test.
        monkeypatch.setattr(agent, "sys", SimpleNamespace(stdin=stdin, stdout=stdout))
        end = DriverEnd(selector, our_in, our_out)
        yield end
    os.close(our_out)
    if end.stdin >= 0:
        os.close(end.stdin)


def test_the_drivers_messages_are_carried_out_however_they_are_cut(selector, driver):
    data = encode({"do": "signal", "number": 10}) + encode({"do": "end"})
    for part in (data[:5], data[5:]):
        os.write(driver.stdin, part)
        handle_events(selector)
    assert driver.obeyed == [{"do": "signal", "number": 10}, {"do": "end"}]


def test_a_driver_that_has_ended_is_lost_once_and_is_sent_nothing_more(selector, driver, caplog):
    os.close(driver.stdin)
    driver.stdin = -1
    handle_events(selector)
    driver.connection.check_silence(time.monotonic() + 100.0)
    assert driver.num_losses == 1
    assert [record.message for record in caplog.records] == ["the driver has ended; ending its ranks"]
    # The end of stdin stays readable; a loop that waits for it again would never sleep.
    assert handle_events(selector) == 0
    driver.connection.say({"say": "beat"})
    os.set_blocking(driver.stdout, False)
    with pytest.raises(BlockingIOError):
        os.read(driver.stdout, 1)


def test_a_driver_that_is_silent_is_lost(driver):
    driver.connection.check_silence(driver.connection.lost_at)
    assert driver.num_losses == 0
    driver.connection.check_silence(driver.connection.lost_at + 0.1)
    assert driver.num_losses == 1


def test_what_precedes_a_line_that_is_no_message_is_carried_out(driver):
    driver.connection.feed(encode({"do": "end"}) + b"Connection closed.\n")
    assert driver.obeyed == [{"do": "end"}] and driver.num_losses == 1


def test_a_driver_that_does_not_read_gets_everything_later(selector, driver):
    while not driver.connection.is_full:
        driver.connection.say({"say": "output"}, b"x" * (1 << 19))
    driver.connection.watch_room()
    assert handle_events(selector) == 0
    while not driver.connection.is_empty:
        os.read(driver.stdout, 1 << 20)
        handle_events(selector)
    driver.connection.watch_room()
    # Nothing is left to send: a pipe with room does not wake the loop.
    assert handle_events(selector) == 0


# ---- output ----


def new_worker(rank: int) -> tuple[SimpleNamespace, dict[str, int]]:
    """A worker without a process, and the ends of its pipes to which it would write."""
    (out, to_out), (err, to_err) = os.pipe(), os.pipe()
    process = SimpleNamespace(stdout=os.fdopen(out, "rb", buffering=0), stderr=os.fdopen(err, "rb", buffering=0))
    return SimpleNamespace(rank=rank, process=process), {"stdout": to_out, "stderr": to_err}


class Output(WorkerOutput):
    def __init__(self, selector) -> None:
        self.taken: list[tuple[int, str, bytes]] = []
        super().__init__(selector, lambda *read: self.taken.append(read))


def test_output_is_not_read_while_the_driver_does_not_take_it(selector):
    output = Output(selector)
    first, to_first = new_worker(0)
    output.watch(first)
    output.pause_if(True)
    output.pause_if(True)
    # In an elastic job, a worker may start meanwhile.
    second, to_second = new_worker(1)
    output.watch(second)
    os.write(to_first["stdout"], b"a")
    os.write(to_second["stderr"], b"b")
    assert handle_events(selector) == 0 and output.taken == []
    output.pause_if(False)
    handle_events(selector)
    assert sorted(output.taken) == [(0, "stdout", b"a"), (1, "stderr", b"b")]
    for end in (*to_first.values(), *to_second.values()):
        os.close(end)
    output.read_rest()
    assert first.process.stdout.closed and second.process.stderr.closed


def test_the_last_output_of_a_worker_does_not_wait_for_its_children(selector):
    output = Output(selector)
    worker, to_worker = new_worker(0)
    output.watch(worker)
    os.write(to_worker["stdout"], b"last words")
    os.close(to_worker["stderr"])
    # stdout stays open, as in a child of the worker that runs on.
    output.read_last(worker)
    assert output.taken == [(0, "stdout", b"last words")]
    assert worker.process.stderr.closed and not worker.process.stdout.closed
    os.close(to_worker["stdout"])
    output.read_rest()
    assert worker.process.stdout.closed


def test_the_stacks_of_a_rank_are_read_without_the_output_of_others(selector):
    output = Output(selector)
    workers = [new_worker(rank) for rank in range(2)]
    for worker, ends in workers:
        output.watch(worker)
        for stream, end in ends.items():
            os.write(end, stream.encode())
    output.read_stderr(1)
    assert output.taken == [(1, "stderr", b"stderr")]
    for _, ends in workers:
        for end in ends.values():
            os.close(end)
    output.read_rest()
    assert len(output.taken) == 4


# ---- setup ----


def job(tmp_path, **more) -> dict:
    return {
        "workdir": str(tmp_path),
        "command": ["sh"],
        "host": "h1",
        "slots": 2,
        "passed": {},
        "given": {},
        "interfaces": [],
        "is_alone": True,
        **more,
    }


def test_a_host_without_the_folder_or_the_program_refuses_before_anything_starts(tmp_path):
    own = {"PATH": os.environ["PATH"]}
    assert WorkerSetup(job(tmp_path), own).check() == {}
    with pytest.raises(LaunchError, match="There is no working folder"):
        WorkerSetup(job(tmp_path / "none"), own).check()
    with pytest.raises(LaunchError, match="There is no command 'no-such-program'"):
        WorkerSetup(job(tmp_path, command=["no-such-program"]), own).check()
    (tmp_path / "train.py").write_text("print('hi')")
    with pytest.raises(LaunchError, match=r"train\.py is not executable: .*put its interpreter in front of it"):
        WorkerSetup(job(tmp_path, command=["./train.py"]), own).check()
    with pytest.raises(LaunchError, match="There is no network interface 'none0'"):
        WorkerSetup(job(tmp_path, interfaces=["none0"]), own).check()


def test_the_interface_that_the_user_chose_decides_the_address_and_the_environment(tmp_path):
    setup = WorkerSetup(job(tmp_path, interfaces=["none0", "lo"]), {"PATH": os.environ["PATH"]})
    assert setup.check() == {"address": "127.0.0.1"}
    env = setup.placed(World(rank=1, size=2), {"address": "127.0.0.1", "port": 1234})
    assert env["GLOO_SOCKET_IFNAME"] == "lo"
    assert (env["RANK"], env["MASTER_ADDR"], env["MASTER_PORT"]) == ("1", "127.0.0.1", "1234")
    assert env["HOROVOD_HOSTNAME"] == "h1"


def test_variables_of_the_user_come_before_those_of_the_driver_and_these_before_the_hosts(tmp_path):
    own = {"PATH": "/host:/both", "A": "host", "B": "host", "C": "host"}
    passed, given = {"PATH": "/driver:/both", "B": "driver", "C": "driver"}, {"C": "user"}
    base = WorkerSetup(job(tmp_path, passed=passed, given=given), own).base
    assert [base[name] for name in "ABC"] == ["host", "driver", "user"]
    assert base["PATH"] == "/driver:/both:/host"
    assert base["PYTHONFAULTHANDLER"] == "1" and int(base["OMP_NUM_THREADS"]) >= 1
    assert WorkerSetup(job(tmp_path, given={"OMP_NUM_THREADS": "3"}), own).base["OMP_NUM_THREADS"] == "3"


def test_two_ports_are_held_for_rank_0_and_one_if_the_user_chose_it():
    both = Rank0Ports(0, "127.0.0.1")
    found = both.hold()
    assert found["port"] != found["store_port"]
    offer = both.offer_store("192.0.2.1")
    # All ranks are here: the store listens at the loopback address, whatever address the driver names.
    assert offer is not None
    offer.close()
    # With other hosts it listens at the address that they use; this one belongs to no host.
    several = Rank0Ports(0)
    several.hold()
    assert several.offer_store("192.0.2.1") is None
    chosen = Rank0Ports(found["port"], "127.0.0.1")
    # The same one for every generation of an elastic job.
    for _ in range(2):
        assert chosen.hold() == {"port": found["port"], "store_port": 0} and chosen.offer_store("127.0.0.1") is None


def test_every_generation_has_ports_of_its_own_and_those_of_the_last_two_stay_held():
    ports = Rank0Ports(0)
    held = [ports.hold() for _ in range(4)]
    assert len({port for pair in held for port in pair.values()}) == 8
    with socket.create_server(("", 0)) as taken, pytest.raises(LaunchError, match="is in use"):
        Rank0Ports(taken.getsockname()[1]).hold()

    def is_free(port: int) -> bool:
        with socket.socket() as other:
            try:
                other.bind(("0.0.0.0", port))
            except OSError:
                return False
            return True

    assert not any(is_free(port) for pair in held[1:] for port in pair.values())
    assert all(is_free(port) for port in held[0].values())


# ---- heartbeats ----


class Supervised:
    """Two workers, of which those in `stopped` do not run."""

    def __init__(self) -> None:
        self.stopped: set[int] = set()
        self.num_watched = 0

    def running(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(rank=rank, pid=100 + rank) for rank in range(2)]

    def is_stopped(self, worker) -> bool:
        return worker.rank in self.stopped

    def keep_watch(self) -> None:
        self.num_watched += 1


def test_a_heartbeat_reports_new_checkpoints_and_each_stopped_rank_once():
    said: list[dict] = []
    supervised = Supervised()
    watch = RankWatch(supervised, lambda message, payload: said.append(message), host="h1", interval_s=5.0)
    ranks = [OwnStatus(watch.new_page(rank).fileno()) for rank in range(2)]
    begun = time.monotonic()
    watch.check(begun)
    assert said == [{"say": "beat"}]
    assert watch.next_at(begun) == begun + 1.0 and watch.next_at(begun + 4.5) == begun + 5.0
    watch.check(begun + 4.9)
    assert len(said) == 1 and supervised.num_watched == 1
    supervised.stopped.add(1)
    ranks[1].checkpoint(7)
    watch.check(begun + 5.0)
    news = [{"say": "beat"}, {"say": "progress", "step": 7}, {"say": "stopped", "rank": 1, "pid": 101}]
    assert said[1:] == news
    # An older step of another rank is no news.
    ranks[0].checkpoint(3)
    watch.check(begun + 10.0)
    assert said[4:] == [{"say": "beat"}]


def test_a_rank_that_has_become_late_is_reported_before_the_next_heartbeat():
    said: list[dict] = []
    watch = RankWatch(Supervised(), lambda message, payload: said.append(message), host="h1", interval_s=500.0)
    ranks = [OwnStatus(watch.new_page(rank).fileno()) for rank in range(2)]
    begun = time.monotonic()
    watch.check(begun)
    ranks[0].progress(allowed_s=100.0, step=1)
    ranks[1].give_stacks("", "no step has finished", "train.hang_after_s")
    ranks[1].progress(allowed_s=0.001, step=1)
    time.sleep(0.01)
    watch.check(begun + 1.1)
    [status] = [message for message in said if message["say"] == "status"]
    assert (status["missing"], status["setting"]) == ("no step has finished", "train.hang_after_s")
    assert 0.0 < status["silent_s"] < 60.0 and status["idle_s"] >= status["silent_s"] - 60.0
    watch.check(begun + 2.2)
    assert len([message for message in said if message["say"] == "status"]) == 1
