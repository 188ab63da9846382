"""Hands the listening socket of the job's store from the launcher to rank 0. Standard library only.

The launcher listens before it starts any rank, so that the port cannot become another user's. Rank 0 asks for the socket at an
abstract Unix socket, whose name is in its environment. Inheritance would be simpler, but programs between launcher and rank 0
that close files for their children (Python's subprocess does) would keep the listening socket without ever accepting.
"""

import contextlib
import os
import secrets
import socket
import threading

from megaclass_launch.rendezvous.job_secret import user_of

OFFER_NAME = "MEGACLASS_STORE_SOCKET"
_WAIT_S = 10.0


class SocketOffer:
    """Gives copies of a socket to processes of the same user that connect to `name`."""

    def __init__(self, offered: socket.socket) -> None:
        self.name = f"megaclass-{secrets.token_hex(16)}"
        self._offered = offered
        self._door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._door.bind(f"\0{self.name}")
        self._door.listen(16)

    def serve(self) -> None:
        """Starts to answer. To be called after the ranks were started, because it starts a thread: callers wait until then."""
        threading.Thread(target=self._serve, name="megaclass-store-socket", daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._door.shutdown(socket.SHUT_RDWR)  # ends the thread's accept()
        self._door.close()
        self._offered.close()

    def _serve(self) -> None:
        while True:
            try:
                caller, _ = self._door.accept()
            except OSError:
                return
            with contextlib.suppress(OSError), caller:
                if user_of(caller) == os.geteuid():
                    # At least one byte has to go with the descriptor, or the kernel drops it.
                    socket.send_fds(caller, [b"."], [self._offered.fileno()])


def take_socket(name: str) -> socket.socket | None:
    """Returns the socket that a process of this user offers at `name`; None if there is none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.settimeout(_WAIT_S)
        try:
            caller.connect(f"\0{name}")
            # Checked on this side, too: another user could have bound the name after the launcher ended.
            files = socket.recv_fds(caller, 1, 1)[1] if user_of(caller) == os.geteuid() else []
        except OSError:
            return None
    return socket.socket(fileno=files[0]) if files else None
