"""The state of a job: one object that all decisions read and change, and the orders that follow. Standard library only.

All ranks of a job that is not elastic belong to one generation, and none of them is replaced; a restart is the next generation
(`JobState.begin`). The ranks of an elastic job outlive its generations, which it forms one after the other.

Everything happens in the driver's one thread, so no field needs a lock. Decisions (messages.py, generations.py, start.py,
hang_watch.py, job_end.py) change the fields below and add orders; the loop (driver.py) takes the orders and
carries them out. Decisions show messages and output, which only queues them, but neither read nor write a pipe.

    fields                          changed by
    agents, opened                  driver.py when it opens an agent; drop, finish, forget
    ranks                           messages.py; generations.py
    hosts                           answers of the discovery; job_end.py:ban
    problems, start_deadline        start.py, until the ranks go
    decision, give_up_at, …         job_end.py
    current, is_closing, …          generations.py
    is_aware, is_finishing, …       messages.py
"""

import random
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from megaclass_launch.driver.agent_pipe import AgentPipe, PipeState
from megaclass_launch.driver.outcome import LastLines, Outcome, OutcomeDecision, failure_report
from megaclass_launch.driver.output import DriverIo
from megaclass_launch.hosts import Host
from megaclass_launch.options import RunOptions
from megaclass_launch.placement import places_on
from megaclass_launch.signals import InterruptLadder
from megaclass_launch.wire.protocol import Message, Why, silence_limits

# ---- ranks ----
#
# Table of the processes of all ranks: where each runs, what it printed last, how it ended.


_LEFT_EARLY_S = 60.0
"""A rank that left with 0 is named if others still run after this time: they may be waiting for it."""


@dataclass(slots=True)
class WorkerRecord:
    """One process that the job has started, as the driver knows it; in a job that is not elastic there is one per rank."""

    number: int
    """Unique in the whole job; messages use it in place of a rank. In a job that is not elastic it is the rank."""
    host: str
    slot: int
    """Place on its host. It stays the same as long as the process lives, so the process keeps its GPU."""
    rank: int | None = None
    """Rank in the current generation; None for a process that is not a member of it."""
    is_ready: bool = False
    """Waits at the rendezvous."""
    why: Why = Why.START
    is_leaving: bool = False
    """Was dismissed by the driver: its end is not a failure."""
    since: float = 0.0
    """Time at which it was started, or told to leave."""
    stopped_at: float | None = None
    """Time at which its agent reported that it was stopped by SIGSTOP."""
    shown_rank: int = 0
    """Rank in front of its output: that of the current generation, or before the first one that of the plan."""
    pid: int = 0
    code: int | None = None
    """Exit code, or minus the signal that ended it; None while it runs."""
    ended_at: float = 0.0
    last_lines: LastLines = field(default_factory=LastLines)

    @property
    def name(self) -> str:
        return f"rank {self.shown_rank} on {self.host}"


