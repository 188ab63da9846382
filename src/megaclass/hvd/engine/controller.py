"""The controller of one process: it agrees with the other ranks on operations, and has them run.

    any thread   submit(operation) appends it to the queue
    the driver   announces the queue to rank 0 (at once if a thread waits, else after the cycle time), receives responses,
                 runs them in the order received, and wakes the threads that wait for them
    on rank 0    the driver also keeps the table of announced operations (coordinator.py) and sends the responses

driver_seat.py decides which thread is the driver. The driver sleeps until a submission, a message or a deadline wakes it, so
that an idle job costs nothing.

stopping.py ends the controllers of all ranks together.

State; "driver" stands for the thread that holds `_seat.driving`:

    field                               written by                      read by           guarded by
    _queue (submission_queue.py)        submit(), together(), driver    driver            _lock
    _num_together                       together()                      submit()          _lock
    _in_flight (in_flight.py)           submit(), driver                submit(), driver  _lock
    _wants_join                         submit_join(), driver           driver            _lock
    _is_stopping                        stop()                          driver            set once, under _lock
    closed                              _close()                        all threads       set once, under _lock
    _stopping (stopping.py)             driver                          driver            _seat.driving; is_over: see _run
    _senders, _receivers, _coordinator  driver                          driver            _seat.driving
    _announced_lists                    driver (not on rank 0)          driver            _seat.driving
    process_sets                        driver (by the executor)        all threads       entries are added and removed whole
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from megaclass.distributed.network.connection_watch import ConnectionWatch
from megaclass.hvd.engine.control_connection import ControlConnection, MessageKind
from megaclass.hvd.engine.coordinator import Coordinator
from megaclass.hvd.engine.driver_seat import DriverSeat
from megaclass.hvd.engine.in_flight import InFlight
from megaclass.hvd.engine.messages import (
    Agreement,
    Answer,
    Receiver,
    Request,
    Response,
    Sender,
    digest_of_all,
    distinct_terms,
)
from megaclass.hvd.engine.operation import Operation, OperationRunner
from megaclass.hvd.engine.stopping import Stopping
from megaclass.hvd.engine.submission_queue import AnnouncedLists, SubmissionQueue
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
        self._settings = settings
        self._timeline = timeline
        self.process_sets = process_sets
        self._runner = runner
        self._connections = connections
        self._watch = watch
        self._coordinator = Coordinator(hosts, settings, process_sets) if rank == 0 else None
        self._senders = {peer: Sender(settings.cache_capacity) for peer in connections}
        self._receivers = {peer: Receiver() for peer in connections}
        self._announced_lists = AnnouncedLists()
        self._by_file = {connection.fileno(): peer for peer, connection in connections.items()}

        self._lock = threading.Lock()
        self._queue = SubmissionQueue(settings.cycle_time_s)
        self._num_together = 0
        self._in_flight = InFlight(self._lock)
        self._wants_join = False
        self._is_stopping = False
        self.closed = ""
        """Why no operation is possible any more; empty while operations are possible."""

        self._stopping = Stopping(rank, connections, self._close)
        self._seat = DriverSeat(self._lock, self._by_file)
        self._thread = threading.Thread(target=self._run, name="megaclass.hvd", daemon=True)
        self._thread.start()

    # -- any thread -----------------------------------------------------------------------------------------------

    def submit(self, operation: Operation, *, is_urgent: bool) -> None:
        """Queues the operation. `is_urgent`: the caller waits for it next, so it is announced without delay."""
        queue = self._queue
        with self._lock:
            if self.closed:
                raise HorovodInternalError(self.closed)
            self._in_flight.add(operation)
            queue.operations.append(operation)
            queue.num_bytes += operation.request.terms.num_bytes
            # The caller of an urgent operation drives next, or wakes the driver, inside wait(). Any other operation wakes the
            # driver only if it is the first one: the driver then looks at the queue until it is announced.
            if is_urgent:
                queue.is_urgent = True
            elif len(queue.operations) == 1 and not self._num_together:
                self._seat.wake_driver()

    def submit_join(self, operation: Operation) -> None:
        """Announces, after everything in the queue, that this rank has no more data. The caller waits for it next."""
        with self._lock:
            if self.closed:
                raise HorovodInternalError(self.closed)
            # No wake: the caller waits for it next, and drives.
            self._in_flight.add_join(operation)
            self._wants_join = True

    @contextmanager
    def together(self, *, is_awaited: bool) -> Iterator[None]:
        """Announces the operations that are submitted inside the block when it ends, without waiting for more.

        `is_awaited`: the caller waits for them next and drives, so that no other thread is woken.
        """
        with self._lock:
            self._num_together += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_together -= 1
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
                is_idle = not (self._in_flight or self._wants_join or self._is_stopping or self._stopping.is_over)
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

    def _next_check(self) -> float | None:
        return self._coordinator.next_check() if self._coordinator is not None else None

    def _sleep_s(self) -> float | None:
        """Returns the time until something is due; None: nothing is, so the driver sleeps until it is woken."""
        now = time.monotonic()
        with self._lock:
            look = self._queue.next_look(now)
        deadline = min((due for due in (look, self._next_check()) if due is not None), default=float("inf"))
        return None if deadline == float("inf") else max(0.0, deadline - now)

    def _send_queue_if_due(self) -> None:
        with self._lock:
            if self.closed:
                return
            operations = self._queue.take_if_due(time.monotonic())
            # A join is announced after everything that was submitted before it.
            joins = self._wants_join and not self._queue.operations
            if joins:
                self._wants_join = False
        # Outside the lock: encoding and sending take long, and other threads submit meanwhile.
        if operations:
            self._announce(operations)
        # Rank 0 announces to itself by a call; all others by a message to it.
        if joins and self._coordinator is not None:
            self._answer(self._coordinator.join(0))
        elif joins:
            self._connections[0].send(MessageKind.JOIN)

    def _announce(self, operations: list[Operation]) -> None:
        self._timeline.mark_cycle()
        requests = [operation.request for operation in operations]
        digest = digest_of_all(requests)
        # A rank does not know what the others announce. If the lists differ, the payload is not used, which is cheap.
        payload = self._runner.small_payload(operations) if len(self._hosts) > 1 else b""
        if self._coordinator is not None:
            self._announced(0, digest, requests, payload)
        else:
            repeats = all(terms.repeats for terms in distinct_terms(requests))
            if not repeats:
                self._announced_lists.keep(digest, operations)
            message = self._senders[0].pack(requests, digest, repeats=repeats)
            self._connections[0].send(MessageKind.REQUESTS, message, payload)

    def _receive_from(self, peer: int) -> None:
        connection = self._connections[peer]
        for kind, content, payload in connection.receive():
            match kind:
                case MessageKind.REQUESTS:
                    self._announced(peer, *self._receivers[peer].unpack(content), payload)
                case MessageKind.RESPONSES:
                    self._perform(self._receivers[peer].unpack(content)[1], payload)
                case MessageKind.AGREEMENT:
                    self._perform(Agreement.responses(content, self._announced_lists.take), payload)
                case MessageKind.JOIN:
                    assert self._coordinator is not None
                    self._answer(self._coordinator.join(peer))
                case MessageKind.STOP:
                    self._stopping.on_stop(content.decode(errors="replace"))
                case MessageKind.DRAINED:
                    self._stopping.on_drained(peer)
                case MessageKind.END:
                    self._stopping.is_over = True
        if not connection.is_open and not self._stopping.is_over:
            # Its file would stay readable and keep the driver awake.
            self._seat.forget(connection.fileno())
            self._stopping.on_lost(peer, self._explained(f"Rank {peer} ({self._hosts[peer]}) is gone."))

    def _explained(self, what: str) -> str:
        """Adds the lost connection, if that is the cause."""
        return " ".join(filter(None, (what, self._watch.reason, SHUT_DOWN)))

    # -- rank 0 ---------------------------------------------------------------------------------------------------

    def _announced(self, rank: int, digest: bytes, requests: list[Request], payload: bytes) -> None:
        """A rank has announced one cycle of requests."""
        assert self._coordinator is not None
        if self._timeline.is_active:
            for request in requests:
                self._timeline.rank_ready(request.full_name, request.kind, rank)
        self._answer(self._coordinator.announce(rank, digest, requests, time.monotonic(), payload))

    def _check_stalls(self) -> None:
        """Warns of operations that some ranks have not announced, or ends the job because of them."""
        if self._coordinator is None or (due := self._next_check()) is None:
            return
        now = time.monotonic()
        if now < due:
            return
        answer, warning, reason = self._coordinator.check(now)
        self._answer(answer)
        if warning:
            _log.warning(warning)
        if reason and not self._stopping.reason:
            _log.error(reason)
            self._stopping.announce(reason)

    def _answer(self, answer: Answer | None) -> None:
        """Sends every rank the responses that concern it, then runs rank 0's own part."""
        if answer is None or self.closed:
            return
        payload = b""
        if answer.payloads:
            payload = self._runner.add_payloads(answer.responses[0].requests[0], answer.payloads)
        if answer.agreement is not None and not answer.repeats:
            # The list will not come again, so that there is nothing to remember by its hash.
            message = answer.agreement.to_bytes()
            for connection in self._connections.values():
                connection.send(MessageKind.AGREEMENT, message, payload)
            self._perform(answer.responses, payload)
            return
        # The others start before rank 0, which has just as much to do itself.
        for peer, connection in self._connections.items():
            theirs = answer.for_rank(peer, self.process_sets)
            if theirs.responses:
                message = self._senders[peer].pack(theirs.responses, theirs.digest, repeats=theirs.repeats)
                connection.send(MessageKind.RESPONSES, message, payload)
        self._perform(answer.for_rank(0, self.process_sets).responses, payload)

    # -- running --------------------------------------------------------------------------------------------------

    def _perform(self, responses: list[Response], payload: bytes) -> None:
        for response in responses:
            if self.closed:
                return
            if response.last_joined >= 0:
                self._in_flight.finish_join(response.last_joined)
                continue
            # By key, not by position: this rank may have submitted them in another order, or joined (None).
            operations = [self._in_flight.get(request.key) for request in response.requests]
            names = [request.full_name for request in response.requests] if self._timeline.is_active else []
            self._timeline.negotiated(names)
            error = response.error
            if not error:
                try:
                    with self._timeline.phase(names, response.requests[0].kind.upper()):
                        # The payload is the result of the one response of this answer: nothing is exchanged.
                        if payload:
                            # Rank 0 has already added the tensors up, as part of the negotiation.
                            with self._timeline.phase(names, "RANK_0_ALLREDUCE"):
                                self._runner.deliver_payload(operations, payload)
                        else:
                            self._runner.perform(response, operations)
                except Exception as caught:  # whatever the backend raises, the waiting threads must learn of it
                    where = f"rank {self._rank} ({self._hosts[self._rank]})"
                    error = f"{response.requests[0].full_name} on {where} failed: {caught}"
                    self._in_flight.finish(operations, error)
                    # The ranks are no longer in step: no further operation can be trusted.
                    self._stopping.announce(self._explained(f"{error}."))
                    continue
            self._in_flight.finish(operations, error)

    def _close(self, reason: str) -> None:
        """Fails all open operations, and all later ones, with the reason of the first call."""
        with self._lock:
            # The first reason is the cause; later ones follow from it.
            self.closed = self.closed or reason
            self._queue.clear()
        self._in_flight.fail_all(self.closed)
