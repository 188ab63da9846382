"""The agents of an elastic job: one per host that is in use, opened and closed while the job runs. Standard library only."""

import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from megaclass_launch.driver.agent_pipe import AgentPipe, AgentPipes, PipeState
from megaclass_launch.driver.job_start import address_of_first_host, agent_job
from megaclass_launch.driver.lost_agents import OrphanKillers, why_ended
from megaclass_launch.driver.ssh import SshSettings, agent_command
from megaclass_launch.elastic.generation import Generation, WorkerRecord, publication, worlds_of, worlds_on
from megaclass_launch.elastic.worker import Why
from megaclass_launch.hosts import Host
from megaclass_launch.options import RunOptions
from megaclass_launch.placement import Placement
from megaclass_launch.rendezvous.job_secret import new_secret
from megaclass_launch.versions import differences
from megaclass_launch.wire.agent_messages import MAX_STEP, AgentMessageChecker
from megaclass_launch.wire.checks import Check, one_of, text, whole
from megaclass_launch.wire.protocol import Message
from megaclass_launch.world import World

_MODULE = "megaclass_launch.elastic.agent"


class ElasticAgents:
    """Opens agents, tells them what to do, and gives up those that are lost.

    by_host has the agents that are not over. Everything happens in the driver's thread.
    """

    def __init__(self, pipes: AgentPipes, options: RunOptions, ssh: SshSettings) -> None:
        self.by_host: dict[str, AgentPipe] = {}
        self._pipes = pipes
        self._options = options
        self._ssh = ssh
        self._run_id = secrets.token_hex(8)
        self._secret = new_secret()
        self._checkers: dict[str, ElasticMessageChecker] = {}
        self._opened_at: dict[str, float] = {}
        self._ports: dict[str, Message] = {}
        """Ports that an agent holds for the next generation with rank 0 on its host."""
        self._versions: dict[str, dict[str, str]] = {}
        self._orphan_killers = OrphanKillers(ssh, options.fault_grace_s)

    # ---- opening ----

    def open(self, host: Host) -> None:
        """Starts an agent on the host and sends it the job."""
        # The agent computes the default number of threads from the number of worlds, which are not known yet.
        placement = Placement(host=host, worlds=(World(),) * host.slots)
        # A new one for each agent: an agent that is opened again on this host must not speak about the workers of the last one.
        self._checkers[host.name] = ElasticMessageChecker()
        agent = self._pipes.open(placement, agent_command(host, self._ssh, _MODULE), self._checkers[host.name])
        self.by_host[host.name] = agent
        self._opened_at[host.name] = time.monotonic()
        agent.send(self._job_for(placement, self._pipes.all.index(agent)))

    def greet(self, agent: AgentPipe, hello: Message) -> str:
        """Notes an agent's hello; returns why the host cannot take part, or an empty text."""
        agent.hello = hello
        agent.state = PipeState.READY
        self.note_ports(agent, hello)
        self._versions[agent.name] = hello.get("versions", {})
        # With one other host only: each of them was compared when it said hello.
        found = differences({agent.name: self._versions[agent.name], **_first_of(self._versions, agent.name)})
        if not found or self._options.allows_mixed_versions:
            return ""
        return (
            f"The hosts differ: {'. '.join(found.values())}. Install the same versions, or add --allow-mixed-versions."
        )

    def note_ports(self, agent: AgentPipe, message: Message) -> None:
        self._ports[agent.name] = {"port": message["port"], "store_port": message["store_port"]}

    def late(self, now: float) -> list[AgentPipe]:
        """Returns the agents that have not said hello within the start timeout."""
        limit_s = self._options.start_timeout_s
        return [
            agent
            for name, agent in self.by_host.items()
            if agent.state is PipeState.STARTING and now - self._opened_at[name] > limit_s
        ]

    def is_any_starting(self) -> bool:
        return any(agent.state is PipeState.STARTING for agent in self.by_host.values())

    # ---- orders ----

    def new_generation(self, number: int, members: Sequence[WorkerRecord]) -> Generation | None:
        """Returns a generation with rank 0 on the host of the first member; None while its ports are not known."""
        ports = self._ports.get(members[0].host)
        if ports is None:
            return None
        hosts = dict.fromkeys(member.host for member in members)
        address = address_of_first_host([self.by_host[host] for host in hosts])
        return Generation(number=number, token=secrets.token_hex(16), secret=new_secret(), address=address, **ports)

    def start(
        self, workers: Sequence[WorkerRecord], worlds: dict[int, World], generation: Generation, *, is_running: bool
    ) -> None:
        """Starts new workers. Their environment has the given worlds, until they learn others at the rendezvous.

        is_running: the program has made progress already, and the workers join it.
        """
        job = {"is_running": is_running, "max_ranks": self._options.max_processes or 0}
        for host in dict.fromkeys(worker.host for worker in workers):
            here = [worker for worker in workers if worker.host == host]
            entries = [{"worker": worker.number, "world": asdict(worlds[worker.number])} for worker in here]
            # A message about a worker that the agent was not told to start breaks the protocol.
            self._checkers[host].expect({worker.number for worker in here})
            agent = self.by_host[host]
            agent.state = PipeState.RUNNING
            agent.send({"do": "start", "workers": entries, **job, **generation.where()})

    def publish(
        self, generation: Generation, members: Sequence[WorkerRecord], previous_size: int, *, has_progressed: bool
    ) -> dict[int, World]:
        """Tells all members their places; returns their worlds."""
        worlds = worlds_of(members)
        message = publication(generation, members, previous_size, has_progressed=has_progressed)
        for host in dict.fromkeys(member.host for member in members):
            uses_ports = host == members[0].host
            if uses_ports:
                # Used once: no rank of an old generation may reach the new one by an address that it knows.
                del self._ports[host]
            self.by_host[host].send({**message, "worlds": worlds_on(host, members, worlds), "uses_ports": uses_ports})
        return worlds

    def announce_change(self, token: str, *, only_removals: bool, has_removals: bool) -> None:
        """Tells all workers of the generation that the hosts have changed."""
        change = {"only_removals": only_removals, "has_removals": has_removals}
        self._tell_all({"do": "changed", "token": token, **change})

    def announce_break(self, token: str) -> None:
        """Tells all workers of the generation that a member is gone, so that they do not wait for it."""
        self._tell_all({"do": "broken", "token": token})

    def _tell_all(self, message: Message) -> None:
        for agent in self.by_host.values():
            # The others have started no worker yet. Each agent tells only its workers of that generation.
            if agent.state is PipeState.RUNNING:
                agent.send(message)

    def order(self, what: str, workers: Collection[WorkerRecord], **more: object) -> None:
        """Sends an order about workers to their agents."""
        for host in dict.fromkeys(worker.host for worker in workers):
            if host in self.by_host:
                numbers = [worker.number for worker in workers if worker.host == host]
                self.by_host[host].send({"do": what, "workers": numbers, **more})

    def end(self, agent: AgentPipe) -> None:
        """Lets the agent of a host leave that the job does not use any more."""
        self.forget(agent)
        agent.send({"do": "end", "grace_s": None})

    # ---- the end of an agent ----

    def why_ended(self, agent: AgentPipe) -> str:
        """Returns why ssh or the agent has closed its output before it was done."""
        why = why_ended(agent, self._ssh)
        return why if agent.state is PipeState.STARTING else f"{agent.name} {why}"

    def lose(self, agent: AgentPipe, *, is_reachable: bool) -> None:
        """Closes the pipe of a lost agent, and kills what it left behind if its host can be reached."""
        if agent.state is PipeState.RUNNING and is_reachable:
            self._orphan_killers.start(agent, self._run_id_of(self._pipes.all.index(agent)))
        self._pipes.drop(agent)
        self.forget(agent)

    def forget(self, agent: AgentPipe) -> None:
        # The host may have a newer agent by now, which stays.
        if self.by_host.get(agent.name) is agent:
            del self.by_host[agent.name]
            self._ports.pop(agent.name, None)
            self._versions.pop(agent.name, None)

    def finish(self, agent: AgentPipe, state: PipeState) -> None:
        """Stops listening to an agent that is over."""
        self._pipes.finish(agent, state)

    def wait_for_orphan_killers(self) -> None:
        self._orphan_killers.wait()

    def _run_id_of(self, number: int) -> str:
        return f"{self._run_id}-{number + 1}"

    def _job_for(self, placement: Placement, number: int) -> Message:
        run_id = self._run_id_of(number)
        job = agent_job(placement, self._options, token=self._pipes.token, secret=self._secret, run_id=run_id)
        # A rank that hangs is not told from one that waits at the rendezvous: no hang timeout.
        return {**job, "restart": 0, "master_port": 0, "needs_versions": True, "hang_timeout_s": 0.0}