class RankTable:
    """One row per process that was ever started; `alive` has those that run, keyed by number."""

    def __init__(self) -> None:
        self.rows: list[WorkerRecord] = []
        self.alive: dict[int, WorkerRecord] = {}
        self.has_started = False
        """True once any rank ran."""
        self._has_named_early = False

    def add(self, host: str, slot: int, now: float, rank: int | None = None) -> WorkerRecord:
        """Adds a worker that is about to be started."""
        # Rows are never removed, so no number is given twice.
        worker = WorkerRecord(len(self.rows), host, slot, rank=rank, since=now, shown_rank=rank or 0)
        self.rows.append(worker)
        self.alive[worker.number] = worker
        return worker

    def note_pids(self, pids: dict[int, int]) -> None:
        """Notes that workers have started."""
        self.has_started = self.has_started or bool(pids)
        for number, pid in pids.items():
            self.rows[number].pid = pid

    def note_exit(self, worker: WorkerRecord, pid: int, code: int) -> None:
        worker.pid, worker.code, worker.ended_at = pid, code, time.monotonic()
        self.has_started = True
        self.alive.pop(worker.number, None)

    def staying(self) -> list[WorkerRecord]:
        """Returns the workers that run and were not told to leave."""
        return [worker for worker in self.alive.values() if not worker.is_leaving]

    def members(self) -> list[WorkerRecord]:
        """Returns the members of the current generation that run and were not told to leave, in the order of their ranks."""
        found = [worker for worker in self.staying() if worker.rank is not None]
        return sorted(found, key=lambda worker: worker.rank or 0)

    def free_slots(self, host: str, num_slots: int) -> list[int]:
        """Returns the slots of a host that no running worker has, the lowest first."""
        # Workers that are leaving included: until it has ended, a process holds the GPU of its slot.
        taken = {worker.slot for worker in self.alive.values() if worker.host == host}
        return [slot for slot in range(num_slots) if slot not in taken]

    def on_host(self, host: str) -> list[WorkerRecord]:
        return [worker for worker in self.alive.values() if worker.host == host]

    def ranks_of(self, host: str) -> str:
        """Returns the ranks of a host in a job that is not elastic, whether they run or not: "ranks 0-3"."""
        ranks = [worker.shown_rank for worker in self.rows if worker.host == host]
        return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"

    def failure_report_of(self, worker: WorkerRecord) -> str:
        """Returns the report about the rank that failed first, and names the ranks that had left before it."""
        assert worker.code is not None
        text = failure_report(worker.name, worker.pid, worker.code, worker.last_lines.shown())
        early = [other for other in self.rows if other.code == 0 and not other.is_leaving]
        if early:
            # A rank that left early with exit code 0 often is the cause: the others then fail for want of it.
            now = time.monotonic()
            times = ", ".join(f"{other.shown_rank} ({now - other.ended_at:.1f} s before)" for other in early)
            text += f"\nAlready ended with exit code 0: rank {times}. If that was too early, look there for the cause."
        return text

    def name_early_leaver(self) -> str | None:
        """Returns a sentence, once per start, about a rank that has left while others may be waiting for it."""
        now = time.monotonic()
        # Only exits with 0 get this old: after any other code, 75 included, the job is being ended by then.
        ended = (worker for worker in self.rows if worker.code is not None and now - worker.ended_at > _LEFT_EARLY_S)
        if self._has_named_early or not self.alive or (early := next(ended, None)) is None:
            return None
        self._has_named_early = True
        running = ", ".join(f"{w.shown_rank} on {w.host} (pid {w.pid or '?'})" for w in self.alive.values())
        return f"{early.name} ended with exit code 0 {_LEFT_EARLY_S:g} s ago; still running: {running}."


def named(workers: Iterable[WorkerRecord]) -> str:
    """Returns the workers by rank: "rank 1 on h2, rank 3 on h4"."""
    return ", ".join(worker.name for worker in workers)


# ---- hosts ----


class HostTable:
    """The hosts that the job may use, in the order in which they appeared, and those that have failed.

    A host that has failed gets no new processes: forever, or for a cooldown that doubles with each of its failures. Ranks
    that run there stay.
    """

    def __init__(self, cooldown_s: tuple[float, float] | None, jitter: Callable[[], float]) -> None:
        """cooldown_s: shortest and longest time; None: forever. jitter: returns random numbers from 0 to 1."""
        self.listed: dict[str, Host] = {}
        self._cooldown_s = cooldown_s
        self._jitter = jitter
        self._num_failures: dict[str, int] = {}
        self._banned_until: dict[str, float] = {}

    def update(self, hosts: Sequence[Host]) -> tuple[list[Host], list[Host]]:
        """Takes over an answer; returns the hosts or slots that were added, and those that were removed."""
        new = {host.name: host for host in hosts}
        nothing = Host(name="", slots=0)
        added = [host for host in hosts if host.slots > self.listed.get(host.name, nothing).slots]
        removed = [host for host in self.listed.values() if new.get(host.name, nothing).slots < host.slots]
        # Ranks are placed in this order, so a script that prints its hosts in another order must not move them.
        kept = {name: new[name] for name in self.listed if name in new}
        self.listed = kept | new
        return added, removed

    def ban(self, name: str, now: float) -> float:
        """Notes a failure of the host; returns for how long it gets no new processes, possibly forever (infinity)."""
        self._num_failures[name] = self._num_failures.get(name, 0) + 1
        if self._cooldown_s is None:
            pause_s = float("inf")
        else:
            least_s, most_s = self._cooldown_s
            # The random part keeps hosts that failed together from being tried again together.
            grown_s = least_s * 2.0 ** min(self._num_failures[name] - 1, 30) * (1.0 + self._jitter())
            pause_s = min(most_s, grown_s)
        # A longer ban stands: because of the random part, that of the next failure may end earlier.
        self._banned_until[name] = max(self._banned_until.get(name, 0.0), now + pause_s)
        return pause_s

    def slots(self, name: str) -> int:
        """Returns the slots of a host; 0 if it is not listed any more."""
        return self.listed[name].slots if name in self.listed else 0

    def is_usable(self, name: str, now: float) -> bool:
        """Returns whether new processes may be started there."""
        return name in self.listed and now >= self._banned_until.get(name, 0.0)

    def next_return(self, now: float) -> float:
        """Returns when the next cooldown ends; infinity if none does."""
        times = (until for name, until in self._banned_until.items() if name in self.listed and until > now)
        return min(times, default=float("inf"))


