"""Everything that workers need before they start: folder, command, environment, network interface, and the ports of rank 0.

Standard library only.
"""

import contextlib
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from megaclass_launch.agent.supervisor import default_threads, find_command
from megaclass_launch.errors import LaunchError
from megaclass_launch.network import hold_store_port, interface_towards, offer_store_socket, present, reserve_port
from megaclass_launch.placement import interface_environment, rank_environment, without_other_starters
from megaclass_launch.rendezvous.addresses import interfaces
from megaclass_launch.rendezvous.socket_offer import SocketOffer
from megaclass_launch.versions import installed_versions
from megaclass_launch.wire.protocol import Message
from megaclass_launch.world import World


class WorkerSetup:
    """Prepares the start of the workers on this host. job: the driver's first message; own: the agent's environment."""

    def __init__(self, job: Message, own: Mapping[str, str]) -> None:
        self._job = job
        self.workdir = Path(job["workdir"])
        self.base = _base_environment(job, own)
        """The environment that all workers of this host share."""
        self._interfaces: list[str] = []
        """Those of --network-interface that this host has; written by `check`."""

    def check(self) -> Message:
        """Returns what the driver must know before the workers may start. Raises LaunchError if they cannot."""
        if not self.workdir.is_dir():
            raise LaunchError(f"There is no working folder {str(self.workdir)!r}; give another with --workdir.")
        # Found out now, so nothing is started anywhere if one host lacks the program.
        find_command(self._job["command"], self.base, self.workdir)
        found: Message = {}
        if self._job["interfaces"]:
            self._interfaces = present(self._job["interfaces"])
            found["address"] = interfaces()[self._interfaces[0]][0]
        if self._job["needs_versions"]:
            found["versions"] = installed_versions()
        return found

    def placed(self, world: World, where: Message) -> dict[str, str]:
        """Returns the variables that tell a worker its place and its network interface, beyond `base`.

        where: the driver's message with the address and the port of rank 0.
        """
        given = self._job["given"]
        # Without a choice of the user, the interface towards rank 0: gloo would take that of the host's name, often loopback.
        interface = ",".join(self._interfaces) or interface_towards(where["address"])
        return {
            **(interface_environment(interface, self.base, given) if interface is not None else {}),
            **rank_environment(
                world, host=self._job["host"], address=where["address"], port=where["port"], given=given
            ),
        }


def _base_environment(job: Message, own: Mapping[str, str]) -> dict[str, str]:
    """Returns the host's own environment with the driver's part and the user's variables."""
    env = {**own, **job["passed"]}
    if "PATH" in job["passed"] and "PATH" in own:
        # The driver's folders come first, for the same interpreter; the host's own may have more programs.
        folders = [*job["passed"]["PATH"].split(os.pathsep), *own["PATH"].split(os.pathsep)]
        env["PATH"] = os.pathsep.join(dict.fromkeys(folders))
    # A crash, or SIGABRT after a hang, then prints the Python stack of every thread.
    env.setdefault("PYTHONFAULTHANDLER", "1")
    env.setdefault("OMP_NUM_THREADS", str(default_threads(job["slots"])))
    return {**without_other_starters(env, job["given"]), **job["given"]}


# ---- rank0 ports ----
# The ports on which rank 0 will listen, held by the agent of its host before any rank starts.


_NUM_HELD = 6
"""Two sockets for the running generation, two for the previous one, whose ranks may still leave it, and two spare ones."""


class Rank0Ports:
    """Holds the ports for the next generation with rank 0 on this host; a job that is not elastic has one generation.

    master_port: the port that the user chose, or 0. store_address: the only address at which the store will listen, or an
    empty text.
    """

    def __init__(self, master_port: int, store_address: str = "") -> None:
        self._master_port = master_port
        self._store_address = store_address
        # Kept here, because a socket that is not referred to any more is closed, and its port is free again.
        self._held: list[socket.socket] = []

    def hold(self) -> Message:
        """Holds the ports and returns them for the driver. Raises LaunchError if the user's port is in use."""
        # If the user chose the port, it is the only one, for all generations: a firewall may block all others.
        if self._master_port:
            self._held = self._held or [reserve_port(self._master_port)]
            return {"port": self._master_port, "store_port": 0}
        # The kernel gives a held port to no process that asks for any free one.
        self._held += [reserve_port(0), hold_store_port(self._store_address)]
        # Closed late: ranks of that generation may still be leaving it, and no other process may listen there meanwhile.
        for old in self._held[:-_NUM_HELD]:
            old.close()
        self._held = self._held[-_NUM_HELD:]
        port, store_port = (held.getsockname()[1] for held in self._held[-2:])
        return {"port": port, "store_port": store_port}

    def offer_store(self, address: str) -> SocketOffer | None:
        """Listens at the store's port for rank 0, which asks for the socket; None if rank 0 has to listen itself.

        To be called before the ranks start: rank 0 asks for it as soon as it has imported torch. address: of this host.
        """
        if self._master_port or not self._held:
            return None
        # If that fails, rank 0 cannot listen there either, and says why.
        with contextlib.suppress(OSError):
            return offer_store_socket(self._held[-1], self._store_address or address)
        return None
