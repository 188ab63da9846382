"""The start of a job: from the first connection to the moment when all ranks may go. Standard library only.

    connect (ssh or local agent, job on stdin) -> every host says hello or refuses -> versions agree -> go

Nothing is started anywhere unless every host can take part.
"""

import secrets
from collections.abc import Sequence
from dataclasses import asdict

from megaclass_launch.driver.agent_pipe import AgentPipe, AgentPipes, PipeState
from megaclass_launch.driver.outcome import Outcome
from megaclass_launch.driver.output import DriverIo
from megaclass_launch.driver.ssh import SshSettings, agent_command, why_not_started
from megaclass_launch.errors import LaunchError
from megaclass_launch.exit_codes import EXIT_USER_ERROR
from megaclass_launch.options import RunOptions
from megaclass_launch.placement import Placement, passed_on
from megaclass_launch.rendezvous.addresses import interfaces, is_own
from megaclass_launch.rendezvous.job_secret import new_secret
from megaclass_launch.versions import differences, short_list
from megaclass_launch.wire.agent_messages import AgentMessageChecker
from megaclass_launch.wire.checks import ip_address
from megaclass_launch.wire.protocol import Message

_SHOWN_ALIKE = 3
"""If more hosts have the same problem, it is printed once, with their names."""


class JobStart:
    """Connects to the agents and lets the ranks go. The run id, the token and the secret are new in every start."""

    def __init__(
        self,
        placements: Sequence[Placement],
        options: RunOptions,
        ssh: SshSettings,
        io: DriverIo,
        *,
        restart: int,
    ) -> None:
        self.problems: list[tuple[str, str]] = []
        """Host, or an empty text for all together, and why the job cannot start."""
        # Random, so that the output of a login script on that host cannot be taken for it.
        self.token = secrets.token_hex(16)
        """The agents' greeting: what login scripts print before it is skipped."""
        self._placements = placements
        self._options = options
        self._ssh = ssh
        self._messages, self._call = io.messages, io.call
        self._restart = restart
        self._run_id = secrets.token_hex(8)
        self._secret = new_secret()
        self._remote_hosts = [placement.host.name for placement in placements if not placement.host.is_local]
        # Only in the first start: the log of a restart is about what changed.
        self._speaks_as_horovodrun = options.is_horovod and restart == 0

    def connect(self, pipes: AgentPipes) -> None:
        """Starts one agent per host and sends it the job."""
        if self._speaks_as_horovodrun:
            self._report_hosts()
        for number, placement in enumerate(self._placements):
            command = agent_command(placement.host, self._ssh)
            self._messages.detail(f"{placement.host.name}: {placement.ranks()}, {command}")
            job = agent_job(
                placement, self._options, token=self.token, secret=self._secret, run_id=self.run_id_of(number)
            )
            ranks = [world.rank for world in placement.worlds]
            checker = AgentMessageChecker(ranks, has_call=self._call is not None)
            pipes.open(placement, command, checker).send(
                {
                    **job,
                    "restart": self._restart,
                    "master_port": self._options.master_port,
                    "needs_versions": len(self._placements) > 1,
                    "hang_timeout_s": self._options.hang_timeout_s,
                }
            )

    def _report_hosts(self) -> None:
        """Shows the messages of horovodrun's start: scripts and people look for them in its log."""
        show = self._messages.as_horovodrun
        show("Filtering local host names.")
        show(f"Remote host found: {' '.join(self._remote_hosts)}")
        if self._remote_hosts:
            show("Checking ssh on all remote hosts.")
            return
        show("All hosts are local, finding the interfaces with address 127.0.0.1")
        loopback = [name for name, addresses in interfaces().items() if "127.0.0.1" in addresses]
        show(f"Local interface found {' '.join(loopback)}")

    def run_id_of(self, number: int) -> str:
        """Returns the run id of one agent: two host names may be one machine, where no agent may end another's ranks."""
        return f"{self._run_id}-{number + 1}"

    def note_silent_hosts(self, pipes: AgentPipes) -> None:
        """Records a problem per host that has not answered within the start timeout."""
        for agent in pipes.all:
            if agent.state is PipeState.STARTING:
                why = why_not_started(agent.placement.host, self._ssh, None, agent.stderr_text)
                timeout = f"(--start-timeout {self._options.start_timeout_s:g} s)"
                self.problems.append((agent.name, f"{why} {timeout}"))

    def compare_versions(self, pipes: AgentPipes) -> None:
        """Records a problem if the hosts have different versions of Python, torch or megaclass."""
        # A single host was not asked for its versions (needs_versions).
        if len(pipes.all) == 1:
            return
        found = differences({agent.name: agent.hello.get("versions", {}) for agent in pipes.all})
        if not found:
            return
        listed = ". ".join(found.values())
        if self._options.allows_mixed_versions:
            self._messages.say(f"WARNING the hosts differ: {listed}.")
        else:
            advice = "Install the same versions on all of them, or add --allow-mixed-versions."
            self.problems.append(("", f"The hosts differ: {listed}. {advice}"))

    def failure(self, num_hosts: int) -> Outcome:
        """Prints the problems and returns the outcome of a job that was not started."""
        # One host may have several problems; a difference between hosts belongs to none of them.
        # Each host once, in the order in which the problems were found.
        hosts = tuple(dict.fromkeys(host for host, _ in self.problems if host))
        for group in _grouped(self.problems):
            shown = group if len(group) <= _SHOWN_ALIKE else group[:1]
            for _, problem in shown:
                self._messages.say(problem)
            if others := [host for host, _ in group[len(shown) :]]:
                self._messages.say(f"{len(others)} other hosts likewise: {short_list(others)}.")
        who = f": {len(hosts)} of {num_hosts} host(s) cannot take part" if hosts else ""
        self._messages.say(f"nothing was started{who}.")
        return Outcome(exit_code=EXIT_USER_ERROR, failed_hosts=hosts)

    def go(self, pipes: AgentPipes) -> None:
        """Tells every agent where rank 0 listens, upon which it starts its ranks."""
        if self._speaks_as_horovodrun and self._remote_hosts:
            # Every agent has answered, and those of other hosts did so over ssh.
            self._messages.as_horovodrun("SSH was successful into all the remote hosts.")
        first = pipes.all[0]
        address, port = address_of_first_host(pipes.all), first.hello["port"]
        self._messages.detail(f"run {self._run_id}: rank 0 listens at {address}, port {port} of {first.name}")
        for agent in pipes.all:
            # Before the message is sent: from here on a lost agent may have left ranks behind.
            agent.state = PipeState.RUNNING
        if self._call is not None:
            for message in self._call.messages():
                pipes.send(message)
        store_port = first.hello.get("store_port", 0)
        pipes.send({"do": "go", "address": address, "port": port, "store_port": store_port})


