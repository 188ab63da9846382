"""The start of a job: what an agent is told, which hosts can take part, and the address of rank 0. Standard library only.

    connect (ssh or local agent, job on stdin) -> every host says hello or refuses -> versions agree -> start

In a job that is not elastic, nothing is started anywhere unless every host can take part. An elastic job starts with the hosts
that can; generations.py decides when there are enough.
"""

import secrets
from collections.abc import Sequence
from dataclasses import asdict

from megaclass_launch.driver.agent_pipe import AgentPipe, PipeState
from megaclass_launch.driver.job import Generation, JobState, Open, WorkerRecord
from megaclass_launch.driver.job_end import end
from megaclass_launch.driver.outcome import Outcome
from megaclass_launch.driver.ssh import address_in, why_not_started
from megaclass_launch.errors import LaunchError
from megaclass_launch.exit_codes import EXIT_USER_ERROR
from megaclass_launch.hosts import Host
from megaclass_launch.placement import passed_on, worlds_of
from megaclass_launch.rendezvous.addresses import is_own
from megaclass_launch.rendezvous.job_secret import new_secret
from megaclass_launch.versions import differences, short_list
from megaclass_launch.wire.agent_messages import AgentMessageChecker
from megaclass_launch.wire.protocol import Message
from megaclass_launch.world import World

_SETTLE_S = 3.0
"""After one host could not be reached, others may fail for the same reason; after this time all are named at once."""
_SAME_VERSIONS = "Install the same versions on all of them, or add --allow-mixed-versions."
_SHOWN_ALIKE = 3
"""If more hosts have the same problem, it is printed once, with their names."""


# ---- agents ----


def agent_job(job: JobState, host: Host, run_id: str) -> Message:
    """Returns the job line of one agent."""
    is_only_host = not job.is_elastic and len(job.hosts.listed) == 1
    is_first = next(iter(job.hosts.listed)) == host.name
    return {
        "token": job.token,
        "run_id": run_id,
        "host": host.name,
        "slots": host.slots,
        "command": job.options.command,
        "workdir": job.options.workdir,
        # The local agent inherits the driver's environment; other hosts get the part of it that concerns the ranks.
        "passed": {} if host.is_local else passed_on(),
        "given": dict(job.options.given_env),
        "interfaces": job.options.interfaces,
        "heartbeat_s": job.options.heartbeat_s,
        "grace_s": job.options.fault_grace_s,
        "hang_timeout_s": job.options.hang_timeout_s,
        "master_port": job.options.master_port,
        "is_elastic": job.is_elastic,
        # In an elastic job every host may get rank 0.
        "holds_ports": job.is_elastic or is_first,
        "is_alone": is_only_host,
    }


def checker_for(job: JobState, host: Host) -> AgentMessageChecker:
    """Returns the checker of an agent's messages."""
    # A new one for each agent: one that is opened again on this host must not speak about the workers of the last one.
    return AgentMessageChecker(
        [worker.number for worker in job.ranks.on_host(host.name)],
        is_elastic=job.is_elastic,
        holds_ports=next(iter(job.hosts.listed)) == host.name,
        has_call=job.io.call is not None,
    )


def greet(job: JobState, agent: AgentPipe, hello: Message) -> str:
    """Notes an agent's hello; returns why its host cannot take part in an elastic job, or an empty text."""
    agent.hello = hello
    agent.state = PipeState.READY
    agent.ports = {"port": hello.get("port", 0), "store_port": hello.get("store_port", 0)}
    job.messages.detail(f"{agent.name}: agent {hello['pid']} is ready")
    if not job.is_elastic:
        return ""
    others = [other for other in job.agents.values() if other.hello and other is not agent]
    # With one other host only: each of them was compared when it said hello.
    if not job.options.allows_mixed_versions and (found := _version_differences([agent, *others[:1]])):
        return f"{found} {_SAME_VERSIONS}"
    # Found out before it has ranks: while a generation trains, nothing about another host may end the job.
    try:
        for other in others:
            address_of_first_host([other, agent])
    except LaunchError as error:
        return str(error)
    return ""


def _version_differences(agents: Sequence[AgentPipe]) -> str:
    """Returns sentences about versions of Python, torch or megaclass that differ; empty if all are the same."""
    found = differences({agent.name: agent.hello.get("versions", {}) for agent in agents})
    return f"The hosts differ: {'. '.join(found.values())}." if found else ""


def start_workers(
    job: JobState, workers: Sequence[WorkerRecord], worlds: dict[int, World], generation: Generation, **more: object
) -> None:
    """Tells the agents of these workers to start them. more: for the agent, beyond the places of the workers."""
    for host in dict.fromkeys(worker.host for worker in workers):
        here = [worker for worker in workers if worker.host == host]
        entries = [{"worker": worker.number, "world": asdict(worlds[worker.number])} for worker in here]
        agent = job.agents[host]
        # Before the message is sent: from here on a lost agent may have left ranks behind.
        is_first_start, agent.state = agent.state is PipeState.READY, PipeState.RUNNING
        if job.is_elastic:
            agent.checker.expect({worker.number for worker in here})
        if job.io.call is not None and is_first_start:
            for message in job.io.call.messages():
                job.tell(agent, message)
        job.tell(agent, {"do": "start", "workers": entries, "restart": job.restart, **more, **generation.where()})


