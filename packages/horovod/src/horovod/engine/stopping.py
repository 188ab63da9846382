"""The end of a job's controllers: STOP goes to all ranks, each answers DRAINED, then rank 0 sends END.

    rank 0                                         another rank
    announce(reason): STOP to all, close
                       <--------------------- STOP   announce(reason): asks rank 0 for the end
                       STOP --------------------->   close, DRAINED: it no longer uses the process groups
    all have answered  <------------------ DRAINED
    or are lost: END   ---------------------- END >  is_over

A rank destroys its process groups after `is_over` only: a peer that still runs an operation would fail in a way that hides the
reason. Only the engine thread calls this class, so that its fields need no lock.
"""

from collections.abc import Callable, Mapping

from horovod.engine.control_connection import ControlConnection, MessageKind

STOP_KINDS = (MessageKind.STOP, MessageKind.DRAINED, MessageKind.END)
"""The messages that Stopping.receive() handles."""


class Stopping:
    """This rank's part in ending the job."""

    def __init__(self, rank: int, connections: Mapping[int, ControlConnection], close: Callable[[str], None]) -> None:
        """`close`: fails all open and later operations of this rank with a reason."""
        self.reason = ""
        """Why the job ends; empty while it runs."""
        self.is_over = False
        """True once no rank uses the process groups any more, or this rank cannot learn whether they do."""
        self._rank = rank
        self._connections = connections
        self._close = close
        self._drained: set[int] = set()

    def announce(self, reason: str) -> None:
        """Asks all ranks, through rank 0, to stop."""
        # The first reason is the cause; all later ones follow from it.
        if self.reason:
            return
        self.reason = reason
        if self._rank != 0:
            # Open operations fail when rank 0 sends STOP back: until then, they may still be answered.
            self._connections[0].send(MessageKind.STOP, reason.encode())
            return
        for connection in self._connections.values():
            connection.send(MessageKind.STOP, reason.encode())
        self._close(reason)
        # A job of one rank, or one whose other ranks are all lost, has no answer to wait for.
        self._end_if_drained()

    def receive(self, peer: int, kind: int, content: bytes) -> None:
        """Handles a message of another rank about the end."""
        match kind:
            case MessageKind.STOP:
                self._on_stop(content.decode(errors="replace"))
            case MessageKind.DRAINED:
                self._drained.add(peer)
                self._end_if_drained()
            case MessageKind.END:
                self.is_over = True

    def _on_stop(self, reason: str) -> None:
        if self._rank == 0:
            self.announce(reason)
            return
        self.reason = reason
        self._close(reason)
        # Only now: no operation of this rank is under way any more, and none can start.
        self._connections[0].send(MessageKind.DRAINED)

    def on_lost(self, peer: int, reason: str) -> None:
        """Handles the end of the connection to a rank."""
        if self._rank != 0:
            # Without rank 0 the ranks cannot drain.
            self._close(reason)
            self.is_over = True
            return
        # A rank that is gone uses no process group.
        self._drained.add(peer)
        if self.reason:
            self._end_if_drained()
        else:
            self.announce(reason)

    def _end_if_drained(self) -> None:
        if self.reason and len(self._drained) == len(self._connections):
            for connection in self._connections.values():
                connection.send(MessageKind.END)
            self.is_over = True
