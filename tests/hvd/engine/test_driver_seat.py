"""Who drives the controller: the seat by itself, with threads and sockets, without torch or other processes."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megaclass.hvd.engine import driver_seat
from megaclass.hvd.engine.driver_seat import DriverSeat

SOON_S = 10.0


def _num_open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


class Bench:
    """A seat with one connection, and the lock of its controller."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.ours, self.theirs = socket.socketpair()
        self.seat = DriverSeat(self.lock, [self.ours.fileno()])
        self.has_work = False

    def own_turn(self, sleep_s: float | None = 0.0) -> bool:
        return self.seat.own_turn(lambda: sleep_s, lambda: self.has_work)

    def take(self) -> bool:
        with self.lock:
            return self.seat.take()

    def release(self, *, may_lease: bool) -> None:
        with self.lock:
            self.seat.release(may_lease=may_lease)

    @contextlib.contextmanager
    def own_thread_sleeps(self) -> Iterator[list[bool]]:
        """Runs own_turn() without a timeout on another thread; the list receives its result."""
        turns: list[bool] = []
        thread = threading.Thread(target=lambda: turns.append(self.own_turn(None)))
        thread.start()
        yield turns
        thread.join(SOON_S)
        assert not thread.is_alive(), "the own thread was not woken"


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    with made.lock:
        made.seat.close()
    made.ours.close()
    made.theirs.close()


@pytest.fixture
def long_lease(monkeypatch):
    monkeypatch.setattr(driver_seat, "_LEASE_S", 600.0)


def test_without_a_waiting_thread_it_is_the_own_threads_turn(bench):
    assert bench.own_turn()


def test_a_wake_ends_the_own_threads_sleep(bench):
    with bench.own_thread_sleeps() as turns, bench.lock:
        bench.seat.wake_driver()
    assert turns == [True]


def test_a_message_ends_the_own_threads_sleep(bench):
    with bench.own_thread_sleeps() as turns:
        bench.theirs.send(b"x")
    assert turns == [True]
    assert bench.seat.readable() == [bench.ours.fileno()]


def test_a_wake_before_the_sleep_is_not_lost(bench):
    with bench.lock:
        bench.seat.wake_driver()
    assert bench.own_turn(None)


def test_the_first_waiting_thread_takes_the_seat_and_the_second_one_wakes_it(bench):
    assert bench.take()
    assert not bench.take()
    # Without the wake this would sleep for ten seconds.
    begun = time.monotonic()
    bench.seat.sleep_as_waiting_thread(SOON_S)
    assert time.monotonic() - begun < SOON_S


def test_while_a_waiting_thread_drives_it_is_not_the_own_threads_turn_and_no_message_wakes_it(bench, monkeypatch):
    monkeypatch.setattr(driver_seat, "_WATCH_S", 0.2)
    assert bench.take()
    bench.theirs.send(b"x")
    begun = time.monotonic()
    assert not bench.own_turn(None)
    assert time.monotonic() - begun >= 0.19
    # The waiting thread is woken by the same message.
    bench.seat.sleep_as_waiting_thread(SOON_S)
    assert bench.seat.readable() == [bench.ours.fileno()]


def test_wakes_go_to_the_waiting_thread_while_it_drives(bench, monkeypatch):
    monkeypatch.setattr(driver_seat, "_WATCH_S", 0.0)
    assert bench.take()
    with bench.lock:
        bench.seat.wake_driver()
    bench.seat.sleep_as_waiting_thread(SOON_S)
    assert not bench.own_turn(None)


def test_with_work_left_the_seat_returns_to_the_own_thread_which_is_woken_and_listens_again(bench):
    assert bench.take()
    bench.release(may_lease=False)
    assert bench.own_turn(None)
    with bench.own_thread_sleeps() as turns:
        bench.theirs.send(b"x")
    assert turns == [True]


def test_during_a_lease_messages_are_left_to_the_next_wait(bench, long_lease, monkeypatch):
    assert bench.take()
    bench.release(may_lease=True)
    bench.theirs.send(b"x")
    # The own thread would sleep for the rest of the lease; a wake without work does not end the lease.
    with bench.lock:
        bench.seat.wake_driver()
    assert not bench.own_turn(None)
    assert bench.take()
    assert bench.seat.readable() == [bench.ours.fileno()]


def test_work_ends_a_lease(bench, long_lease):
    assert bench.take()
    bench.release(may_lease=True)
    bench.has_work = True
    assert bench.own_turn(0.0)


def test_after_a_lease_the_own_thread_listens_again(bench, monkeypatch):
    monkeypatch.setattr(driver_seat, "_LEASE_S", 0.01)
    assert bench.take()
    bench.release(may_lease=True)
    assert bench.own_turn(None)
    with bench.own_thread_sleeps() as turns:
        bench.theirs.send(b"x")
    assert turns == [True]


def test_an_own_thread_that_slept_through_a_whole_wait_listens_again(bench, monkeypatch):
    """The thread goes to sleep before the wait begins, and nothing wakes it when the wait is over."""
    monkeypatch.setattr(driver_seat, "_TICK_S", 0.2)
    with bench.own_thread_sleeps() as turns:
        time.sleep(0.05)
        assert bench.take()
        bench.release(may_lease=True)
    assert turns == [True]
    with bench.own_thread_sleeps() as turns:
        bench.theirs.send(b"x")
    assert turns == [True]


def test_a_forgotten_connection_wakes_nobody(bench):
    bench.theirs.send(b"x")
    bench.seat.forget(bench.ours.fileno())
    assert bench.seat.readable() == []


def test_after_closing_wakes_and_releases_do_nothing_and_no_file_stays_open():
    before = _num_open_files()
    bench = Bench()
    assert bench.take()
    with bench.lock:
        bench.seat.close()
        bench.seat.wake_driver()
        bench.seat.wake_all()
        bench.seat.release(may_lease=False)
    bench.ours.close()
    bench.theirs.close()
    assert _num_open_files() == before


def test_many_threads_pass_the_seat_on_and_never_drive_at_the_same_time(bench):
    """The protocol of Controller.wait(), with a counter instead of operations."""
    drivers: list[str] = []
    overlaps: list[tuple[str, ...]] = []
    num_turns = {"own": 0, "waiting": 0}
    is_over = threading.Event()

    def drive(kind: str) -> None:
        with bench.seat.driving:
            drivers.append(kind)
            if len(drivers) > 1:
                overlaps.append(tuple(drivers))
            num_turns[kind] += 1
            time.sleep(0)
            drivers.pop()

    def own() -> None:
        while not is_over.is_set():
            if bench.own_turn(0.001):
                drive("own")

    def wait_often() -> None:
        for turn in range(200):
            if bench.take():
                drive("waiting")
                bench.release(may_lease=bool(turn % 2))

    threads = [threading.Thread(target=wait_often) for _ in range(4)]
    own_thread = threading.Thread(target=own)
    for thread in (own_thread, *threads):
        thread.start()
    for thread in threads:
        thread.join(60.0)
    begun = num_turns["own"]
    deadline = time.monotonic() + SOON_S
    while num_turns["own"] == begun and time.monotonic() < deadline:
        time.sleep(0.001)
    is_over.set()
    own_thread.join(SOON_S)
    assert not overlaps
    assert num_turns["waiting"] > 0
    assert num_turns["own"] > begun, "the own thread did not get the seat back"