def new_generation(job: JobState, number: int, hosts: Sequence[str]) -> Generation | None:
    """Returns a generation with rank 0 on the first of these hosts; None while its ports are not known."""
    if not (ports := job.agents[hosts[0]].ports):
        return None
    address = address_of_first_host([job.agents[host] for host in dict.fromkeys(hosts)])
    return Generation(number=number, token=secrets.token_hex(16), secret=new_secret(), address=address, **ports)


# ---- the start of a job that is not elastic ----


def connect(job: JobState) -> None:
    """Opens all agents at the same time: a slow host costs its own time, not the sum."""
    for host in job.hosts.listed.values():
        job.order(Open(host))


def start_together(job: JobState, now: float) -> None:
    """Starts all ranks once every host has answered, or nothing if one of them cannot take part."""
    if job.is_ending:
        # A signal came during the start. Agents that are ready were told to end; the others know nothing yet.
        job.start_deadline = float("inf")
        drop_starting(job)
        return
    if job.problems:
        # The first problem sets this moment, and later ones do not move it.
        job.start_deadline = min(job.start_deadline, now + _SETTLE_S)
    if job.is_any_starting() and now < job.start_deadline:
        return
    # If other hosts have problems, the silent ones have not had the whole time: they are not blamed.
    if not job.problems:
        _note_silent_hosts(job)
    if not job.problems:
        _compare_versions(job)
    job.start_deadline = float("inf")
    if job.problems:
        _fail(job)
    else:
        _start(job, now)


def _start(job: JobState, now: float) -> None:
    generation = new_generation(job, 1 + job.restart, [agent.name for agent in job.opened])
    assert generation is not None, "the agent of the first host has named its ports"
    where = f"{generation.address}, port {generation.port} of {job.opened[0].name}"
    job.messages.detail(f"run {job.run_id}: rank 0 listens at {where}")
    # The time without progress counts from the start of the ranks, not from that of the driver.
    job.printed_at = now
    worlds = worlds_of([(worker.host, worker.slot) for worker in job.ranks.rows])
    start_workers(job, job.ranks.rows, dict(enumerate(worlds)), generation)


def _note_silent_hosts(job: JobState) -> None:
    """Records a problem per host that has not answered within the start timeout."""
    for agent in job.opened:
        if agent.state is PipeState.STARTING:
            why = why_not_started(agent.host, job.options, None, agent.stderr_text)
            job.problems.append((agent.name, f"{why} (--start-timeout {job.options.start_timeout_s:g} s)"))


def _compare_versions(job: JobState) -> None:
    """Records a problem if the hosts have different versions. A host that is alone was not asked for them."""
    found = _version_differences(job.opened) if len(job.opened) > 1 else ""
    if found and job.options.allows_mixed_versions:
        job.messages.say(f"WARNING {found.replace('The', 'the', 1)}")
    elif found:
        job.problems.append(("", f"{found} {_SAME_VERSIONS}"))


def _fail(job: JobState) -> None:
    """Prints the problems and ends a job of which nothing was started."""
    # One host may have several problems; a difference between hosts belongs to none of them.
    # Each host once, in the order in which the problems were found.
    hosts = tuple(dict.fromkeys(host for host, _ in job.problems if host))
    for group in _grouped(job.problems):
        shown = group if len(group) <= _SHOWN_ALIKE else group[:1]
        for _, problem in shown:
            job.messages.say(problem)
        if others := [host for host, _ in group[len(shown) :]]:
            job.messages.say(f"{len(others)} other hosts likewise: {short_list(others)}.")
    who = f": {len(hosts)} of {len(job.opened)} host(s) cannot take part" if hosts else ""
    job.messages.say(f"nothing was started{who}.")
    drop_starting(job)
    end(job, Outcome(exit_code=EXIT_USER_ERROR, failed_hosts=hosts), grace_s=0.0)


def drop_starting(job: JobState) -> None:
    """Drops the agents that have not answered yet; no rank runs there."""
    for agent in job.opened:
        if agent.state is PipeState.STARTING:
            job.drop(agent)


def _grouped(problems: Sequence[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """Groups problems that differ in the host's name only. What ssh printed, in the lines below the first, may also differ."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for host, problem in problems:
        first = problem.partition("\n")[0]
        groups.setdefault(first.replace(host, "*") if host else first, []).append((host, problem))
    return list(groups.values())


# ---- the address of rank 0 ----


def address_of_first_host(agents: Sequence[AgentPipe]) -> str:
    """Returns an address of host 0 that the other hosts reach, as an ssh connection has used it.

    The names in -H may be known to ssh alone, but ssh's connection has numeric addresses.
    """
    first = agents[0]
    remote = [agent for agent in agents if not agent.host.is_local]
    # --network-interface was given, and host 0 has told the address of that interface.
    if "address" in first.hello:
        return str(first.hello["address"])
    if not remote or len(agents) == 1:
        return "127.0.0.1"
    if first.host.address:
        return first.host.address
    # SSH_CONNECTION holds the client's address and port, then the server's. Host 0 is the client of every other host if it
    # is the driver's machine, and the server of its own connection otherwise.
    source, index = (remote[0], 0) if first.host.is_local else (first, 2)
    address = address_in(source.hello.get("ssh", ""), index)
    # Every rank will connect to this address. If it should be ours, another host's claim is not enough: it is checked.
    if address is None or (first.host.is_local and not is_own(address)):
        raise LaunchError(
            f"Cannot tell by which address the other hosts reach {first.name}: ssh on {source.name} reports "
            f"{source.hello.get('ssh', '')!r} (a tunnel?). Name the interface to use with --network-interface."
        )
    return address
