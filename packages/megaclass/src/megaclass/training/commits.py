"""Decisions about commits of an elastic training, as pure functions: every rank computes the same ones from the same table.

A commit is the state of one step, in the memory of the ranks. Each rank holds the part of it that all ranks have (backbone and
its optimizer), the centres of its own classes, and a copy of the centres of one other rank, which has a number of places
(`copy_distance`) less. A commit can be restored as long as the ranks that are left hold all classes of it.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor

from megaclass.checkpoint.class_ranges import Classes, overlapping, whole_up_to
from megaclass.checkpoint.host_copy import HostCopy
from megaclass.checkpoint.tensor_file import DTYPE_NAMES
from megaclass.distributed.agreement import gather_texts
from megaclass.distributed.data_parallel import average_buffers_
from megaclass.head.centres import class_range
from megaclass.training.model.build import Model, generator_states, restore_generators
from megaclass_launch.elastic import Assignment, ElasticWorker
from megaclass_launch.errors import ConnectionLostError
from megaclass_launch.ranks.collectives import gather_blocks


@dataclass(frozen=True, slots=True)
class HeldCommit:
    """The part of a commit that one rank holds. The ranks exchange it as seven numbers."""

    generation: int
    """Generation of the job in which it was made, from 1; 0 if the rank holds none."""
    step: int
    num_classes: int
    own_start: int
    own_stop: int
    kept_start: int
    """Classes of the other rank; none if kept_start equals kept_stop."""
    kept_stop: int

    def numbers(self) -> list[int]:
        return list(astuple(self))

    @property
    def key(self) -> tuple[int, int, int]:
        """Of all parts of a commit; larger for a newer one, also if a later generation has gone back to an earlier step."""
        return self.generation, self.step, self.num_classes


NO_COMMIT = HeldCommit(0, 0, 0, 0, 0, 0, 0)
NUM_NUMBERS = len(NO_COMMIT.numbers())


@dataclass(frozen=True, slots=True)
class Restoration:
    """How a commit is restored: which rank has which part of it."""

    generation: int
    step: int
    num_classes: int
    holders: Mapping[Classes, int]
    """The rank that provides each range of classes."""
    ranks: tuple[int, ...]
    """Ranks that hold this commit, and thus the part that all ranks have."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """Centres of the classes [start, stop) that rank `source` holds in the shard `shard` and rank `target` needs."""

    source: int
    target: int
    shard: Classes
    start: int
    stop: int


def newest_whole_commit(held_W: Sequence[Sequence[HeldCommit]]) -> Restoration | None:
    """Returns how to restore the newest commit of which no class is lost; None if there is none. held_W: by rank.

    The rank to which the classes belonged provides them if it is there, otherwise the one with the copy.
    """
    found = [(rank, commit) for rank, commits in enumerate(held_W) for commit in commits if commit.generation]
    for key in sorted({commit.key for _, commit in found}, reverse=True):
        these = [(rank, commit) for rank, commit in found if commit.key == key]
        copies = {(commit.kept_start, commit.kept_stop): rank for rank, commit in these}
        owners = {(commit.own_start, commit.own_stop): rank for rank, commit in these}
        holders = {classes: rank for classes, rank in (copies | owners).items() if classes[0] < classes[1]}
        if whole_up_to(holders) == key[2]:
            return Restoration(*key, holders, tuple(rank for rank, _ in these))
    return None


def transfers(restoration: Restoration, world_size: int) -> list[Transfer]:
    """Returns what each rank of the new world gets from whom, in the order in which it is sent."""
    return [
        Transfer(restoration.holders[shard], target, shard, start, stop)
        for target in range(world_size)
        for own in [class_range(restoration.num_classes, target, world_size)]
        for shard, start, stop in overlapping({shard: shard for shard in restoration.holders}, own.start, own.stop)
    ]


def copy_distance(hosts: Sequence[str]) -> int:
    """Returns the offset d that puts most copies on another host: rank r sends its centres to rank (r + d) % W.

    hosts: by rank. 0 for a single rank. Every rank then holds one copy, whatever the offset is.
    """
    size = len(hosts)

    def num_elsewhere(distance: int) -> int:
        return sum(host != hosts[(rank + distance) % size] for rank, host in enumerate(hosts))

    return max(range(1, size), key=num_elsewhere, default=0)


# ---- Sends the state of an elastic training between ranks, as plain bytes. Nothing that arrives is unpickled. -----

_CHUNK_BYTES = 64 << 20
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def swap_rows(
    own: Mapping[str, Tensor], kept: Mapping[str, Tensor], *, to: int, source: int, device: torch.device
) -> None:
    """Collective. Sends this rank's rows to rank `to` and fills `kept`, in host memory, with those of rank `source`.

    own, kept: the same names on every rank. Traffic: the rows of one rank, per rank, in pieces of up to 64 MiB.
    """
    for name in own:
        # Shards differ by at most one class, so one side may have a piece more.
        for part, place in zip_longest(_pieces(own[name]), _pieces(kept[name])):
            # Both in one batch: a send that waits for its receiver, on every rank at once, would never end.
            operations = []
            if part is not None:
                operations.append(dist.P2POp(dist.isend, part.contiguous(), to))
            buffer = None
            if place is not None:
                # NCCL receives on the GPU only; one piece at a time, because there may be no room for a second shard.
                buffer = place if device.type == "cpu" else torch.empty_like(place, device=device)
                operations.append(dist.P2POp(dist.irecv, buffer, source))
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            if place is not None and buffer is not None and buffer is not place:
                place.copy_(buffer)


def send_rows(rows: Mapping[str, Tensor], target: int, device: torch.device) -> None:
    """Sends rows to another rank, which calls receive_rows with rows of the same names and sizes."""
    for tensor in rows.values():
        for part in _pieces(tensor):
            dist.send(part.to(device).contiguous(), target)


def receive_rows(rows: Mapping[str, Tensor], source: int) -> None:
    """Fills the rows, on the device of the process group, with those that another rank sends."""
    for tensor in rows.values():
        for part in _pieces(tensor):
            dist.recv(part, source)


def tensors_of_rank(tensors: Mapping[str, Tensor], source: int, device: torch.device) -> dict[str, Tensor]:
    """Collective. Returns the tensors of rank `source` on every rank, in host memory; the other ranks' own do not matter.

    One exchange of names, types and shapes, then a broadcast per tensor.
    """
    is_source = dist.get_rank() == source
    rows = [[name, DTYPE_NAMES[tensor.dtype], list(tensor.shape)] for name, tensor in tensors.items()]
    found = {}
    for name, dtype, shape in json.loads(gather_texts(json.dumps(rows) if is_source else "", device)[source]):
        value = tensors[name] if is_source else torch.empty(shape, dtype=_DTYPES[dtype])
        for part in _pieces(value.reshape(-1).view(torch.uint8)):
            sent = part.to(device)
            dist.broadcast(sent, source)
            if not is_source and sent is not part:
                part.copy_(sent)
        found[name] = value
    return found


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    """Yields views of whole rows of up to 64 MiB; none of a tensor without rows."""
    if tensor.numel():
        yield from tensor.split(max(1, _CHUNK_BYTES // (tensor[0].numel() * tensor.element_size())))


# ---- Commits of an elastic training: copies of its state in the memory of the ranks, and how they are restored. -----
#
# A rank has two places for a commit and fills the one that does not hold the last good commit:
#
#     take        copies the state to host memory, exchanges copies of the centres      place: holds nothing
#     agree       all-gather: every rank has filled its place                           place: whole, and the last good one
#
# A rank that dies in between leaves the previous commit untouched on all ranks. A rank that has passed `agree` knows that
# all ranks have a whole copy, so at most one of two commits is unfinished at any time. After a loss the ranks compare what
# they hold (restoration.py) and restore the newest commit of which nothing is missing.
#
# State of Commits, used by the training thread only. It outlives the generations of the job:
#
#     _places       the two places                          written by commit, restore
#     _last         the place with the last good commit     written by commit, restore
#     _joined       this generation                         written by join
#     has_begun     the run has been put into its folder    written by join, rank_main
#     is_state_lost no member holds a commit any more       written by join
#     last_step     steps done by this process              written by the loop
#     spent_s       seconds in commits since the last row   written by commit, take_seconds


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the job's ranks that is about to happen, as all ranks have agreed at a commit."""

    is_wanted: bool = False
    has_removals: bool = False
    """Ranks will leave, perhaps one together with the rank that holds the copy of its centres."""


