"""The controller of one process: it agrees with the other ranks on operations, and has them run.

    any thread           submit(operation) appends it to the queue; wait(operation) waits until it is done
    the engine thread    announces the queue to rank 0 (at once if a thread waits, else after five cycle times),
                         receives responses, runs them in the order received, and wakes the threads that wait for them
    on rank 0            it also serves the announcements of all ranks (rank0.py)

All ranks receive the same responses in the same order, so each rank meets the others in each operation. The engine thread
sleeps until a submission, a message or a deadline wakes it, so an idle job costs nothing.

State:

    field          written by                                     read by                   guarded by
    _queue         submit(), together(), wait(), engine thread    engine thread             _lock
    _operations    submit(), _finish()                            any thread                _lock; the engine thread also
                                                                                            reads without it
    closed         _close()                                       all threads               set once, under _lock
    _is_stopping   stop()                                         engine thread             set once, under _lock
    _drain_s       fail()                                         stop()                    set once
    _wake          (constant)                                     any thread writes to it   _lock; _is_over: it is closed
    process_sets   engine thread (by the executor)                all threads               entries are added and removed
                                                                                            whole
    all others     engine thread                                                            (only that thread)
"""

import logging
import math
import os
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch

from horovod.common.exceptions import DUPLICATE_NAME, SHUT_DOWN, HorovodInternalError
from horovod.common.settings import Settings
from horovod.engine.control_connection import ControlConnection, MessageKind
from horovod.engine.messages import (
    JOIN,
    Key,
    Request,
    Response,
    Sender,
    distinct_terms,
    packed,
    short_hash,
    unpacked_responses,
)
from horovod.engine.operation import Operation
from horovod.engine.rank0 import Rank0
from horovod.engine.submission_queue import SubmissionQueue
from horovod.engine.timeline import Timeline
from megaclass_launch.rendezvous.connection_watch import ConnectionWatch

