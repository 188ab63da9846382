"""Connections between ranks, over TCP: how they are made, and whole messages over them. No torch here."""

import contextlib
import hmac
import json
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from megaclass.errors import LaunchError

_LENGTH = struct.Struct("<IIB")
_NUMBER_BYTES = _MAC_BYTES = 32
_PROOF = struct.Struct(f"<{_NUMBER_BYTES}sI{_MAC_BYTES}s")
_PROOF_S = 5.0
"""For a caller to prove itself; ranks need milliseconds."""
_MAX_STRANGERS = 128
_TICK_S = 0.5
_RETRY_S = 0.05
_SOCKET_BYTES = 1024 * 1024
_MAX_MESSAGE_BYTES = 256 * 1024 * 1024

REQUESTS, JOIN, STOP, DRAINED, RESPONSES, END = range(6)
"""What a message is about."""


class Link:
    """A control connection, between a rank and rank 0: whole messages in, whole messages out."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, buffer, _SOCKET_BYTES)
        connection.setblocking(True)
        self._socket = connection
        self._received = bytearray()
        self.is_open = True

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, about: int, content: bytes = b"", payload: bytes = b"") -> None:
        """To a rank that is gone: nothing; the loop learns of its end by reading."""
        with contextlib.suppress(OSError):
            self._socket.sendall(_LENGTH.pack(len(content), len(payload), about) + content + payload)

    def receive(self) -> Iterator[tuple[int, bytes, bytes]]:
        """Messages that are complete by now; call it when the connection is readable. At its end `is_open` falls."""
        try:
            data = self._socket.recv(1 << 18)
        except OSError:
            data = b""
        self.is_open = bool(data)
        self._received += data
        while len(self._received) >= _LENGTH.size:
            length, payload_length, about = _LENGTH.unpack_from(self._received)
            middle = _LENGTH.size + length
            end = middle + payload_length
            if end > _MAX_MESSAGE_BYTES:
                self.is_open = False
                return
            if len(self._received) < end:
                return
            content = bytes(self._received[_LENGTH.size : middle])
            payload = bytes(self._received[middle:end])
            del self._received[:end]
            yield about, content, payload

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@dataclass(frozen=True)
class Door:
    """Where a rank listens, and with which key callers prove that they belong to the job."""

    address: str
    port: int
    token: str
    """Random. In jobs without a secret, strangers who cannot read the job's store are turned away for lack of it."""

    def to_json(self) -> str:
        return json.dumps([self.address, self.port, self.token])

    @staticmethod
    def from_json(text: bytes) -> "Door":
        address, port, token = json.loads(text)
        return Door(str(address), int(port), str(token))

    def key(self, secret: bytes) -> bytes:
        return hmac.digest(secret, self.token.encode(), "sha256")


