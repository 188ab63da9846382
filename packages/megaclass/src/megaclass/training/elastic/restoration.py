"""Decisions about commits of an elastic training, as pure functions: every rank computes the same ones from the same table.

A commit is the state of one step, in the memory of the ranks. Each rank holds the part of it that all ranks have (backbone and
its optimizer), the centres of its own classes, and a copy of the centres of one other rank, which has a number of places
(`copy_distance`) less. A commit can be restored as long as the ranks that are left hold all classes of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

from megaclass.checkpoint.class_ranges import Classes, overlapping, whole_up_to
from megaclass.head.shards import class_range


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
    # A later generation may have gone back to an earlier step: its commits are newer.
    keys = {(commit.generation, commit.step, commit.num_classes) for _, commit in found}
    for generation, step, num_classes in sorted(keys, reverse=True):
        these = [
            (rank, commit)
            for rank, commit in found
            if (commit.generation, commit.step, commit.num_classes) == (generation, step, num_classes)
        ]
        copies = {(commit.kept_start, commit.kept_stop): rank for rank, commit in these}
        owners = {(commit.own_start, commit.own_stop): rank for rank, commit in these}
        holders = {classes: rank for classes, rank in (copies | owners).items() if classes[0] < classes[1]}
        if whole_up_to(holders) == num_classes:
            return Restoration(generation, step, num_classes, holders, tuple(rank for rank, _ in these))
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
