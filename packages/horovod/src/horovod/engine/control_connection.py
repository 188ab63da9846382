"""TCP connections between ranks: how they are made and authenticated, and whole messages over them. No torch here.

    listener   AuthenticatedListener(address, secret)    its `endpoint` goes to the callers through the job's store
               .accept_ranks(ranks)                      returns one socket per rank
    caller     connect(endpoint, secret, rank=...)       returns a socket

ControlConnection wraps such a socket for the messages of the negotiation.
"""

import contextlib
import hmac
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Collection, Iterator
from enum import IntEnum
from typing import NamedTuple

from megaclass_launch.errors import LaunchError

# Every message starts with the length of its content, the length of its payload and its kind.
_HEADER = struct.Struct("<IIB")
_NUMBER_BYTES = _MAC_BYTES = 32
_PROOF = struct.Struct(f"<{_NUMBER_BYTES}sI{_MAC_BYTES}s")
# Time for a caller to prove itself; ranks need milliseconds.
_PROOF_S = 5.0
_MAX_UNPROVEN = 128
_RETRY_S = 0.05
# An engine thread that sends does not read meanwhile. Buffers of this size take the usual messages of both sides, so
# two engine threads that send to each other do not wait for each other.
_SOCKET_BYTES = 1024 * 1024
_MAX_MESSAGE_BYTES = 256 * 1024 * 1024


class MessageKind(IntEnum):
    """The kinds of control messages, and who sends them."""

    REQUESTS = 0
    """Any rank to rank 0: operations it wants to run."""
    STOP = 1
    """Any rank to rank 0, and rank 0 to all: the job ends, with the reason as content."""
    DRAINED = 2
    """Any rank to rank 0, after STOP: it no longer uses the process groups."""
    RESPONSES = 3
    """Rank 0 to all: operations that the members of their process sets run next."""
    END = 4
    """Rank 0 to all: every rank is drained."""


class ControlConnection:
    """A connection between a rank and rank 0 that carries whole messages. Only the engine thread uses it."""

    def __init__(self, connection: socket.socket) -> None:
        # Messages are small and each is awaited: the kernel must not hold one back to join it with the next.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, buffer, _SOCKET_BYTES)
        connection.setblocking(True)
        self._socket = connection
        # Bytes of messages that are not complete yet.
        self._received = bytearray()
        self.is_open = True

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, kind: int, content: bytes = b"", payload: bytes = b"") -> None:
        """Sends one message. An error is ignored: the engine thread learns of a lost connection by reading from it."""
        with contextlib.suppress(OSError):
            self._socket.sendall(_HEADER.pack(len(content), len(payload), kind) + content + payload)

    def receive(self) -> Iterator[tuple[int, bytes, bytes]]:
        """Yields the messages that are complete by now; call it when the connection is readable.

        At the end of the connection, `is_open` becomes False.
        """
        try:
            # One read per call: a rank that sends without pause must not keep the engine thread from the other ranks.
            data = self._socket.recv(1 << 18)
        except OSError:
            data = b""
        self.is_open = bool(data)
        self._received += data
        while len(self._received) >= _HEADER.size:
            length, payload_length, kind = _HEADER.unpack_from(self._received)
            middle = _HEADER.size + length
            end = middle + payload_length
            # No rank sends so much: the stream is damaged, and what follows cannot be trusted.
            if end > _MAX_MESSAGE_BYTES:
                self.is_open = False
                return
            # The rest comes with a later read; the header is parsed again then, which is cheap.
            if len(self._received) < end:
                return
            content = bytes(self._received[_HEADER.size : middle])
            payload = bytes(self._received[middle:end])
            del self._received[:end]
            yield kind, content, payload

    def close(self) -> None:
        _shut_down(self._socket)
        self._socket.close()