class Reception:
    """A listening socket, bound to one address; only ranks that know the job's secret get in.

    Both sides prove it before anything else is read, by an HMAC over two random numbers, one from each side:

        listener -> caller   number_L
        caller -> listener   number_C, rank, HMAC(key, "caller", number_L, number_C, rank)
        listener -> caller   HMAC(key, "listener", number_L, number_C, rank)

    All callers are served at the same time by one thread, each has a deadline of its own, and at most
    `_MAX_STRANGERS` are connected without having proved themselves: beyond that the one that came first is dropped, and
    a rank that is hit calls again.
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
        self._listener.listen(1024)
        self._listener.setblocking(False)
        host, port = self._listener.getsockname()[:2]
        self.door = Door(host, port, secrets.token_hex(16))
        self._key = self.door.key(secret)
        self._guests: dict[socket.socket, _Guest] = {}
        self._is_closed = False

    def close(self) -> None:
        """Ends welcome(), from another thread."""
        self._is_closed = True

    def welcome(self, ranks: Collection[int], timeout_s: float) -> dict[int, socket.socket]:
        """Connections from these ranks. LaunchError when some do not come in time, or after close()."""
        gives_up_at = time.monotonic() + timeout_s
        arrived: dict[int, socket.socket] = {}
        with self._listener, selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            try:
                while len(arrived) < len(ranks):
                    left_s = gives_up_at - time.monotonic()
                    if left_s <= 0 or self._is_closed:
                        missing = sorted(set(ranks) - set(arrived))
                        raise LaunchError(
                            f"Ranks {missing} did not connect to {self.door.address} port {self.door.port} within "
                            f"{timeout_s:g} s."
                        )
                    for key, _ in selector.select(min(left_s, _TICK_S)):
                        if key.fileobj is self._listener:
                            self._let_in(selector)
                        elif key.fileobj in self._guests:
                            self._hear(self._guests[key.fileobj], ranks, arrived, selector)
                    self._drop_late(selector)
            except BaseException:
                for connection in arrived.values():
                    connection.close()
                raise
            finally:
                for guest in list(self._guests.values()):
                    self._drop(guest, selector)
        return arrived

    def _let_in(self, selector: selectors.BaseSelector) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            guest = _Guest(connection, time.monotonic() + _PROOF_S)
            if len(self._guests) >= _MAX_STRANGERS:
                self._drop(next(iter(self._guests.values())), selector)
            self._guests[connection] = guest
            connection.setblocking(False)
            selector.register(connection, selectors.EVENT_READ)
            connection.send(guest.number)

    def _hear(
        self,
        guest: "_Guest",
        ranks: Collection[int],
        arrived: dict[int, socket.socket],
        selector: selectors.BaseSelector,
    ) -> None:
        try:
            data = guest.connection.recv(_PROOF.size - len(guest.said))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        guest.said += data
        if not data:
            self._drop(guest, selector)
        if len(guest.said) < _PROOF.size:
            return
        number, rank, mac = _PROOF.unpack(guest.said)
        is_genuine = hmac.compare_digest(mac, _proof(self._key, b"caller", guest.number, number, rank))
        if not is_genuine or rank not in ranks or rank in arrived:
            self._drop(guest, selector)
            return
        try:
            guest.connection.sendall(_proof(self._key, b"listener", guest.number, number, rank))
        except OSError:
            self._drop(guest, selector)
            return
        del self._guests[guest.connection]
        selector.unregister(guest.connection)
        guest.connection.setblocking(True)
        arrived[rank] = guest.connection

    def _drop_late(self, selector: selectors.BaseSelector) -> None:
        now = time.monotonic()
        for guest in list(self._guests.values()):
            if guest.leaves_at > now:
                return
            self._drop(guest, selector)

    def _drop(self, guest: "_Guest", selector: selectors.BaseSelector) -> None:
        if self._guests.pop(guest.connection, None) is not None:
            selector.unregister(guest.connection)
            guest.connection.close()


@dataclass(eq=False)
class _Guest:
    """A connection that has not proved yet to come from a rank of the job."""

    connection: socket.socket
    leaves_at: float
    number: bytes = field(default_factory=lambda: secrets.token_bytes(_NUMBER_BYTES))
    said: bytes = b""


def _proof(key: bytes, who: bytes, listeners: bytes, callers: bytes, rank: int) -> bytes:
    return hmac.digest(key, b"%s %d " % (who, rank) + listeners + callers, "sha256")


def connect(door: Door, secret: bytes, *, rank: int, to: str, timeout_s: float) -> socket.socket:
    """A connection to the rank called `to`, which has proved that it knows the secret, and which receives `rank`."""
    gives_up_at = time.monotonic() + timeout_s
    while True:
        try:
            connection = socket.create_connection((door.address, door.port), timeout=timeout_s)
        except OSError as error:
            raise LaunchError(
                f"Rank {rank} on {socket.gethostname()} cannot reach {to} at {door.address} port {door.port}: {error}. "
                f"Set HOROVOD_GLOO_IFACE to the interface through which the hosts reach each other."
            ) from error
        try:
            connection.settimeout(max(0.1, gives_up_at - time.monotonic()))
            _prove(connection, door.key(secret), rank)
        except OSError as error:
            connection.close()
            if time.monotonic() < gives_up_at:
                # Strangers filled the other side's room. Not at once: all ranks may have been dropped together.
                time.sleep(_RETRY_S * (1 + secrets.randbelow(4)))
                continue
            raise LaunchError(
                f"Rank {rank} on {socket.gethostname()} reaches {door.address} port {door.port}, but {to} does not answer "
                f"there as a rank of this job within {timeout_s:g} s: {error}."
            ) from error
        connection.settimeout(None)
        return connection


def _prove(connection: socket.socket, key: bytes, rank: int) -> None:
    """OSError unless both sides know the key."""
    theirs, ours = _received(connection, _NUMBER_BYTES), secrets.token_bytes(_NUMBER_BYTES)
    connection.sendall(_PROOF.pack(ours, rank, _proof(key, b"caller", theirs, ours, rank)))
    mac = _received(connection, _MAC_BYTES)
    if not hmac.compare_digest(mac, _proof(key, b"listener", theirs, ours, rank)):
        raise OSError("its proof is wrong")


def _received(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise OSError("the connection was closed")
        data += part
    return data