@dataclass(slots=True)
class _Place:
    """Memory for the part of one commit that this rank holds; the buffers are reused."""

    held: HeldCommit = NO_COMMIT
    """NO_COMMIT while it is being filled."""
    shared: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)
    kept: dict[str, Tensor] = field(default_factory=dict)
    generators: dict[str, Tensor] = field(default_factory=dict)
    shared_copy: HostCopy = field(default_factory=HostCopy)
    rows_copy: HostCopy = field(default_factory=HostCopy)
    kept_copy: HostCopy = field(default_factory=HostCopy)

    def rows_of(self, shard: tuple[int, int], start: int, stop: int, num_subcentres: int) -> dict[str, Tensor]:
        """Returns the rows of the classes [start, stop), which are part of a shard that this place holds."""
        is_own = shard == (self.held.own_start, self.held.own_stop)
        rows = self.rows if is_own else self.kept
        here = slice(*((number - shard[0]) * num_subcentres for number in (start, stop)))
        return {name: tensor[here] for name, tensor in rows.items()}


class Commits:
    """The commits that this process holds, through all generations of its job."""

    def __init__(self, worker: ElasticWorker, interval: int) -> None:
        """interval: steps from one commit to the next."""
        self.interval = interval
        self.has_begun = False
        """True once the run of this job is in its folder: a later generation continues it."""
        self.last_step = 0
        self.is_state_lost = False
        """True if the job has made progress, but no member of this generation holds a commit of it; the same on every rank."""
        self._worker = worker
        self._places = (_Place(), _Place())
        self._last = self._places[0]
        self._joined: Assignment | None = None
        self._distance = 0
        self._spent_s = 0.0

    # ---- generations ---------------------------------------------------------------------------------------------

    def join(self, joined: Assignment, device: torch.device) -> Restoration | None:
        """Collective. Begins a generation; returns the commit to restore. has_begun is then the same on every rank.

        One all-gather of 16 numbers per rank.
        """
        self._joined = joined
        # In each generation, because hosts have come and gone, and the copy should be on another host than its original.
        self._distance = copy_distance([member.host for member in joined.members])
        # A job that has made progress has begun, also if all ranks that did so are lost.
        self.has_begun |= joined.has_progressed
        own = [int(self.has_begun), *(number for place in self._places for number in place.held.numbers())]
        rows_W = self._gather(own, device)
        # A rank that is new in the job has begun nothing, but must take the same way as the others.
        self.has_begun = any(row[0] for row in rows_W)
        held_W = [
            [HeldCommit(*row[start : start + NUM_NUMBERS]) for start in range(1, len(row), NUM_NUMBERS)]
            for row in rows_W
        ]
        # Where progress was reported, a commit was made: each generation begins with one.
        self.is_state_lost = joined.has_progressed and not any(
            commit.generation for commits in held_W for commit in commits
        )
        return newest_whole_commit(held_W)

    def _gather(self, numbers: Sequence[int], device: torch.device) -> list[list[int]]:
        """Collective. Returns the numbers of every rank.

        ConnectionLostError if NCCL's group was aborted meanwhile: its operations then end without an error, and leave what was
        in the memory before.
        """
        assert self._joined is not None
        generation = self._joined.generation
        rows_W = gather_blocks(torch.tensor([generation, *map(int, numbers)], device=device), None).tolist()
        if any(row[0] != generation for row in rows_W):
            raise ConnectionLostError(
                f"{self._joined.world.name()}: an exchange of generation {generation} was aborted."
            )
        return [row[1:] for row in rows_W]

    def describe_change(self, first_step: int) -> dict[str, object]:
        """Returns the fields of the event `rank_change`; empty in the first generation of a run."""
        joined = self._joined
        if joined is None or joined.previous_size == 0:
            return {}
        return {
            "before": joined.previous_size,
            "after": joined.world.size,
            "lost_ranks": list(joined.lost_ranks()),
            "undone_steps": max(0, self.last_step - first_step),
            "generation": joined.generation,
        }

    # ---- saving --------------------------------------------------------------------------------------------------

    def step_done(self, step: int) -> None:
        """Notes a finished step; the first one of a generation tells the driver that it trains."""
        self.last_step = step
        self._worker.committed()

    def commit(self, model: Model, step: int, device: torch.device) -> Change:
        """Collective. Keeps the state of this step; returns whether the ranks are about to change, the same on every rank.

        Traffic: an all-reduce of batch norm's statistics, the centres of one rank from each rank to another one, an
        all-gather of four numbers per rank.
        """
        begun = time.monotonic()
        place = self._places[1] if self._last is self._places[0] else self._places[0]
        held = self._take(place, model, step, device)
        # News of the driver reach the ranks at different times: what one of them knows, all of them do after the exchange.
        is_changed = self._worker.hosts_changed()
        steps_W, changed_W, removals_W = zip(
            *self._gather([step, is_changed, self._worker.has_removals], device), strict=True
        )
        assert set(steps_W) == {step}, f"the ranks commit different steps: {steps_W}"
        # Not before: if a rank dies earlier, some ranks have filled their place and others have not, and what NCCL has received
        # from that rank is garbage, which only the exchange above shows.
        place.held, self._last = held, place
        self._spent_s += time.monotonic() - begun
        return Change(any(changed_W), any(removals_W))

    def _take(self, place: _Place, model: Model, step: int, device: torch.device) -> HeldCommit:
        """Fills the place; returns what it holds, if the exchange with the other ranks has succeeded."""
        assert self._joined is not None
        rank, size = self._joined.world.rank, self._joined.world.size
        # First: a place that is half overwritten must not be offered if this process survives an error in the lines below.
        place.held = NO_COMMIT
        # The statistics of batch norm differ between ranks, and a rank that is lost takes its own along.
        average_buffers_(model.backbone)
        head = model.head
        rows = head.rows()
        # On a GPU both copies are started here and waited for below, so they overlap with the exchange between ranks.
        place.shared = place.shared_copy.take(model.shared_state())
        place.rows = place.rows_copy.take(rows)
        place.generators = generator_states(device)
        own, kept = head.classes, range(0)
        if size > 1:
            source = (rank - self._distance) % size
            kept = class_range(head.num_classes, source, size)
            place.kept = place.kept_copy.reserve(rows, len(kept) * head.store.num_subcentres)
            swap_rows(rows, place.kept, to=(rank + self._distance) % size, source=source, device=device)
        place.shared_copy.wait()
        place.rows_copy.wait()
        classes = own.start, own.stop, kept.start, kept.stop
        return HeldCommit(self._joined.generation, step, head.num_classes, *classes)

    def take_seconds(self) -> float:
        """Returns the seconds spent on commits since the last call."""
        seconds, self._spent_s = self._spent_s, 0.0
        return seconds

    # ---- restoring -----------------------------------------------------------------------------------------------

    def restore(self, restoration: Restoration, model: Model, device: torch.device) -> int:
        """Collective. Loads a commit into a model that was built for the ranks of this generation; returns its step.

        Traffic: what ranks need of shards that other ranks hold; if a rank is new, a broadcast of what all ranks have.
        """
        assert self._joined is not None
        rank, size = self._joined.world.rank, self._joined.world.size
        key = restoration.generation, restoration.step, restoration.num_classes
        place = next((place for place in self._places if place.held.key == key), None)
        shared: Mapping[str, Tensor] = place.shared if place is not None else {}
        # All ranks know the restoration, so either all of them broadcast or none does.
        if len(restoration.ranks) < size:
            shared = tensors_of_rank(shared, restoration.ranks[0], device)
        model.load_shared_state(dict(shared))
        # Every rank goes through the same list in the same order: sender and receiver meet, and no two wait for each other.
        for transfer in transfers(restoration, size):
            if rank not in (transfer.source, transfer.target):
                continue
            num_subcentres = model.head.store.num_subcentres
            if rank == transfer.source:
                assert place is not None
                rows = place.rows_of(transfer.shard, transfer.start, transfer.stop, num_subcentres)
                if transfer.target != rank:
                    send_rows(rows, transfer.target, device)
                    continue
            else:
                num_rows = (transfer.stop - transfer.start) * num_subcentres
                rows = {
                    name: torch.empty((num_rows, *tensor.shape[1:]), dtype=tensor.dtype, device=device)
                    for name, tensor in model.head.rows().items()
                }
                receive_rows(rows, transfer.source)
            model.head.load_rows(transfer.start, rows)
        # The head draws its samples by step number.
        model.head.step_count = restoration.step
        if place is not None:
            # The other place may hold a newer commit that not all ranks had completed; the next commit overwrites it.
            self._last = place
            restore_generators(place.generators, device)
        return restoration.step