class Endpoint(NamedTuple):
    """The address of a listening rank, and the token from which callers derive the key of their proof."""

    address: str
    port: int
    token: str
    """Random. In a job without a secret, it still keeps out strangers who cannot read the job's store."""

    def key(self, secret: bytes) -> bytes:
        return hmac.digest(secret, self.token.encode(), "sha256")


class AuthenticatedListener:
    """A socket that listens on one address and accepts only ranks that know the job's secret.

    Both sides prove that they know it before anything else is read, by an HMAC over two random numbers, one per side:

        listener -> caller   number_L
        caller -> listener   number_C, rank, HMAC(key, "caller", number_L, number_C, rank)
        listener -> caller   HMAC(key, "listener", number_L, number_C, rank)

    Each caller has a thread and a deadline. At most `_MAX_UNPROVEN` callers are connected without having proved themselves;
    beyond that the oldest one is dropped, and a dropped rank calls again.
    """

    def __init__(self, address: str, secret: bytes) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._listener.bind((address, 0))
        except OSError as error:
            self._listener.close()
            raise LaunchError(
                f"A rank on {socket.gethostname()} cannot listen at {address}: {error.strerror}. Set "
                f"HOROVOD_GLOO_IFACE to the interface through which the hosts reach each other."
            ) from error
        # All ranks of a large job may call at the same moment.
        self._listener.listen(1024)
        host, port = self._listener.getsockname()[:2]
        self.endpoint = Endpoint(host, port, secrets.token_hex(16))
        self._key = self.endpoint.key(secret)
        # Guards all fields below; notified when a rank arrives.
        self._change = threading.Condition()
        self._arrived: dict[int, socket.socket] = {}
        # Dicts keep their order, so the first caller is the one that has had the most time.
        self._unproven: dict[socket.socket, None] = {}
        self._is_closed = False
        _listeners.add(self)

    def close(self) -> None:
        """Ends accept_ranks(), from another thread."""
        with self._change:
            self._is_closed = True
            self._change.notify()

    def accept_ranks(self, ranks: Collection[int], timeout_s: float) -> dict[int, socket.socket]:
        """Returns one connection per rank; LaunchError if a rank does not connect in time, or after close()."""
        threading.Thread(target=self._accept, args=(ranks,), name="horovod.accept", daemon=True).start()
        with self._change:
            try:
                self._change.wait_for(lambda: self._is_closed or len(self._arrived) == len(ranks), timeout_s)
            finally:
                # From here on no caller is let in.
                self._is_closed = True
                missing = sorted(set(ranks) - set(self._arrived))
                for connection in (self._listener, *self._unproven, *(self._arrived.values() if missing else ())):
                    _shut_down(connection)
        if missing:
            raise LaunchError(
                f"Ranks {missing} did not connect to {self.endpoint.address} port {self.endpoint.port} within "
                f"{timeout_s:g} s."
            )
        return self._arrived

    def _accept(self, ranks: Collection[int]) -> None:
        """Main function of the thread that accepts callers."""
        with self._listener:
            while not self._is_closed:
                # An error is that of one caller, or the end.
                with contextlib.suppress(OSError):
                    caller, _ = self._listener.accept()
                    with self._change:
                        self._unproven[caller] = None
                        if len(self._unproven) > _MAX_UNPROVEN:
                            oldest = next(iter(self._unproven))
                            del self._unproven[oldest]
                            _shut_down(oldest)
                    threading.Thread(
                        target=self._admit, args=(caller, ranks), name="horovod.admit", daemon=True
                    ).start()

    def _admit(self, caller: socket.socket, ranks: Collection[int]) -> None:
        """Main function of a caller's thread: lets it in if it proves that it is one of the ranks."""
        with contextlib.suppress(OSError):
            ends_at, ours = time.monotonic() + _PROOF_S, secrets.token_bytes(_NUMBER_BYTES)
            caller.settimeout(_PROOF_S)
            caller.sendall(ours)
            theirs, rank, mac = _PROOF.unpack(_receive_exactly(caller, _PROOF.size, ends_at))
            # Compared in constant time. Nothing but fixed-size fields was parsed before this line.
            is_genuine = hmac.compare_digest(mac, _proof(self._key, b"caller", ours, theirs, rank))
            with self._change:
                # A second connection of a rank that has arrived is refused: it could only take over the place of the first.
                if is_genuine and rank in ranks and rank not in self._arrived and not self._is_closed:
                    caller.sendall(_proof(self._key, b"listener", ours, theirs, rank))
                    caller.settimeout(None)
                    self._arrived[rank] = caller
                    self._unproven.pop(caller, None)
                    self._change.notify()
                    return
        with self._change:
            self._unproven.pop(caller, None)
        caller.close()


