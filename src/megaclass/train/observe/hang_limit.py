"""Tells the agent after every step that this rank is alive, and how long the next step may take.

The agent reads it from a page of memory (distributed/rank_status.py) and starts the search for the culprit when a rank is
late (launch/hang). Long work that is no step (evaluation, saving, exporting) may take any time.
"""

import statistics
import time
from collections import deque

from megaclass.config.schema import TrainConfig
from megaclass.distributed.rank_status import OwnStatus

_LEAST_S = 30.0
_MEDIANS = 10
_FIRST_STEP_S = 300.0
"""The first step compiles, allocates and connects; a compiled backbone may take twice as long."""
_REMEMBERED_STEPS = 64


class HangLimit:
    """Marks the steps of one rank. Used by the training loop alone; a mark costs about 6 µs."""

    def __init__(self, settings: TrainConfig, status: OwnStatus, first_step: int, *, is_compiled: bool = False) -> None:
        self._given_s = settings.hang_after_s
        self._status = status
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED_STEPS)
        self._num_unread = 0
        self._median_s = 0.0
        self._longest_s = 0.0
        first_s = 0.0 if self._given_s == 0 else max(self._given_s or 0.0, _FIRST_STEP_S * (1 + is_compiled))
        self._status.progress(step=first_step, phase="first step", allowed_s=first_s)
        self._read_at = self._marked_at = time.monotonic()

    def limit_s(self) -> float:
        """Returns the seconds that a step may take; 0 for any time."""
        if self._given_s is not None:
            return self._given_s
        if not self._seconds:
            # Before the first report only the host's view of the steps is known, which may be far ahead of its GPU.
            return max(_FIRST_STEP_S, _MEDIANS * self._longest_s)
        return max(_LEAST_S, _MEDIANS * self._median_s)

    def step_done(self, step: int) -> None:
        """Marks a step whose work is done, or on a GPU queued."""
        now = time.monotonic()
        self._longest_s, self._marked_at = max(self._longest_s, now - self._marked_at), now
        self._num_unread += 1
        # The host may be several steps ahead of its GPU and then has to wait for all of them.
        ahead_s = self._num_unread * self._median_s
        limit_s = self.limit_s()
        self._status.progress(step=step, phase="training", allowed_s=limit_s + ahead_s if limit_s else 0.0)

    def all_read(self) -> None:
        """Marks that the device has finished all steps up to now, which tells how long a step takes."""
        now = time.monotonic()
        if self._num_unread:
            self._seconds.append((now - self._read_at) / self._num_unread)
            self._median_s = statistics.median(self._seconds)
        self._read_at, self._num_unread = now, 0
