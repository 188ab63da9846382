"""Table of all ranks: where each runs, what it printed last, how it ended. Standard library only."""

import time
from collections.abc import Sequence

from megaclass_launch.driver.failure_report import LastLines, failure_report, headline
from megaclass_launch.placement import Placement

_LEFT_EARLY_S = 60.0
"""A rank that left with 0 is named if others still run after this time: they may be waiting for it."""


class RankTable:
    """One row per rank. Written by MessageHandler, read for reports, by JobEnd and by the check for hangs."""

    def __init__(self, placements: Sequence[Placement]) -> None:
        self.hosts = {world.rank: placement.host.name for placement in placements for world in placement.worlds}
        self.pids: dict[int, int] = {}
        self.codes: dict[int, int] = {}
        self.printed_at = time.monotonic()
        """Time at which a rank last printed anything, or at which all were started."""
        self._exit_times: dict[int, float] = {}
        self._last_lines = {rank: LastLines() for rank in self.hosts}
        self._has_named_early = False

    @property
    def size(self) -> int:
        return len(self.hosts)

    @property
    def has_started(self) -> bool:
        """Returns whether any rank ran."""
        return bool(self.pids)

    @property
    def num_left(self) -> int:
        """Returns the number of ranks that have not ended."""
        return self.size - len(self.codes)

    def running(self) -> list[int]:
        return sorted(set(self.hosts) - set(self.codes))

    def name_running(self) -> str:
        return ", ".join(f"{rank} on {self.hosts[rank]} (pid {self.pids.get(rank, '?')})" for rank in self.running())

    def note_lines(self, rank: int, lines: list[bytes]) -> None:
        self._last_lines[rank].add(lines)

    def note_exit(self, rank: int, pid: int, code: int) -> None:
        self.pids[rank] = pid
        self.codes[rank] = code
        self._exit_times[rank] = time.monotonic()

    def headline_of(self, rank: int) -> str:
        return headline(rank, self.hosts[rank], self.pids[rank], self.codes[rank], self.num_left)

    def failure_report_of(self, rank: int) -> str:
        """Returns the report about the rank that failed first, and names the ranks that had left before it."""
        last_lines = self._last_lines[rank].shown()
        text = failure_report(rank, self.hosts[rank], self.pids[rank], self.codes[rank], last_lines)
        early = sorted(other for other, code in self.codes.items() if code == 0)
        if early:
            # A rank that left early with exit code 0 often is the cause: the others then fail for want of it.
            times = ", ".join(f"{r} ({time.monotonic() - self._exit_times[r]:.1f} s before)" for r in early)
            text += f"\nAlready ended with exit code 0: rank {times}. If that was too early, look there for the cause."
        return text

    def name_early_leaver(self) -> str | None:
        """Returns a sentence, once per start, about a rank that has left while others may be waiting for it."""
        now = time.monotonic()
        # Only exits with 0 get this old: after any other code, 75 included, the job is being ended by then.
        early = [rank for rank, at in self._exit_times.items() if now - at > _LEFT_EARLY_S]
        if not early or self._has_named_early or not self.num_left:
            return None
        self._has_named_early = True
        return (
            f"rank {early[0]} on {self.hosts[early[0]]} ended with exit code 0 {_LEFT_EARLY_S:g} s ago; "
            f"still running: {self.name_running()}."
        )
