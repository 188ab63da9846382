"""How many bytes this process sends, counted by the kernel's TCP."""

import os
import socket
import struct
from pathlib import Path

# Place of tcpi_bytes_sent in Linux's struct tcp_info (since 4.19): payload, with whatever was sent again.
_BYTES_SENT = struct.Struct("=200xQ")


class SentBytes:
    """Counts from its creation on, over all TCP connections of the process: gloo's, stores', control messages'.

    Linux only. What a connection sent that was closed in the meantime is not counted.
    """

    def __init__(self) -> None:
        self._before = _by_connection()

    def count(self) -> int:
        return sum(sent - self._before.get(connection, 0) for connection, sent in _by_connection().items())


def _by_connection() -> dict[int, int]:
    """Bytes sent so far, by the inode of the socket."""
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
