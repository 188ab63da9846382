"""When to speak and when to act on silence; the same on both ends of a line. Standard library only."""

_BEATS_PER_LIMIT = 10


def silence_limits(heartbeat_s: float, grace_s: float) -> tuple[float, float]:
    """After how long a silence to act, and the grace then, so that all is over within the heartbeat limit."""
    grace_s = min(grace_s, heartbeat_s / 4)
    return 0.9 * heartbeat_s - grace_s, grace_s


def beat_interval(heartbeat_s: float) -> float:
    return heartbeat_s / _BEATS_PER_LIMIT
