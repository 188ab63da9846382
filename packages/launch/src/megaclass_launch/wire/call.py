"""A job that is a call: the function on its way to the ranks, and the results on their way back. Standard library only.

    caller --pipe--> driver --"call" messages--> agent --memory file--> rank
    caller <--pipe-- driver <--stream "result"-- agent <--pipe--------- rank

There is no port. The caller starts the driver with two pipes (`--call-fds`), and the agents start the ranks with theirs, so
only processes of the job can take part. Nothing on this path unpickles anything, except for the rank and the caller.
"""

import base64
import contextlib
import os
import struct
from collections.abc import Iterator

from megaclass_launch.errors import LaunchError
from megaclass_launch.wire.protocol import Message

MAX_CALL_BYTES = 1 << 30
"""Maximum size of the pickled function and its arguments; the driver holds one copy per host while it sends them."""
CALL_FDS = "MEGACLASS_CALL_FDS"
"""Environment variable of a rank: the numbers of the file with the call and of the pipe for the result."""
SIZE = struct.Struct(">Q")
"""Precedes the call and each rank's result: a shorter one is known to be incomplete."""
PIECE = struct.Struct(">II")
"""Precedes each piece of a result on the pipe to the caller: rank and number of bytes."""
_PIECE_BYTES = 1 << 19


class CallPipes:
    """The driver's ends of the pipes to the process that asked for the job."""

    def __init__(self, fds: tuple[int, int]) -> None:
        """Reads the call. The first pipe stays open until the caller ends: its end means that the caller is gone."""
        self.caller_fd, self.results_fd = fds
        for fd in fds:
            os.set_inheritable(fd, False)
        [size] = SIZE.unpack(self._read(SIZE.size))
        self._call = self._read(size)

    def _read(self, num_bytes: int) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            if not (more := os.read(self.caller_fd, min(1 << 20, num_bytes - len(data)))):
                raise LaunchError("The process that asked for this job ended before it had sent the function.")
            data += more
        return bytes(data)

    def messages(self) -> Iterator[Message]:
        """Yields the messages that bring the call to an agent."""
        for start in range(0, len(self._call), _PIECE_BYTES):
            piece = self._call[start : start + _PIECE_BYTES]
            yield {"do": "call", "data": base64.b64encode(piece).decode("ascii")}


class AgentCall:
    """The call on one host: a file in memory, which all ranks of the host inherit."""

    def __init__(self) -> None:
        self._file = os.memfd_create("megaclass-call", os.MFD_CLOEXEC)

    def add(self, data: str) -> None:
        """Adds the next piece, as the driver has sent it."""
        view = memoryview(base64.b64decode(data))
        while view:
            view = view[os.write(self._file, view) :]

    @contextlib.contextmanager
    def pipe(self) -> Iterator[tuple[dict[str, str], list[int], int]]:
        """Yields a rank's variables, the files that it inherits, and the end of the pipe from which to read its result.

        The rank's ends are closed here once it has been started.
        """
        reader, writer = os.pipe()
        try:
            yield {CALL_FDS: f"{self._file},{writer}"}, [self._file, writer], reader
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)


class RankCall:
    """A rank's ends of both; taken out of the environment, and not inherited by processes that the function starts."""

    def __init__(self) -> None:
        self._file, self._result = (int(number) for number in os.environ.pop(CALL_FDS).split(","))
        for fd in (self._file, self._result):
            os.set_inheritable(fd, False)

    def read(self) -> bytes:
        """Returns the pickled call."""
        data = bytearray()
        # By position: all ranks of the host share the file and its offset.
        while more := os.pread(self._file, 1 << 24, len(data)):
            data += more
        os.close(self._file)
        return bytes(data)

    def send(self, result: bytes) -> None:
        """Sends the pickled result; returns when the agent has all of it, or will find it in the pipe."""
        for part in (SIZE.pack(len(result)), result):
            view = memoryview(part)
            while view:
                view = view[os.write(self._result, view) :]
        os.close(self._result)
