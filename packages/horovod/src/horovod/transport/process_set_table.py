"""The process sets of a job, this rank's connections to the other members of each, and which of them carries an operation.

The engine thread changes the table, at the same place in the order of operations on every rank, so all ranks number the
sets alike. Other threads only read it.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from horovod.common.settings import Settings
from horovod.engine.messages import Request
from horovod.engine.rendezvous import Meeting, new_group
from megaclass_launch.elastic import is_elastic
from megaclass_launch.ranks.process_group import abort_nccl


@dataclass
class SetConnections:
    """The connections of one process set."""

    gpu: dist.ProcessGroup | None
    """NCCL's group, where every rank has a GPU of its own."""
    make_cpu: Callable[[], dist.ProcessGroup]
    """Creates gloo's group; collective over the set."""
    scripts: dist.ProcessGroup | None = None
    """The group that the script uses itself; made when it first asks for it."""

    @functools.cached_property
    def cpu(self) -> dist.ProcessGroup:
        """gloo's group. The first use is collective: the engine thread asks at the same operation on every member.

        gloo connects every member with every other one, so a job whose operations all run on GPUs never creates it.
        """
        return self.make_cpu()

    def abort(self) -> None:
        """Ends NCCL's operations that wait for a member that is gone; their results are garbage. Any thread may call it."""
        for group in (self.gpu, self.scripts):
            if group is not None and self.gpu is not None:
                abort_nccl(group)

    def close(self) -> None:
        for group in (self.__dict__.get("cpu"), self.gpu, self.scripts):
            if group is not None:
                group.shutdown()


class ProcessSetTable:
    """All process sets by number; number 0 is the set of all ranks."""

    def __init__(self, meeting: Meeting, settings: Settings) -> None:
        self._meeting = meeting
        self._settings = settings
        self.rank = meeting.rank
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
            connections.scripts = new_group(meeting, name, self.ranks[number], self._settings, backend=backend)
        return connections.scripts

    def change(self, request: Request) -> int:
        """Executes an agreed request to add or remove a set."""
        return self.add(request.splits) if request.kind == "add_process_set" else self.remove(request.splits[0])

    # -- what carries an operation: chosen by the request alone, so all ranks choose alike ---------------------------

    def members(self, request: Request) -> tuple[int, ...]:
        """Returns the ranks that take part, in the order of their places in the group."""
        return self.ranks[request.process_set]

    def place(self, request: Request) -> int:
        """Returns the place of this rank among them."""
        return self.members(request).index(self.rank)

    def group(self, request: Request) -> dist.ProcessGroup:
        groups = self.connections[request.process_set]
        if request.device == "cpu" or not self._meeting.uses_nccl:
            return groups.cpu
        assert groups.gpu is not None
        return groups.gpu

    def transport(self, request: Request) -> str:
        """Returns the name of what carries the tensors, for the timeline."""
        return "NCCL" if request.device != "cpu" and self._meeting.uses_nccl else "GLOO"

    def is_direct(self, tensor: Tensor) -> bool:
        return self._meeting.uses_nccl or tensor.device.type == "cpu"

    def staged(self, tensor: Tensor, run: Callable[[Tensor], object]) -> None:
        """Runs on a copy in main memory if NCCL cannot be used, because not every rank has its own GPU."""
        if self.is_direct(tensor):
            run(tensor)
            return
        copy = tensor.cpu()
        run(copy)
        tensor.copy_(copy)

    # -- the end --------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """Ends operations on GPUs that wait for a rank that is gone. Any thread may call it."""
        for connections in list(self.connections.values()):
            connections.abort()

    def close(self) -> None:
        """Closes all connections."""
        for connections in self.connections.values():
            connections.close()
        self.connections.clear()

    # -- checks and connections ------------------------------------------------------------------------------------

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
        gpu = new_group(meeting, name, ranks, settings, backend="nccl") if meeting.uses_nccl else None
        connections = SetConnections(gpu, functools.partial(new_group, meeting, name, ranks, settings))
        # In an elastic job all sockets of a generation must exist when init() returns: OwnConnections ends those it has noted.
        if gpu is None or is_elastic():
            _ = connections.cpu
        return connections
