"""Counts the bytes that this process sends over TCP, as the kernel reports them."""

import os
import socket
import struct
from pathlib import Path

# Offset of tcpi_bytes_sent in Linux's struct tcp_info (since 4.19): payload bytes, retransmissions included.
_BYTES_SENT = struct.Struct("=200xQ")


class SentBytes:
    """Bytes sent since this object was created, over all TCP connections of the process (gloo, stores, control messages).

    Linux only. Connections that were closed in the meantime are not counted.
    """

    def __init__(self) -> None:
        self._before = _by_connection()

    def count(self) -> int:
        return sum(sent - self._before.get(connection, 0) for connection, sent in _by_connection().items())


def _by_connection() -> dict[int, int]:
    """Returns the bytes sent so far by each connection, keyed by the inode of its socket."""
    sent: dict[int, int] = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            number = os.dup(int(entry.name))
        except OSError:
            continue
        try:
            connection = socket.socket(fileno=number)
        except OSError:
            os.close(number)
            continue
        with connection:
            try:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            except OSError:
                continue
            if len(info) >= _BYTES_SENT.size:
                sent[os.fstat(connection.fileno()).st_ino] = int(_BYTES_SENT.unpack_from(info)[0])
    return sent
