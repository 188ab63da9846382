"""`megaclass run --launcher ray`: agents in a placement group of a running Ray cluster (extra `ray`).

Ray chooses the nodes, with one actor per rank. The first actor of each node runs the agent, and the calls of that actor take
the place of the ssh connection; all else is the driver's.
"""

import contextlib
import importlib
import os
import re
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Collection, Sequence
from typing import IO, Any

from megaclass_launch.driver import driver
from megaclass_launch.driver.agent_pipe import Process
from megaclass_launch.driver.output import DriverMessages
from megaclass_launch.errors import LaunchError
from megaclass_launch.hosts import Host
from megaclass_launch.launchers.ray_worker import AgentActor
from megaclass_launch.options import RunOptions
from megaclass_launch.signals import SignalQueue

_POLL_S = 0.2
_CONNECT_S = 5.0
_READ_BYTES = 1 << 18


def launch(options: RunOptions, hosts: Sequence[Host]) -> int:
    """Runs the job on nodes of Ray. Exit codes are those of ssh."""
    if hosts:
        raise LaunchError("--launcher ray: Ray chooses the hosts; leave -H and --hostfile out, and give -np N.")
    if options.is_dry_run:
        ranks = f"{options.num_processes} ranks" if options.num_processes else "one rank per GPU of the cluster"
        print(f"{ranks}, packed onto as few nodes as possible, each with a CPU, and a GPU if the cluster has any")
        print(f"command: {shlex.join(options.command)}\nworking folder: {options.workdir}")
        return 0
    ray = _connected_ray()
    try:
        num_gpus = int(ray.cluster_resources().get("GPU", 0))
        num_processes = options.num_processes or num_gpus
        if not num_processes:
            raise LaunchError("How many processes? Give -np N; this Ray cluster has no GPUs to count.")
        nodes = _RayHosts(ray, options, num_processes, bool(num_gpus))
        return driver.run_job(options, nodes, num_processes, num_processes)
    finally:
        ray.shutdown()


