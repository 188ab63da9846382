"""The controller of one process: it agrees with the other ranks on operations, and has them run.

    any thread   submit(operation) appends it to the queue
    the driver   announces the queue to rank 0 (at once if a thread waits, else after the cycle time), receives responses,
                 runs them in the order received, and wakes the threads that wait for them
    on rank 0    the driver also keeps the table of announced operations (rank0/) and sends the responses

Its parts, each in a file of its own:

    submission_queue.py   what was submitted, and when to announce it        any thread, under _lock
    in_flight.py          what is not done yet, and its waiting threads      any thread, under _lock
    driver_seat.py        which thread is the driver, how it sleeps          any thread, see there
    negotiation.py        what is sent to and received from other ranks      the driver
    response_runner.py    what the ranks have agreed on is run               the driver
    stopping.py           how the controllers of all ranks end together      the driver

The driver sleeps until a submission, a message or a deadline wakes it, so that an idle job costs nothing.

State; "driver" stands for the thread that holds `_seat.driving`:

    field          written by                              read by           guarded by
    _queue         submit(), together(), wait(), driver    driver            _lock
    _in_flight     submit(), wait(), driver                submit(), driver  _lock; the driver also reads without it
    closed         _close()                                all threads       set once, under _lock; it is in _in_flight
    _is_stopping   stop()                                  driver            set once, under _lock
    _stopping      driver                                  driver            _seat.driving; is_over: see _run
    _negotiation   driver                                  driver            _seat.driving
    _responses     (constant)                              driver            _seat.driving
    process_sets   driver (by the executor)                all threads       entries are added and removed whole
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from megaclass.distributed.network.connection_watch import ConnectionWatch
from megaclass.hvd.engine.control_connection import ControlConnection
from megaclass.hvd.engine.driver_seat import DriverSeat
from megaclass.hvd.engine.in_flight import InFlight
from megaclass.hvd.engine.negotiation import Negotiation, OtherRankNegotiation, Rank0Negotiation
from megaclass.hvd.engine.operation import Operation, OperationRunner
from megaclass.hvd.engine.response_runner import ResponseRunner
from megaclass.hvd.engine.stopping import STOP_KINDS, Stopping
from megaclass.hvd.engine.submission_queue import SubmissionQueue
from megaclass.hvd.engine.timeline import Timeline
from megaclass.hvd.exceptions import SHUT_DOWN, HorovodInternalError
from megaclass.hvd.settings import Settings

_log = logging.getLogger("megaclass.hvd")
_DRAIN_S = 30.0


class Controller:
    """Runs from init() to shutdown(); each process has one."""

    def __init__(
        self,
        rank: int,
        hosts: list[str],
        settings: Settings,
        timeline: Timeline,
        process_sets: dict[int, tuple[int, ...]],
        runner: OperationRunner,
        connections: dict[int, ControlConnection],
        watch: ConnectionWatch,
    ) -> None:
        """`connections`: on rank 0 to all other ranks, elsewhere to rank 0 only."""
        self._rank = rank
        self._hosts = hosts
        self._timeline = timeline
        self.process_sets = process_sets
        self._connections = connections
        self._watch = watch
        self._by_file = {connection.fileno(): peer for peer, connection in connections.items()}

        self._lock = threading.Lock()
        self._queue = SubmissionQueue(settings.cycle_time_s)
        self._in_flight = InFlight(self._lock)
        self._is_stopping = False

        self._stopping = Stopping(rank, connections, self._close)
        self._negotiation: Negotiation
        if rank == 0:
            self._negotiation = Rank0Negotiation(
                hosts,
                settings,
                process_sets,
                connections,
                timeline,
                runner,
                is_closed=lambda: bool(self._in_flight.closed),
            )
        else:
            self._negotiation = OtherRankNegotiation(connections[0], settings.cache_capacity, runner)
        self._responses = ResponseRunner(
            f"rank {rank} ({hosts[rank]})", self._in_flight, runner, timeline, on_failure=self._end_after_failure
        )
        self._seat = DriverSeat(self._lock, self._by_file)
        # Last: the thread uses all of the above at once.
        self._thread = threading.Thread(target=self._run, name="megaclass.hvd", daemon=True)
        self._thread.start()

    @property
    def closed(self) -> str:
        """Why no operation is possible any more; empty while operations are possible."""
        return self._in_flight.closed

    # -- any thread -----------------------------------------------------------------------------------------------

    def submit(self, operation: Operation, *, is_urgent: bool) -> None:
        """Queues the operation. `is_urgent`: the caller waits for it next, so it is announced without delay."""
        queue = self._queue
        with self._lock:
            self._in_flight.add(operation)
            queue.operations.append(operation)
            queue.num_bytes += operation.request.terms.num_bytes
            # The caller of an urgent operation drives next, or wakes the driver, inside wait(). Any other operation wakes the
            # driver only if it is the first one: the driver then looks at the queue until it is announced.
            if is_urgent:
                queue.is_urgent = True
            elif len(queue.operations) == 1 and not queue.num_together:
                self._seat.wake_driver()

    def submit_join(self, operation: Operation) -> None:
        """Announces, after everything in the queue, that this rank has no more data. The caller waits for it next."""
        with self._lock:
            # No wake: the caller waits for it next, and drives.
            self._in_flight.add_join(operation)
            self._queue.wants_join = True

    @contextmanager
    def together(self, *, is_awaited: bool) -> Iterator[None]:
        """Announces the operations that are submitted inside the block when it ends, without waiting for more.

        `is_awaited`: the caller waits for them next and drives, so that no other thread is woken.
        """
        with self._lock:
            self._queue.num_together += 1
        try:
            yield
        finally:
            with self._lock:
                self._queue.num_together -= 1
                self._queue.hurry()
                if self._queue.operations and not is_awaited:
                    self._seat.wake_driver()

    def call_when_done(self, operation: Operation, call: Callable[[], None]) -> None:
        """Calls `call` once the operation is done, or now if it is. The driver calls it, so that it must not wait."""
        self._in_flight.call_when_done(operation, call)

    def wait(self, operation: Operation) -> None:
        """Returns when the operation is done; raises HorovodInternalError if it failed."""
        while not operation.is_done:
            with self._lock:
                if operation.is_done:
                    break
                # Everything before this operation goes with it: the other ranks may wait for any of that.
                self._queue.hurry()
                is_driver = self._seat.take()
                if not is_driver:
                    self._in_flight.add_waiter(operation)
            if is_driver:
                self._drive_until_done(operation)
            else:
                assert operation.waiter is not None
                operation.waiter.acquire()
                # Several threads may wait for one operation: each lets the next one through.
                operation.waiter.release()
        if operation.error:
            raise HorovodInternalError(operation.error)

    def _drive_until_done(self, operation: Operation) -> None:
        """Drives on the waiting thread; the controller's own thread sleeps meanwhile."""
        try:
            # The caller's thread may be in inference mode, in which tensors of the script could not be written in place.
            with self._seat.driving, torch.inference_mode(False), torch.no_grad():
                # is_over without is_done does not last: _run() fails every operation that is left when it ends.
                while not operation.is_done and not self._stopping.is_over:
                    self._step()
                    if operation.is_done or self._stopping.is_over:
                        break
                    self._seat.sleep_as_waiting_thread(self._sleep_s())
        except BaseException as error:
            # KeyboardInterrupt may have hit in the middle of a step: the state of the negotiation cannot be trusted any more.
            self._close(f"{SHUT_DOWN} A wait on rank {self._rank} was interrupted: {error!r}.")
            raise
        finally:
            with self._lock:
                # A lease leaves messages unread for a moment, which is allowed only while no rank can wait for this one.
                is_idle = not (self._in_flight or self._queue.wants_join or self._is_stopping or self._stopping.is_over)
                # Rank 0 must keep answering process sets that it is not a member of: it leaves no message unread.
                is_needed = self._rank == 0 and len(self.process_sets) > 1
                self._seat.release(may_lease=is_idle and not is_needed)

    def stop(self) -> None:
        """Ends the controllers of all ranks and returns when no rank uses the process groups any more."""
        with self._lock:
            self._is_stopping = True
            self._seat.wake_all()
        # Not without limit: an operation may wait for a rank that is gone until the transport's own timeout.
        self._thread.join(_DRAIN_S)
        # A thread that is stuck in an operation whose other ranks are gone still uses the files: they stay open.
        if not self._thread.is_alive():
            with self._lock:
                self._seat.close()

    # -- the driver -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Main function of the controller's own thread."""
        try:
            while not self._stopping.is_over:
                if not self._seat.own_turn(self._sleep_s, lambda: bool(self._queue.operations)):
                    continue
                with self._seat.driving, torch.no_grad():
                    if not self._stopping.is_over:
                        self._step()
        except BaseException as error:
            _log.exception("the controller of rank %d ended", self._rank)
            self._close(f"{SHUT_DOWN} The controller of rank {self._rank} ended: {error!r}.")
        finally:
            with self._seat.driving:
                self._stopping.is_over = True
                self._close(self._stopping.reason or SHUT_DOWN)
                for connection in self._connections.values():
                    connection.close()

    def _step(self) -> None:
        """Does everything that is due now."""
        # Receive before sending: an answer that has arrived may finish what the caller waits for.
        for file in self._seat.readable():
            self._receive_from(self._by_file[file])
        self._send_queue_if_due()
        self._check_stalls()
        if self._is_stopping and not self._stopping.reason:
            self._stopping.announce(SHUT_DOWN)

    def _sleep_s(self) -> float | None:
        """Returns the time until something is due; None: nothing is, so the driver sleeps until it is woken."""
        now = time.monotonic()
        with self._lock:
            look = self._queue.next_look(now)
        deadline = min((due for due in (look, self._negotiation.next_check()) if due is not None), default=float("inf"))
        return None if deadline == float("inf") else max(0.0, deadline - now)

    def _send_queue_if_due(self) -> None:
        with self._lock:
            if self._in_flight.closed:
                return
            operations = self._queue.take_if_due(time.monotonic())
            joins = self._queue.take_join()
        # Outside the lock: encoding and sending take long, and other threads submit meanwhile.
        if operations:
            self._timeline.mark_cycle()
            self._responses.run(self._negotiation.announce(operations))
        if joins:
            self._responses.run(self._negotiation.announce_join())

    def _receive_from(self, peer: int) -> None:
        connection = self._connections[peer]
        for kind, content, payload in connection.receive():
            if kind in STOP_KINDS:
                self._stopping.receive(peer, kind, content)
            else:
                # At once, not after the last message: what follows may depend on what this one runs, as on a new process set.
                self._responses.run(self._negotiation.receive(peer, kind, content, payload))
        if not connection.is_open and not self._stopping.is_over:
            # Its file would stay readable and keep the driver awake.
            self._seat.forget(connection.fileno())
            self._stopping.on_lost(peer, self._explained(f"Rank {peer} ({self._hosts[peer]}) is gone."))

    def _check_stalls(self) -> None:
        """Warns of operations that some ranks have not announced, or ends the job because of them."""
        if (due := self._negotiation.next_check()) is None:
            return
        now = time.monotonic()
        if now < due:
            return
        agreed, warning, reason = self._negotiation.check(now)
        self._responses.run(agreed)
        if warning:
            _log.warning(warning)
        if reason and not self._stopping.reason:
            _log.error(reason)
            self._stopping.announce(reason)

    # -- the end --------------------------------------------------------------------------------------------------

    def _end_after_failure(self, error: str) -> None:
        self._stopping.announce(self._explained(error))

    def _explained(self, what: str) -> str:
        """Adds the lost connection, if that is the cause."""
        return " ".join(filter(None, (what, self._watch.reason, SHUT_DOWN)))

    def _close(self, reason: str) -> None:
        """Fails all open operations, and all later ones, with the reason of the first call."""
        with self._lock:
            # Together: an operation that came between the two would stay in the queue, and the driver would never sleep.
            self._in_flight.close(reason)
            self._queue.clear()
        self._in_flight.fail_all()
