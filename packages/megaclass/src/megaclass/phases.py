"""The phases of a training step, and the rule by which a rank counts as slow. Standard library only.

    data       waiting for the loader (measured on the host)
    forward    backbone and head, without their collectives
    backward   gradients of head and backbone, without their collectives
    exchange   collectives, including the wait for slower ranks
    update     optimizers

A rank that waits for a slow one shows the time as exchange, so the time without exchange is a rank's own: it tells which one
is slow. The training loop, the report and `megaclass top` use this one rule.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PHASES = ("data", "forward", "backward", "exchange", "update")
OWN_PHASES = tuple(phase for phase in PHASES if phase != "exchange")
"""Phases in which a rank works; in exchanges it waits for the others."""
SLOW = 0.2
"""A rank is named if its own time is more than this share above that of the median of the others."""
_LEAST_EXCESS_S = 0.001
"""Below a millisecond the difference is noise of the clock."""


@dataclass(frozen=True, slots=True)
class SlowRank:
    rank: int
    phase: str
    """The phase in which it loses the most."""
    slower: float
    """Its own time above the median of the other ranks: 0.3 for 30 %."""


def find_slow_rank(phases: Mapping[str, Sequence[float]]) -> SlowRank | None:
    """Returns the slowest rank if its own time is more than 20 % above the median of the others', else None.

    phases: the seconds of every rank, by phase.
    """
    own_W = [sum(values) for values in zip(*(phases[phase] for phase in OWN_PHASES), strict=True)]
    if len(own_W) < 2:
        return None
    rank = max(range(len(own_W)), key=own_W.__getitem__)
    usual = usual_of_others(own_W, rank)
    excess = own_W[rank] - usual
    if excess <= SLOW * usual or excess < _LEAST_EXCESS_S:
        return None
    loss = {phase: phases[phase][rank] - usual_of_others(phases[phase], rank) for phase in OWN_PHASES}
    return SlowRank(rank, max(loss, key=loss.__getitem__), excess / max(usual, 1e-9))


def usual_of_others(seconds_W: Sequence[float], rank: int) -> float:
    """Returns the median time of the other ranks; that of the rank itself if it is alone."""
    others = [value for other, value in enumerate(seconds_W) if other != rank]
    return statistics.median(others) if others else seconds_W[rank]
