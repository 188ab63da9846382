"""Members of the next generation and their ranks: pure functions of the workers. Standard library only."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from megaclass_launch.elastic.worker import Why
from megaclass_launch.placement import STARTER
from megaclass_launch.wire.protocol import Message
from megaclass_launch.world import World


@dataclass(slots=True)
class WorkerRecord:
    """One worker process, as the driver knows it.

    WorkerTable makes the record. WorkerEvents writes what the worker's agent reports and its rank in each generation, Leavers
    what it is told to do; each in the driver's one thread.
    """

    number: int
    """Unique in the whole job; agents use it in place of a rank."""
    host: str
    slot: int
    """Place on its host. It stays the same as long as the process lives, so that the process keeps its GPU."""
    rank: int | None = None
    """Rank in the current generation; None for a process that is not a member of it."""
    is_ready: bool = False
    """Waits at the rendezvous."""
    why: Why = Why.START
    is_leaving: bool = False
    """Was dismissed by the driver: its end is no failure."""
    since: float = 0.0
    """Time at which it was started, or told to leave."""
    stopped_at: float | None = None
    """Time at which its agent reported that it was stopped by SIGSTOP."""
    shown_rank: int = 0
    """Rank in front of its output: that of the current generation, or before the first one that of the plan."""

    @property
    def is_survivor(self) -> bool:
        return self.rank is not None


def in_rank_order(workers: Sequence[WorkerRecord], host_order: Sequence[str]) -> list[WorkerRecord]:
    """Returns the workers in the order of their new ranks.

    Survivors keep their order, and the ranks of a host stay together: hosts in the order of their lowest surviving rank, then
    new hosts; on each host survivors, then new processes. Rank 0 is thus a survivor if there is one, and has the state.
    """
    infinity = float("inf")

    def old_rank(worker: WorkerRecord) -> float:
        return worker.rank if worker.rank is not None else infinity

    # The ranks of a host stay neighbours, as in the plan of other jobs (plan.py).
    lowest: dict[str, float] = {}
    for worker in workers:
        lowest[worker.host] = min(lowest.get(worker.host, infinity), old_rank(worker))
    places = {host: place for place, host in enumerate(host_order)}

    def order(worker: WorkerRecord) -> tuple[float, float, float, int]:
        return lowest[worker.host], places.get(worker.host, infinity), old_rank(worker), worker.slot

    return sorted(workers, key=order)


def chosen(ready: Sequence[WorkerRecord], max_processes: int, host_order: Sequence[str]) -> list[WorkerRecord]:
    """Returns at most max_processes of the workers, survivors first, in the order of their new ranks."""
    # A survivor is never replaced by a new process, which would first have to get the state.
    survivors = [worker for worker in ready if worker.is_survivor]
    new = [worker for worker in ready if not worker.is_survivor]
    room = max(0, max_processes - len(survivors))
    return in_rank_order([*survivors, *new[:room]], host_order)


def worlds_of(members: Sequence[WorkerRecord]) -> dict[int, World]:
    """Returns the world of each member, keyed by worker. members: in the order of their ranks.

    Local ranks follow the slots, not the ranks: a process that keeps its slot keeps its local rank whenever the slots below it
    are filled, and a new process never gets the GPU of an old one.
    """
    slots: dict[str, list[int]] = {}
    for member in members:
        slots.setdefault(member.host, []).append(member.slot)
    hosts = list(slots)
    found = {}
    for rank, member in enumerate(members):
        local_rank = sorted(slots[member.host]).index(member.slot)
        index = hosts.index(member.host)
        found[member.number] = World(
            rank=rank,
            size=len(members),
            local_rank=local_rank,
            local_size=len(slots[member.host]),
            # Among the ranks with the same local rank: hosts with fewer slots have none of them.
            cross_rank=sum(len(slots[host]) > local_rank for host in hosts[:index]),
            cross_size=sum(len(slots[host]) > local_rank for host in hosts),
            starter=STARTER,
        )
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """A generation that the driver publishes: everything by which the ranks of one generation find and trust each other."""

    number: int
    token: str
    secret: str
    address: str
    port: int
    store_port: int

    def where(self) -> Message:
        return {
            "address": self.address,
            "port": self.port,
            "store_port": self.store_port,
            "secret": self.secret,
        }


def publication(
    generation: Generation, members: Sequence[WorkerRecord], previous_size: int, *, has_progressed: bool
) -> Message:
    """Returns the message that makes the members' agents tell them their places; the worlds of a host are added per agent."""
    # Survivors that left together after a commit have the same state; one that failed went back to its last commit.
    needs_sync = any(not member.is_survivor or member.why is not Why.CHANGED for member in members)
    return {
        "do": "publish",
        "generation": generation.number,
        "token": generation.token,
        **generation.where(),
        "members": [
            {"worker": member.number, "host": member.host, "slot": member.slot, "previous_rank": member.rank}
            for member in members
        ],
        "previous_size": previous_size,
        "needs_sync": needs_sync,
        "has_progressed": has_progressed,
    }


def worlds_on(host: str, members: Sequence[WorkerRecord], worlds: Mapping[int, World]) -> dict[str, Message]:
    """Returns the worlds of the members on one host, for its agent."""
    return {str(member.number): asdict(worlds[member.number]) for member in members if member.host == host}


def listed(members: Sequence[WorkerRecord]) -> str:
    """Returns the hosts with the number of their ranks: "h1:2, h2:1"."""
    counts: dict[str, int] = {}
    for member in members:
        counts[member.host] = counts.get(member.host, 0) + 1
    return ", ".join(f"{host}:{count}" for host, count in counts.items())
