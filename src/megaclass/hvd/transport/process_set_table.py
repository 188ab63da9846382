"""The process sets of a job, and this rank's connections to the other members of each.

The engine thread changes the table, at the same place in the order of operations on every rank, so that all ranks number the sets
alike. Other threads only read it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch.distributed as dist

from megaclass.hvd.engine.messages import Request
from megaclass.hvd.engine.rendezvous import Meeting, new_group
from megaclass.hvd.settings import Settings


@dataclass
class SetConnections:
    """The connections of one process set."""

    ranks: tuple[int, ...]
    cpu: dist.ProcessGroup
    gpu: dist.ProcessGroup | None
    """NCCL's group, where every rank has a GPU of its own."""
    scripts: dist.ProcessGroup | None = None
    """The group that the script uses itself; made when it first asks for it."""

    def close(self) -> None:
        for group in (self.cpu, self.gpu, self.scripts):
            if group is not None:
                group.shutdown()


class ProcessSetTable:
    """All process sets by number; number 0 is the set of all ranks."""

    def __init__(self, meeting: Meeting, settings: Settings) -> None:
        self._meeting = meeting
        self._settings = settings
        self._next = 0
        self.ranks: dict[int, tuple[int, ...]] = {}
        """The members of every set."""
        self.connections: dict[int, SetConnections] = {}
        """The connections of the sets that this rank is a member of."""
        self.add(tuple(range(meeting.size)))

    def add(self, ranks: tuple[int, ...]) -> int:
        """Adds a set and connects its members; returns its number, or -1 if a set of these ranks exists."""
        if ranks in self.ranks.values():
            return -1
        number, self._next = self._next, self._next + 1
        # A set without ranks is allowed, as in Horovod, and needs no connections.
        if self._meeting.rank in ranks:
            self.connections[number] = self._connect(number, ranks)
        # Last: other threads take a set that is listed here for one that can be used.
        self.ranks[number] = ranks
        return number

    def remove(self, number: int) -> int:
        """Removes a set and closes its connections; returns its number, or -1 if there is none."""
        if self.ranks.pop(number, None) is None:
            return -1
        if (connections := self.connections.pop(number, None)) is not None:
            connections.close()
        return number

    def scripts_group(self, number: int) -> dist.ProcessGroup:
        """Returns a group for collectives that the script calls itself. The first call is collective over the set.

        The engine runs its operations on groups of its own, in its own thread: on a shared group, the operations of both
        could meet in a different order on each rank.
        """
        connections, meeting = self.connections[number], self._meeting
        if connections.scripts is None:
            backend = "nccl" if meeting.uses_nccl else "gloo"
            name = f"set {number} of the script"
            connections.scripts = new_group(meeting, name, connections.ranks, self._settings, backend=backend)
        return connections.scripts

    def change(self, request: Request) -> int:
        """Executes an agreed request to add or remove a set."""
        return self.add(request.splits) if request.kind == "add_process_set" else self.remove(request.splits[0])

    def close(self) -> None:
        """Closes all connections."""
        for connections in self.connections.values():
            connections.close()
        self.connections.clear()

    def wrong_ranks(self, ranks: Sequence[int]) -> str:
        """Returns the text of an error; empty if these ranks can form a process set."""
        size = self._meeting.size
        if any(not 0 <= rank < size for rank in ranks):
            return f"Process set {list(ranks)}: ranks must lie in [0, {size})."
        if len(set(ranks)) < len(ranks):
            return f"Process set {list(ranks)}: each rank may appear only once."
        return ""

    def _connect(self, number: int, ranks: tuple[int, ...]) -> SetConnections:
        """Connects this rank to the other members; all members call it."""
        meeting, settings = self._meeting, self._settings
        name = f"set {number}"
        # All members come here at the same place in the order of operations, which makes these collective constructions safe.
        cpu = new_group(meeting, name, ranks, settings)
        gpu = new_group(meeting, name, ranks, settings, backend="nccl") if meeting.uses_nccl else None
        return SetConnections(ranks, cpu, gpu)
