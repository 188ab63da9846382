"""Intervals of the heartbeat, the same for the driver and its agents. Standard library only."""

# TCP retransmits lost packets after pauses that double: on a local network 0.2, 0.6, 1.4, 3, 6.2, 12.6 and 25.4 s after the
# first attempt. ssh's connection therefore recovers from an outage of 13 to 25 s after 25.4 s, and the lost heartbeat may
# have been due one interval after the last one that arrived. With the default limit of 30 s, the longest silence is longer
# than both together, and the rest suffices to end everything.
_BEATS_PER_LIMIT = 30
_LONGEST_GRACE_S = 1.0
"""Grace after a silence: the ranks wait for a host that is gone, and have less time than after other failures."""
_LONGEST_END_S = 1.5
"""Time for processes to vanish and for the last messages."""


def silence_limits(heartbeat_s: float, grace_s: float) -> tuple[float, float]:
    """Returns the longest silence and the grace after it, so that everything is over within the heartbeat limit."""
    grace_s = min(grace_s, heartbeat_s / 4, _LONGEST_GRACE_S)
    return heartbeat_s - min(heartbeat_s / 10, _LONGEST_END_S) - grace_s, grace_s


def beat_interval(heartbeat_s: float) -> float:
    """Returns the time between two heartbeats."""
    return heartbeat_s / _BEATS_PER_LIMIT
