"""When to speak and when to act on silence; the same on both ends of a line. Standard library only."""

# TCP repeats what was lost after pauses that double: on a local network 0.2, 0.6, 1.4, 3, 6.2, 12.6 and 25.4 s after it was
# first sent. Of an outage of 13 to 25 s ssh's connection thus recovers after 25.4 s, and the beat that was lost may have come
# one interval after the last one that was heard: the silence to act on must be longer than both together.
_BEATS_PER_LIMIT = 20


def silence_limits(heartbeat_s: float, grace_s: float) -> tuple[float, float]:
    """After how long a silence to act, and the grace then, so that all is over within the heartbeat limit."""
    grace_s = min(grace_s, heartbeat_s / 4)
    return 0.9 * heartbeat_s - grace_s, grace_s


def beat_interval(heartbeat_s: float) -> float:
    return heartbeat_s / _BEATS_PER_LIMIT
