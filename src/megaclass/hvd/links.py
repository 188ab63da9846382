"""Connections between ranks, over TCP: how they are made, and whole messages over them. No torch here."""

import contextlib
import hmac
import secrets
import select
import socket
import struct
import time
from collections.abc import Collection, Iterator

from megaclass.errors import LaunchError

_LENGTH = struct.Struct("<IIB")
_HELLO = struct.Struct("<32sI")
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


class Reception:
    """A listening socket, bound to one address; only ranks that know the token get in."""

    def __init__(self, address: str) -> None:
        self.token = secrets.token_hex(16)
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
        self.address: str = self._listener.getsockname()[0]
        self.port: int = self._listener.getsockname()[1]

    def welcome(self, ranks: Collection[int], timeout_s: float) -> dict[int, socket.socket]:
        """Connections from these ranks. Strangers are turned away."""
        deadline = time.monotonic() + timeout_s
        connections: dict[int, socket.socket] = {}
        with self._listener:
            while len(connections) < len(ranks):
                left = deadline - time.monotonic()
                if left <= 0 or not select.select([self._listener], [], [], left)[0]:
                    missing = sorted(set(ranks) - set(connections))
                    raise LaunchError(
                        f"Ranks {missing} did not connect to {self.address} port {self.port} within {timeout_s:g} s."
                    )
                connection, _ = self._listener.accept()
                rank = self._rank_of(connection)
                if rank is None or rank not in ranks or rank in connections:
                    connection.close()
                else:
                    connections[rank] = connection
        return connections

    def _rank_of(self, connection: socket.socket) -> int | None:
        # A stranger that says nothing must not keep the others waiting for long.
        connection.settimeout(5.0)
        data = b""
        try:
            while len(data) < _HELLO.size:
                part = connection.recv(_HELLO.size - len(data))
                if not part:
                    return None
                data += part
        except OSError:
            return None
        token, rank = _HELLO.unpack(data)
        return int(rank) if hmac.compare_digest(token, self.token.encode()) else None


def connect(address: str, port: int, token: str, *, rank: int, to: str, timeout_s: float) -> socket.socket:
    """A connection to the rank called `to`, which receives `rank` there."""
    try:
        connection = socket.create_connection((address, port), timeout=timeout_s)
        connection.sendall(_HELLO.pack(token.encode(), rank))
    except OSError as error:
        raise LaunchError(
            f"Rank {rank} on {socket.gethostname()} cannot reach {to} at {address} port {port}: {error}. Set "
            f"HOROVOD_GLOO_IFACE to the interface through which the hosts reach each other."
        ) from error
    return connection
