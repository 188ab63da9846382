"""Everything that watches the training loop without changing it: limits for hangs, times per phase, slow ranks, profiles.

After every step the rank tells the agent that it is alive, and how long the next step may take. The agent reads it from a page
of memory (distributed/rank_status.py) and starts the search for the culprit when a rank is late (launch/hang). Long work that
is not a step (evaluation, saving, exporting) may take any time.
"""

import logging
import statistics
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from megaclass.config.schema import TrainConfig
from megaclass.data.loader import Batch
from megaclass.distributed.agreement import on_every_rank
from megaclass.errors import HeadError
from megaclass.head.faults import NO_CLASS
from megaclass.phases import SlowRank, find_slow_rank
from megaclass.training.metrics import Meter, StepClock, gather_phases, phase_row
from megaclass.training.run.run import Run
from megaclass_launch.errors import UserError
from megaclass_launch.files import make_private_folder, published_file
from megaclass_launch.rank_status import OwnStatus, own_status

T = TypeVar("T")
PROFILE_FOLDER = "profile"
_logger = logging.getLogger("megaclass.training")
_MAX_ALLOCATIONS = 200_000


class StepProfile:
    """Profiles the steps from `first` to before `stop`, counted from 0, if this rank is one of the chosen."""

    def __init__(self, run: Run) -> None:
        settings = run.config.train
        self._folder = run.folder.path / PROFILE_FOLDER
        self._run = run
        self._ranks = [rank for rank in settings.profile_ranks if rank < run.world.size]
        self._first, self._stop = settings.profiled_steps()
        self._is_chosen = run.world.rank in self._ranks
        self._profile: profile | None = None

    def before(self, step: int) -> None:
        """Starts to record if this is the first of the profiled steps."""
        if step != self._first or self._first == self._stop or not self._is_chosen:
            return
        activities = [ProfilerActivity.CPU]
        if self._run.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history(max_entries=_MAX_ALLOCATIONS)
        # Python stacks are left out: they make a step several times slower than it is.
        self._profile = profile(activities=activities, record_shapes=True, profile_memory=True, acc_events=True)
        self._profile.start()

    def after(self, step: int, is_last: bool) -> None:
        """Writes the files after the last of the profiled steps, or of the run."""
        is_over = step == self._stop - 1 or is_last
        if self._first == self._stop or not self._first <= step < self._stop or not is_over:
            return
        if self._profile is not None:
            self._write(self._profile)
            self._profile = None
        names = [name for rank in self._ranks for name in self._names(rank)]
        self._run.events.note("profile", step + 1, ranks=self._ranks, files=names)

    def _write(self, recorded: profile) -> None:
        if self._run.device.type == "cuda":
            torch.cuda.synchronize(self._run.device)
        recorded.stop()
        trace, *snapshots = (self._run.folder.path / name for name in self._names(self._run.world.rank))
        try:
            make_private_folder(self._folder)
            with published_file(trace, is_private=True) as unfinished:
                recorded.export_chrome_trace(str(unfinished))
            for path in snapshots:
                with published_file(path, is_private=True) as unfinished:
                    torch.cuda.memory._dump_snapshot(str(unfinished))
                torch.cuda.memory._record_memory_history(enabled=None)
        except (OSError, RuntimeError) as error:
            # A profile is not worth a run.
            _logger.warning(
                f"the profile of rank {self._run.world.rank} could not be written to {trace.parent}: {error}"
            )
            return
        where = "https://ui.perfetto.dev or chrome://tracing"
        if snapshots:
            where += ", the memory snapshot with https://pytorch.org/memory_viz"
        _logger.info(
            f"profile of rank {self._run.world.rank}, steps {self._first}:{self._stop}: {trace}; open it with {where}."
        )

    def _names(self, rank: int) -> list[str]:
        names = [f"{PROFILE_FOLDER}/rank-{rank}.trace.json"]
        return names + ([f"{PROFILE_FOLDER}/rank-{rank}.memory.pickle"] if self._run.device.type == "cuda" else [])


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
        self._status.progress(step=step, allowed_s=limit_s + ahead_s if limit_s else 0.0)

    def all_read(self) -> None:
        """Marks that the device has finished all steps up to now, which tells how long a step takes."""
        now = time.monotonic()
        if self._num_unread:
            self._seconds.append((now - self._read_at) / self._num_unread)
            self._median_s = statistics.median(self._seconds)
        self._read_at, self._num_unread = now, 0


