"""The duties of rank 0 for all ranks: it answers their announcements, and ends the job when one of them asks for it.

    any rank                                           rank 0
    REQUESTS: a list of requests, or its hash ----->   coordinator.announce()
                                                       all members have announced it:
    runs them  <----- RESPONSES to a hash or a list    answers all ranks

    STOP: the reason ------------------------------>   the first reason counts
    fails everything   <----------------------- STOP
    DRAINED: it uses no process group any more ---->   all have answered, or are lost:
    ends       <--------------------------------- END

A rank destroys its process groups after END only: a peer that still runs an operation would fail in a way that hides the
reason. Rank 0 is a client of itself, by calls instead of messages. Only its engine thread calls this class, so no field needs
a lock.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from horovod.common.settings import Settings
from horovod.engine.control_connection import MessageKind
from horovod.engine.coordinator import Answer, Coordinator, Cycle
from horovod.engine.messages import Receiver
from horovod.engine.timeline import Timeline

if TYPE_CHECKING:
    from horovod.transport.executor import Executor

_log = logging.getLogger("megaclass.horovod")


class Rank0:
    """The part of rank 0 that serves all ranks."""

    def __init__(
        self,
        hosts: Sequence[str],
        settings: Settings,
        process_sets: Mapping[int, tuple[int, ...]],
        sends: Mapping[int, Callable[..., None]],
        is_closed: Callable[[], bool],
        timeline: Timeline,
        runner: "Executor",
    ) -> None:
        """sends: sends a message to each rank; rank 0 itself comes last, because it runs operations in the call.

        is_closed: whether rank 0 can run no operation.
        """
        self._sends = sends
        self._is_closed = is_closed
        self._timeline = timeline
        self._runner = runner
        self._coordinator = Coordinator(hosts, settings, process_sets)
        self._receivers = {rank: Receiver() for rank in sends}
        self._drained: set[int] = set()
        self.reason = ""
        """Why the job ends; empty while it runs."""
        self.next_check = self._coordinator.next_check

    def receive(self, peer: int, kind: int, content: bytes = b"", payload: bytes = b"") -> None:
        """Handles a message of a rank."""
        match kind:
            case MessageKind.REQUESTS:
                digest, packed = self._receivers[peer].read(content)
                cycle = Cycle(digest, packed, time.monotonic(), payload)
                # The list is read only if a trace is written.
                if self._timeline.is_active:
                    for request in cycle.requests():
                        self._timeline.rank_ready(request.full_name, request.kind, peer)
                self._answer(self._coordinator.announce(peer, cycle))
            case MessageKind.STOP:
                self.stop(content.decode(errors="replace"))
            case MessageKind.DRAINED:
                self._drain(peer)

    def check_if_due(self, now: float) -> None:
        """Fails operations that can never be complete; warns of those that wait for long, or ends the job because of them."""
        if now < self.next_check():
            return
        answer, warning, reason = self._coordinator.check(now)
        self._answer(answer)
        if warning:
            _log.warning(warning)
        if reason and not self.reason:
            _log.error(reason)
            self.stop(reason)

    def _answer(self, answer: Answer | None) -> None:
        # Once rank 0 is closed it cannot take part, so the others must not start.
        if answer is None or self._is_closed():
            return
        payload, payloads = b"", [cycle.payload for cycle in answer.cycles]
        # The lists are equal, so either all ranks have sent their tensors or none has.
        if payloads and all(payloads) and len(answer.responses) == 1 and not answer.responses[0].error:
            payload = self._runner.add_payloads(answer.responses[0].requests[0], payloads)
        self._send_all(MessageKind.RESPONSES, answer.message, payload)

    def stop(self, reason: str) -> None:
        """Asks all ranks to end. The first reason is the cause; all later ones follow from it."""
        if not self.reason:
            self.reason = reason
            self._send_all(MessageKind.STOP, reason.encode())

    def on_lost(self, peer: int, reason: str) -> None:
        """Handles the end of the connection to a rank."""
        self.stop(reason)
        # A rank that is gone uses no process group.
        self._drain(peer)

    def _drain(self, peer: int) -> None:
        self._drained.add(peer)
        if len(self._drained) == len(self._sends):
            self._send_all(MessageKind.END)

    def _send_all(self, kind: MessageKind, content: bytes = b"", payload: bytes = b"") -> None:
        for send in self._sends.values():
            send(kind, content, payload)
