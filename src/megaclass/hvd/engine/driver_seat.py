"""Decides which thread drives the controller, and puts drivers to sleep and wakes them.

At any time at most one thread drives: it reads messages, announces the queue and runs operations. Two kinds of thread can:

    own thread      the controller's own thread, which always exists
    waiting thread  a caller's thread inside Controller.wait(); the first one takes the seat from the own thread, because a
                    blocking call is faster when no second thread has to be woken

                              take()
    own thread drives  -------------------->  a waiting thread drives
           ^    ^                                   |          |
           |    |  release(may_lease=False)         |          |  release(may_lease=True)
           |    +-----------------------------------+          v
           +-------------------------------------------  no thread drives (lease)  -----> take() by the next wait
                     after _LEASE_S, or when there is work

take() does not wake the own thread, which would cost as much as the seat saves. The own thread may therefore sleep through a
whole wait, without listening to messages. It never sleeps longer than _TICK_S, so that it listens again after that time.

A thread that waits once often waits again at once. The lease therefore leaves incoming messages unread for up to 5 ms after a
wait, instead of waking the own thread for each of them.

`lock` is the controller's lock, which also guards its queue. `driving` is held while a thread drives, so that a thread that
takes the seat waits until the other one has finished its step. Lock order: `driving` before `lock`.

    field                 written by                        read by                     guarded by
    _has_waiting_driver   take(), release()                 all threads                 lock; the own thread also peeks
    _own_listens          take(), release(), own thread     own thread                  lock; the own thread also peeks
    _lease_until          release()                         own thread                  lock; the own thread also peeks
    _is_closed            close()                           wake...(), _listen()        lock
    _network              __init__(), forget()              the driver                  driving
    _own, _waiting        (constant)                        their eventfd: all threads  lock for writing to the eventfd

A peek without the lock may see an old value. That is harmless: the own thread then sleeps once more, and every change that
concerns it also wakes it or is seen within _TICK_S.
"""

import os
import select
import threading
import time
from collections.abc import Callable, Iterable

# How long the own thread leaves messages to threads that wait one after the other.
_LEASE_S = 0.005
# Longest sleep of the own thread. Two wake-ups per second are not measurable, and nothing else wakes it after a lease.
_TICK_S = 0.5
# How often the own thread checks whether the waiting thread that drives is still there.
_WATCH_S = 0.05


class _Sleeper:
    """An eventfd that wakes one driver, and the epoll on which that driver sleeps."""

    def __init__(self, network: select.epoll) -> None:
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._network = network.fileno()
        # An epoll is itself a file to wait for: `network` is readable while any of its connections is.
        self._events = select.epoll()
        self._events.register(self._wake, select.EPOLLIN)
        self._events.register(self._network, select.EPOLLIN)

    def wake(self) -> None:
        os.eventfd_write(self._wake, 1)

    def listen(self, is_listening: bool) -> None:
        """Sets whether messages wake the driver, too."""
        self._events.modify(self._network, select.EPOLLIN if is_listening else 0)

    def sleep(self, timeout_s: float | None) -> None:
        """Sleeps until wake(), a message or the timeout; None: no timeout."""
        # Only the wake is consumed here. Messages stay where they are until the driver asks for readable().
        for file, _ in self._events.poll(timeout_s):
            if file == self._wake:
                os.eventfd_read(file)

    def close(self) -> None:
        self._events.close()
        os.close(self._wake)


class DriverSeat:
    """The right to drive one controller."""

    def __init__(self, lock: threading.Lock, connections: Iterable[int]) -> None:
        """`connections`: file descriptors on which messages arrive."""
        self._lock = lock
        self.driving = threading.RLock()
        # Both sleepers wait on this epoll inside their own one: registering a connection once serves both threads.
        self._network = select.epoll()
        for file in connections:
            self._network.register(file, select.EPOLLIN)
        self._own, self._waiting = _Sleeper(self._network), _Sleeper(self._network)
        self._has_waiting_driver = False
        self._own_listens = True
        self._lease_until = 0.0
        self._is_closed = False

    # -- any thread; the caller holds `lock` ------------------------------------------------------------------------

    def wake_driver(self) -> None:
        """Wakes the thread that drives now."""
        if not self._is_closed:
            (self._waiting if self._has_waiting_driver else self._own).wake()

    def wake_all(self) -> None:
        if not self._is_closed:
            self._own.wake()
            self._waiting.wake()

    def take(self) -> bool:
        """Makes the calling thread the driver. If another waiting thread drives, wakes that one and returns False."""
        if self._has_waiting_driver:
            self.wake_driver()
            return False
        self._has_waiting_driver = True
        # modify() is a system call; the flag spares it for waits that follow each other.
        if self._own_listens:
            self._own_listens = False
            self._own.listen(False)
        return True

    def release(self, *, may_lease: bool) -> None:
        """Ends the turn of the waiting thread. `may_lease`: there is no work, so the own thread may sleep on for a moment."""
        self._has_waiting_driver = False
        if may_lease:
            self._lease_until = time.monotonic() + _LEASE_S
            return
        self._listen()
        self.wake_driver()

    def _listen(self) -> None:
        """Lets messages wake the own thread, unless a waiting thread reads them."""
        if not (self._has_waiting_driver or self._own_listens or self._is_closed):
            self._own_listens = True
            self._own.listen(True)

    def close(self) -> None:
        """Releases the file descriptors; later wakes do nothing."""
        self._is_closed = True
        self._own.close()
        self._waiting.close()
        self._network.close()

    # -- the driver, which holds `driving` --------------------------------------------------------------------------

    def readable(self) -> list[int]:
        """Returns the connections that have data to read."""
        return [file for file, _ in self._network.poll(0)]

    def forget(self, connection: int) -> None:
        self._network.unregister(connection)

    def sleep_as_waiting_thread(self, timeout_s: float | None) -> None:
        self._waiting.sleep(timeout_s)

    # -- the own thread, which holds no lock ------------------------------------------------------------------------

    def own_turn(self, sleep_s: Callable[[], float | None], has_work: Callable[[], bool]) -> bool:
        """Sleeps, and returns whether it is the own thread's turn to drive.

        `sleep_s` returns the time until something is due, None for never.
        """
        if self._has_waiting_driver:
            self._own.sleep(_WATCH_S)
        else:
            timeout_s = self._lease_left_s(has_work) or sleep_s()
            self._own.sleep(_TICK_S if timeout_s is None else min(timeout_s, _TICK_S))
        # Asked again after the sleep: a thread may have taken the seat meanwhile, and then no message is ours to read.
        if self._has_waiting_driver or self._lease_left_s(has_work):
            return False
        with self._lock:
            self._listen()
        return True

    def _lease_left_s(self, has_work: Callable[[], bool]) -> float:
        """Returns how long messages are left to the next waiting thread; 0 if there is no lease or there is work."""
        if self._own_listens or has_work():
            return 0.0
        return max(0.0, self._lease_until - time.monotonic())
