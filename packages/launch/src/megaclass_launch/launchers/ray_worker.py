"""An actor of Ray, which holds the place of one rank. The first one of a node runs the agent that starts all ranks there."""

import importlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from megaclass_launch.operating_system import readable

_READ_BYTES = 1 << 18
_WAIT_S = 0.2


class AgentActor:
    """Carries the bytes between an agent and the driver, which calls `read` and `write` at the same time.

    If Ray kills this process, the agent's stdin ends, and the agent ends its ranks.
    """

    def __init__(self) -> None:
        self._agent: subprocess.Popen[bytes] | None = None
        self._open: dict[int, str] = {}
        """The stream of each pipe of the agent that has not ended."""

    def where(self) -> dict[str, Any]:
        """Returns the node, the host, its address and the GPUs that Ray has assigned."""
        context = importlib.import_module("ray").get_runtime_context()
        return {
            "node": context.get_node_id(),
            "host": socket.gethostname(),
            "address": importlib.import_module("ray").util.get_node_ip_address(),
            "gpus": context.get_accelerator_ids().get("GPU", []),
        }

    def start(self, gpus: Sequence[str]) -> None:
        """Starts the agent. gpus: those of all ranks on this node; a rank takes the one of its local rank."""
        chosen = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
        # Ray's workers block SIGINT, and the processes they start inherit that.
        blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        try:
            self._agent = subprocess.Popen(
                [sys.executable, "-X", "utf8", "-P", "-m", "megaclass_launch.agent.agent"],
                env={**os.environ, **chosen},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                # Ray ends the group of this process at once, and the agent needs time to end its ranks.
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        assert self._agent.stdout is not None and self._agent.stderr is not None
        self._open = {self._agent.stdout.fileno(): "stdout", self._agent.stderr.fileno(): "stderr"}

    def write(self, data: bytes) -> None:
        """Writes to the agent's stdin; closes it if there is nothing to write."""
        assert self._agent is not None and self._agent.stdin is not None
        try:
            while data:
                data = data[self._agent.stdin.write(data) or 0 :]
                if not data:
                    return
            self._agent.stdin.close()
        except OSError:
            return  # it has ended, which `read` tells

    def read(self) -> list[tuple[str, bytes]] | int:
        """Returns what the agent has written, waiting for it a little; its exit code once it has ended."""
        assert self._agent is not None
        found = []
        for pipe in readable(self._open, _WAIT_S) if self._open else ():
            if data := os.read(pipe, _READ_BYTES):
                found.append((self._open[pipe], data))
            else:
                del self._open[pipe]
        return found if found or self._open else self._agent.wait()
