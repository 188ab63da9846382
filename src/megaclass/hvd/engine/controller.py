"""What brings ranks together in every process, and runs what they agreed on.

    any thread      submit(operation) puts it into the queue
    the driver      announces the queue to rank 0 (at once if somebody waits, else after the cycle time), receives
                    responses, runs them in the order received, tells those who wait
    rank 0's        also keeps the table of who waits for whom (coordinator.py) and sends the responses

The driver is a thread of the controller's own, or, while somebody waits for an operation, the first one who does: a
blocking call then costs no change of threads. Nothing polls: the driver sleeps until a submission, a message or a
deadline wakes it, and an idle job costs nothing.
"""

import logging
import os
import select
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from megaclass.distributed.network.connection_watch import ConnectionWatch
from megaclass.hvd.engine import control_connection as links
from megaclass.hvd.engine.control_connection import Link
from megaclass.hvd.engine.coordinator import Coordinator
from megaclass.hvd.engine.messages import Answer, Key, Receiver, Request, Response, Sender, digest_of_all
from megaclass.hvd.engine.timeline import Timeline
from megaclass.hvd.exceptions import DUPLICATE_NAME, SHUT_DOWN, HorovodInternalError
from megaclass.hvd.settings import Settings

_log = logging.getLogger("megaclass.hvd")
_DRAIN_S = 30.0
# How long the controller's own thread leaves messages to threads that wait one after the other, and how often it looks
# whether the one that drives is still there.
_LEASE_S = 0.005
_WATCH_S = 0.05
# How many cycle times operations that nobody waits for are held back while more of them keep coming: those that are much to
# send, and those that are little, which lose by being cut, as each rank cuts elsewhere.
_MOST_CYCLES = 5
_MOST_CYCLES_OF_LITTLE = 40
_WORTH_STARTING_BYTES = 1024 * 1024


@dataclass(slots=True, eq=False)
class Operation:
    """A submitted operation, until its result is fetched."""

    request: Request
    inputs: list[Any] = field(default_factory=list)
    """Tensors to send."""
    outputs: list[Any] = field(default_factory=list)
    """Where results go; empty where their shape is known only after negotiation."""
    result: Any = None
    """What synchronize() returns."""
    sizes: tuple[tuple[int, ...], ...] = ()
    """Rows of every member, for each tensor of an allgather."""
    error: str = ""
    is_done: bool = False
    waiter: Any = None
    """A held lock, once somebody waits."""
    ready: Any = None
    """CUDA event after which the inputs may be read, and later the one after which the outputs may."""


class Work(Protocol):
    """What a controller has done by others, who know tensors."""

    def perform(self, response: Response, operations: list[Operation | None]) -> None: ...

    def small_payload(self, operations: list[Operation]) -> bytes:
        """The tensors of a cycle, if they are small enough to travel with its announcement; else nothing."""

    def add_payloads(self, request: Request, payloads: list[bytes]) -> bytes:
        """The payloads of all ranks combined."""

    def deliver_payload(self, operations: list[Operation | None], payload: bytes) -> None:
        """Puts the combined payload where results go."""


