"""Everything that watches the training loop without changing it: limits for hangs, times per phase, slow ranks, profiles."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from megaclass.distributed.rank_status import own_status
from megaclass.phases import SlowRank, find_slow_rank
from megaclass.train.clock import StepClock, gather_phases, phase_row
from megaclass.train.metrics import Meter
from megaclass.train.observe.hang_limit import HangLimit
from megaclass.train.observe.profile import StepProfile
from megaclass.train.observe.trackers import TRACKERS
from megaclass.train.run.run import Run

_SERVICES_S = 300.0
_SLOW_REPORTS = 3


class Observer:
    """Watches the loop of one rank; used by the loop alone."""

    def __init__(self, run: Run, clock: StepClock, first_step: int) -> None:
        self._run, self._clock = run, clock
        self._status = own_status()
        self._limit = HangLimit(
            run.config.train,
            self._status,
            first_step,
            is_compiled=run.config.is_compiled(on_gpu=run.device.type == "cuda"),
        )
        self._profile = StepProfile(run)
        self._slow: SlowRank | None = None
        self._num_slow = 0

    @contextmanager
    def step(self, step: int, *, is_last: bool) -> Iterator[None]:
        """Wraps the work of one step, counted from 0."""
        self._profile.before(step)
        with self._clock.step():
            yield
        self._profile.after(step, is_last)
        self._limit.step_done(step + 1)

    def finish(self) -> None:
        """Ends the limit: after the last step the slowest disk decides how long the last checkpoint takes."""
        self._status.progress(allowed_s=0.0, phase="after the last step")

    def long_work(self, phase: str) -> AbstractContextManager[None]:
        """Allows the block any time; the time of the next step begins after it."""
        return self._status.long_work(phase)

    def reporting(self) -> AbstractContextManager[None]:
        """Wraps the report of a row. A service that gets a copy may answer slowly without the job counting as hung."""
        limit_s = self._limit.limit_s()
        has_services = any(tracker.is_wanted(self._run.config.train) for tracker in TRACKERS)
        return self._status.long_work(
            "report", allowed_s=max(limit_s, _SERVICES_S) if limit_s and has_services else limit_s
        )

    def read(self, meter: Meter, step: int) -> dict[str, Any]:
        """Collective. Returns the fields of the metrics about phases and ranks. To be called right after Meter.read."""
        self._limit.all_read()
        own = meter.phase_s
        phases, memory = gather_phases(own, self._run.device)
        slow = find_slow_rank(phases)
        is_same = slow is not None and self._slow is not None and slow.rank == self._slow.rank
        self._num_slow = self._num_slow + 1 if is_same else 1
        # Chance makes one rank or the other slow in single reports; the diary names those that stay slow, once.
        if slow is not None and self._num_slow == _SLOW_REPORTS:
            host, slower = self._run.hosts[slow.rank], round(slow.slower, 3)
            self._run.events.note("slow_rank", step, rank=slow.rank, host=host, phase=slow.phase, slower=slower)
        self._slow = slow
        row = phase_row(phases, slow)
        if self._run.device.type == "cuda":
            on_gpu_s = sum(seconds for phase, seconds in own.items() if phase != "data")
            row |= {"rank_gpu_memory_gib": memory, "gpu_busy_share": min(1.0, on_gpu_s / max(meter.last_step_s, 1e-9))}
        return row

    def describe_slow(self) -> str:
        """Returns the part of the progress line about a slow rank; empty if none is slow."""
        slow = self._slow
        if slow is None:
            return ""
        return f"rank {slow.rank} ({self._run.hosts[slow.rank]}) {slow.slower:.0%} slower: {slow.phase}"
