"""One rank as a worker of Ray: it keeps the rank's process, hands on its output, and never leaves it behind."""

import contextlib
import importlib
import os
import select
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megaclass.launch.agent.supervisor import Supervisor, find_command
from megaclass.launch.network import hold_store_port, interface_towards, reserve_port
from megaclass.launch.plan import without_other_starters

_READ_BYTES = 1 << 18


class RankKeeper:
    """An actor of Ray; one call at a time. If Ray ends it, the supervisor's sweeper ends the rank."""

    def __init__(self) -> None:
        self._supervisor: Supervisor | None = None
        self._held_port: socket.socket | None = None
        self._store_port: socket.socket | None = None
        self._pipes: dict[int, str] = {}

    def where(self) -> dict[str, Any]:
        context = importlib.import_module("ray").get_runtime_context()
        return {
            "node": context.get_node_id(),
            "host": socket.gethostname(),
            "address": importlib.import_module("ray").util.get_node_ip_address(),
            "gpus": context.get_accelerator_ids().get("GPU", []),
        }

    def hold_port(self, port: int) -> int:
        self._held_port = reserve_port(port)
        return int(self._held_port.getsockname()[1])

    def hold_store_port(self) -> int:
        self._store_port = hold_store_port()
        return int(self._store_port.getsockname()[1])

    def start(
        self, run_id: str, rank: int, command: Sequence[str], env: Mapping[str, str], workdir: str, grace_s: float
    ) -> int:
        """Its pid. LaunchError when it cannot be started."""
        whole = {**without_other_starters(os.environ, env), **env}
        if interface := interface_towards(env["HOROVOD_GLOO_RENDEZVOUS_ADDR"]):
            whole.setdefault("GLOO_SOCKET_IFNAME", interface)
        find_command(command, whole, Path(workdir))
        self._supervisor = Supervisor(run_id, grace_s=grace_s, adopts=False, captures=True)
        self._supervisor.__enter__()
        # Ray's workers block SIGINT, and what is blocked stays so in the processes they start.
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
        """What it printed, waiting for it a little, and how it ended; None while it runs or has more to say."""
        assert self._supervisor is not None
        output = []
        for pipe in select.select([*self._pipes], [], [], timeout_s)[0] if self._pipes else ():
            data = os.read(pipe, _READ_BYTES)
            if data:
                output.append((self._pipes[pipe], data))
            else:
                del self._pipes[pipe]
        self._supervisor.reap()
        self._supervisor.is_clear()
        [worker] = self._supervisor.workers
        # A child of the rank may hold the pipes open; the rank's own end counts, once nothing more comes.
        is_over = worker.code is not None and not output
        if is_over:
            self._supervisor.__exit__(None, None, None)
        return output, worker.code if is_over else None

    def signal(self, number: int) -> None:
        if self._supervisor is not None:
            self._supervisor.send_signal(number)

    def end(self) -> None:
        """SIGTERM now, SIGKILL after the grace."""
        if self._supervisor is not None:
            with contextlib.suppress(ProcessLookupError):
                self._supervisor.end()
