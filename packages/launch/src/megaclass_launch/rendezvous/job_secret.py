"""The secret that the processes of one job share, and how they get it. Standard library only.

A launcher creates a new secret at each start. It passes it to local ranks in the environment, and to agents on other hosts
over ssh's stdin. Ranks of mpirun on several hosts get it from rank 0 through PMIx. Ranks without a secret that are all on one
machine get one from each other over a Unix socket, where the kernel identifies the user at the other end. Otherwise there is
no secret, and every message must be treated as one from a stranger.
"""

import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Mapping
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


class LocalSecret:
    """A new secret that this process gives to a number of other processes of the same user on this machine.

    They connect to `name`, an abstract Unix socket. Connections of other users are closed without reading from them.
    """

    def __init__(self, num_others: int, timeout_s: float) -> None:
        self.name = f"megaclass-{secrets.token_hex(16)}"
        self.secret = secrets.token_bytes(_SECRET_BYTES)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Abstract: no file that could be left behind, or that another user could create first.
        self._listener.bind(f"\0{self.name}")
        self._listener.listen(128)
        self._num_left = num_others
        self._gives_up_at = time.monotonic() + timeout_s
        threading.Thread(target=self._serve, name="megaclass-secret", daemon=True).start()

    def _serve(self) -> None:
        with self._listener:
            while self._num_left and (left_s := self._gives_up_at - time.monotonic()) > 0:
                self._listener.settimeout(left_s)
                try:
                    connection, _ = self._listener.accept()
                    with connection:
                        # The kernel names the user at the other end, so no message has to be trusted for it.
                        if user_of(connection) == os.geteuid():
                            connection.sendall(self.secret)
                            self._num_left -= 1
                except OSError:
                    continue


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
