"""Tells a watcher that was paused from ranks that hang. Standard library only.

A stopped job (Ctrl-Z, scontrol suspend, docker pause) or virtual machine makes no progress, while the clock goes on. Its
watcher, which looks once per second, is stopped with it and sees the pause as a gap between two looks.
"""

PAUSE_S = 5.0
"""A gap between two looks from which on the watcher counts as paused; an overloaded host delays a look by less."""


class LookClock:
    """Remembers when one watcher has looked."""

    def __init__(self, now: float) -> None:
        self._looked_at, self._since = now, 0.0

    def since(self, now: float) -> float:
        """To be called at every look; returns the time of the first look after the last pause, before which nothing counts."""
        if now - self._looked_at >= PAUSE_S:
            self._since = now
        self._looked_at = now
        return self._since

    def restart(self, now: float) -> None:
        """Lets everything count from now on, after work of the watcher itself that took long."""
        self._looked_at = self._since = now