# ---- errors in the data of one rank, which must end the run on all ranks, without a collective of their own
#
# A rank whose data fails cannot raise at once: the other ranks would wait for it in the next all-gather. It keeps the error
# and sends batches whose labels are all NO_CLASS. Every rank finds such a label in the head's all-gather and refuses the
# step (head/faults.py); then the ranks exchange the reason, and all of them raise.


class DataErrors:
    """Keeps an error of this rank's data until all ranks are at a point where they can exchange it."""

    def __init__(self) -> None:
        self._error: UserError | OSError | None = None

    @property
    def is_any(self) -> bool:
        return self._error is not None

    def keep_error(self, batches: Iterable[T], instead: T) -> Iterator[T]:
        """Yields the batches; after an error, which is kept, yields `instead` without end."""
        try:
            yield from batches
        except (UserError, OSError) as error:
            self._error = error
            while True:
                yield instead

    @contextmanager
    def raised_on_all_ranks(self, device: torch.device) -> Iterator[None]:
        """Wraps a step: if the head refuses a batch of NO_CLASS, raises the kept error on every rank instead."""
        try:
            yield
        except HeadError:
            on_every_rank(self.check, device)
            raise

    def check(self) -> None:
        """Raises the kept error, if there is one."""
        if self._error is not None:
            raise self._error


_SLOW_REPORTS = 3


class SlowRanks:
    """Finds the slow rank of each report."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._slow: SlowRank | None = None
        self._num_slow = 0

    def read(self, meter: Meter, step: int) -> dict[str, Any]:
        """Collective. Returns the fields of the metrics about phases and ranks. To be called right after Meter.read."""
        own = meter.phase_s
        phases, memory = gather_phases(own, self._run.device)
        slow = find_slow_rank(phases)
        is_same = slow is not None and self._slow is not None and slow.rank == self._slow.rank
        self._num_slow = self._num_slow + 1 if is_same else 1
        # Chance makes one rank or the other slow in single reports; the event log names those that stay slow, once.
        if slow is not None and self._num_slow == _SLOW_REPORTS:
            host, slower = self._run.hosts[slow.rank], round(slow.slower, 3)
            self._run.events.note("slow_rank", step, rank=slow.rank, host=host, phase=slow.phase, slower=slower)
        self._slow = slow
        row = phase_row(phases, slow)
        if self._run.device.type == "cuda":
            on_gpu_s = sum(seconds for phase, seconds in own.items() if phase != "data")
            row |= {"rank_gpu_memory_gib": memory, "gpu_busy_share": min(1.0, on_gpu_s / max(meter.last_step_s, 1e-9))}
        return row

    def describe(self) -> str:
        """Returns the part of the progress line about a slow rank; empty if none is slow."""
        slow = self._slow
        if slow is None:
            return ""
        return f"rank {slow.rank} ({self._run.hosts[slow.rank]}) {slow.slower:.0%} slower: {slow.phase}"


class Observer:
    """Wraps the steps of one rank: measures them, keeps errors of their data, profiles them, and limits their time."""

    def __init__(self, run: Run, backbone: nn.Module, first_step: int) -> None:
        self.clock, self.data_errors = StepClock(run.device, backbone), DataErrors()
        # A run that is resumed after its last step trains nothing: its last loss and speed come from the metrics it wrote.
        self.meter = Meter(run.config.train.global_batch, run.folder.read_metrics(), run.device, self.clock)
        is_compiled = run.config.is_compiled(on_gpu=run.device.type == "cuda")
        self.limit = HangLimit(run.config.train, own_status(), first_step, is_compiled=is_compiled)
        self._profile, self._run = StepProfile(run), run

    def batches(self, source: Iterable[Batch]) -> Iterator[Batch]:
        """Yields the batches; after an error in its data a rank keeps sending one that all ranks refuse (DataErrors).

        They refuse it on a CPU in the same forward, on a GPU some steps later, and nothing is updated until then.
        """
        most = -(-self._run.config.train.global_batch // self._run.world.size)
        return self.meter.batches(self.data_errors.keep_error(source, self._run.loader.blank(most, NO_CLASS)))

    @contextmanager
    def step(self, step: int, *, is_last: bool) -> Iterator[None]:
        """Wraps the work of one step, counted from 0."""
        with self.data_errors.raised_on_all_ranks(self._run.device):
            self._profile.before(step)
            with self.clock.step():
                yield
            self._profile.after(step, is_last)
        self.limit.step_done(step + 1)

    @contextmanager
    def paused(self, phase: str) -> Iterator[None]:
        """Wraps work between the steps: it may take any time, and does not count in the speed."""
        with self.meter.paused(), own_status().long_work(phase):
            yield