_listeners: "weakref.WeakSet[AuthenticatedListener]" = weakref.WeakSet()


def close_listeners() -> None:
    """Ends every accept_ranks() of this process: a rank for which one waits is gone. May be called from any thread."""
    for listener in list(_listeners):
        listener.close()


def _shut_down(connection: socket.socket) -> None:
    """Ends a connection, or a listener, in which another thread may be waiting."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _proof(key: bytes, who: bytes, listeners: bytes, callers: bytes, rank: int) -> bytes:
    # The role is part of the text, so a stranger cannot send a side its own proof back.
    return hmac.digest(key, b"%s %d " % (who, rank) + listeners + callers, "sha256")


def connect(endpoint: Endpoint, secret: bytes, *, rank: int, to: str, timeout_s: float) -> socket.socket:
    """Connects to a rank that proves that it knows the secret, and that learns this rank's number.

    `to`: the name of that rank, for error messages.
    """
    gives_up_at = time.monotonic() + timeout_s
    while True:
        try:
            connection = socket.create_connection((endpoint.address, endpoint.port), timeout=timeout_s)
        except OSError as error:
            raise LaunchError(
                f"Rank {rank} on {socket.gethostname()} cannot reach {to} at {endpoint.address} port {endpoint.port}: {error}. "
                f"Set HOROVOD_GLOO_IFACE to the interface through which the hosts reach each other."
            ) from error
        try:
            _prove(connection, endpoint.key(secret), rank, max(gives_up_at, time.monotonic() + 0.1))
        except OSError as error:
            connection.close()
            if time.monotonic() < gives_up_at:
                # Strangers pushed this caller out of the listener. The random pause keeps ranks that were dropped together
                # from calling again together.
                time.sleep(_RETRY_S * (1 + secrets.randbelow(4)))
                continue
            raise LaunchError(
                f"Rank {rank} on {socket.gethostname()} reaches {endpoint.address} port {endpoint.port}, but {to} does not "
                f"answer there as a rank of this job within {timeout_s:g} s: {error}."
            ) from error
        connection.settimeout(None)
        return connection


def _prove(connection: socket.socket, key: bytes, rank: int, ends_at: float) -> None:
    """Proves to the listener that this side knows the key, and raises OSError unless the listener proves the same."""
    theirs, ours = _receive_exactly(connection, _NUMBER_BYTES, ends_at), secrets.token_bytes(_NUMBER_BYTES)
    connection.sendall(_PROOF.pack(ours, rank, _proof(key, b"caller", theirs, ours, rank)))
    mac = _receive_exactly(connection, _MAC_BYTES, ends_at)
    if not hmac.compare_digest(mac, _proof(key, b"listener", theirs, ours, rank)):
        raise OSError("its proof is wrong")


def _receive_exactly(connection: socket.socket, count: int, ends_at: float) -> bytes:
    data = b""
    while len(data) < count:
        # Also of a sender that sends a byte now and then.
        connection.settimeout(max(0.001, ends_at - time.monotonic()))
        part = connection.recv(count - len(data))
        if not part:
            raise OSError("the connection was closed")
        data += part
    return data