# ---- orders ----


@dataclass(frozen=True, slots=True)
class Tell:
    """Send a message to an agent."""

    agent: AgentPipe
    message: Message


@dataclass(frozen=True, slots=True)
class Open:
    """Start an agent on a host and send it the job."""

    host: Host


@dataclass(frozen=True, slots=True)
class Close:
    """Stop listening to an agent that is over. Pipes of a lost one are closed now, those of others at the end.

    kills_orphans: end what it may have left on its host.
    """

    agent: AgentPipe
    kills_orphans: bool = False


Order = Tell | Open | Close


# ---- generations ----


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """Everything by which the ranks of one generation find and trust each other."""

    number: int
    token: str
    secret: str
    address: str
    port: int
    store_port: int

    def where(self) -> Message:
        return {"address": self.address, "port": self.port, "store_port": self.store_port, "secret": self.secret}


@dataclass(slots=True)
class RunningGeneration:
    """The generation of an elastic job that was published last. It never runs again once it is broken."""

    facts: Generation
    size: int
    """Number of its members when it was published."""
    published_at: float
    hung: str = ""
    """How a rank hangs, once one does: a sentence without its end."""
    announced: tuple[frozenset[int], frozenset[int]] | None = None
    """Workers that join and workers that leave in the change that the members were told of."""
    has_announced_break: bool = False
    broken_since: float | None = None
    """Time at which it was first found broken, or at which late members were last killed."""

    def is_broken(self, members: Sequence[WorkerRecord]) -> bool:
        """Returns whether the next generation has to follow. members: those that are left."""
        return bool(self.hung) or len(members) < self.size or any(worker.is_ready for worker in members)


# ---- the job ----


