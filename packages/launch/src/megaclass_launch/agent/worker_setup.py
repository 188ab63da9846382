"""Everything that workers need before they start: folder, command, environment, network interface, and the ports of rank 0.

Standard library only.
"""

import contextlib
import os
import socket
from collections.abc import Mapping, Sequence
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
        # Found out now, so that nothing is started anywhere if one host lacks the program.
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
    env.setdefault("OMP_NUM_THREADS", str(default_threads(len(job["worlds"]))))
    return {**without_other_starters(env, job["given"]), **job["given"]}


# ---- rank0 ports ----
# The ports on which rank 0 will listen, held by the agent of its host before any rank starts.


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
