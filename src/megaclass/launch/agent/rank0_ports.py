"""The ports on which rank 0 will listen, held by the agent of its host before any rank starts. Standard library only."""

import contextlib
import socket
from collections.abc import Sequence

from megaclass.distributed.network.socket_offer import SocketOffer
from megaclass.launch.network import hold_store_port, offer_store_socket, reserve_port
from megaclass.launch.wire.protocol import Message
from megaclass.world import World


class Rank0Ports:
    """Holds the ports for the whole run, if rank 0 is on this host.

    worlds: of the ranks on this host. master_port: the port that the user chose, or 0.
    """

    def __init__(self, worlds: Sequence[World], master_port: int) -> None:
        self._has_rank_0 = worlds[0].is_main
        self._is_one_machine = len(worlds) == worlds[0].size
        self._master_port = master_port
        # Kept here, because a socket that is not referred to any more is closed, and its port is free again.
        self._held: socket.socket | None = None
        self._store: socket.socket | None = None

    def hold(self) -> Message:
        """Holds the ports and returns them for the hello. Raises LaunchError if the user's port is in use."""
        if not self._has_rank_0:
            return {}
        # Held for the whole run: the kernel gives it to no process that asks for any free port.
        self._held = reserve_port(self._master_port)
        found = {"port": self._held.getsockname()[1]}
        # If the user chose the port, it is the only one: a firewall may block all others.
        if not self._master_port:
            self._store = hold_store_port("127.0.0.1" if self._is_one_machine else "")
            found["store_port"] = self._store.getsockname()[1]
        return found

    def offer_store(self, address: str) -> SocketOffer | None:
        """Listens at the store's port for rank 0, which asks for the socket; None if rank 0 has to listen itself.

        To be called before the ranks start: rank 0 asks for it as soon as it has imported torch. address: of this host.
        """
        if self._store is None:
            return None
        # If that fails, rank 0 cannot listen there either, and says why.
        with contextlib.suppress(OSError):
            return offer_store_socket(self._store, "127.0.0.1" if self._is_one_machine else address)
        return None