class JobState:
    """The whole job: what all its generations share, and the generation that runs."""

    def __init__(self, options: RunOptions, io: DriverIo, hosts: Sequence[Host] | None = None) -> None:
        """hosts: of the first generation, see `begin`; None in an elastic job, which has to find them."""
        self.options, self.io = options, io
        self.messages, self.output = io.messages, io.output
        self.is_elastic = hosts is None
        # It is random, so the output of a login script on a host cannot be taken for an agent's greeting.
        self.token = secrets.token_hex(16)
        self.silence_s, self.silence_grace_s = silence_limits(options.heartbeat_s, options.fault_grace_s)
        """An agent that sent nothing for this long is lost, and the others have so long to end their ranks."""
        self.is_paused = False
        """True while the screen is full and nothing is read: the driver cannot tell then who is silent."""

        self.hosts = HostTable(options.cooldown_s, random.random)
        """Hosts that may be used, and hosts that have failed."""
        self.agents: dict[str, AgentPipe] = {}
        """The agents in use, by host; one that was told to leave is not in use any more."""
        self.checkpoint_step: int | None = None
        """Step of the last checkpoint that a rank has reported."""
        self.ladder = InterruptLadder()
        self.has_passed_sigterm = False

        self.current: RunningGeneration | None = None
        """The generation that was published last; None before the first one, and in a job that is not elastic."""
        self.is_aware = False
        """True once a worker has come to the rendezvous: the program is an elastic one."""
        self.has_progressed = False
        """True once a worker has reported a commit."""
        self.is_finishing = False
        """True once a member of an elastic job has ended with exit code 0."""
        self.is_closing = False
        """True once the last worker has ended and the agents of an elastic job were told to leave."""
        self.first_failure: tuple[Outcome, str] | None = None
        """Outcome and report of the first failure since the last commit; decides the exit code if the job ends by it."""
        self.disturbed_at: float | None = None
        """Time of the first failure since the last commit."""
        self.failed_generation = 0
        """Generation of the last failure: a commit of the same one may have been on its way before it failed."""
        self.short_since: float | None = None
        """Time since which there are too few ranks for a generation."""
        self.has_told_shortage = False

        self.begin(0, hosts)

    def begin(self, restart: int, hosts: Sequence[Host] | None) -> None:
        """Begins the next generation of a job that is not elastic; an elastic job begins once, and then publishes its own.

        The fields below belong to the generation. It has agents of its own: an agent, an ssh or a host may have ended the
        last one. hosts: with as many slots as ranks are to be started there; None in an elastic job.
        """
        self.restart = restart
        # By the run id, orphan killers know the processes of this generation.
        self.run_id = secrets.token_hex(8)
        self.opened: list[AgentPipe] = []
        """All agents, also those that are over."""
        self.ranks = RankTable()
        self.printed_at = time.monotonic()
        """Time at which a rank last printed anything, or at which all were started."""

        self.problems: list[tuple[str, str]] = []
        """Host, or an empty text for all together, and why the job cannot start; not used by elastic jobs."""
        self.start_deadline = self.printed_at + self.options.start_timeout_s if hosts is not None else float("inf")
        """Until when the hosts may answer; infinity once they have."""

        self.decision = OutcomeDecision()
        self.give_up_at = float("inf")
        """Time at which agents that do not report the end of their ranks are abandoned."""
        self.resume_deadline = float("inf")
        """Time at which ranks are ended that have not saved and left after the first one did with exit code 75."""
        self._orders: list[Order] = []
        if hosts is not None:
            # Not `update`, which keeps the order of the last generation: rank 0 belongs to the first of these.
            self.hosts.listed = {host.name: host for host in hosts}
            for place in places_on(hosts):
                self.ranks.add(*place, self.printed_at, rank=len(self.ranks.rows))

    @property
    def is_ending(self) -> bool:
        """Returns True once the ranks have been told to end, so their exit codes say nothing about the cause."""
        return self.decision.is_ending

    @property
    def is_starting(self) -> bool:
        """Returns True until all ranks of a job that is not elastic may go, or it is known that they cannot."""
        return self.start_deadline < float("inf")

    @property
    def generation(self) -> int:
        """Returns the number of the current generation; 0 before the first one."""
        return self.current.facts.number if self.current is not None else 0

    @property
    def generation_token(self) -> str:
        """Returns the token of the current generation; an empty text before the first one."""
        return self.current.facts.token if self.current is not None else ""

    def unfinished(self) -> list[AgentPipe]:
        """Returns the agents that are neither done nor lost."""
        return [agent for agent in self.opened if not agent.is_over]

    def is_any_starting(self) -> bool:
        return any(agent.state is PipeState.STARTING for agent in self.agents.values())

    def is_wanted(self, worker: WorkerRecord) -> bool:
        """Returns whether the job may still use the worker's slot: its host is listed, with at least as many slots."""
        return worker.slot < self.hosts.slots(worker.host)

    def show_rest(self, worker: WorkerRecord) -> None:
        """Shows what a worker has printed without a line end."""
        worker.last_lines.add(self.output.finish(worker.shown_rank))

    # ---- orders ----

    def order(self, order: Order) -> None:
        self._orders.append(order)

    def take_orders(self) -> list[Order]:
        """Returns what is to be done, in this order, and forgets it."""
        orders, self._orders = self._orders, []
        return orders

    def tell(self, agent: AgentPipe, message: Message) -> None:
        self.order(Tell(agent, message))

    def tell_all(self, message: Message) -> None:
        """Sends a message to every agent that is not over."""
        for agent in self.unfinished():
            self.tell(agent, message)

    def tell_about(self, what: str, workers: Sequence[WorkerRecord], **more: object) -> None:
        """Sends an order about workers to their agents."""
        for host in dict.fromkeys(worker.host for worker in workers):
            if host in self.agents:
                numbers = [worker.number for worker in workers if worker.host == host]
                self.tell(self.agents[host], {"do": what, "workers": numbers, **more})

    def drop(self, agent: AgentPipe, *, kills_orphans: bool = False) -> None:
        """Counts an agent as lost."""
        agent.state = PipeState.LOST
        self.forget(agent)
        self.order(Close(agent, kills_orphans))

    def finish(self, agent: AgentPipe) -> None:
        """Notes that an agent is done."""
        agent.state = PipeState.DONE
        self.forget(agent)
        self.order(Close(agent))

    def forget(self, agent: AgentPipe) -> None:
        """Uses an agent no more. Its host may have a newer agent by now, which stays."""
        if self.agents.get(agent.name) is agent:
            del self.agents[agent.name]