def _grouped(problems: Sequence[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """Groups problems that differ in the host's name only. What ssh printed, in the lines below the first, may differ, too."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for host, problem in problems:
        first = problem.partition("\n")[0]
        groups.setdefault(first.replace(host, "*") if host else first, []).append((host, problem))
    return list(groups.values())


def agent_job(placement: Placement, options: RunOptions, *, token: str, secret: str, run_id: str) -> Message:
    """Returns the job line of one agent, up to the fields that elastic jobs fill in another way."""
    return {
        "token": token,
        "secret": secret,
        # By its run id in the environment, an orphan killer recognises the processes of this start.
        "run_id": run_id,
        "host": placement.host.name,
        "worlds": [asdict(world) for world in placement.worlds],
        "command": options.command,
        "workdir": options.workdir,
        # The local agent inherits the driver's environment; other hosts get the part of it that concerns the ranks.
        "passed": {} if placement.host.is_local else passed_on(),
        "given": dict(options.given_env),
        "interfaces": options.interfaces,
        "heartbeat_s": options.heartbeat_s,
        "grace_s": options.fault_grace_s,
    }


def address_of_first_host(agents: Sequence[AgentPipe]) -> str:
    """Returns an address of host 0 that the other hosts reach, as an ssh connection has used it.

    The names in -H may be known to ssh alone, but ssh's connection has numeric addresses.
    """
    first = agents[0]
    remote = [agent for agent in agents if not agent.placement.host.is_local]
    # --network-interface was given, and host 0 has told the address of that interface.
    if "address" in first.hello:
        return str(first.hello["address"])
    if not remote or len(agents) == 1:
        return "127.0.0.1"
    # SSH_CONNECTION holds the client's address and port, then the server's. Host 0 is the client of every other host if it
    # is the driver's machine, and the server of its own connection otherwise.
    source, index = (remote[0], 0) if first.placement.host.is_local else (first, 2)
    address = _address_in(source.hello.get("ssh", ""), index)
    # Every rank will connect to this address. If it should be ours, another host's claim is not enough: it is checked.
    if address is None or (first.placement.host.is_local and not is_own(address)):
        raise LaunchError(
            f"Cannot tell by which address the other hosts reach {first.name}: ssh on {source.name} reports "
            f"{source.hello.get('ssh', '')!r} (a tunnel?). Name the interface to use with --network-interface."
        )
    return address


def _address_in(ssh_connection: str, index: int) -> str | None:
    """Returns a field of SSH_CONNECTION that other hosts can reach, or None."""
    fields = ssh_connection.split()
    try:
        address = ip_address(fields[index]) if len(fields) == 4 else ""
    except ValueError:
        return None
    return address if address and not address.startswith("127.") and address != "::1" else None
