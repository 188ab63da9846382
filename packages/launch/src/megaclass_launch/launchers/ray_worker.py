"""One rank as an actor of Ray: it starts the rank's process, returns its output, and never leaves it behind."""

import contextlib
import importlib
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megaclass_launch.agent.supervisor import Supervisor, find_command
from megaclass_launch.agent.workers import Rank0Ports
from megaclass_launch.operating_system import readable
from megaclass_launch.placement import without_other_starters
from megaclass_launch.rendezvous.addresses import OFFER_NAME, interface_towards

_READ_BYTES = 1 << 18


class RankActor:
    """Supervises one rank; Ray makes one call at a time. If Ray kills it, the supervisor's orphan killers end the rank."""

    def __init__(self) -> None:
        self._supervisor: Supervisor | None = None
        self._ports: Rank0Ports | None = None
        self._pipes: dict[int, str] = {}

    def where(self) -> dict[str, Any]:
        """Returns the node, the host, its address and the GPUs that Ray has assigned."""
        context = importlib.import_module("ray").get_runtime_context()
        return {
            "node": context.get_node_id(),
            "host": socket.gethostname(),
            "address": importlib.import_module("ray").util.get_node_ip_address(),
            "gpus": context.get_accelerator_ids().get("GPU", []),
        }

    def hold_ports(self, master_port: int) -> dict[str, int]:
        """Holds the ports for rank 0, which runs here, and returns them."""
        self._ports = Rank0Ports(master_port)
        return self._ports.hold()

    def start(
        self, run_id: str, rank: int, command: Sequence[str], env: Mapping[str, str], workdir: str, grace_s: float
    ) -> int:
        """Starts the rank and returns its pid. Raises LaunchError if it cannot be started."""
        whole = {**without_other_starters(os.environ, env), **env}
        if interface := interface_towards(env["HOROVOD_GLOO_RENDEZVOUS_ADDR"]):
            whole.setdefault("GLOO_SOCKET_IFNAME", interface)
        find_command(command, whole, Path(workdir))
        is_one_machine = env["HOROVOD_LOCAL_SIZE"] == env["HOROVOD_SIZE"]
        address = "127.0.0.1" if is_one_machine else env["HOROVOD_GLOO_RENDEZVOUS_ADDR"]
        if self._ports is not None and (offer := self._ports.offer_store(address)) is not None:
            whole[OFFER_NAME] = offer.name
            offer.serve()
        self._supervisor = Supervisor(run_id, grace_s=grace_s, adopts=False, captures=True)
        self._supervisor.__enter__()
        # Ray's workers block SIGINT, and the processes they start inherit that.
        blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        try:
            process = self._supervisor.start(rank, command, whole, Path(workdir)).process
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        assert process.stdout is not None and process.stderr is not None
        for pipe, stream in ((process.stdout, "stdout"), (process.stderr, "stderr")):
            os.set_blocking(pipe.fileno(), False)
            self._pipes[pipe.fileno()] = stream
        return process.pid

    def poll(self, timeout_s: float) -> tuple[list[tuple[str, bytes]], int | None]:
        """Returns what the rank printed, waiting for it a little, and its exit code; None while it runs or prints."""
        assert self._supervisor is not None
        output = []
        for pipe in readable(self._pipes, timeout_s) if self._pipes else ():
            data = os.read(pipe, _READ_BYTES)
            if data:
                output.append((self._pipes[pipe], data))
            else:
                del self._pipes[pipe]
        self._supervisor.reap()
        self._supervisor.continue_ending()
        [worker] = self._supervisor.workers
        # A child of the rank may hold the pipes open: the rank is over once it has ended and no more output comes.
        is_over = worker.code is not None and not output
        if is_over:
            self._supervisor.__exit__(None, None, None)
        return output, worker.code if is_over else None

    def signal(self, number: int) -> None:
        """Sends a signal to the rank."""
        if self._supervisor is not None:
            self._supervisor.send_signal(number)

    def end(self, grace_s: float | None = None) -> None:
        """Sends SIGTERM now and SIGKILL after `grace_s`, or else after the grace that `start` was given."""
        if self._supervisor is not None:
            with contextlib.suppress(ProcessLookupError):
                self._supervisor.end(grace_s)
