"""Shards and the classes they hold: the one rule by which centres move to another number of ranks.

A shard is the centres of a contiguous range of classes, in a file of a checkpoint (load.py) or in the memory of a rank of an
elastic job (training/elastic). No torch here.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

Key = TypeVar("Key")
Classes = tuple[int, int]
"""First class, and the class after the last one."""


def overlapping(shards: Mapping[Key, Classes], class_start: int, class_stop: int) -> Iterator[tuple[Key, int, int]]:
    """Yields key, first class and end of what each shard holds of the classes [class_start, class_stop), if that is any."""
    for key, (start, stop) in shards.items():
        first, end = max(start, class_start), min(stop, class_stop)
        if first < end:
            yield key, first, end


def whole_up_to(shards: Iterable[Classes]) -> int:
    """Returns the class up to which the shards, in order, leave no gap and hold no class twice."""
    next_class = 0
    for start, stop in sorted(shards):
        if start < stop:
            if start != next_class:
                break
            next_class = stop
    return next_class