# Only the type: the transport is built on the engine, not the other way round.
if TYPE_CHECKING:
    from horovod.transport.executor import Executor

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
        runner: "Executor",
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
        # Operations that are not done yet.
        self._operations: dict[Key, Operation] = {}
        self.closed = ""
        """Why no operation is possible any more; empty while operations are possible."""
        self._is_stopping = False
        self._drain_s = _DRAIN_S

        self._sender = Sender(settings.cache_capacity)
        # The operations of each list that was announced and may be answered as a whole, by the list's hash.
        self._announced: dict[bytes, list[Operation]] = {}
        # Why the job ends, as far as this rank knows; True once no rank uses the process groups any more.
        self._reason = ""
        self._has_ended = False
        # True once this rank could not run an operation: the ranks are no longer in step.
        self._has_failed = False
        self._rank0: Rank0 | None = None
        if rank == 0:
            sends: dict[int, Callable[..., None]] = {peer: each.send for peer, each in connections.items()}
            sends[0] = self._receive
            self._rank0 = Rank0(hosts, settings, process_sets, sends, lambda: bool(self.closed), timeline, runner)
            self._send_to_rank0: Callable[..., None] = partial(self._rank0.receive, 0)
        else:
            self._send_to_rank0 = connections[0].send

        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_over = False
        self._events = select.epoll()
        for file in (self._wake, *self._by_file):
            self._events.register(file, select.EPOLLIN)
        # Last: the thread uses all of the above at once.
        self._thread = threading.Thread(target=self._run, name="megaclass.horovod", daemon=True)
        self._thread.start()

    # -- any thread -----------------------------------------------------------------------------------------------

    def submit(self, operation: Operation) -> None:
        """Queues the operation. A thread that waits for it, or the end of together(), has it announced without delay."""
        queue = self._queue
        with self._lock:
            if self.closed:
                raise HorovodInternalError(self.closed)
            # Two operations of one name could not be told apart by the other ranks. Horovod refuses this with the same text.
            if self._operations.setdefault(operation.request.key, operation) is not operation:
                raise ValueError(DUPLICATE_NAME)
            queue.operations.append(operation)
            # The first one wakes the engine thread, which sleeps until the queue is to be announced.
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
        with self._lock:
            if not operation.is_done:
                operation.on_done = call
                return
        call()

    def wait(self, operation: Operation) -> None:
        """Returns when the operation is done; raises HorovodInternalError if it failed.

        A wait that is interrupted leaves the operation in flight.
        """
        if not operation.is_done:
            with self._lock:
                # Everything before this operation goes with it: the other ranks may wait for any of that.
                if self._queue.hurry():
                    self._wake_up()
                if operation.waiter is None and not operation.is_done:
                    operation.waiter = threading.Event()
            if operation.waiter is not None:
                operation.waiter.wait()
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

    def _finish(self, operations: Sequence[Operation | None], error: str) -> None:
        """Marks the operations as done, and lets the threads that wait for them through.

        The engine thread finishes operations, and so does a thread that closes the controller, possibly while the engine
        thread still runs one of them: the first to finish an operation decides its result.
        """
        calls: list[Callable[[], None]] = []
        with self._lock:
            for operation in operations:
                if operation is None or operation.is_done:
                    continue
                self._operations.pop(operation.request.key, None)
                # In this order: readers look at `is_done` first, without the lock.
                operation.error = error
                operation.is_done = True
                if operation.waiter is not None:
                    operation.waiter.set()
                if operation.on_done is not None:
                    calls.append(operation.on_done)
        # Without the lock: what is called may submit the next operation.
        for call in calls:
            call()

    def _close(self, reason: str) -> None:
        """Fails all open operations, and all later ones, with the reason of the first call: later ones follow from it."""
        with self._lock:
            # Together: an operation that came between the two would stay in the queue, and the engine thread would never sleep.
            self.closed = self.closed or reason
            self._queue.clear()
            operations = list(self._operations.values())
        self._finish(operations, self.closed)

    # -- the engine thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Main function of the engine thread."""
        try:
            with torch.no_grad():
                while not self._has_ended:
                    readable = self._events.poll(self._sleep_s())
                    # Receive before sending: an answer that has arrived may finish what the caller waits for.
                    for file, _ in readable:
                        if file == self._wake:
                            os.eventfd_read(file)
                        else:
                            self._receive_from(self._by_file[file])
                    self._send_queue_if_due()
                    if self._rank0 is not None:
                        self._rank0.check_if_due(time.monotonic())
                    if self._is_stopping:
                        self._ask_to_stop(SHUT_DOWN)
        except BaseException as error:
            _log.exception("the controller of rank %d ended", self._rank)
            self._close(f"{SHUT_DOWN} The controller of rank {self._rank} ended: {error!r}.")
        finally:
            self._close(self._reason or SHUT_DOWN)
            with self._lock:
                self._is_over = True
                os.close(self._wake)
            self._events.close()
            for connection in self._connections.values():
                connection.close()

    def _sleep_s(self) -> float | None:
        """Returns the time until something is due; None if nothing is."""
        now = time.monotonic()
        with self._lock:
            due = self._queue.due_at(now)
        if self._rank0 is not None:
            due = min(due, self._rank0.next_check())
        return None if due == math.inf else max(0.0, due - now)

    def _send_queue_if_due(self) -> None:
        with self._lock:
            if self.closed:
                return
            operations = self._queue.take_if_due(time.monotonic())
        # Outside the lock: encoding and sending take long, and other threads submit meanwhile.
        if not operations:
            return
        self._timeline.mark_cycle()
        requests = [operation.request for operation in operations]
        content = packed(requests)
        digest = short_hash(content)
        # If one operation of a list was answered by itself, so are the others.
        self._announced = {key: old for key, old in self._announced.items() if not old[0].is_done}
        self._announced[digest] = operations
        repeats = all(terms.repeats for terms in distinct_terms(requests))
        # This rank does not know what the others announce. If the lists differ, the payload is not used, which is cheap.
        payload = self._runner.small_payload(operations, len(self._hosts))
        self._send_to_rank0(MessageKind.REQUESTS, self._sender.message(content, digest, repeats=repeats), payload)

    def _requests_of(self, digest: bytes) -> list[Request]:
        return [operation.request for operation in self._announced[digest]]

    def _receive_from(self, peer: int) -> None:
        connection = self._connections[peer]
        # One after the other: what follows may depend on what a message runs, as on a new process set.
        for message in connection.receive():
            if self._rank0 is not None:
                self._rank0.receive(peer, *message)
            else:
                self._receive(*message)
        if not connection.is_open and not self._has_ended:
            # Its file would stay readable and keep this thread awake.
            self._events.unregister(connection.fileno())
            reason = self._explained(f"Rank {peer} ({self._hosts[peer]}) is gone.")
            if self._rank0 is not None:
                self._rank0.on_lost(peer, reason)
            else:
                # Without rank 0 the ranks cannot drain.
                self._close(reason)
                self._has_ended = True

    def _receive(self, kind: int, content: bytes = b"", payload: bytes = b"") -> None:
        """Handles a message of rank 0."""
        match kind:
            case MessageKind.RESPONSES:
                self._run_agreed(unpacked_responses(content, self._requests_of), payload)
            case MessageKind.STOP:
                self._reason = content.decode(errors="replace")
                self._close(self._reason)
                # Only now: no operation of this rank is under way any more, and none can start.
                self._send_to_rank0(MessageKind.DRAINED)
            case MessageKind.END:
                self._has_ended = True

    def _ask_to_stop(self, reason: str) -> None:
        """Asks all ranks, through rank 0, to end. Open operations may still be answered until rank 0 sends STOP back."""
        if not self._reason:
            self._reason = reason
            self._send_to_rank0(MessageKind.STOP, reason.encode())

    def _run_agreed(self, responses: list[Response], payload: bytes) -> None:
        """Runs this rank's part of the agreed operations in their order, until the controller is closed."""
        for response in responses:
            # Asked before each one: the end of the job closes the controller between two of them. After a failure, the next
            # operation of this rank would meet the failed one of the others.
            if self.closed or self._has_failed:
                return
            if response.last_joined >= 0:
                self._timeline.negotiated([JOIN.full_name])
                join = self._operations.get(JOIN.key)
                if join is not None:
                    join.result = response.last_joined
                self._finish([join], "")
            # An operation of a set that this rank is not a member of does not concern it.
            elif self._rank in self.process_sets.get(response.process_set, ()):
                self._run_one(response, payload)

    def _run_one(self, response: Response, payload: bytes) -> None:
        # By key, not by position: this rank may have submitted them in another order, or joined (None).
        operations = [self._operations.get(request.key) for request in response.requests]
        # A thousand names are formed only if a trace is written.
        names = [request.full_name for request in response.requests] if self._timeline.is_active else []
        self._timeline.negotiated(names)
        if response.error:
            # The ranks disagree about this operation only: all of them fail it, and the job continues.
            self._finish(operations, response.error)
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
            self._finish(operations, error)
            self._has_failed = True
            self._ask_to_stop(self._explained(f"{error}."))
            return
        self._finish(operations, "")

    def _explained(self, what: str) -> str:
        """Adds the lost connection, if that is the cause."""
        return " ".join(filter(None, (what, self._watch.reason, SHUT_DOWN)))
