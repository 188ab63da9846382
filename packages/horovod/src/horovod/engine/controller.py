"""The controller of one process: it agrees with the other ranks on operations, and has them run.

    any thread           submit(operation) appends it to the queue; wait(operation) waits until it is done
    the engine thread    announces the queue to rank 0 (at once if a thread waits, else after the cycle time), receives
                         responses, runs them in the order received, and wakes the threads that wait for them
    on rank 0            it also keeps the table of announced operations (rank0/) and sends the responses

Its parts, each in a file of its own:

    submission_queue.py   what was submitted, and when to announce it        any thread, under _lock
    operation.py          what is not done yet, and its waiting threads      any thread, under _lock
    negotiation.py        what is sent to and received from other ranks      the engine thread
    stopping.py           how the controllers of all ranks end together      the engine thread

All ranks receive the same responses in the same order, so each rank meets the others in each operation.

The engine thread sleeps until a submission, a message or a deadline wakes it, so an idle job costs nothing.

State:

    field          written by                                     read by                   guarded by
    _queue         submit(), together(), wait(), engine thread    engine thread             _lock
    _in_flight     submit(), wait(), engine thread                submit(), engine thread   _lock; the engine thread also
                                                                                            reads without it
    closed         _close()                                       all threads               set once, under _lock
    _is_stopping   stop()                                         engine thread             set once, under _lock
    _drain_s       fail()                                         stop()                    set once
    _wake          (constant)                                     any thread writes to it   _lock; _is_over: it is closed
    _stopping, _negotiation, _events               engine thread                            (only that thread)
    process_sets   engine thread (by the executor)                all threads               entries are added and removed
                                                                                            whole
"""

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from horovod.common.exceptions import SHUT_DOWN, HorovodInternalError
from horovod.common.settings import Settings
from horovod.engine.control_connection import ControlConnection
from horovod.engine.messages import JOIN, Response
from horovod.engine.negotiation import Agreed, Negotiation, OtherRankNegotiation, Rank0Negotiation
from horovod.engine.operation import InFlight, Operation, OperationRunner
from horovod.engine.stopping import STOP_KINDS, Stopping
from horovod.engine.submission_queue import SubmissionQueue
from horovod.engine.timeline import Timeline
from megaclass_launch.rendezvous.connection_watch import ConnectionWatch

