"""The secret that the processes of one job share, and how they get it. Standard library only.

A launcher creates a new secret at each start. It passes it to local ranks in the environment, and to agents on other hosts
over ssh's stdin. Ranks of mpirun on several hosts get it from rank 0 through PMIx. Ranks without a secret that are all on one
machine get one from each other over a Unix socket, where the kernel identifies the user at the other end. Otherwise there is
no secret, and every message must be treated as one from a stranger.
"""

import contextlib
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from megaclass_launch.errors import LaunchError

JOB_SECRET = "MEGACLASS_JOB_SECRET"
_SECRET_BYTES = 32
_LEAST_BYTES = 16
_PEER_CREDENTIALS = struct.Struct("3i")


def new_secret() -> str:
    """Returns a random secret in hexadecimal digits, for the environment."""
    return secrets.token_hex(_SECRET_BYTES)


def job_secret(env: Mapping[str, str] = os.environ) -> bytes:
    """Returns the secret of this job, or empty bytes if the starter gave none. LaunchError if it is too short or not hex."""
    text = env.get(JOB_SECRET, "")
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        secret = b"?"
    if text and len(secret) < _LEAST_BYTES:
        # The value itself is never printed: error messages end up in logs.
        raise LaunchError(
            f"{JOB_SECRET} must be at least {2 * _LEAST_BYTES} hexadecimal digits and the same on all ranks: "
            f"export {JOB_SECRET}=$(openssl rand -hex {_SECRET_BYTES})"
        )
    return secret


def machine_and_network() -> str:
    """Returns a text that is equal in two processes exactly if they share a machine and its loopback interface."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/net').stat().st_ino}"


class LocalOffer:
    """Serves processes of the same user that connect to `name`, an abstract Unix socket, in a thread.

    give: called with each connection; returns whether to serve further ones. Those of other users are closed without reading.
    """

    def __init__(self, give: Callable[[socket.socket], bool], timeout_s: float | None = None) -> None:
        self.name = f"megaclass-{secrets.token_hex(16)}"
        self._give = give
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Abstract: no file that could be left behind, or that another user could create first.
        self._listener.bind(f"\0{self.name}")
        self._listener.listen(128)
        self._listener.settimeout(timeout_s)

    def serve(self) -> None:
        """Starts the thread; callers wait until then."""
        threading.Thread(target=self._serve, name="megaclass-offer", daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # ends the thread's accept()
        self._listener.close()

    def _serve(self) -> None:
        with self._listener:
            while True:
                try:
                    caller, _ = self._listener.accept()
                except OSError:
                    return
                with contextlib.suppress(OSError), caller:
                    # The kernel names the user at the other end, so no message has to be trusted for it.
                    if user_of(caller) == os.geteuid() and not self._give(caller):
                        return


class LocalSecret(LocalOffer):
    """A new secret that this process gives to a number of other processes of the same user on this machine."""

    def __init__(self, num_others: int, timeout_s: float) -> None:
        """timeout_s: it is offered no longer if no process asks for it for so long."""
        super().__init__(self._send, timeout_s)
        self.secret = secrets.token_bytes(_SECRET_BYTES)
        self._num_left = num_others
        self.serve()

    def _send(self, caller: socket.socket) -> bool:
        caller.sendall(self.secret)
        self._num_left -= 1
        return self._num_left > 0


def local_secret(name: str) -> bytes:
    """Returns the secret that a process of this user offers at `name`; LaunchError if it belongs to another user."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(30.0)
        try:
            connection.connect(f"\0{name}")
            is_own_user = user_of(connection) == os.geteuid()
            secret = connection.recv(_SECRET_BYTES, socket.MSG_WAITALL) if is_own_user else b""
        except OSError as error:
            raise LaunchError(f"A rank cannot get the job's secret from another on this machine: {error}.") from error
    if len(secret) < _SECRET_BYTES:
        raise LaunchError(
            "A rank cannot get the job's secret from another on this machine: all ranks must run as the same user. "
            f"Otherwise give all of them the same {JOB_SECRET}."
        )
    return secret


def user_of(connection: socket.socket) -> int:
    """Returns the user id at the other end, as the kernel reports it."""
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    return int(_PEER_CREDENTIALS.unpack(packed)[1])