class Controller:
    """One a process, from init() to shutdown()."""

    def __init__(
        self,
        rank: int,
        hosts: list[str],
        settings: Settings,
        timeline: Timeline,
        process_sets: dict[int, tuple[int, ...]],
        work: "Work",
        peers: dict[int, Link],
        watch: ConnectionWatch,
    ) -> None:
        self._rank = rank
        self._watch = watch
        self._hosts = hosts
        self._settings = settings
        self._timeline = timeline
        self._work = work
        # Rank 0: links to all others. The others: one link, to rank 0.
        self._peers = peers
        self.process_sets = process_sets
        self._coordinator = Coordinator(hosts, settings, process_sets) if rank == 0 else None
        self._senders = {peer: Sender(settings.cache_capacity) for peer in peers}
        self._receivers = {peer: Receiver() for peer in peers}
        self._by_file = {link.fileno(): peer for peer, link in peers.items()}

        # Guards what submitting threads and the driver share.
        self._lock = threading.Lock()
        self._queue: list[Operation] = []
        self._queued_since = self._queued_last = 0.0
        self._queued_bytes = 0
        self._is_urgent = False
        self._num_together = 0
        self._in_flight: dict[Key, Operation] = {}
        self._join: Operation | None = None
        self._wants_join = False
        self._has_waiting_driver = False
        self._thread_listens = True
        self._lease_until = 0.0
        self._is_stopping = False
        self.closed = ""
        """Why no operation is possible any more; empty while they are."""

        # Held by whoever drives; guards all the rest.
        self._driving = threading.RLock()
        self._stop_reason = ""
        self._drained: set[int] = set()
        self._is_over = False
        self._network = select.epoll()
        for link in peers.values():
            self._network.register(link.fileno(), select.EPOLLIN)
        self._wake_thread, self._thread_events = self._waking()
        self._wake_waiting, self._waiting_events = self._waking()
        self._thread = threading.Thread(target=self._run, name="megaclass.hvd", daemon=True)
        self._thread.start()

    def _waking(self) -> tuple[int, select.epoll]:
        """A file that wakes a driver when written to, and what that driver sleeps on."""
        wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        events = select.epoll()
        events.register(wake, select.EPOLLIN)
        events.register(self._network.fileno(), select.EPOLLIN)
        return wake, events

    # -- any thread -----------------------------------------------------------------------------------------------

    def submit(self, operation: Operation, *, is_urgent: bool) -> None:
        """Queues the operation. `is_urgent`: the caller waits for it next, so it does not wait for company."""
        with self._lock:
            if self.closed:
                raise HorovodInternalError(self.closed)
            key = operation.request.key
            if key in self._in_flight:
                raise ValueError(DUPLICATE_NAME)
            self._in_flight[key] = operation
            self._queued_last = time.monotonic()
            if not self._queue:
                self._queued_since = self._queued_last
            self._queue.append(operation)
            self._queued_bytes += operation.request.terms.num_bytes
            self._is_urgent |= is_urgent
            # An urgent one needs nobody: its caller drives, or finds a driver to wake.
            if len(self._queue) == 1 and not is_urgent and not self._num_together:
                self._wake_driver()

    @contextmanager
    def together(self, *, is_awaited: bool) -> Iterator[None]:
        """What is submitted within is announced when it ends, without waiting for more.

        `is_awaited`: the caller waits for it next and announces it; nobody else is woken.
        """
        with self._lock:
            self._num_together += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_together -= 1
                self._is_urgent |= bool(self._queue)
                if self._queue and not is_awaited:
                    self._wake_driver()

    def _wake_driver(self) -> None:
        self._poke(self._wake_waiting if self._has_waiting_driver else self._wake_thread)

    def submit_join(self, operation: Operation) -> None:
        with self._lock:
            if self.closed:
                raise HorovodInternalError(self.closed)
            self._join, self._wants_join = operation, True

    def wait(self, operation: Operation) -> None:
        """Until the operation is done; raises what went wrong with it."""
        while not operation.is_done:
            with self._lock:
                if operation.is_done:
                    break
                self._is_urgent |= bool(self._queue)
                is_driver = not self._has_waiting_driver
                if is_driver:
                    self._has_waiting_driver = True
                    if self._thread_listens:
                        self._thread_listens = False
                        self._thread_events.modify(self._network.fileno(), 0)
                else:
                    self._poke(self._wake_waiting)
                    if operation.waiter is None:
                        operation.waiter = threading.Lock()
                        operation.waiter.acquire()
            if is_driver:
                self._drive_until_done(operation)
            else:
                operation.waiter.acquire()
                # Several threads may wait for one operation: each lets the next one through.
                operation.waiter.release()
        if operation.error:
            raise HorovodInternalError(operation.error)

    def _drive_until_done(self, operation: Operation) -> None:
        """The waiting thread does what else the controller's own would; that one sleeps on meanwhile."""
        try:
            with self._driving, torch.inference_mode(False), torch.no_grad():
                while not operation.is_done and not self._is_over:
                    self._step()
                    if operation.is_done or self._is_over:
                        break
                    for file, _ in self._waiting_events.poll(self._sleep_s()):
                        if file == self._wake_waiting:
                            os.eventfd_read(file)
        except BaseException as error:
            self._close(f"{SHUT_DOWN} A wait on rank {self._rank} was interrupted: {error!r}.")
            raise
        finally:
            self._stop_driving()

    def _stop_driving(self) -> None:
        with self._lock:
            self._has_waiting_driver = False
            is_idle = not (self._in_flight or self._wants_join or self._is_stopping or self._is_over)
            # Who has just waited will often wait again at once. Nothing of ours is open: the thread may sleep on for a
            # moment, unless rank 0 is needed by sets that it is no part of.
            if is_idle and (self._rank != 0 or len(self.process_sets) == 1):
                self._lease_until = time.monotonic() + _LEASE_S
                return
            self._poke(self._wake_thread)
        self._listen()

    def _listen(self) -> None:
        """Lets messages wake the controller's own thread, unless somebody who waits reads them."""
        with self._lock:
            if not self._has_waiting_driver and not self._thread_listens and self._wake_thread >= 0:
                self._thread_listens = True
                self._thread_events.modify(self._network.fileno(), select.EPOLLIN)

    def stop(self) -> None:
        """Ends the controllers of all ranks and returns when no rank uses the process groups any more."""
        with self._lock:
            self._is_stopping = True
            self._poke(self._wake_thread)
            self._poke(self._wake_waiting)
        self._thread.join(_DRAIN_S)
        if self._thread.is_alive():
            return  # stuck in an operation whose other ranks are gone; its files go with the process
        with self._lock:
            for events in (self._thread_events, self._waiting_events, self._network):
                events.close()
            for wake in (self._wake_thread, self._wake_waiting):
                os.close(wake)
            self._wake_thread = self._wake_waiting = -1

    def _poke(self, wake: int) -> None:
        """Wakes a driver. With the lock held: nobody writes to a file that was closed."""
        if wake >= 0:
            os.eventfd_write(wake, 1)

    # -- the driver -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """The controller's own thread."""
        try:
            while not self._is_over:
                for file, _ in self._thread_events.poll(self._thread_sleep_s()):
                    if file == self._wake_thread:
                        os.eventfd_read(file)
                if self._has_waiting_driver or self._lease_left_s() > 0:
                    continue
                self._listen()
                with self._driving, torch.no_grad():
                    if not self._is_over:
                        self._step()
        except BaseException as error:
            _log.exception("the controller of rank %d ended", self._rank)
            self._close(f"{SHUT_DOWN} The controller of rank {self._rank} ended: {error!r}.")
        finally:
            with self._driving:
                self._is_over = True
                self._close(self._stop_reason or SHUT_DOWN)
                for link in self._peers.values():
                    link.close()

    def _thread_sleep_s(self) -> float | None:
        if self._has_waiting_driver:
            return _WATCH_S
        return self._lease_left_s() or self._sleep_s()

    def _lease_left_s(self) -> float:
        """How long messages are still left to a thread that may wait again; 0 once we listen, or have work."""
        if self._thread_listens or self._queue:
            return 0.0
        return max(0.0, self._lease_until - time.monotonic())

    def _step(self) -> None:
        """Whatever is due now."""
        for file, _ in self._network.poll(0):
            self._hear(self._by_file[file])
        self._send_queue_if_due()
        self._look_at_waiting()
        if self._is_stopping and not self._stop_reason:
            self._announce_stop(SHUT_DOWN)

    def _next_check(self) -> float | None:
        return self._coordinator.next_check() if self._coordinator is not None else None

    def _sleep_s(self) -> float | None:
        """How long nothing is due; None: until somebody wakes us."""
        deadlines = []
        with self._lock:
            if self._queue:
                if self._is_urgent:
                    return 0.0
                deadlines.append(self._due_at())
        if (check := self._next_check()) is not None:
            deadlines.append(check)
        if not deadlines or min(deadlines) == float("inf"):
            return None
        return max(0.0, min(deadlines) - time.monotonic())

    def _due_at(self) -> float:
        """One cycle time after the last submission, but not long after the first: who comes in a row goes together."""
        cycle_s = self._settings.cycle_time_s
        # To begin early gains nothing where all that is queued travels in less time than it took to submit.
        most_cycles = _MOST_CYCLES if self._queued_bytes >= _WORTH_STARTING_BYTES else _MOST_CYCLES_OF_LITTLE
        return min(self._queued_last + cycle_s, self._queued_since + most_cycles * cycle_s)

    def _send_queue_if_due(self) -> None:
        now = time.monotonic()
        with self._lock:
            if self.closed:
                return
            is_due = self._is_urgent or now >= self._due_at()
            operations: list[Operation] = []
            if self._queue and is_due:
                operations, self._queue, self._is_urgent = self._queue, [], False
                self._queued_bytes = 0
            joins, self._wants_join = self._wants_join and not self._queue, self._wants_join and bool(self._queue)
        if operations:
            self._timeline.mark_cycle()
            requests = [operation.request for operation in operations]
            digest = digest_of_all(requests)
            repeats = all(request.terms.repeats for request in requests)
            payload = self._work.small_payload(operations) if len(self._hosts) > 1 else b""
            if self._coordinator is not None:
                self._announced(0, digest, requests, payload)
            else:
                message = self._senders[0].pack(requests, digest, repeats=repeats)
                self._peers[0].send(links.REQUESTS, message, payload)
        if joins and self._coordinator is not None:
            self._answer(self._coordinator.join(0))
        elif joins:
            self._peers[0].send(links.JOIN)

    def _hear(self, peer: int) -> None:
        link = self._peers[peer]
        for about, content, payload in link.receive():
            if about == links.REQUESTS:
                self._announced(peer, *self._receivers[peer].unpack(content), payload)
            elif about == links.RESPONSES:
                self._perform(self._receivers[peer].unpack(content)[1], payload)
            elif about == links.JOIN:
                assert self._coordinator is not None
                self._answer(self._coordinator.join(peer))
            elif about == links.STOP:
                self._stopped(content.decode(errors="replace"))
            elif about == links.DRAINED:
                self._drained.add(peer)
                self._end_if_drained()
            elif about == links.END:
                self._is_over = True
        if not link.is_open and not self._is_over:
            self._network.unregister(link.fileno())
            self._lost(peer)

    def _lost(self, peer: int) -> None:
        if self._rank != 0:
            # Without rank 0 there is nobody to drain with.
            self._close(self._explained(f"Rank 0 ({self._hosts[0]}) is gone."))
            self._is_over = True
            return
        self._drained.add(peer)
        if self._stop_reason:
            self._end_if_drained()
        else:
            self._announce_stop(self._explained(f"Rank {peer} ({self._hosts[peer]}) is gone."))

    def _explained(self, what: str) -> str:
        """With the connection that was lost, where that is why."""
        return " ".join(filter(None, (what, self._watch.reason, SHUT_DOWN)))

    # -- rank 0 ---------------------------------------------------------------------------------------------------

    def _announced(self, rank: int, digest: bytes, requests: list[Request], payload: bytes) -> None:
        assert self._coordinator is not None
        if self._timeline.is_active:
            for request in requests:
                self._timeline.rank_ready(request.full_name, request.kind, rank)
        self._answer(self._coordinator.announce(rank, digest, requests, time.monotonic(), payload))

    def _look_at_waiting(self) -> None:
        if self._coordinator is None or (due := self._next_check()) is None:
            return
        now = time.monotonic()
        if now < due:
            return
        answer, warning, reason = self._coordinator.check(now)
        self._answer(answer)
        if warning:
            _log.warning(warning)
        if reason and not self._stop_reason:
            _log.error(reason)
            self._announce_stop(reason)

    def _answer(self, answer: Answer | None) -> None:
        """Sends everybody what concerns them, then does rank 0's own part."""
        if answer is None or self.closed:
            return
        payload = b""
        if answer.payloads:
            payload = self._work.add_payloads(answer.responses[0].requests[0], answer.payloads)
        for peer, link in self._peers.items():
            theirs = self._of_rank(answer, peer)
            if theirs.responses:
                message = self._senders[peer].pack(theirs.responses, theirs.digest, repeats=theirs.repeats)
                link.send(links.RESPONSES, message, payload)
        self._perform(self._of_rank(answer, 0).responses, payload)

    def _of_rank(self, answer: Answer, rank: int) -> Answer:
        if answer.is_global:
            return answer
        sets = self.process_sets
        return Answer([response for response in answer.responses if rank in sets.get(response.process_set, ())])

    # -- running --------------------------------------------------------------------------------------------------

    def _perform(self, responses: list[Response], payload: bytes) -> None:
        for response in responses:
            if self.closed:
                return
            if response.last_joined >= 0:
                self._finish([self._join], "", response.last_joined)
                self._join = None
                continue
            operations = [self._in_flight.get(request.key) for request in response.requests]
            names = [request.full_name for request in response.requests] if self._timeline.is_active else []
            self._timeline.negotiated(names)
            error = response.error
            if not error:
                try:
                    with self._timeline.phase(names, response.requests[0].kind.upper()):
                        if payload:
                            # Rank 0 has already added the tensors up, as part of the negotiation.
                            with self._timeline.phase(names, "RANK_0_ALLREDUCE"):
                                self._work.deliver_payload(operations, payload)
                        else:
                            self._work.perform(response, operations)
                except Exception as caught:  # whatever the backend raises, those who wait must hear of it
                    where = f"rank {self._rank} ({self._hosts[self._rank]})"
                    error = f"{response.requests[0].full_name} on {where} failed: {caught}"
                    self._finish(operations, error)
                    # The ranks are no longer at the same place: no further operation can be trusted.
                    self._announce_stop(self._explained(f"{error}."))
                    continue
            self._finish(operations, error)

    def _finish(self, operations: list[Operation | None], error: str, result: Any = None) -> None:
        with self._lock:
            for operation in operations:
                if operation is None:
                    continue
                self._in_flight.pop(operation.request.key, None)
                operation.error = error
                if result is not None:
                    operation.result = result
                operation.is_done = True
                if operation.waiter is not None:
                    operation.waiter.release()

    # -- the end --------------------------------------------------------------------------------------------------

    def _announce_stop(self, reason: str) -> None:
        """Tells all ranks, through rank 0, that it is over; each answers when it no longer uses the process groups."""
        if self._stop_reason:
            return
        self._stop_reason = reason
        if self._rank != 0:
            self._peers[0].send(links.STOP, reason.encode())
            return
        for link in self._peers.values():
            link.send(links.STOP, reason.encode())
        self._close(reason)
        self._end_if_drained()

    def _stopped(self, reason: str) -> None:
        if self._rank == 0:
            self._announce_stop(reason)
            return
        self._stop_reason = reason
        self._close(reason)
        self._peers[0].send(links.DRAINED)

    def _end_if_drained(self) -> None:
        if self._stop_reason and len(self._drained) == len(self._peers):
            for link in self._peers.values():
                link.send(links.END)
            self._is_over = True

    def _close(self, reason: str) -> None:
        """Fails everything that is still open."""
        with self._lock:
            self.closed = self.closed or reason
            self._queue.clear()
            self._queued_bytes = 0
            operations = [*self._in_flight.values(), self._join]
            self._join = None
        self._finish(operations, self.closed)
