"""Everything that workers need before they start: folder, command, environment and network interface. Standard library only."""

import os
from collections.abc import Mapping
from pathlib import Path

from megaclass.distributed.network.addresses import interfaces
from megaclass.errors import LaunchError
from megaclass.launch.agent.supervisor import default_threads, find_command
from megaclass.launch.network import interface_towards, present
from megaclass.launch.plan import interface_environment, rank_environment, without_other_starters
from megaclass.launch.versions import installed_versions
from megaclass.launch.wire.protocol import Message
from megaclass.world import World


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