_log = logging.getLogger("megaclass.horovod")
_DRAIN_S = 30.0
_STUCK_S = 1.0
"""The same for an engine thread that was found stuck: a survivor must not wait longer for the next generation."""


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
        self._runner = runner
        self.process_sets = process_sets
        self._connections = connections
        self._watch = watch
        self._by_file = {connection.fileno(): peer for peer, connection in connections.items()}

        self._lock = threading.Lock()
        self._queue = SubmissionQueue(settings.cycle_time_s)
        self._in_flight = InFlight(self._lock)
        self._is_stopping = False
        self._drain_s = _DRAIN_S

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
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_over = False
        self._readable: list[int] = []
        self._events = select.epoll()
        for file in (self._wake, *self._by_file):
            self._events.register(file, select.EPOLLIN)
        # Last: the thread uses all of the above at once.
        self._thread = threading.Thread(target=self._run, name="megaclass.horovod", daemon=True)
        self._thread.start()

    @property
    def closed(self) -> str:
        """Why no operation is possible any more; empty while operations are possible."""
        return self._in_flight.closed

    # -- any thread -----------------------------------------------------------------------------------------------

    def submit(self, operation: Operation) -> None:
        """Queues the operation. A thread that waits for it, or the end of together(), has it announced without delay."""
        queue = self._queue
        with self._lock:
            self._in_flight.add(operation)
            queue.operations.append(operation)
            queue.num_bytes += operation.request.terms.num_bytes
            # The first one wakes the engine thread, which then looks at the queue until it is announced.
            if len(queue.operations) == 1 and not queue.num_together:
                self._wake_up()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Announces the operations that are submitted inside the block when it ends, without waiting for more."""
        with self._lock:
            self._queue.num_together += 1
        try:
            yield
        finally:
            with self._lock:
                self._queue.num_together -= 1
                self._queue.hurry()
                if self._queue.operations:
                    self._wake_up()

    def call_when_done(self, operation: Operation, call: Callable[[], None]) -> None:
        """Calls `call` once the operation is done, or now if it is. The engine thread calls it, so it must not wait."""
        self._in_flight.call_when_done(operation, call)

    def wait(self, operation: Operation) -> None:
        """Returns when the operation is done; raises HorovodInternalError if it failed.

        A wait that is interrupted leaves the operation in flight.
        """
        if not operation.is_done:
            with self._lock:
                # Everything before this operation goes with it: the other ranks may wait for any of that.
                if self._queue.hurry():
                    self._wake_up()
                waiter = self._in_flight.waiter(operation)
            if waiter is not None:
                waiter.acquire()
                # Several threads may wait for one operation: each lets the next one through.
                waiter.release()
        if operation.error:
            raise HorovodInternalError(operation.error)

    def _wake_up(self) -> None:
        """Wakes the engine thread; the caller holds _lock."""
        if not self._is_over:
            os.eventfd_write(self._wake, 1)

    def fail(self, reason: str) -> None:
        """Fails all open and later operations, also if the engine thread is stuck in one of them."""
        self._drain_s = _STUCK_S
        self._close(f"{reason} {SHUT_DOWN}")

    def stop(self) -> None:
        """Ends the controllers of all ranks and returns when no rank uses the process groups any more."""
        with self._lock:
            self._is_stopping = True
            self._wake_up()
        # Not without limit: an operation may wait for a rank that is gone until the transport's own timeout.
        self._thread.join(self._drain_s)

    # -- the engine thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Main function of the engine thread."""
        try:
            with torch.no_grad():
                while not self._stopping.is_over:
                    self._sleep()
                    self._step()
        except BaseException as error:
            _log.exception("the controller of rank %d ended", self._rank)
            self._close(f"{SHUT_DOWN} The controller of rank {self._rank} ended: {error!r}.")
        finally:
            self._stopping.is_over = True
            self._close(self._stopping.reason or SHUT_DOWN)
            with self._lock:
                self._is_over = True
                os.close(self._wake)
            self._events.close()
            for connection in self._connections.values():
                connection.close()

    def _sleep(self) -> None:
        """Sleeps until something is due, a message arrives or another thread wakes this one."""
        for file, _ in self._events.poll(self._sleep_s()):
            if file == self._wake:
                os.eventfd_read(file)
            else:
                self._readable.append(file)

    def _step(self) -> None:
        """Does everything that is due now."""
        # Receive before sending: an answer that has arrived may finish what the caller waits for.
        readable, self._readable = self._readable, []
        for file in readable:
            self._receive_from(self._by_file[file])
        self._send_queue_if_due()
        self._check_stalls()
        if self._is_stopping and not self._stopping.reason:
            self._stopping.announce(SHUT_DOWN)

    def _sleep_s(self) -> float | None:
        """Returns the time until something is due; None: nothing is."""
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
        # Outside the lock: encoding and sending take long, and other threads submit meanwhile.
        if operations:
            self._timeline.mark_cycle()
            self._run_agreed(self._negotiation.announce(operations))

    def _receive_from(self, peer: int) -> None:
        connection = self._connections[peer]
        for kind, content, payload in connection.receive():
            if kind in STOP_KINDS:
                self._stopping.receive(peer, kind, content)
            else:
                # At once, not after the last message: what follows may depend on what this one runs, as on a new process set.
                self._run_agreed(self._negotiation.receive(peer, kind, content, payload))
        if not connection.is_open and not self._stopping.is_over:
            # Its file would stay readable and keep this thread awake.
            self._events.unregister(connection.fileno())
            self._stopping.on_lost(peer, self._explained(f"Rank {peer} ({self._hosts[peer]}) is gone."))

    def _check_stalls(self) -> None:
        """Warns of operations that some ranks have not announced, or ends the job because of them."""
        if (due := self._negotiation.next_check()) is None:
            return
        now = time.monotonic()
        if now < due:
            return
        agreed, warning, reason = self._negotiation.check(now)
        self._run_agreed(agreed)
        if warning:
            _log.warning(warning)
        if reason and not self._stopping.reason:
            _log.error(reason)
            self._stopping.announce(reason)

    def _run_agreed(self, agreed: Agreed) -> None:
        """Runs this rank's part of the agreed operations in their order, until the controller is closed."""
        for response in agreed.responses:
            # Asked before each one: a failure, or the end of the job, closes the controller between two of them.
            if self._in_flight.closed:
                return
            if response.last_joined >= 0:
                self._timeline.negotiated([JOIN.full_name])
                self._in_flight.finish_join(response.last_joined)
            # An operation of a set that this rank is not a member of does not concern it.
            elif self._rank in self.process_sets.get(response.process_set, ()):
                self._run_one(response, agreed.payload)

    def _run_one(self, response: Response, payload: bytes) -> None:
        # By key, not by position: this rank may have submitted them in another order, or joined (None).
        operations = [self._in_flight.get(request.key) for request in response.requests]
        # A thousand names are formed only if a trace is written.
        names = [request.full_name for request in response.requests] if self._timeline.is_active else []
        self._timeline.negotiated(names)
        if response.error:
            # The ranks disagree about this operation only: all of them fail it, and the job continues.
            self._in_flight.finish(operations, response.error)
            return
        try:
            with self._timeline.phase(names, response.requests[0].kind.upper()):
                if payload:
                    # Rank 0 has already added the tensors up, as part of the negotiation, and nothing is exchanged.
                    with self._timeline.phase(names, "RANK_0_ALLREDUCE"):
                        self._runner.deliver_payload(operations, payload)
                else:
                    self._runner.perform(response, operations)
        except Exception as caught:  # whatever the backend raises, the waiting threads must learn of it
            name, host = response.requests[0].full_name, self._hosts[self._rank]
            error = f"{name} on rank {self._rank} ({host}) failed: {caught}"
            self._in_flight.finish(operations, error)
            # The ranks are no longer in step: no further operation can be trusted.
            self._stopping.announce(self._explained(f"{error}."))
            return
        self._in_flight.finish(operations, "")

    # -- the end --------------------------------------------------------------------------------------------------

    def _explained(self, what: str) -> str:
        """Adds the lost connection, if that is the cause."""
        return " ".join(filter(None, (what, self._watch.reason, SHUT_DOWN)))

    def _close(self, reason: str) -> None:
        """Fails all open operations, and all later ones, with the reason of the first call."""
        with self._lock:
            # Together: an operation that came between the two would stay in the queue, and the engine thread would never sleep.
            self._in_flight.close(reason)
            self._queue.clear()
        self._in_flight.fail_all()