class _RayHosts:
    """The nodes that Ray chooses for each generation of a job: a node may have gone, and with it the places there."""

    def __init__(self, ray: Any, options: RunOptions, num_processes: int, has_gpus: bool) -> None:
        self._ray, self._options, self._num_processes = ray, options, num_processes
        self._bundle = {"CPU": 1, "GPU": 1} if has_gpus else {"CPU": 1}
        self._group: Any = None
        self._actors: list[Any] = []
        self._agents: dict[str, tuple[Any, list[str]]] = {}
        """The actor that runs the agent of each host, and the GPUs of all actors there."""

    def placed(self, signals: SignalQueue) -> list[Host]:
        self._release()
        self._group = _requested_group(self._ray, self._num_processes, self._bundle)
        self._wait_for_room(signals)
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        actor = self._ray.remote(AgentActor)
        self._actors = [
            actor.options(
                num_cpus=1,
                num_gpus=self._bundle.get("GPU", 0),
                # The driver reads from an agent and writes to it at the same time.
                max_concurrency=2,
                scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=i
                ),
            ).remote()
            for i in range(self._num_processes)
        ]
        try:
            places = self._ray.get([actor.where.remote() for actor in self._actors])
        except self._ray.exceptions.RayError as error:
            reason = next((line for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
            raise LaunchError(
                f"An actor of Ray did not start ({reason.strip()}): megaclass must be installed on every node, as here."
            ) from error
        return self._hosts_at(places)

    def _hosts_at(self, places: Sequence[dict[str, Any]]) -> list[Host]:
        hosts: list[Host] = []
        for node in dict.fromkeys(place["node"] for place in places):
            here = [index for index, place in enumerate(places) if place["node"] == node]
            first = places[here[0]]
            # Two nodes of Ray may be on one machine.
            is_known = any(host.name == first["host"] for host in hosts)
            name = f"{first['host']}-{len(hosts)}" if is_known else first["host"]
            gpus = sorted({gpu for index in here for gpu in places[index]["gpus"]})
            self._agents[name] = self._actors[here[0]], gpus
            hosts.append(Host(name=name, slots=len(here), address=first["address"]))
        return hosts

    def start_agent(self, host: Host, messages: DriverMessages) -> Process:
        return _RayProcess(self._ray, *self._agents[host.name])

    def exclude(self, failed: Collection[str]) -> bool:
        # Ray itself avoids nodes that are gone.
        return False

    def describe(self) -> str:
        return f"{self._num_processes} ranks"

    def _wait_for_room(self, signals: SignalQueue) -> None:
        # Ray reserves all bundles or none, so two jobs never wait for each other's rest.
        deadline = time.monotonic() + self._options.start_timeout_s
        while not self._group.wait(_POLL_S):
            signals.raise_if_ended()
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"Ray had no room for {self._num_processes} x {self._bundle} within "
                    f"{self._options.start_timeout_s:g} s: other jobs use it (see `ray status`). Wait longer with "
                    f"--start-timeout."
                )

    def _release(self) -> None:
        """Gives the places of the last generation back to Ray."""
        for actor in self._actors:
            self._ray.kill(actor)
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
        self._actors, self._agents = [], {}


class _RayProcess:
    """An agent that an actor runs, with the pipes and the methods of a Popen. Two threads carry the bytes.

    Both block: while the driver does not read, the actor is not asked for more, and the agent stops reading its ranks.
    """

    def __init__(self, ray: Any, actor: Any, gpus: list[str]) -> None:
        self._ray, self._actor = ray, actor
        self._code = 1
        """Written by the thread `_carry_output` before it ends; also the code of an agent that Ray has lost."""
        self._started = actor.start.remote(gpus)
        self.stdin: IO[bytes] | None
        self.stdout: IO[bytes] | None
        self.stderr: IO[bytes] | None
        reader, self.stdin = _pipe()
        self.stdout, output = _pipe()
        self.stderr, errors = _pipe()
        self._thread = threading.Thread(
            target=self._carry_output, args=({"stdout": output, "stderr": errors},), daemon=True
        )
        self._thread.start()
        threading.Thread(target=self._carry_input, args=(reader,), daemon=True).start()

    def poll(self) -> int | None:
        return None if self._thread.is_alive() else self._code

    def wait(self, timeout: float | None = None) -> int:
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise subprocess.TimeoutExpired("an agent on a node of Ray", timeout or 0.0)
        return self._code

    def send_signal(self, number: int, /) -> None:
        self._ray.kill(self._actor)

    def _carry_input(self, reader: IO[bytes]) -> None:
        # That the actor is gone is told by the other thread.
        with reader, contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.get(self._started)
            while data := reader.read(_READ_BYTES):
                self._ray.get(self._actor.write.remote(data))
            # The driver has hung up.
            self._ray.get(self._actor.write.remote(b""))

    def _carry_output(self, streams: dict[str, IO[bytes]]) -> None:
        try:
            self._ray.get(self._started)
            while isinstance(answer := self._ray.get(self._actor.read.remote()), list):
                for stream, data in answer:
                    _write(streams[stream], data)
            self._code = answer
        except self._ray.exceptions.RayError as error:
            with contextlib.suppress(OSError):
                _write(streams["stderr"], f"Ray: {str(error).strip()}\n".encode())
        except OSError:
            pass  # the driver has closed its ends
        finally:
            for pipe in streams.values():
                pipe.close()


def _pipe() -> tuple[IO[bytes], IO[bytes]]:
    reader, writer = os.pipe()
    return os.fdopen(reader, "rb", buffering=0), os.fdopen(writer, "wb", buffering=0)


def _write(pipe: IO[bytes], data: bytes) -> None:
    while data:
        data = data[pipe.write(data) :]


def _connected_ray() -> Any:
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise LaunchError('--launcher ray needs Ray: pip install "megaclass-launch[ray]"') from error
    # Before ray.init, whose own error comes late and names no address.
    _check_address(os.environ.get("RAY_ADDRESS", ""))
    try:
        # The driver shows the ranks' output, line by line with its prefix; Ray's own log would repeat it.
        ray.init(address="auto", log_to_driver=False, logging_level="ERROR", include_dashboard=None)
    except (ConnectionError, RuntimeError) as error:
        where = os.environ.get("RAY_ADDRESS", "on this machine")
        reason = str(error).strip().partition("\n")[0]
        raise LaunchError(f"There is no Ray cluster {where} ({reason}). Start one: ray start --head") from error
    return ray


def _check_address(address: str) -> None:
    """Raises LaunchError if no process listens there: Ray itself would wait for more than a minute."""
    match = re.fullmatch(r"([^/]+):([0-9]{1,5})", address)
    if match is None:
        return
    try:
        socket.create_connection((match[1].strip("[]"), int(match[2])), timeout=_CONNECT_S).close()
    except OSError as error:
        raise LaunchError(
            f"There is no Ray cluster at RAY_ADDRESS={address} ({error.strerror or error}): "
            f"unset RAY_ADDRESS, or start one there with ray start --head --port={match[2]}."
        ) from error


def _requested_group(ray: Any, num_processes: int, bundle: dict[str, int]) -> Any:
    resources = ray.cluster_resources()
    for resource, each in bundle.items():
        if resources.get(resource, 0) < num_processes * each:
            raise LaunchError(
                f"-np {num_processes} requires {num_processes * each} {resource}s, but the Ray cluster has "
                f"{int(resources.get(resource, 0))}: lower -np, or add a host with ray start --address=<head>."
            )
    module = importlib.import_module("ray.util.placement_group")
    return module.placement_group([bundle] * num_processes, strategy="PACK")