def _first_of(versions: dict[str, dict[str, str]], apart_from: str) -> dict[str, dict[str, str]]:
    name = next((name for name in versions if name != apart_from), None)
    return {name: versions[name]} if name is not None else {}


_MAX_TOKEN = 64


class ElasticMessageChecker(AgentMessageChecker):
    """Checks the messages of one agent, whose workers become more over time."""

    def __init__(self) -> None:
        super().__init__(())
        self._starting: set[int] = set()

    def expect(self, workers: set[int]) -> None:
        """Notes that the agent was told to start these workers."""
        self._ranks |= workers
        self._starting |= workers

    def _fields(self) -> Mapping[str, Mapping[str, tuple[Check, bool]]]:
        rank, token = (self._rank, True), (_token, True)
        port = (whole(1, 65535), True)
        known = super()._fields()
        return {
            **known,
            "hello": {**known["hello"], "port": port, "store_port": port},
            # These come from workers by way of their agent, and the driver trusts neither.
            "ready": {"rank": rank, "token": token, "why": (one_of(tuple(Why)), True)},
            "committed": {"rank": rank, "token": token, "step": (whole(0, MAX_STEP), True)},
            "failed": {"rank": rank, "token": token, "text": (text(), True)},
            "spare": {"port": port, "store_port": port},
        }

    def _pids(self, value: Any) -> dict[int, int]:
        # The agent may have been told to start others before it could report about these.
        named = {number for number in self._starting if isinstance(value, dict) and str(number) in value}
        pids = self._pids_of(value, named)
        self._starting -= named
        return pids


def _token(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _MAX_TOKEN or not value.isascii():
        raise ValueError("a token")
    return value
