"""Intervals of the heartbeat, the same for the driver and its agents. Standard library only."""

# TCP retransmits lost packets after pauses that double: on a local network 0.2, 0.6, 1.4, 3, 6.2, 12.6 and 25.4 s after the
# first attempt. ssh's connection therefore recovers from an outage of 13 to 25 s after 25.4 s, and the lost heartbeat may
# have been due one interval after the last one that arrived. The silence limit must be longer than both together.
_BEATS_PER_LIMIT = 20


def silence_limits(heartbeat_s: float, grace_s: float) -> tuple[float, float]:
    """Returns the longest silence and the grace after it, so that everything is over within the heartbeat limit."""
    grace_s = min(grace_s, heartbeat_s / 4)
    return 0.9 * heartbeat_s - grace_s, grace_s


def beat_interval(heartbeat_s: float) -> float:
    """Returns the time between two heartbeats."""
    return heartbeat_s / _BEATS_PER_LIMIT
